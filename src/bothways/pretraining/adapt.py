"""Adaptation of a model to a domain: continued pre-training on its text, measured before and after.

Source: Gururangan et al. 2020 (one pass over the domain, warm-up of 6 %, Adam with betas 0.9 and
0.98). Their rate of 5e-4 belongs to 2,048 sequences of 512 tokens; for batches of a few thousand
tokens it is 5e-5 here. General text among that of the domain (replay) limits forgetting.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch

from bothways.core import errors
from bothways.core.config.values import require_range
from bothways.core.errors import DataError
from bothways.core.files import make_folder, read_object, replace_text
from bothways.core.progress import SILENT, Part, Progress
from bothways.core.report import sections as s
from bothways.core.report.html import can_write
from bothways.core.runtime.devices import choose_device, own_torch_state
from bothways.core.terminal import result_line
from bothways.core.training_module import TrainingModule
from bothways.data.corpus import Corpus, write_corpus
from bothways.data.corpus_source import ByWeight
from bothways.data.documents import DocumentReader, have_columns, read_documents
from bothways.data.loader import TokenBudget
from bothways.data.manifest import holds_corpus
from bothways.data.masking import Vocabulary
from bothways.hub.hf_config import RECORD
from bothways.hub.model_folder import load_model
from bothways.hub.resolve import resolve, resolve_run
from bothways.model.heads import token_head
from bothways.model.model import Model
from bothways.objectives.masked_lm import MaskedLM, MaskedLMModule
from bothways.objectives.objective import Objective
from bothways.pretraining import config
from bothways.pretraining.build import build_training_module, start_encoder
from bothways.pretraining.evaluation import HeldOut, replaced_tokens_of
from bothways.pretraining.run import PretrainResult, pretrain, write_run_page
from bothways.tasks.metrics import error_reduction, errors_text
from bothways.text.tokenizer import Tokenizer
from bothways.text.tokenizer_files import LONGEST_WORD
from bothways.text.trainers import sample
from bothways.text.vocabulary_report import SplitWord, VocabularyReport, vocabulary_report
from bothways.training.checkpoint import latest_checkpoint, run_folder
from bothways.training.optimizers import AdamW
from bothways.training.parallel import Plan, connected, from_main_rank, is_main, plan_here
from bothways.training.run import Training
from bothways.training.schedules import Linear, Tokens, duration

T = TypeVar("T")
Scores = Mapping[str, Mapping[str, float]]
"""Metrics by corpus."""

DOMAIN, GENERAL = "domain", "general"
HEAD_SHARE = 0.2
"""The length of the training of a new head with the encoder frozen, as a share of the run's."""
LEAST_STEPS = 1000
"""Updates of a run of unspecified length, if the text is read in fewer."""
LONGEST_WAIT = timedelta(days=7)
"""For which ranks wait while the main one builds corpora and measures."""
WORDS = "new_words.txt"
"""The file of the run with the words worth adding."""
NEW_HEAD = (
    "The model had no head that predicts tokens. A new one was trained first, with the encoder "
    "frozen; the values before are those of the original encoder with this head. Vectors of texts "
    "have changed: fine-tune the model again before you compare texts with it."
)
WEAK_HEAD = (
    "With this head the original encoder predicts no better than token frequencies (perplexity "
    "{:,.4g}): the head was trained too briefly, and the values before say little about the "
    "encoder. Lengthen the run: a fifth of its length is added for the head."
)
MASKED = "Of masked tokens, under the same masks before and after, in text that was not trained on."


@dataclass(frozen=True)
class MaskedHeadOnly(MaskedLM):
    """Masked LM that trains the head alone: the encoder is frozen, without dropout."""

    kind: Literal["masked_head"] = "masked_head"  # type: ignore[assignment]

    def training_module(
        self, models: Mapping[str, Model], vocabulary: Vocabulary
    ) -> TrainingModule:
        """Return the module to train."""
        return _HeadModule(models["model"])


class _HeadModule(MaskedLMModule):
    def __init__(self, model: Model) -> None:
        super().__init__(model)
        model.encoder.requires_grad_(False)

    def frozen(self) -> tuple[str, ...]:
        """Return the prefix of the encoder."""
        return ("model.encoder.",)


