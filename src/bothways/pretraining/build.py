"""A pre-training run before it begins: its models, learner and data, and the preflight."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import torch
from numpy.typing import NDArray

from bothways.core.errors import ConfigError
from bothways.core.finding import Finding, report_findings
from bothways.core.source import Cursor
from bothways.data.corpus import Corpus
from bothways.data.corpus_source import ContinuedSource, CorpusSource
from bothways.data.loader import Loader, Share
from bothways.data.masking import Vocabulary
from bothways.families.catalogue import FAMILIES, family_for
from bothways.hub.hf_config import read_hf_config
from bothways.hub.model_folder import load_model
from bothways.hub.resolve import resolve
from bothways.model.config import LSTMConfig, ModelConfig
from bothways.model.heads import Head
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.objectives.objective import Objective
from bothways.preflight.machine import Load, check_machine
from bothways.preflight.text import check_model, unknown_tokens
from bothways.pretraining.config import PretrainConfig
from bothways.text.tokenizer import Tokenizer
from bothways.training.parallel import Plan

C = TypeVar("C", bound=ModelConfig)


def fit_to_corpus(encoder: C, tokenizer: Tokenizer) -> C:
    """Return the encoder with the tokenizer's vocabulary size and padding id.

    RoBERTa's positions count from the padding id.
    """
    pad = tokenizer.specials.pad
    if isinstance(encoder, LSTMConfig):
        return dataclasses.replace(encoder, vocab=tokenizer.size, pad=pad)
    position = encoder.position
    if isinstance(position, Learned) and position.offset:
        position = dataclasses.replace(position, offset=pad + 1)
    return dataclasses.replace(encoder, vocab=tokenizer.size, pad=pad, position=position)


def start_encoder(source: str) -> ModelConfig:
    """Return the configuration of the encoder in a model folder or on the Hub."""
    return read_hf_config(resolve(source)).encoder


def _load_start(source: str, settings: PretrainConfig, corpus: Corpus) -> Model:
    """Return the weights of `settings.start` with the heads of the objective and its dropout.

    Raises:
        FolderError: the folder lacks a head that is not in `settings.fresh`, or is not a model.
        TokenizerError: the folder has no tokenizer.
        ConfigError: the encoder is not the folder's, or the corpus has another vocabulary.
    """
    folder = resolve(source)
    if Tokenizer.load(folder).backend.get_vocab() != corpus.tokenizer.backend.get_vocab():
        what = f"the corpus {corpus.folder} was built with another vocabulary than that of {source}"
        fix = f"Build it with that one: bothways corpus build … --tokenizer {source}"
        raise ConfigError(what, where="start", fix=fix)
    heads = settings.objective.models(settings.encoder)["model"].heads
    model = load_model(folder, heads, settings.fresh).model
    if model.config == settings.encoder:
        return model
    # Every encoder has a field `dropout`, of a type of its own.
    dropout: Any = settings.encoder.dropout
    if dataclasses.replace(model.config, dropout=dropout) != settings.encoder:
        what = f"is not that of {source}: only its dropout may differ"
        raise ConfigError(what, where="encoder", fix="Leave the other settings out.")
    changed = Model(settings.encoder, model.specification)
    changed.load_state_dict(model.state_dict())
    changed.kept = model.kept
    return changed


def build_models(settings: PretrainConfig, corpus: Corpus) -> dict[str, Model]:
    """Return the objective's models by role, seeded; "model" starts from `settings.start`.

    Raises:
        ConfigError, FolderError, TokenizerError: `settings.start` cannot be used.
    """
    torch.manual_seed(settings.seed)
    models = {}
    for role, spec in settings.objective.models(settings.encoder).items():
        if role == "model" and settings.start is not None:
            models[role] = _load_start(settings.start, settings, corpus)
        else:
            models[role] = Model(*spec)
    return models


def vocabulary_of(corpus: Corpus, objective: Objective) -> Vocabulary:
    """Return what an objective needs of a corpus' vocabulary."""
    counts = corpus.token_counts if objective.needs_counts else None
    return Vocabulary.of(corpus.tokenizer, counts)


