"""A pre-training run before it begins: its models, training module and data, and the preflight."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bothways.core.errors import (
    ConfigError,
    DataError,
    Finding,
    argument,
    call,
    report_findings,
    setting,
)
from bothways.core.source import Cursor, Source
from bothways.core.training_module import TrainingModule, hidden_matrices
from bothways.data.corpus import Corpus
from bothways.data.corpus_source import ContinuedSource, Corpora, CorpusSource, MixedSource
from bothways.data.epoch_order import DocumentIds
from bothways.data.loader import BatchSize, Loader, TokenBudget
from bothways.data.masking import Vocabulary
from bothways.hub.hf_config import read_hf_config
from bothways.hub.model_folder import load_model
from bothways.hub.resolve import resolve, resolve_run
from bothways.model.block import Attention
from bothways.model.config import EncoderConfig, with_vocabulary
from bothways.model.families.catalogue import FAMILIES, PRESETS, family_for, nearest_family, preset
from bothways.model.heads import Head
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.objectives.masked_lm import with_masking
from bothways.objectives.objective import ModelSpec, Objective
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.forecast import memory_demand, tokens_of_phases
from bothways.text.tokenizer import Tokenizer
from bothways.training.encoding_checks import check_model, unknown_tokens
from bothways.training.parallel import Plan
from bothways.training.run import compute_as
from bothways.training.step_cost import check_machine

SINGLE = Plan()


def fit_to_corpus(encoder: EncoderConfig, tokenizer: Tokenizer) -> EncoderConfig:
    """Return the encoder with the tokenizer's vocabulary size and padding id."""
    return with_vocabulary(encoder, tokenizer.size, tokenizer.specials.pad)


def encoder_of(
    model: str | EncoderConfig | None, start: str | None, tokenizer: Tokenizer
) -> EncoderConfig:
    """Return the encoder of a run: a shape that is fitted to the corpus, or that of `start`.

    Args:
        model: a preset or a shape; None for "bert-mini", or for that of `start`. Settings may
            change it before `_load_start` compares it with `start`.

    Raises:
        ConfigError: there is no such preset.
    """
    if start is not None and model is None:
        return start_encoder(start)
    shape = "bert-mini" if model is None else model
    if not isinstance(shape, str | EncoderConfig):
        message = f"must be the name of a preset or an EncoderConfig, not {type(shape).__name__}"
        fix = f"To continue a model's pre-training, give its folder: {argument(start='FOLDER')}."
        raise ConfigError(message, where="model", fix=fix)
    return fit_to_corpus(preset(shape) if isinstance(shape, str) else shape, tokenizer)


def start_encoder(source: str) -> EncoderConfig:
    """Return the configuration of the encoder in a model folder or on the Hub."""
    return read_hf_config(resolve(resolve_run(source))).encoder


def start_folders(start: str | None, roles: Iterable[str]) -> dict[str, Path]:
    """Return the folder of each role that has one where a run starts.

    Roles of an objective other than "model", such as "generator", are in the folder of the model,
    or next to it if that is the `model/` of a run.

    Raises:
        FolderError: `start` is neither a folder nor a model of the Hub.
    """
    if start is None:
        return {}
    folder = resolve(resolve_run(start))
    around = [folder, folder.parent] if folder.name == "model" else [folder]
    role_folders = {
        role: parent / role
        for role in roles
        for parent in around
        if role != "model" and (parent / role / "config.json").is_file()
    }
    return {"model": folder, **role_folders}