@dataclass(frozen=True)
class Adaptation:
    """The result of an adaptation.

    Attributes:
        run: the continued pre-training; its metrics are final.
        before, after: held-out metrics by corpus, "domain" and "general", under the same masks.
        vocabulary: how the vocabulary fits the domain.
        new_head: True if the model had no head that predicts tokens; `before` is then that of the
            original encoder with a head trained on top.
    """

    run: PretrainResult
    before: Scores
    after: Scores
    vocabulary: VocabularyFit
    new_head: bool

    def __repr__(self) -> str:
        scores = {"before": self.before, "after": self.after}
        metrics = {
            f"{corpus}/perplexity {stage}": values["perplexity"]
            for stage, corpora in scores.items()
            for corpus, values in corpora.items()
            if "perplexity" in values
        }
        steps = self.run.progress.steps
        return result_line("Adaptation", metrics, steps=steps, folder=self.folder)

    @property
    def folder(self) -> Path | None:
        """The model folder."""
        return self.run.folder

    def comparison(self) -> list[list[s.Cell]]:
        """Return a row for each corpus and metric: before, after, and the relative difference."""
        rows = list[list[s.Cell]]()
        for name, metrics in self.before.items():
            for metric, before in metrics.items():
                after = self.after[name][metric]
                if metric == "perplexity":
                    change = f"{100 * (after / before - 1):+,.1f} %"
                elif metric.startswith(("accuracy/", "f1/")):
                    change = errors_text(error_reduction(before, after))
                else:
                    continue
                rows.append([name, metric, before, after, change])
        return rows

    def lead(self) -> s.Report:
        """Return the first sections of the page of the run."""
        figures = list[s.KeyFigure]()
        for name, values in self.before.items():
            if "perplexity" in values:
                pair = f"{values['perplexity']:.4g} → {self.after[name]['perplexity']:.4g}"
                figures.append(s.KeyFigure(f"{name}: perplexity", pair, "before → after"))
        note, vocabulary = head_note(self.before) if self.new_head else "", self.vocabulary
        columns = ["measure", "domain", *(["general"] if vocabulary.general else [])]
        words: list[list[s.Cell]] = [
            [word.word, " ".join(word.pieces), word.count] for word in vocabulary.words[:50]
        ]
        listed = s.TableSection(
            "Words to add", ["word", "its tokens now", "occurrences"], words,
            note="All are in new_words.txt: bothways convert MODEL --vocabulary new_words.txt.",
        )  # fmt: skip
        scored = ["text", "metric", "before", "after", "relative"]
        answer, note = f"Are new words worth adding? {vocabulary.answer}", f"{MASKED} {note}"
        sections: tuple[s.Section, ...] = (
            s.KeyFigures(figures),
            s.TableSection("Before and after", scored, self.comparison(), note=note),
            s.TableSection("Vocabulary", columns, vocabulary.rows(), note=answer),
            *([listed] if words else []),
        )
        headline = "; ".join(f"{figure.label} {figure.value}" for figure in figures)
        return s.Report("Adaptation", headline, "", sections)


def head_note(scores: Scores) -> str:
    """Explain the values before adaptation of a new head, and whether it has learned anything."""
    weak = [
        frequencies
        for metrics in scores.values()
        for name, value in metrics.items()
        if name.startswith("loss/")
        and value >= (frequencies := metrics.get(f"unigram/{name}", math.inf))
    ]
    return f"{NEW_HEAD} {WEAK_HEAD.format(math.exp(weak[0]))}" if weak else NEW_HEAD


