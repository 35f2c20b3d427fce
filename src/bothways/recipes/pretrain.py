"""Pre-training: from a corpus to a model folder with a head that predicts tokens and, by choice, a next-sentence head.

The run folder holds the checkpoints, `metrics.jsonl`, TensorBoard's events, the configuration as resolved and, at the end,
`model/`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_never

from bothways.core import config as configs
from bothways.core.errors import ConfigError
from bothways.core.hardware import choose_device, gemm_rate, resolve_precision
from bothways.core.learner import Cursor, Step
from bothways.data import nextsentence
from bothways.data.corpus import Corpus
from bothways.data.loader import Loader, Share, ahead
from bothways.data.masking import Vocabulary
from bothways.data.packing import Tokens
from bothways.data.segments import CorpusSource, FullSentences, NextSentence
from bothways.families.catalogue import family_for
from bothways.interop.card import Card
from bothways.interop.folder import load_model, save_model
from bothways.interop.hub import resolve
from bothways.interop.settings import read_settings
from bothways.model.config import Learned
from bothways.model.heads import Head, Masked, Model, Pair, Pooled, token_head
from bothways.model.operations import BACKWARD, forward_flops
from bothways.model.recurrentconfig import ModelConfig, RecurrentConfig
from bothways.objectives.language import LanguageModelling
from bothways.objectives.pretraining import Pretraining
from bothways.recipes.cards import data_of_corpus, limits_of_pretrained
from bothways.recipes.settings import Phase, PretrainConfig
from bothways.tasks.preflight import Finding, Load, check_machine, check_model, settle
from bothways.text.template import Template
from bothways.text.tokenizer import Tokenizer
from bothways.training import run
from bothways.training.folder import run_folder
from bothways.training.loop import evaluate
from bothways.training.parallel import Plan, connected, is_main, place, plan_here, total
from bothways.training.run import Training
from bothways.training.state import Duration, Epochs, Hours, Progress, Steps
from bothways.training.state import Tokens as TokenCount
from bothways.training.trackers import Peak, flat

C = TypeVar("C", bound=ModelConfig)
Learning = Pretraining | LanguageModelling
COUNTED = 10_000_000
"""Tokens of the corpus from which the unigram baseline is counted, at most."""


@dataclass(frozen=True)
class Pretrained:
    """What a run came to.

    Attributes:
        learner: with the weights of the last step.
        progress: at the end; short of the configured length if the run was interrupted.
        metrics: of held-out documents, by name: "held-out/loss/masked", "held-out/accuracy/pair", "held-out/perplexity" …
    """

    learner: Learning
    progress: Progress
    metrics: Mapping[str, float]

    def finished(self, training: Training) -> bool:
        """Whether the run came to its configured end."""
        return self.progress.finished(training.until)


def heads_for(encoder: ModelConfig, segments: FullSentences | NextSentence) -> tuple[Head, ...]:
    """The heads that these segments can train: what predicts tokens from this encoder, and the pair head, which needs pairs.

    Raises:
        ConfigError: pairs for a language model: none of its vectors has read both segments.
    """
    head = token_head(encoder)
    match segments:
        case NextSentence() if not isinstance(head, Masked):
            what = f"next-sentence pairs go with masked LM, and this encoder is trained by the head {head.kind!r}"
            raise ConfigError(what, where="segments", fix="Set segments=full_sentences.")
        case NextSentence():
            return head, Pooled(), Pair()
        case FullSentences():
            return (head,)
        case _:
            assert_never(segments)


def fitted(encoder: C, tokenizer: Tokenizer) -> C:
    """The encoder for a tokenizer: its rows, and its padding, from which RoBERTa's positions count."""
    pad = tokenizer.specials.pad
    if isinstance(encoder, RecurrentConfig):
        return dataclasses.replace(encoder, vocab=tokenizer.size, pad=pad)
    position = encoder.position
    if isinstance(position, Learned) and position.offset:
        position = dataclasses.replace(position, offset=pad + 1)
    return dataclasses.replace(encoder, vocab=tokenizer.size, pad=pad, position=position)