def _load_start(
    folder: Path, role: str, spec: ModelSpec, settings: PretrainConfig, corpus: Corpus
) -> Model:
    """Return the weights of a folder with the heads of the objective and its dropout.

    Raises:
        FolderError: the folder lacks a head that is not in `settings.fresh`, or is not a model.
        TokenizerError: the folder has no tokenizer.
        ConfigError: the encoder is not the folder's, or the corpus has another vocabulary.
    """
    source = settings.start if role == "model" else folder
    _require_vocabulary_of(folder, source, corpus)
    encoder, heads = spec
    start_layers = settings.start_layers if role == "model" else None
    config = read_hf_config(folder).encoder
    readout = dataclasses.replace(config.readout, shifted=encoder.readout.shifted)
    same_shape = dataclasses.replace(config.with_dropout_of(encoder), readout=readout) == encoder
    if start_layers is None and not same_shape:
        if role != "model":
            message = f"is not that of {source}: only its dropout may differ"
            fix = "Give it the shape of that folder, or rename the folder to start with a new "
            raise ConfigError(message, where=f"objective.{role}", fix=f"{fix}{role}.")
        _require_growth(config, encoder)
    model = load_model(folder, heads, settings.fresh if role == "model" else ()).model
    if start_layers is not None:
        return with_layers(model, encoder, start_layers)
    return model if model.config == encoder else grow(model, encoder)


def _require_vocabulary_of(folder: Path, source: str | Path | None, corpus: Corpus) -> None:
    """Raise ConfigError if a corpus has another vocabulary than the model folder `source`."""
    difference = Tokenizer.load(folder).difference(corpus.tokenizer)
    if difference is not None:
        message = f"the corpus {corpus.folder} has another vocabulary than {source}: {difference}"
        fix = f"Build it with that one: {call('corpus build', '…', tokenizer=str(source))}"
        raise ConfigError(message, where="start", fix=fix)


def build_models(settings: PretrainConfig, corpus: Corpus) -> dict[str, Model]:
    """Return the objective's models by role, seeded; those of `start_folders` are loaded.

    Raises:
        ConfigError, FolderError, TokenizerError: `settings.start` cannot be used.
    """
    torch.manual_seed(settings.seed)
    models, specs = {}, settings.objective.models(settings.encoder)
    folders, frozen = start_folders(settings.start, specs), settings.objective.frozen_models
    for role, spec in specs.items():
        if role in frozen:  # with the first layers of its folder
            model = load_model(resolve(resolve_run(frozen[role])), spec.heads).model
            if model.config != spec.encoder:
                model = with_layers(model, spec.encoder, range(1, spec.encoder.depth + 1))
            models[role] = model
        elif role in folders:
            models[role] = _load_start(folders[role], role, spec, settings, corpus)
        else:
            models[role] = Model(*spec)
    for role, other in settings.objective.copied_tables.items():
        if role not in folders:
            values = models[other].encoder.embedding.tables()
            for name, table in models[role].encoder.embedding.tables().items():
                table.load_state_dict(values[name].state_dict())
    return models


def vocabulary_of(corpus: Corpus | Corpora, objective: Objective) -> Vocabulary:
    """Return the vocabulary of a corpus, with token counts where an objective reads them."""
    masking = objective.masking
    counts = corpus.token_counts if masking is not None and masking.needs_counts else None
    return Vocabulary.of(corpus.tokenizer, counts)


def build_training_module(
    settings: PretrainConfig, corpus: Corpus | Corpora, device: torch.device
) -> TrainingModule:
    """Return the training module of a run, with its models, on its device.

    Raises:
        ConfigError: `training.compiled` is set and does not fit; and the errors of `build_models`.
    """
    models = build_models(settings, corpus.first if isinstance(corpus, Corpora) else corpus)
    for model in models.values():
        compute_as(model.encoder, settings.training, device)
    objective = settings.objective
    return objective.training_module(models, vocabulary_of(corpus, objective)).to(device)