@own_torch_state(torch.float32)
def adapt(  # noqa: PLR0913 – one option per question
    model: str | Path,
    texts: Iterable[str],
    out: Path,
    *,
    replay: Iterable[str] = (),
    replay_share: float | None = None,
    length: int = 128,
    column: str = "text",
    overrides: Any = (),
    resume: bool = False,
    device: str = "auto",
    progress: Progress = SILENT,
) -> Adaptation:
    """Continue the pre-training of a model on text of a domain, and save it in `out/model`.

    Under `torchrun` each process is a rank of the training; the main one builds the corpora and
    measures, while the others wait.

    Args: as `bothways.adapt`, and
        overrides: settings of `PretrainConfig`, as a tree or as texts.

    Raises:
        ConfigError: a setting is not suitable, or the model cannot be adapted (an ELECTRA without
            its generator).
        BothwaysError: as `pretrain` and `write_corpus`.
    """
    fix = "0.1 reads general text in a tenth."
    require_range("[0, 1)", replay_share=replay_share, fix=fix)
    plan = plan_here()
    progress = progress if is_main(plan) else SILENT
    source = str(resolve(resolve_run(str(model))))
    loaded = load_model(source)
    heads, encoder = loaded.model.heads, loaded.model.config
    kind = token_head(encoder).kind
    fresh = kind not in heads
    if kind != "masked":
        objective = config.default_objective(encoder)
    elif not fresh or "replaced" not in heads:
        objective = MaskedLM()
    else:
        objective, fresh = replaced_tokens_of(loaded, source), False
    if length > encoder.max_positions:
        known = f"the most that the model reads, not {length:,}"
        progress.message(f"note: sequences have {encoder.max_positions:,} tokens, {known}")
    sources = _sources([*texts], [*replay], column)
    if GENERAL not in sources and replay_share is not None:
        message = f"is {replay_share:g}, and there is no general text to read"
        fix = f"Name some: {errors.argument(replay='FILE')}."
        raise errors.ConfigError(message, where="replay_share", fix=fix)
    share = 0.0 if GENERAL not in sources else 0.1 if replay_share is None else replay_share
    settings_for = functools.partial(_settings, source, objective, share, length, overrides)
    settings_for(1)  # refuses wrong settings before corpora are built
    with _nothing_left(out, plan):

        def build() -> dict[str, Path]:
            with run_folder(out, resume=resume, progress=progress):
                pass
            tokenizer = loaded.tokenizer
            return {
                name: _corpus(paths, tokenizer, out, name, progress).folder
                for name, paths in sources.items()
            }

        folders = _by_main(plan, build)
        corpora = {name: Corpus.open(folder) for name, folder in folders.items()}
        start = settings_for(corpora[DOMAIN].manifest.counts.tokens)
        if fresh:
            head_progress = Part(progress, "new head")
            head = _train_head(start, corpora[DOMAIN], out / "head", resume, device, head_progress)
            start = dataclasses.replace(start, start=str(head))
        before_scores, vocabulary = _by_main(
            plan, lambda: _look(sources, start, corpora, out, device, progress)
        )
        trained: Any = corpora if share else corpora[DOMAIN]
        done = pretrain(start, trained, out, resume=resume, device=device, progress=progress)
    best = dataclasses.replace(start, start=str(done.folder))
    after_scores = _by_main(plan, lambda: scores_of(best, corpora, device, Part(progress, "after")))
    result = Adaptation(done, before_scores, after_scores, vocabulary, fresh)
    page = out / "report.html"
    if is_main(plan) and can_write(page, SILENT):  # in place of the run's page
        used_device = choose_device(device)
        write_run_page(page, start, done.metrics, done.progress, used_device, result.lead())
    return result


def _sources(texts: list[str], replay: list[str], column: str) -> dict[str, Sources]:
    """Return the text of the domain and general text."""
    sources = {DOMAIN: Sources(texts, column)}
    if replay:
        sources[GENERAL] = Sources(replay, column)
    if pipes := [path for path in (*texts, *replay) if Path(path).is_fifo()]:
        message, fix = "is a pipe, and the text is read twice", "Save it to a file first."
        raise DataError(message, where=pipes[0], fix=fix)
    if column != "text" and not any(source.has_columns for source in sources.values()):
        message = "does nothing with plain text and corpora, which have no columns"
        raise errors.ConfigError(message, where="column", fix="Leave it out.")
    return sources


def _by_main(plan: Plan, make: Callable[[], T]) -> T:
    """Return on all ranks what the main one makes."""
    with connected(plan, torch.device("cpu"), LONGEST_WAIT):
        return from_main_rank(plan, make)


@contextlib.contextmanager
def _nothing_left(out: Path, plan: Plan) -> Iterator[None]:
    """Remove what a refused run has written, if there was nothing before and no update was made."""
    if not is_main(plan):
        yield
        return
    new, empty = not out.exists(), not out.exists() or not any(out.iterdir())
    try:
        yield
    except (errors.ConfigError, errors.DataError, errors.FolderError, errors.TokenizerError):
        if empty and latest_checkpoint(out) is None and latest_checkpoint(out / "head") is None:
            for path in [out] if new else list(out.iterdir()):
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        raise


def _training(until: Any, lr: float = 5e-5) -> Training:
    optimizer = AdamW(lr=lr, betas=(0.9, 0.98), eps=1e-6, decay=0.01)
    return Training(until, optimizer, Linear(0.06), evaluate=None, save=duration("500 steps"))


