"""What runs on frozen features would cost: the encoder's pass over the data, once a task, and the training of every BiLSTM.

The pass is timed once, since the encoder is computed whole whichever layers are kept; the BiLSTM for each task, since its input
has another width with each choice of layers.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from pathlib import Path

from bothways.finetuning.feature_data import (
    FeatureConfig,
    encoder_speed,
    tagger_speed,
    words_in,
    words_read,
)
from bothways.hub.model_folder import load_model
from bothways.hub.resolve import resolve_run
from bothways.model.lstm import AnyEncoder
from bothways.paper.cost import Cost, Size, size_of
from bothways.paper.experiment import Frozen
from bothways.paper.frozen import features_folder, frozen_restarts, is_frozen_finished
from bothways.runtime.devices import choose_device


def estimate_frozen(experiments: Many[Frozen], out: Path, *, device: str) -> tuple[list[Cost], str]:
    """The cost of each, and how it was measured; they differ in layers alone. Errors as `estimate`."""
    settings = experiments[0].settings
    loaded = load_model(resolve_run(settings.model), ())
    tokenizer = loaded.tokenizer()
    length = settings.length or loaded.model.config.max_positions
    train, dev = (
        size_of(source, settings.task, length, tokenizer)
        for source in (settings.train, settings.dev)
    )
    encoder = loaded.model.encoder.to(choose_device(device))
    rate = encoder_speed(encoder, train.inputs)
    costs = [_cost(experiment, train, dev, encoder, rate, out) for experiment in experiments]
    return (
        costs,
        f"Frozen features: {rate:,.0f} tokens a second through the encoder, once a task, then BiLSTMs, as measured.",
    )


def _cost(
    experiment: Frozen, train: Size, dev: Size, encoder: AnyEncoder, rate: float, out: Path
) -> Cost:
    done = sum(
        is_frozen_finished(experiment, settings, out) is not None
        for settings in frozen_restarts(experiment)
    )
    left, seconds = experiment.seeds - done, 0.0
    if left:
        seconds = left * _fitting(experiment.settings, train, dev, encoder)
    if left and not (features_folder(experiment, out) / "dev").is_dir():  # the last that is written
        seconds += (train.tokens + dev.tokens) / rate
    return Cost(experiment.name, experiment.seeds, done, train.examples, train.tokens, seconds)


def _fitting(settings: FeatureConfig, train: Size, dev: Size, encoder: AnyEncoder) -> float:
    """Seconds of one run."""
    words, of_dev = (
        size.examples * sum(map(words_in, size.inputs)) / len(size.inputs) for size in (train, dev)
    )
    read = (
        words_read(settings, words, of_dev, train.examples) or words
    )  # a run that epochs do not measure is taken for one
    return read / tagger_speed(settings, encoder, train.inputs, len(train.labels))