def loader_of(
    settings: PretrainConfig,
    corpora: Corpora,
    documents: Mapping[str, DocumentIds],
    plan: Plan,
    phase: int = 0,
    ends: tuple[Cursor, ...] = (),
) -> Loader:
    """Return the steps of a phase over documents of each corpus; each rank has its share.

    Args:
        phase: its number.
        ends: where the phases before it ended; without, it begins at the start of an epoch.
    """
    sources = []
    for number, (name, corpus) in enumerate(corpora.parts.items()):
        # The cursor of a single corpus has no parts.
        cursors = [end if len(corpora.parts) == 1 else end.parts[number] if end.parts else Cursor()
                   for end in ends]  # fmt: skip
        phases = settings.phases[phase - len(ends) : phase + 1]
        first, *later = (_source(settings, corpus, documents[name], item) for item in phases)
        source: CorpusSource | ContinuedSource = first
        for cursor, following in zip(cursors, later, strict=True):
            source = ContinuedSource(source, cursor, following)
        sources.append(source)
    mixed: Source = sources[0]
    if len(sources) > 1:
        sizes = [corpus.manifest.counts.tokens for corpus in corpora.parts.values()]
        shares = corpora.shares_with(settings.phases[phase].mixture)
        mixed = MixedSource(sources, list(shares.values()), sizes, settings.seed)
    objective = settings.objective_of(settings.phases[phase])
    return _loader(settings, objective, mixed, corpora, settings.batch, plan)


def held_out_loader(
    settings: PretrainConfig, corpus: Corpus, documents: DocumentIds, plan: Plan
) -> Loader:
    """Return the steps of the longest phase in one order, masked as `evaluation_masking` says."""
    phase = max(settings.phases, key=lambda phase: phase.length)
    fixed = dataclasses.replace(settings, data_copies=1)
    objective = with_masking(settings.objective.evaluated, settings.evaluation_masking)
    batch = TokenBudget(min(settings.evaluation_tokens, 8 * settings.microbatch_tokens))
    source = _source(fixed, corpus, documents, phase)
    return _loader(settings, objective, source, corpus, batch, plan)


def _source(
    settings: PretrainConfig, corpus: Corpus, documents: DocumentIds, phase: PretrainPhase
) -> CorpusSource:
    return CorpusSource(
        corpus, corpus.tokenizer.template, settings.segments_of(phase), documents,
        settings.seed, settings.data_copies,
    )  # fmt: skip


def _loader(
    settings: PretrainConfig,
    objective: Objective,
    source: Source,
    corpus: Corpus | Corpora,
    batch: BatchSize,
    plan: Plan,
) -> Loader:
    """Return the steps of a source, with the targets of an objective."""
    vocabulary = vocabulary_of(corpus, objective)
    prepare = lambda sequence, rng: objective.prepare(sequence, vocabulary, rng)  # noqa: E731
    tokens = settings.microbatch_tokens
    return Loader(source, prepare, batch, tokens, settings.seed, plan.rank, plan.world)


def preflight(
    settings: PretrainConfig,
    corpus: Corpus | Corpora,
    folder: Path | None,
    device: torch.device,
    plan: Plan = SINGLE,
) -> list[Finding]:
    """Return the notes and warnings about a run: ids, classes, data, disk and memory.

    Raises:
        BothwaysError: there are errors; it lists them all.
    """
    corpora = corpus if isinstance(corpus, Corpora) else Corpora.of(corpus, None)
    where, words = "word_milestones", corpora.first.manifest.counts.words
    if settings.word_milestones and folder is None:
        message = "are model folders in the folder of the run, and this one has none"
        raise ConfigError(message, where=where, fix="Give the run a folder.")
    if settings.word_milestones and len(corpora.parts) > 1:
        message = "are for one corpus: the words of a mixture are not counted"
        raise ConfigError(message, where=where, fix="Leave them out, or join the corpora.")
    if settings.word_milestones and words is None:
        message = "was built before words were counted, which word_milestones needs"
        raise DataError(message, where=corpora.first.folder, fix="Build the corpus again.")
    models = settings.objective.models(settings.encoder)
    folders = start_folders(settings.start, models)
    if "model" in folders:  # what follows depends on the vocabulary
        _require_vocabulary_of(folders["model"], settings.start, corpora.first)
    length = max(phase.length for phase in settings.phases)
    findings = [*check_model(settings.encoder, corpus.tokenizer, length)]
    # Ranks that may share a model do so where it would not fit otherwise.
    ranks = 1 if settings.sharding is None else plan.world
    findings += check_machine(memory_demand(settings), folder, device, ranks)
    findings += check_class(*models["model"], corpus.tokenizer)
    missing = [] if settings.start is None else [
        role for role in models if role not in {*folders, *settings.objective.frozen_models}
    ]  # fmt: skip
    message = "there is no {0}/ in {1} or next to it: the {0} starts with random weights"
    notes = [message.format(role, settings.start) for role in missing]
    findings += [Finding("heads", "note", note, "start") for note in notes]
    findings += check_data(settings, corpora)
    findings += _check_mixture(settings, corpora)
    return report_findings(dict.fromkeys(findings))