def _settings(
    source: str,
    objective: Objective,
    share: float,
    length: int,
    overrides: Any,
    tokens: int,
) -> config.PretrainConfig:
    """Return the settings of the run, given the number of tokens of the domain."""
    encoder, batch = start_encoder(source), TokenBudget(8192)
    # Each token of the domain once; the replayed share is on top.
    end = Tokens(round(max(tokens / (1 - share), LEAST_STEPS * batch.n)))
    base = config.PretrainConfig(
        encoder,
        _training(end),
        objective,
        (config.PretrainPhase(min(length, encoder.max_positions)),),
        batch,
        held_out=0.05,
        evaluation_tokens=50_000,
        mixture=ByWeight({DOMAIN: 1 - share, GENERAL: share}) if share else None,
        start=source,
    )
    settings = config.load_pretraining(base, overrides)
    if settings.start != source:
        message = f"is {settings.start}, and the model to adapt is {source}"
        raise errors.ConfigError(message, where="start", fix="Leave it out.")
    return settings


def _look(
    sources: Mapping[str, Sources],
    settings: config.PretrainConfig,
    corpora: Mapping[str, Corpus],
    out: Path,
    device: str,
    progress: Progress,
) -> tuple[dict[str, dict[str, float]], VocabularyFit]:
    """Return the metrics before the run and the fit of the vocabulary; write the words to add."""
    scores = scores_of(settings, corpora, device, Part(progress, "before"))
    progress.stage("comparing vocabularies")
    texts = {name: _texts(sources[name], corpus) for name, corpus in corpora.items()}
    vocabulary = vocabulary_fit(corpora[DOMAIN].tokenizer, texts[DOMAIN], texts.get(GENERAL, ()))
    if vocabulary.words:
        replace_text(out / WORDS, "".join(f"{word.word}\n" for word in vocabulary.words))
    return scores, vocabulary


class Sources(NamedTuple):
    """Files with text in a column, or the folder of a corpus."""

    paths: list[str]
    column: str

    @property
    def is_corpus(self) -> bool:
        """True for the folder of a corpus."""
        return len(self.paths) == 1 and holds_corpus(self.paths[0])

    @property
    def has_columns(self) -> bool:
        """True for tables."""
        return not self.is_corpus and have_columns(self.paths)

    def read(self) -> DocumentReader:
        """Return the documents of the files."""
        column = self.column if self.has_columns else "text"  # it may be that of the other texts
        return read_documents(self.paths, column=column)


def _corpus(
    sources: Sources, tokenizer: Tokenizer, out: Path, name: str, progress: Progress
) -> Corpus:
    """Return the corpus of texts, built once, or the corpus that is given."""
    if sources.is_corpus:
        corpus = Corpus.open(sources.paths[0])
        if corpus.tokenizer.backend.get_vocab() != tokenizer.backend.get_vocab():
            message = "was built with another vocabulary than the model's"
            fix = "Give the text itself."
            raise errors.ConfigError(message, where=sources.paths[0], fix=fix)
        return corpus
    folder = out / "corpora" / name
    make_folder(folder.parent)
    return write_corpus(sources.read(), tokenizer, folder, progress=Part(progress, name))


def _texts(sources: Sources, corpus: Corpus) -> Iterator[str]:
    """Yield the texts; those of a corpus are decoded."""
    if sources.is_corpus:
        for document in range(len(corpus)):
            ids = np.concatenate(corpus.sentences_of(document))
            yield corpus.tokenizer.decode(ids[ids != corpus.tokenizer.specials.unknown])
    else:
        yield from (document.text for document in sources.read())


def _train_head(
    settings: config.PretrainConfig,
    corpus: Corpus,
    folder: Path,
    resume: bool,
    device: str,
    progress: Progress,
) -> Path:
    """Train a new head that predicts tokens, with the encoder frozen; return the model folder.

    Raises:
        ConfigError: the folder has a head that was trained on another model.
    """
    model = folder / "model"
    if (model / "config.json").is_file():
        start = read_object(model / RECORD, errors.FolderError)["pretraining"]["start"]
        if start == settings.start:
            return model
        message = f"the head in {folder} was trained on {start}, not on {settings.start}"
        raise errors.ConfigError(message, where="model", fix="Choose another folder for this run.")
    until = settings.training.end.part(HEAD_SHARE)
    if not isinstance(settings.objective, MaskedLM):
        message = f"the model has no head for {settings.objective.kind!r}, and none can be started"
        raise errors.ConfigError(message, where="model", fix="Give a model that predicts tokens.")
    training = _training(until, lr=1e-3)
    head_settings = dataclasses.replace(
        settings,
        training=dataclasses.replace(training, precision=settings.training.precision),
        objective=MaskedHeadOnly(masking=settings.objective.masking),
        mixture=None,
        fresh=("masked",),
    )
    pretrain(head_settings, corpus, folder, resume=resume, device=device, progress=progress)
    return model