def pretrain(
    settings: PretrainConfig,
    corpus: Corpus,
    folder: Path,
    *,
    resume: bool = False,
    device: str = "auto",
    start: Model | None = None,
    on_finding: Callable[[Finding], object] = lambda _: None,
) -> Pretrained:
    """Pre-train on a corpus.

    Under `torchrun` each process is a rank. SIGINT and SIGTERM end the run after a step, with a checkpoint.

    Args:
        folder: of this run: checkpoints, metrics, `config.toml`.
        resume: go on from the newest checkpoint in the folder; without, it must be new or empty.
        start: a model to go on from, with the heads of `settings.segments`; none for new weights.
        on_finding: takes what the preflight warns of.

    Raises:
        ResourceError: another run is in the folder, or has been.
        BothwaysError: what the preflight and `training.run.train` raise.
    """
    plan = plan_here()
    where = place(plan, choose_device(device))
    findings = preflight(settings, corpus, folder, where)
    if is_main(plan):
        for finding in findings:
            on_finding(finding)
    torch.manual_seed(settings.seed)
    model = start or Model(settings.encoder, heads_for(settings.encoder, settings.segments))
    model.encoder.recompute = settings.training.recompute
    learner = learner_of(model, settings, corpus).to(where)
    # The main rank takes the folder before the ranks meet, so that none writes into another run's.
    with run_folder(folder, resume=resume) if is_main(plan) else contextlib.nullcontext(), connected(plan, where):
        if is_main(plan) and not resume:
            (folder / "config.toml").write_text(configs.to_toml(settings), encoding="utf8")
        peak = _peak(settings, where, plan)
        torch.manual_seed(settings.seed + 1 + plan.rank)  # after the peak, which draws the first time in a process
        train_ids, held_out_ids = corpus.split(settings.held_out, settings.seed)
        counts = np.bincount(corpus.tokens[:COUNTED], minlength=settings.encoder.vocab)
        scoring = HeldOut(settings, corpus, held_out_ids, plan, learner, counts)
        progress = run.train(
            learner,
            _phases(settings, corpus, train_ids, plan, learner),
            settings.training,
            plan,
            folder,
            config=configs.to_dict(settings) | {"corpus": fingerprint(corpus)},
            evaluation=scoring,
            peak=peak,
        )
        return Pretrained(learner, progress, scoring())


def learner_of(model: Model, settings: PretrainConfig, corpus: Corpus) -> Learning:
    """The model as what it is trained to be: a masked language model, or one that reads in one direction, or in each."""
    if isinstance(token_head(model.config), Masked):
        return Pretraining(model, settings.masking, vocabulary_of(corpus))
    return LanguageModelling(model)


def vocabulary_of(corpus: Corpus) -> Vocabulary:
    """What masking knows of a corpus' vocabulary."""
    tokenizer = corpus.tokenizer
    return Vocabulary(tokenizer.special, tokenizer.continues, tokenizer.specials.mask)