def check_data(settings: PretrainConfig, corpora: Corpora) -> list[Finding]:
    """Return the findings about each corpus under the objective and the phases of a run."""
    findings, fix = [], "Train a tokenizer on this text, and build the corpus with it. "
    fix += "Words of over 100 characters are unknown to WordPiece: kind bpe divides them."
    for name, corpus in corpora.parts.items():
        corpus_findings = unknown_tokens(corpus.unknown_share, fix)
        for phase in settings.phases:
            checked: Any = settings.segments_of(phase)
            if checked.classes and settings.encoder.segments == 1:
                message = f"is 1, and {checked.kind} has two segments"
                advice = f"Set {setting('encoder.segments', 2)}, or 0 for no segment embedding."
                findings.append(Finding("ids", "error", message, "encoder.segments", advice))
            if phase.segments is None:  # those of the objective
                objective: Any = settings.objective_of(phase)
                checked = dataclasses.replace(objective, segments=checked)
            corpus_findings += checked.check(corpus)
        prefix = f"{name}: " if name else ""
        findings += [dataclasses.replace(x, what=f"{prefix}{x.what}") for x in corpus_findings]
    return findings


FEWEST_DRAWN = 3
"""Expected sequences below which a corpus may never be drawn: at 3 the probability is 5 %."""


def _check_mixture(settings: PretrainConfig, corpora: Corpora) -> list[Finding]:
    """Return the forecast of a mixture: what the run will read of each corpus."""
    if len(corpora.parts) == 1:
        for number, phase in enumerate(settings.phases):
            if phase.mixture is not None:
                message = "there is one corpus, and a mixture is of several"
                location = f"phases.{number}.mixture"
                return [Finding("balance", "error", message, location, "Leave it out.")]
        return []
    tokens = tokens_of_phases(settings, float(corpora.tokens))
    mixtures = [
        corpora.shares_with(phase.mixture, f"phases.{number}.mixture")
        for number, phase in enumerate(settings.phases)
    ]
    findings = []
    for name, corpus in corpora.parts.items():
        shares, size = [mixture[name] for mixture in mixtures], corpus.manifest.counts.tokens
        percentages = ", then ".join(dict.fromkeys(f"{share:.2%}" for share in shares))
        message = f"{name}: {size:,} tokens, {percentages} of the sequences"
        # Without a number of tokens, as of a length in hours, a corpus with a share may be read.
        drawn = math.inf if any(shares) else 0.0
        if tokens is not None:
            read = [share * count for share, count in zip(shares, tokens, strict=True)]
            drawn = sum(n / phase.length for n, phase in zip(read, settings.phases, strict=True))
            # 8,277 rather than 8.28e+03, but 22.5 and 0.031
            count, times = (
                f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
                for number in (drawn, sum(read) / size)
            )
            message += f", about {count} in this run, {times} times the text"
        if drawn >= FEWEST_DRAWN:
            findings.append(Finding("balance", "note", message, "mixture"))
            continue
        fix = "Lengthen the run, raise the share of this corpus, or leave the corpus out."
        message += ": it may never be read"
        findings.append(Finding("balance", "error", message, "mixture", fix))
    return findings


NAMED_DIFFERENCES = 3
"""The most settings in which a family may differ to be named as the one to change to."""