def scores_of(
    settings: config.PretrainConfig,
    corpora: Mapping[str, Corpus],
    device: str,
    progress: Progress,
) -> dict[str, dict[str, float]]:
    """Return the metrics of the model in `settings.start` on the held-out text of each corpus.

    Masks are those of `settings.evaluation_masking`, the same at each call. "unigram/loss/…" is the
    loss of token frequencies alone.
    """
    result = {}
    for name, corpus in corpora.items():
        training_module = build_training_module(settings, corpus, choose_device(device))
        _, document_ids = corpus.split(settings.held_out, settings.seed)
        scoring = HeldOut(settings, corpus, document_ids, Plan(), training_module)
        metrics = scoring(Part(progress, name))
        result[name] = {
            key.removeprefix("held-out/"): value
            for key, value in metrics.items()
            if key.startswith(("held-out/", "unigram/loss/"))
        }
    return result


CEILING = 10_000_000
"""Characters of each text that are compared, an even sample."""
FEWEST, MOST, WORTH = 20, 1000, 0.03
"""Occurrences of a word that is worth adding, at least; words, at most; and the share of the tokens
that all of them must save beyond what the best words of general text save there: of any text, the
most frequent words that are split save some. Rarer words are not learned, and fewer tokens are not
noticed."""
_SPLIT = 20_000


@dataclass(frozen=True)
class VocabularyFit:
    """How a vocabulary fits the text of a domain.

    Attributes:
        domain, general: the measures; None without general text.
        words: candidates, those that save most tokens first.
        saved: the share of the domain's tokens that all of them save.
        saved_general: the same of general text by its own best words; 0 without general text.
    """

    domain: VocabularyReport
    general: VocabularyReport | None
    words: tuple[SplitWord, ...]
    saved: float
    saved_general: float = 0.0

    @property
    def worth(self) -> bool:
        """True if adding the words is worth it."""
        return self.saved - self.saved_general >= WORTH

    def rows(self) -> list[list[str]]:
        """Return the measures on the domain and on general text, as texts."""
        reports = [self.domain, *([self.general] if self.general else [])]
        return [
            ["tokens per word", *(f"{report.fertility:.3f}" for report in reports)],
            ["unknown tokens", *(f"{report.unknown:.3%}" for report in reports)],
            ["words of one token", *(f"{report.whole_words:.1%}" for report in reports)],
        ]

    @property
    def answer(self) -> str:
        """The answer, as a sentence."""
        if not self.words:
            return f"No: no word that is split occurs {FEWEST} times."
        savings = f"the {len(self.words):,} best words save {self.saved:.1%} of the tokens"
        if self.general is not None:
            savings += f", those of general text {self.saved_general:.1%} there"
        return f"Yes: {savings}." if self.worth else f"No: {savings}, a gain below {WORTH:.0%}."


def vocabulary_fit(
    tokenizer: Tokenizer, domain: Iterable[str], general: Iterable[str] = ()
) -> VocabularyFit:
    """Measure the fit on an even sample of each text.

    Raises:
        DataError: the domain's text holds no word.
    """
    domain_report = vocabulary_report(tokenizer, sample(domain, CEILING).read(), examples=_SPLIT)
    words, saved = _best_words(tokenizer, domain_report)
    try:
        other = vocabulary_report(tokenizer, sample(general, CEILING).read(), examples=_SPLIT)
    except DataError:  # there is none
        return VocabularyFit(domain_report, None, words, saved)
    return VocabularyFit(domain_report, other, words, saved, _best_words(tokenizer, other)[1])


def _best_words(
    tokenizer: Tokenizer, report: VocabularyReport
) -> tuple[tuple[SplitWord, ...], float]:
    """Return the words that save most tokens as entries, and the share of tokens they save."""
    merged: dict[str, SplitWord] = {}
    for split in (*report.split, *report.strange):
        word = split.word.lower() if tokenizer.lowercase else split.word
        previous = merged[word].count if word in merged else 0
        merged[word] = SplitWord(word, split.pieces, previous + split.count)
    ranked = sorted(merged.values(), key=lambda entry: (-_saved(entry), entry.word))
    frequent = (word for word in ranked if word.count >= FEWEST and len(word.word) <= LONGEST_WORD)
    new = (word for word in frequent if tokenizer.id(word.word) is None)
    words = tuple(itertools.islice(new, MOST))
    return words, sum(map(_saved, words)) / max(1, report.tokens)


def _saved(word: SplitWord) -> int:
    """Return the tokens that a word saves as an entry of its own; unknown words count once."""
    return word.count * max(1, len(word.pieces) - 1)
