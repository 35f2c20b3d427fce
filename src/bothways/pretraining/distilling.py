"""The settings of a distillation run: a teacher, a student and a recipe."""

from __future__ import annotations

from dataclasses import replace

from bothways.core.errors import ConfigError
from bothways.data.corpus import Corpus
from bothways.model.config import EncoderConfig, with_vocabulary
from bothways.model.families.catalogue import PRESETS, preset
from bothways.pretraining.build import fit_to_corpus, start_encoder
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.layers import layer_differences, spread_layers
from bothways.pretraining.recipes import DISTILLING


def distillation(
    teacher: str, corpus: Corpus | None, student: str | None = None, recipe: str | None = None
) -> PretrainConfig:
    """Return the settings of a run in which a student learns from a teacher.

    A student that differs from the teacher in depth alone starts from the teacher's layers, spread
    from the first to the last: DistilBERT's start. One from a folder starts from its weights, any
    other at random.

    Args:
        teacher: a model folder, the folder of a run, or a Hub id.
        corpus: None for a forecast without one: the vocabulary is then as large as the teacher's.
        student: a preset, or a model folder; None for half of the teacher's layers.
        recipe: "distilbert", "tinybert" or "minilm"; None for the first.

    Raises:
        ConfigError: an unknown recipe, or a loss of the recipe does not fit the two.
        FolderError: a folder cannot be read.
    """
    recipe = recipe or "distilbert"
    if recipe not in DISTILLING:
        message, fix = f"unknown recipe {recipe!r}", f"Choose one of {', '.join(DISTILLING)}."
        raise ConfigError(message, where="recipe", fix=fix)
    source = start_encoder(teacher)
    max_length = source.max_positions
    if student is None:
        encoder: EncoderConfig = replace(source, depth=max(1, source.depth // 2))
    elif student in PRESETS:
        encoder = preset(student)
        if corpus is None:
            encoder = with_vocabulary(encoder, source.vocab, source.pad)
        else:
            encoder = fit_to_corpus(encoder, corpus.tokenizer)
    else:
        encoder = start_encoder(student)
    settings = DISTILLING[recipe](encoder, teacher)
    # No sequence is longer than what both read.
    phases = (replace(phase, length=min(phase.length, max_length)) for phase in settings.phases)
    settings = replace(settings, phases=tuple(phases))
    if student is not None and student not in PRESETS:
        return replace(settings, start=student)
    if source.sharing is not None or layer_differences(source, encoder):
        return settings
    layers = spread_layers(encoder.depth, source.depth)
    return replace(settings, start=teacher, start_layers=layers)