def check_class(
    encoder: EncoderConfig, heads: Iterable[Head], tokenizer: Tokenizer
) -> list[Finding]:
    """Check that transformers has a model class for this encoder and these heads."""
    family, kinds = family_for(encoder, tokenizer.kind), [head.kind for head in heads]
    suffix = "only bothways will open the folder"
    if family is None:
        message = f"no family of transformers has this configuration: {suffix}"
        other, differences = nearest_family(encoder)
        if len(differences) <= NAMED_DIFFERENCES:
            message += f"; {other}, the nearest, has {', '.join(differences)}"
        return [Finding("heads", "note", message, "encoder")]
    suitable = [other for other in FAMILIES if other.architecture_with(kinds) is not None]
    names = ", ".join(kinds)
    if not suitable:
        message = f"transformers has no class with the heads {names}: {suffix}"
        return [Finding("heads", "note", message, "objective")]
    if family in suitable:
        return []
    message = f"transformers has no {family.model_type} class with the heads {names}"
    alternatives = ", ".join(other.model_type for other in suitable)
    presets = (name for name in PRESETS if family_for(PRESETS[name]()) in suitable)
    # The preset of a suitable family whose width is nearest.
    nearest = min(presets, key=lambda x: abs(PRESETS[x]().width - encoder.width), default=None)
    advice = f": {argument(model=nearest)}" if nearest else ""
    fix = f"Set {setting('objective', 'masked_lm')}, or choose a model of another family "
    fix += f"({alternatives}){advice}."
    return [Finding("heads", "error", message, "objective", fix)]


_BLOCK, _POSITION = "encoder.blocks.", "encoder.embedding.position.weight"
_SEGMENT = "encoder.embedding.segment.weight"


def _origin(name: str, layers: Sequence[int]) -> str:
    """Return the name of a weight in another model, of which a model has these layers, from 1."""
    if not name.startswith(_BLOCK):
        return name
    number, rest = name.removeprefix(_BLOCK).split(".", 1)
    return f"{_BLOCK}{layers[int(number)] - 1}.{rest}"


def spread_layers(count: int, depth: int) -> tuple[int, ...]:
    """Return `count` layers of 1 … `depth` from the first to the last, as even as they can be.

    For 6 of 12 they are DistilBERT's: 1, 3, 5, 8, 10, 12.
    """
    return tuple(1 + int(n * (depth - 1) / max(1, count - 1) + 0.5) for n in range(count))


GROWING = ("depth", "width", "heads", "intermediate_size")
"""Settings that may be larger than in the model a run starts from."""


def _require_growth(model: EncoderConfig, encoder: EncoderConfig) -> None:
    """Raise ConfigError for settings in which `encoder` is not a larger shape of `model`."""
    names = [name for name in GROWING if getattr(encoder, name) < getattr(model, name)]
    if model.width // model.heads != encoder.width // encoder.heads:
        names.append("heads")
    sizes = {name: getattr(model, name) for name in GROWING}
    names += layer_differences(model, dataclasses.replace(encoder, **sizes))
    larger = any(getattr(encoder, name) > size for name, size in sizes.items())
    names += ["sharing"] if larger and model.sharing is not None else []
    if names:
        listed = ", ".join(dict.fromkeys(names))
        message = f"is not a larger shape of the model that it starts from: {listed}"
        layers = ",".join(map(str, spread_layers(min(encoder.depth, model.depth), model.depth)))
        fix = "Only dropout may differ, and depth, width, heads of the same size and "
        fix += "intermediate_size be larger. For fewer layers, choose them: "
        fix += setting("start_layers", layers)
        raise ConfigError(message, where="encoder", fix=fix)


