"""`bothways features`: tagging with a frozen encoder, as in the paper's section 5.3."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

from bothways.cli.options import Device, JsonOutput, StartModel, keeping, say_kernels
from bothways.core.terminal import output_console, show_lines

if TYPE_CHECKING:
    from rich.console import RenderableType

    from bothways.lab.features.run import FeatureResult

Layers = Literal[
    "embeddings", "second_to_last", "last", "weighted_last_four", "concat_last_four", "weighted_all"
]
"""As `model.layer_mix.LayerChoice`, spelled out so that the command line starts without the library
behind it.
"""


def features(
    model: StartModel,
    train: str,
    *overrides: str,
    dev: str,
    layers: Layers = "concat_last_four",
    out: Path = Path("features"),
    json: JsonOutput = False,
    device: Device = "auto",
) -> None:
    """Train a BiLSTM tagger on frozen word vectors of a model, and score it.

    Vectors are computed once and stored; another choice of layers computes only missing ones. The
    fine-tuned counterpart is bothways finetune --task tag.

    Parameters
    ----------
    train
        Words with tags: CoNLL columns, .jsonl, .parquet, or hub:owner/name:configuration:split.
    overrides
        Settings by dotted path, such as tagger.hidden=256 training.until="10 epochs" seed=1.
    dev
        Data of the same kind for choosing the best weights, or its share of TRAIN, such as 20%.
    layers
        Layers of the encoder and their combination: the choices of the paper's table 7.
    out
        The folder of the vectors: words × layers × width × 4 bytes.
    """
    from bothways.core.bar import error_console, terminal_progress
    from bothways.core.config import reader as configs
    from bothways.core.config.tree import merge, parse_overrides
    from bothways.lab.features.data import FeatureConfig
    from bothways.lab.features.run import feature_based

    options = {"model": model, "train": train, "dev": dev, "layers": layers}
    settings = configs.load(
        FeatureConfig,
        base=FeatureConfig(model=model, train=train, dev=dev),
        overrides=merge(parse_overrides(overrides), options),
    )
    console = error_console()
    say_kernels(device)
    with (
        keeping(out, console, "What was read to its end"),
        terminal_progress(console) as progress,
    ):
        done = feature_based(settings, out, device=device, progress=progress)
    if json:
        from json import dumps

        print(dumps({"layers": layers, "metrics": dict(done.metrics), "shares": list(done.shares)}))
    else:
        show_lines(output_console(), _table(done))


def _table(done: FeatureResult) -> RenderableType:
    shares = {
        f"share of layer {index} of {len(done.shares)}": share
        for index, share in enumerate(done.shares, 1)
    }
    from bothways.core.report.terminal import metric_table

    return metric_table(
        f"Frozen features: {done.layers}",
        {"value": {**done.metrics, **shares}},
        "metric on the dev data",
    )