def loader_of(
    settings: PretrainConfig,
    corpus: Corpus,
    chosen: NDArray[Any],
    plan: Plan,
    phase: int = 0,
    ends: tuple[Cursor, ...] = (),
) -> Loader[Any]:
    """Return the steps of a phase over the chosen documents; each rank has its share.

    Args:
        phase: its number.
        ends: where the phases before it ended; without, it begins at the start of an epoch.
    """
    template, seed, copies = corpus.tokenizer.template, settings.seed, settings.data_copies
    sources = [
        CorpusSource(corpus, template, settings.segments_of(each), chosen, seed, copies)
        for each in settings.phases[phase - len(ends) : phase + 1]
    ]
    source: CorpusSource | ContinuedSource = sources[0]
    for end, following in zip(ends, sources[1:], strict=True):
        source = ContinuedSource(source, end, following)
    seed = settings.seed
    objective = settings.objective_of(settings.phases[phase])
    vocabulary = vocabulary_of(corpus, objective)
    prepare = lambda sequence, rng: objective.prepare(sequence, vocabulary, rng)  # noqa: E731
    share = Share(plan.rank, plan.world)
    return Loader(source, prepare, settings.batch, settings.microbatch_tokens, seed, share)


def preflight(
    settings: PretrainConfig, corpus: Corpus, folder: Path | None, device: torch.device
) -> list[Finding]:
    """Return the notes and warnings about a run: ids, classes, data, disk and memory.

    Raises:
        BothwaysError: there are errors; it lists them all.
    """
    longest = max(phase.length for phase in settings.phases)
    models = settings.objective.models(settings.encoder).values()
    findings = [*check_model(settings.encoder, corpus.tokenizer, longest)]
    for encoder, heads in models:
        load = Load(encoder, heads, longest, settings.microbatch_tokens, settings.training)
        findings += check_machine(load, folder, device)
    encoder, heads = settings.objective.models(settings.encoder)["model"]
    findings += _check_class(encoder, heads, corpus.tokenizer)
    fix = "Train a tokenizer on this text, and build the corpus with it."
    findings.append(unknown_tokens(corpus.unknown_share, fix))
    for finding in _data_findings(settings, corpus):
        if finding not in findings:
            findings.append(finding)
    return report_findings(findings)


def _data_findings(settings: PretrainConfig, corpus: Corpus) -> list[Finding]:
    """Return the findings about the segments of all phases, those of one length once."""
    longest = max(phase.length for phase in settings.phases)
    result = []
    for phase in settings.phases:
        segments: Any = settings.segments_of(phase)
        checked: Any = dataclasses.replace(segments, length=longest)
        if phase.segments is None:
            objective: Any = settings.objective
            checked = dataclasses.replace(objective, segments=checked)
        result += checked.check(corpus)
    return result


def _check_class(
    encoder: ModelConfig, heads: Iterable[Head], tokenizer: Tokenizer
) -> list[Finding]:
    """Return what is to be known of the class that the saved model will have."""
    family = family_for(encoder, tokenizer.kind)
    kinds = [head.kind for head in heads]
    names = ", ".join(kinds)
    if family is None:
        what = (
            "no family of transformers has this configuration: only bothways will open the folder"
        )
        return [Finding("heads", "note", what, "encoder")]
    able = [known for known in FAMILIES if known.architecture_with(kinds) is not None]
    if not able:
        what = (
            f"transformers has no class with the heads {names}: only bothways will open the folder"
        )
        return [Finding("heads", "note", what, "objective")]
    if family in able:
        return []
    what = f"transformers has no {family.model_type} class with the heads {names}"
    others = ", ".join(known.model_type for known in able)
    fix = f"Set objective=masked_lm, or train a model of another family: {others}."
    return [Finding("heads", "error", what, "objective", fix)]