def grow(model: Model, encoder: EncoderConfig) -> Model:
    """Return a model of a larger or equal shape that repeats the weights of another one.

    Each matrix of the smaller model is in the middle of the larger one and is repeated around it,
    queries, keys, values and gates each by themselves and by whole heads; layers are repeated in
    order. ModernBERT-large starts so from the base size (Warner et al. 2024, section 2.2.2; Rae et
    al. 2021, appendix G.3.3 for the layers).

    Raises:
        ConfigError: the encoder is smaller or differs in more than size and dropout.
    """
    _require_growth(model.config, encoder)
    larger, state = Model(encoder, model.specification), model.state_dict()
    layers = spread_layers(encoder.depth, model.config.depth)
    stacks, head_size = dict[str, int](), encoder.width // encoder.heads
    for name, count in hidden_matrices(larger).items():
        stacks[name] = stacks[f"{name.removesuffix('weight')}bias"] = count
    for prefix, module in larger.named_modules():
        if isinstance(module, Attention):
            stacks[f"{prefix}.bias"] = 2  # of queries and values
    weights = dict[str, Tensor]()
    for name, tensor in larger.state_dict().items():
        source, count = state[_origin(name, layers)], stacks.get(name, 1)
        in_heads, output = ".attention." in name, ".attention.out." in name
        rows = source.unflatten(0, (count, -1)) if source.ndim else source
        for axis, size in enumerate(tensor.shape):
            unit = head_size if in_heads and output == (axis == 1) else 1
            # Repeated around its middle, by whole units.
            stop, length = size // count if axis == 0 else size, rows.shape[axis + 1]
            offset = (stop - length) // 2 // unit * unit
            rows = rows.index_select(axis + 1, (torch.arange(stop) - offset) % length)
        weights[name] = rows.flatten(0, 1) if source.ndim else rows
    larger.load_state_dict(weights)
    larger.kept = model.kept
    return larger


def layer_differences(model: EncoderConfig, encoder: EncoderConfig) -> list[str]:
    """Return the settings for which `encoder` cannot have the layers of `model`."""
    folds = not encoder.segments and isinstance(model.position, Learned)
    free = {"depth", "dropout", "readout", *(["segments"] if folds else [])}
    names = [field.name for field in dataclasses.fields(encoder) if field.name not in free]
    same_rates = model.with_dropout_of(encoder)
    return [name for name in names if getattr(encoder, name) != getattr(same_rates, name)]


def with_layers(model: Model, encoder: EncoderConfig, layers: Sequence[int]) -> Model:
    """Return a model of shape `encoder` with these layers of another one, and its heads.

    Without a segment embedding, that of segment 0 is added to the positions: the same vectors for
    a text of one segment. (DistilBERT's own code drops it.)

    Args:
        layers: from 1, one for each of the encoder's.

    Raises:
        ConfigError: the encoder differs in more than layers, segments, dropout and readout, or a
            layer does not exist.
    """
    source, location = model.config, "start_layers"
    if source.sharing is not None:
        message = "cannot be chosen: the layers of this model share their weights"
        fix = "Leave them out, or start from another model."
        raise ConfigError(message, where=location, fix=fix)
    if len(layers) != encoder.depth or not all(1 <= layer <= source.depth for layer in layers):
        need = f"{encoder.depth} layers, one for each of the encoder, from 1 to {source.depth}"
        message = f"must be {need}, not {', '.join(map(str, layers))}"
        changes = [setting("encoder.depth", len(layers))] if len(layers) != encoder.depth else []
        if encoder.depth <= source.depth:
            even = ",".join(map(str, spread_layers(encoder.depth, source.depth)))
            changes.insert(0, setting("start_layers", even))
        fix = f"Set {', or '.join(changes)}."
        raise ConfigError(message, where=location, fix=fix)
    if names := layer_differences(source, encoder):
        message = f"the encoder differs from the model that it starts from in {', '.join(names)}"
        # A student of distillation has layers of its teacher without a word from the user.
        fix = "Only depth, segments, dropout and readout may differ. Random weights: "
        fix += f"{setting('start', 'none')}, {setting('start_layers', 'none')}"
        raise ConfigError(message, where="encoder", fix=fix)
    student, state = Model(encoder, model.specification), model.state_dict()
    selected = {name: state[_origin(name, layers)] for name in student.state_dict()}
    if not encoder.segments and _SEGMENT in state:
        selected[_POSITION] = state[_POSITION] + state[_SEGMENT][0]
    student.load_state_dict(selected)
    student.kept = model.kept
    return student