def preflight(settings: PretrainConfig, corpus: Corpus, folder: Path, device: torch.device) -> list[Finding]:
    """What is to be known before the run: ids, disk, memory, sentences that will be cut; no errors among it.

    Raises:
        BothwaysError: there are errors; it lists them all.
    """
    longest = max(phase.length for phase in settings.phases)
    heads = heads_for(settings.encoder, settings.segments)
    checkpoints, recompute = settings.training.keep.last + 2, settings.training.recompute
    load = Load(settings.encoder, heads, longest, settings.microbatch_tokens, checkpoints, recompute)
    findings = [
        *check_model(settings.encoder, corpus.tokenizer, longest),
        *_check_class(settings.encoder, heads, corpus.tokenizer),
        *_check_pairs(settings, corpus.tokenizer.template),
        *check_machine(load, folder, device),
    ]
    room = dataclasses.replace(settings.segments, length=longest).room
    cut = int((np.diff(corpus.sentences[: COUNTED // 10].astype(np.int64)) > room).sum())
    if cut:
        share = cut / min(len(corpus.sentences) - 1, COUNTED // 10)
        what = f"{share:.1%} of the sentences are longer than {room} tokens and will be cut"
        findings.append(Finding("truncation", "note", what, "phases"))
    return settle(findings)


def _check_class(encoder: ModelConfig, heads: Iterable[Head], tokenizer: Tokenizer) -> list[Finding]:
    """Whether the model can be saved in the end, and who opens it then."""
    family = family_for(encoder, tokenizer.kind)
    kinds = [head.kind for head in heads]
    if family is None:
        what = "no family of transformers has this configuration: bothways will open the model's folder, transformers will not"
        return [Finding("heads", "note", what, "encoder")]
    if family.architecture_with(kinds) is not None:
        return []
    what = f"transformers has no class of the family {family.model_type} with the heads {', '.join(kinds)}"
    return [Finding("heads", "error", what, "segments", "Set segments=full_sentences, for masked LM alone.")]


def _check_pairs(settings: PretrainConfig, template: Template) -> list[Finding]:
    """Whether the tokenizer's pairs are as next sentences need them."""
    kinds = {type(settings.segments_of(phase)) for phase in settings.phases}
    if NextSentence not in kinds or template.pair == nextsentence.SPECIALS:
        return []
    what = f"next-sentence pairs are [CLS] A [SEP] B [SEP], and this tokenizer has {template.pair} special tokens there"
    return [Finding("heads", "error", what, "segments", "Set segments=full_sentences, as RoBERTa does.")]


def _loader(
    settings: PretrainConfig, corpus: Corpus, chosen: NDArray[Any], phase: Phase, plan: Plan, learner: Learning
) -> Loader[Any]:
    source = CorpusSource(corpus, corpus.tokenizer.template, settings.segments_of(phase), chosen, settings.seed, settings.views)
    share = Share(plan.rank, plan.world)
    return Loader(source, learner.prepare, settings.batch, settings.microbatch_tokens, settings.seed, share)


def _phases(settings: PretrainConfig, corpus: Corpus, chosen: NDArray[Any], plan: Plan, learner: Learning) -> list[run.Phase]:
    """The run's phases, each with its data from a cursor on."""

    def steps(phase: Phase) -> Callable[[Cursor], Iterable[Step]]:
        loader = _loader(settings, corpus, chosen, phase, plan, learner)
        return lambda cursor: ahead(loader.steps(cursor), device)

    device = next(learner.parameters()).device
    ends = np.cumsum([phase.share for phase in settings.phases])
    ends[-1] = 1.0
    return [
        run.Phase(part_of(settings.training.until, float(end)), steps(phase))
        for phase, end in zip(settings.phases, ends, strict=True)
    ]


def part_of(run: Duration, share: float) -> Duration:
    """The duration up to a share of a run, at least one step or token."""
    match run:
        case Steps(count):
            return Steps(max(1, round(count * share)))
        case TokenCount(count):
            return TokenCount(max(1, round(count * share)))
        case Epochs(count):
            return Epochs(count * share)
        case Hours(count):
            return Hours(count * share)
        case _:
            assert_never(run)


def _peak(settings: PretrainConfig, device: torch.device, plan: Plan) -> Peak:
    heads = heads_for(settings.encoder, settings.segments)
    forward = forward_flops(settings.encoder, heads, settings.phases[0].length, settings.masking.rate)
    rate = gemm_rate(device, resolve_precision(settings.training.precision, device))
    return Peak((1 + BACKWARD) * forward, rate * plan.world)


class HeldOut:
    """Scores a learner on the same held-out sequences, masked in the same way, each time it is called.

    The sequences are those of the longest phase. Beside the losses and accuracies stand the perplexity of predicted tokens, of
    both directions together where there are two, and the unigram baseline: always the most frequent token, and the frequencies
    as probabilities.
    """

    def __init__(
        self,
        settings: PretrainConfig,
        corpus: Corpus,
        chosen: NDArray[Any],
        plan: Plan,
        learner: Learning,
        counts: NDArray[np.int64],
    ) -> None:
        longest = max(settings.phases, key=lambda phase: phase.length)
        size = min(settings.evaluation_tokens, 8 * settings.microbatch_tokens)
        fixed = dataclasses.replace(settings, views=1, batch=Tokens(size))
        loader = _loader(fixed, corpus, chosen, longest, plan, learner)
        self._steps = list(_up_to(settings.evaluation_tokens, loader.epoch()))
        self._learner, self._plan, self._precision = learner, plan, settings.training.precision
        self._unigram = self._baseline(counts)

    def __call__(self) -> dict[str, float]:
        """Metrics by name; equal on all ranks."""
        scores = evaluate(self._learner, self._steps, self._plan, precision=self._precision)
        loss = float(np.mean([scores.losses[name] for name in self._learner.predicts]))
        perplexity = math.exp(min(loss, 700.0))
        return flat(scores, "held-out/") | {"held-out/perplexity": perplexity} | self._unigram

    def _baseline(self, counts: NDArray[np.int64]) -> dict[str, float]:
        """What a model would reach that knows nothing but how frequent each token is."""
        return dict(pair for name in self._learner.predicts for pair in self._unigrams(name, counts).items())

    def _unigrams(self, name: str, counts: NDArray[np.int64]) -> dict[str, float]:
        hidden = [np.asarray(b.targets[name].ids) for step in self._steps for b in step.microbatches]  # type: ignore[attr-defined]
        ids = np.concatenate(hidden)
        surprise = -np.log((counts + 1) / (counts.sum() + len(counts)))
        sums = total(
            self._plan,
            {"n": float(len(ids)), "loss": float(surprise[ids].sum()), "hits": float((ids == counts.argmax()).sum())},
        )
        return {f"unigram/loss/{name}": sums["loss"] / sums["n"], f"unigram/accuracy/{name}": sums["hits"] / sums["n"]}


def _up_to(tokens: int, steps: Iterator[Step]) -> Iterator[Step]:
    """Steps until they have so many tokens together; at least one."""
    for step in steps:
        yield step
        tokens -= step.tokens
        if tokens <= 0:
            return


def begin_from(source: str, segments: FullSentences | NextSentence) -> Model:
    """A model folder's weights with the heads that these segments train; heads that the folder lacks are an error.

    Raises:
        FolderError: the folder lacks a head, or is no model.
        ConfigError: pairs for a language model.
    """
    folder = resolve(source)
    return load_model(folder, heads_for(read_settings(folder).encoder, segments)).model


def save_pretrained(done: Pretrained, settings: PretrainConfig, corpus: Corpus, folder: Path) -> None:
    """Write the model folder, with the settings and what was reached."""
    card = Card(
        "A pre-trained encoder",
        f"Pre-trained with bothways on {corpus.manifest.counts.documents:,} documents, {done.progress.tokens:,} tokens read.",
        flatten(configs.to_dict(settings)),
        done.metrics,
        data_of_corpus(corpus, fingerprint(corpus)),
        limits_of_pretrained(settings.encoder, (phase.length for phase in settings.phases), done.progress.tokens, corpus),
    )
    record = {"pretraining": configs.to_dict(settings), "corpus": fingerprint(corpus), "metrics": dict(done.metrics)}
    save_model(folder, done.learner.model, corpus.tokenizer, card=card, extra=record)


def fingerprint(corpus: Corpus) -> str:
    """The sha256 of a corpus: equal for equal arrays and tokenizers."""
    stored = sorted((name, file.sha256) for name, file in corpus.manifest.files.items())
    return hashlib.sha256(repr(stored).encode()).hexdigest()


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, object]:
    """Nested tables → dotted path → value."""
    rows: dict[str, object] = {}
    for key, value in tree.items():
        rows |= flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return rows
