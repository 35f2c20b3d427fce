"""BERT's claim on this machine, in minutes: with pre-training, a model learns more from few labels.

Text → vocabulary → corpus → pre-training with masked LM and next sentence prediction → fine-tuning
on a labelled task, compared with the same architecture fine-tuned from random weights, several
seeds each. The text is files of the user, or the documentation inside the Python installation: the
docstrings of the standard library and of every installed package, without code, tables and markup.
Source files are parsed, never imported: no third-party code is executed.

Two settings let a BERT of this size learn in so little time: sequences start at 16 tokens without
pairs, which teaches attention to look at neighbours, and 40 % of the tokens are masked. Below a
number of tokens that depends on the shape, a model predicts by token frequency alone and
pre-training gains nothing: the largest shape is chosen whose tokens can be read in the time limit.

Labels come from documents that pre-training does not see, by a task that any text with spaces
gives: detect whether two neighbouring words of a sentence are swapped. Half of the sentences are
unchanged. Both classes contain the same words, so counting words does not help: the task needs word
order, which a masked language model learns. Each sentence is used once. Words at either end, words
with capitals, digits or punctuation, and equal words are never moved, so that only the order
reveals the label: the bigram-shift probe of Conneau et al. 2018 (What you can cram into a single
vector).
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import inspect
import itertools
import math
import os
import re
import sys
import sysconfig
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from bothways.core.config import reader as configs
from bothways.core.errors import DataError, ResourceError, os_errors
from bothways.core.jobs.process_pool import map_in_order
from bothways.core.progress import SILENT, Part, Progress
from bothways.core.report import sections as s
from bothways.core.runtime import devices
from bothways.core.runtime.process import usable_cores
from bothways.core.source import rng
from bothways.core.terminal import quantity, time_text
from bothways.data.corpus import Corpus, write_corpus
from bothways.data.documents import Document, read_documents
from bothways.data.loader import ExampleBudget, TokenBudget
from bothways.data.masking import Masking
from bothways.data.segments import FullSentences
from bothways.data.sentences import detect_language, split_sentences
from bothways.finetuning.config import FinetuneConfig
from bothways.finetuning.data import LabelledData, label
from bothways.finetuning.run import FinetuneResult, finetune
from bothways.hub.model_folder import save_model
from bothways.lab.bench.race import Workload, build_update, make_batch
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.positions import Learned
from bothways.objectives.masked_lm import MaskedLMNextSentence
from bothways.prediction.predictor import Predictor
from bothways.pretraining.config import PretrainConfig, PretrainPhase
from bothways.pretraining.recipes import short
from bothways.pretraining.run import PretrainResult, curves, pretrain
from bothways.tasks.masked_lm.task import MaskFillingTask
from bothways.tasks.metrics import error_reduction, errors_text
from bothways.tasks.text_task import TextExample
from bothways.text.trainers import WordPiece, train_vocabulary
from bothways.training.checkpoint import CONFIG, latest_checkpoint
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Duration, Epochs, Hours, Linear, Tokens
from bothways.training.trackers import read_records

PRETRAINED, SCRATCH = "pre-trained", "from random weights"
MARK = ".quickstart"
"""Empty file that marks the folder of a quickstart, which a later quickstart may resume."""
LIMIT = 8.0
"""Time limit in minutes, unless the user sets a time."""
MEASURED_SECONDS = 1.5
"""Duration of each measurement of the speed."""
SET_ASIDE = 5
"""Every fifth document is kept for the labelled task."""
BATCH = 512
"""Tokens per pre-training update."""
PHASES = (PretrainPhase(16, 0.6, FullSentences()), PretrainPhase(64, 0.4))
_ADAM = AdamW(lr=5e-4, betas=(0.9, 0.98), eps=1e-6)
FINE_TUNING = FinetuneConfig(
    Training(Epochs(3.0), _ADAM, Linear(0.1), evaluate=Epochs(3.0)), 64, ExampleBudget(8)
)


@dataclass(frozen=True)
class Shape:
    """A model with the length of pre-training that it needs.

    Attributes:
        rate: peak learning rate of pre-training.
        tokens: tokens after which the model has left the plateau of token frequencies and gains
            on the labelled task (docs/decisions/086).
        seeds: fine-tuning runs from each start.
    """

    depth: int
    width: int
    rate: float
    tokens: int
    seeds: int

    def encoder(self, vocabulary: int) -> EncoderConfig:
        """Build the encoder's configuration."""
        heads, inner = max(2, self.width // 64), 4 * self.width
        plain = EncoderConfig(vocabulary, self.width, self.depth, heads, inner, initial_range=0.05)
        return dataclasses.replace(plain, position=Learned(128), dropout=Dropouts(0.0, 0.0))

    def seconds(self, speed: float, tuning: int) -> float:
        """Estimate the duration of pre-training and fine-tuning at this speed in tokens."""
        return (self.tokens + tuning * self.seeds) / speed


SHAPES = (
    Shape(4, 256, 1e-3, 1_300_000, 3),
    Shape(4, 128, 2e-3, 1_200_000, 3),
    Shape(2, 128, 2e-3, 800_000, 2),
)
"""Candidates, the largest first."""


@dataclass(frozen=True)
class QuickstartResult:
    """Results of a quickstart; one fine-tuning run per seed from each start."""

    shape: Shape
    corpus: Corpus
    settings: PretrainConfig
    pretrained: PretrainResult
    labelled: LabelledData
    from_pretrained: tuple[FinetuneResult, ...]
    from_scratch: tuple[FinetuneResult, ...]


def _check_folder(out: Path) -> None:
    """Raise ResourceError if the folder holds something else, or cannot be written."""
    with os_errors(out, "Choose another folder."):
        if out.exists() and not (out / MARK).exists() and any(out.iterdir()):
            message = "is not empty, and not the folder of a quickstart"
            raise ResourceError(message, where=out, fix="Choose another folder: --out NAME.")
        above = next(path for path in (out, *out.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=above):  # before minutes of reading
            pass


def run_quickstart(
    out: Path,
    *,
    minutes: float | None = None,
    files: Sequence[str] | None = None,
    vocabulary: int = 4000,
    shapes: Sequence[Shape] = SHAPES,
    method: FinetuneConfig = FINE_TUNING,
    progress: Progress = SILENT,
) -> QuickstartResult:
    """Run or resume a quickstart in a folder.

    Args:
        minutes: total time, all of it used; `None` for as long as the model needs, up to `LIMIT`.
        files: text files; `None` for the installed documentation.

    Raises:
        ResourceError: the folder holds something else, or cannot be written.
    """
    _check_folder(out)
    start, numbers = time.perf_counter(), itertools.count(1)

    def begin(name: str, message: str) -> None:
        progress.message(f"[{next(numbers)}/7] {message}")
        progress.stage(name)

    source = "the text" if files else "the documentation of this Python installation"
    begin("text", f"reading {source}")
    documents = gather_documents(files)
    aside = documents[::SET_ASIDE]
    train_documents = [item for n, item in enumerate(documents) if n % SET_ASIDE]
    train_on, test_on = labelled_examples(train_documents, aside)
    source = f"{vocabulary:,} from {len(train_documents):,} documents"
    begin("vocabulary", f"learning a WordPiece vocabulary of {source}")
    tokenizer = train_vocabulary((item.text for item in train_documents), WordPiece(vocabulary))
    begin("corpus", "building the corpus")
    with os_errors(out, "Choose another folder."):
        out.mkdir(parents=True, exist_ok=True)
        (out / MARK).touch()
    corpus = write_corpus(train_documents, tokenizer, out / "corpus", progress=progress)
    data = label(method.task, tokenizer, train_on, test_on, method.length)
    begin("speed", "measuring the speed of this machine")
    tuning, limit = fine_tuning_tokens(method, data), 60 * (minutes or LIMIT)
    with contextlib.ExitStack() as stack:
        stack.callback(torch.set_num_threads, torch.get_num_threads())
        run = out / "pretraining"
        if resume := latest_checkpoint(run) is not None:
            settings = configs.load(PretrainConfig, file=run / CONFIG)
            depth, width = settings.encoder.depth, settings.encoder.width
            shapes = [shape for shape in shapes if (shape.depth, shape.width) == (depth, width)]
            if not shapes:
                message = f"has {depth} layers × {width}, which is not a shape of this version"
                raise ResourceError(message, where=run, fix="Choose another folder: --out NAME.")
        left = start + limit - time.perf_counter()
        shape, speed = choose_shape(shapes, tokenizer.size, left, tuning)
        if resume:
            plan = f"continuing to pre-train a BERT of {shape.depth} layers × {shape.width}"
        else:
            passed = time.perf_counter() - start
            until, plan = choose_length(shape, speed, tuning, limit, passed, minutes is not None)
            settings = pretraining_settings(shape, tokenizer.size, until)
        begin("pre-training", plan)
        pretrained = pretrain(settings, corpus, run, resume=resume, progress=progress)
        count, labels = shape.seeds, f"{len(train_on):,} labels"
        begin("fine-tuning", f"fine-tuning on {labels}, {count} times from each start")
        starts = [pretrained.model] * count + [pretrained.model.config] * count
        fitted = tuple(
            finetune(
                dataclasses.replace(method, seed=index % count),
                start=initial,
                train=data,
                progress=Part(progress, f"fine-tuning {index + 1} of {len(starts)}"),
            )
            for index, initial in enumerate(starts)
        )
    model, problem = fitted[0].task_model.model, data.task.problem
    save_model(out / "finetuned", model, tokenizer, labels=data.labels, problem=problem)
    begin("report", "writing the report")
    return QuickstartResult(
        shape, corpus, settings, pretrained, data, fitted[:count], fitted[count:]
    )


def pretraining_settings(shape: Shape, vocabulary: int, until: Duration) -> PretrainConfig:
    """Build the settings of pre-training."""
    recipe = short(shape.encoder(vocabulary))
    return dataclasses.replace(
        recipe,
        training=dataclasses.replace(
            recipe.training,
            until=until,
            optimizer=AdamW(lr=shape.rate, betas=(0.9, 0.98), eps=1e-6, decay=0.01),
            evaluate=until.part(1 / 8),
            save=None,
        ),
        objective=MaskedLMNextSentence(masking=Masking(0.4)),
        phases=PHASES,
        batch=TokenBudget(BATCH),
        microbatch_tokens=8192,
        held_out=0.02,
        evaluation_tokens=10_000,  # the default, read nine times, takes as long as the training
    )


def fine_tuning_tokens(method: FinetuneConfig, data: LabelledData) -> int:
    """Count the tokens of fine-tuning from both starts with one seed, as those of pre-training.

    A small batch takes about one and a half times as long per token; a prediction, a third.
    """
    assert isinstance(method.training.until, Epochs)
    test = sum(len(sequence) for item in data.dev for sequence in item.sequences)
    return round(2 * (1.5 * data.tokens * method.training.until.count + test / 3))


def measure_speed(shape: Shape, vocabulary: int) -> float:
    """Measure the tokens per second of pre-training updates."""
    device, length = devices.choose_device(), 64
    load = Workload("", shape.encoder(vocabulary), BATCH // length, length)
    precision: devices.Precision = "bf16" if devices.has_bf16(device) else "fp32"
    update = build_update(load, make_batch(load), precision, device)
    update()
    devices.wait(device)
    start, updates = time.perf_counter(), 0
    while (seconds := time.perf_counter() - start) < MEASURED_SECONDS:
        update()
        devices.wait(device)
        updates += 1
    return updates * load.tokens / seconds


def choose_shape(
    shapes: Sequence[Shape], vocabulary: int, seconds: float, tuning: int
) -> tuple[Shape, float]:
    """Choose the largest shape that fits, and measure its speed; set the faster number of threads.

    Threads wait for each other at every matrix product: where other programs use the cores, one
    thread can read more than ten times as much as two. If no shape fits, the last is chosen, with
    one seed.
    """
    threads = torch.get_num_threads()
    if threads > 1 and devices.choose_device().type == "cpu":
        threaded_speed = measure_speed(shapes[-1], vocabulary)
        torch.set_num_threads(1)
        if measure_speed(shapes[-1], vocabulary) < threaded_speed:
            torch.set_num_threads(threads)
    for shape in shapes:
        speed = measure_speed(shape, vocabulary)
        if shape.seconds(speed, tuning) <= seconds:
            return shape, speed
    return dataclasses.replace(shape, seeds=1), speed


def choose_length(
    shape: Shape, speed: float, tuning: int, limit: float, passed: float, use_all: bool
) -> tuple[Duration, str]:
    """Choose the length of pre-training; return it with the line that announces it."""
    # A slow machine may have used the time up: some seconds are left for a run in any case.
    left, needed = max(5.0, limit - passed), shape.seconds(speed, tuning)
    fine_tuning, seconds = tuning * shape.seeds / speed, shape.tokens / speed
    enough = needed <= left and not use_all
    if not enough:
        seconds = max(left / 2, left - fine_tuning)
    tokens = round(seconds * speed, -4) if seconds * speed > 1e4 else seconds * speed
    message = (
        f"pre-training a BERT of {shape.depth} layers × {shape.width} on about {tokens:,.0f} "
        f"tokens at {speed:,.0f} tokens/s with {quantity(torch.get_num_threads(), 'thread(s)')}: "
        f"{time_text(seconds)}, then {time_text(fine_tuning)} of fine-tuning"
    )
    if tokens < shape.tokens:
        longer = math.ceil((needed - left + limit) / 60)
        message += f". Too slow for a gain, which needs {shape.tokens:,} tokens: --minutes {longer}"
    return Tokens(shape.tokens) if enough else Hours(seconds / 3600), message


def quickstart_report(result: QuickstartResult) -> s.Report:
    """Build the report of a finished quickstart."""
    labels = [example.label for example in result.labelled.dev_examples]
    majority = max(labels.count(label) for label in set(labels)) / len(labels)
    starts = {PRETRAINED: result.from_pretrained, SCRATCH: result.from_scratch}
    comparison = s.ComparisonChart(
        "Fine-tuned on the same labels",
        "test accuracy",
        {name: [run.metrics["accuracy"] for run in runs] for name, runs in starts.items()},
        {"majority baseline": majority},
        percent=True,
        note=f"{len(result.labelled.train):,} training and {len(labels):,} test examples; "
        "one dot per seed.",
    )
    noise = chance_difference(comparison, len(labels))
    gain = comparison.mean(PRETRAINED) - comparison.mean(SCRATCH)
    fewer = error_reduction(comparison.mean(SCRATCH), comparison.mean(PRETRAINED))
    metrics = result.pretrained.metrics
    chance = f"chance: ±{100 * noise:.1f}" + (f"; {errors_text(fewer)}" if fewer else "")
    unigram = s.percentage(metrics["unigram/accuracy/masked"])
    accuracy = s.percentage(metrics["held-out/accuracy/masked"])
    figures = [
        s.KeyFigure("gain by pre-training", f"{100 * gain:+.1f} points", chance),
        s.KeyFigure("masked tokens correct", accuracy, f"{unigram} for the most frequent token"),
    ]
    records = read_records(Path(result.corpus.folder).parent / "pretraining" / "metrics.jsonl")
    means = " against ".join(s.percentage(comparison.mean(n)) for n in (PRETRAINED, SCRATCH))
    if gain > noise:
        headline = f"Pre-training wins: {means} test accuracy."
    else:
        headline = f"No gain that can be told from chance: {means} test accuracy; differences up "
        headline += f"to {100 * noise:.1f} points happen between equal models."
        tokens, needed = result.pretrained.progress.tokens, result.shape.tokens
        if tokens < needed:
            headline += f" This machine read {tokens:,} tokens, and about {needed:,} are needed:"
            headline += " give it more time by --minutes."
        else:
            headline += " Give it more time by --minutes, or a task that needs word order."
    counts, encoder = result.corpus.manifest.counts, result.settings.encoder
    lead = (
        f"A BERT of {encoder.depth} layers × {encoder.width} was pre-trained on "
        f"{counts.documents:,} documents ({counts.tokens:,} tokens) with masked LM and next "
        "sentence prediction, then fine-tuned on unseen sentences, and compared with the same "
        "architecture from random weights. The task: detect two swapped neighbouring words. Both "
        "classes contain the same words."
    )
    return s.Report(
        "BERT's claim, on this machine",
        headline,
        lead,
        (
            s.KeyFigures(figures),
            comparison,
            masked_words(result),
            *curves(records, metrics, "The training curve jumps where sequences get longer."),
            s.Details("Settings", (s.settings_table(result.settings),)),
        ),
        s.colophon(torch.device("cpu")),
    )


def masked_words(result: QuickstartResult) -> s.ExampleSection:
    """Hide a word of each test sentence as it was written, and show what the model puts there."""
    model, data = result.pretrained.model, result.labelled
    tokenizer, draws = data.tokenizer, rng(0, "masked words")
    cases = list[tuple[TextExample, re.Match[str]]]()
    mask, vocabulary = tokenizer.token(tokenizer.specials.mask), tokenizer.backend.get_vocab()
    for example in data.dev_examples:
        words = [match for match in _WORD.finditer(example.text) if match[0] in vocabulary]
        if example.label == AS_WRITTEN and words:
            cases.append((example, words[draws.integers(len(words))]))
    task_model = MaskFillingTask(top=3).bind(model, tokenizer, (), model.config.max_positions)
    texts = [f"{e.text[: m.start()]}{mask}{e.text[m.end() :]}" for e, m in cases]
    counts = Counter(match[0] for _, match in cases)
    shown = dict[bool, list[s.ReportExample]]({True: [], False: []})
    answers = zip(Predictor(task_model)(texts), cases, strict=True)
    for prediction, (example, match) in sorted(answers, key=lambda pair: counts[pair[1][1][0]]):
        guesses = [
            s.ReportGuess(guess.token, guess.probability, guess.token == match[0])
            for guess in prediction.masks[0]
        ]
        parts = example.text[: match.start()], s.Marked(mask), example.text[match.end() :]
        shown[guesses[0].right].append(s.ReportExample(parts, match[0], guesses, example.where))
    share = s.percentage(len(shown[True]) / max(1, len(cases)))
    note = (
        f"A word of each of {len(cases):,} test sentences was hidden; the first guess is right for "
        f"{share}. Shown are right guesses of words that are hidden least often, then a wrong one."
    )
    return s.ExampleSection("Hidden words", [*shown[True][:3], *shown[False][:1]], note)


_WORD = re.compile(r"\b[a-z]{4,}\b")


def chance_difference(comparison: s.ComparisonChart, examples: int) -> float:
    """Compute the difference of accuracies that chance explains.

    It is twice the larger of two standard errors: the spread over seeds, and the difference's
    of two accuracies near one half on the test examples.
    """
    spreads = map(comparison.spread, (PRETRAINED, SCRATCH))
    return 2 * max(*spreads, math.sqrt(0.5 / examples))


_SKIPPED = re.compile(
    r"_*(test(s|ing|_.*)?|conftest|idle_test|pycache|vendor(ed)?|extern(als)?)_*$"
)
_SKIPPED_ROOTS = {"site-packages", "dist-packages", "lib2to3", "pydoc_data"}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_PACKAGE_WORDS = 60_000
"""Words of one package at most, so that no large package is most of the corpus."""
_BLANK = re.compile(r"\n\s*\n")
_NOT_PROSE = re.compile(
    r"[=\-~^\"'#*+_.`:|]{3,}|\||\.\.( |$)|:(type|rtype|meta)\b|[\w*, .]+ : |[A-Z]\w*( \w+)?:{1,2}$"
    r"|(Parameters|Returns|Yields|Raises|Notes|Examples|Attributes|References)$"
)
_CODE = re.compile(r"^\s*(>>>|In \[|```|~~~)", re.MULTILINE)
_MARKUP = re.compile(r":[\w:+-]+:(?=`)|[`*\\]+|_{1,2}(?=\s|$)|<?https?://\S+")

TRAINED, TESTED = 1200, 1500
"""Maximum number of examples to fine-tune on, and to test on."""
AS_WRITTEN, SWAPPED = "as written", "swapped"
WORDS = (6, 25)
"""Minimum and maximum length of a sentence in words."""
_MOVABLE = re.compile(r"[a-z]+")


def installed_documentation(*, max_words: int = 1_500_000) -> Iterator[Document]:
    """Iterate over one document of prose per module; `where` is its name.

    The standard library comes first, then packages by name. Repeated paragraphs are kept once.
    """
    packages = [path for root in _roots() for path in sorted(root.iterdir())]
    paragraphs_read, words = set[str](), 0
    for documents in map_in_order(read_package, packages, usable_cores()):
        for name, paragraphs in documents:
            new = [text for text in dict.fromkeys(paragraphs) if text not in paragraphs_read]
            paragraphs_read.update(new)
            words += sum(len(text.split()) for text in new)
            if new:
                yield Document("\n".join(new), name)
            if words >= max_words:
                return


def _roots() -> list[Path]:
    """Return the folder of the standard library and those of installed packages."""
    paths = {os.path.realpath(entry) for entry in sys.path if entry.endswith("-packages")}
    return [Path(sysconfig.get_paths()["stdlib"]), *sorted(map(Path, paths))]


def read_package(path: Path) -> list[tuple[str, list[str]]]:
    """Return the prose of each module of a package, or of a single module, by its name.

    Tests, vendored code, and files that cannot be imported by their name are skipped.
    """
    documents, words = [], 0
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path] if path.suffix == ".py" else []
    for file in files:
        names = file.relative_to(path.parent).with_suffix("").parts
        if any(not n.isidentifier() or _SKIPPED.match(n) or n in _SKIPPED_ROOTS for n in names):
            continue
        paragraphs = [text for docstring in docstrings(file) for text in prose(docstring)]
        documents.append((".".join(names).removesuffix(".__init__"), paragraphs))
        words += sum(len(text.split()) for text in paragraphs)
        if words >= _PACKAGE_WORDS:
            break
    return documents


def docstrings(file: Path) -> Iterator[str]:
    """Iterate over the docstrings of a module, without importing it; none if it cannot be read."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as invalid escapes in third-party source
            tree = ast.parse(file.read_bytes())
    # No permission, a broken link, templates, and files for other versions of Python.
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in ast.walk(tree):
        if isinstance(node, _DOCUMENTED) and (docstring := ast.get_docstring(node)):
            yield docstring


def prose(docstring: str) -> list[str]:
    """Return the paragraphs of a docstring that are prose, one line each, in order.

    A paragraph is prose if it has no code prompt, at least three words, and at least 80 % letters
    and spaces. Headings, rules, directives, table rows and types of parameters are dropped.
    """
    paragraphs = []
    for block in _BLANK.split(inspect.cleandoc(docstring)):
        if _CODE.search(block):
            continue
        lines = [line.strip() for line in block.split("\n")]
        text = " ".join(line for line in lines if not _NOT_PROSE.match(line))
        text = " ".join(_MARKUP.sub("", text).replace("::", ":").split())
        words = text.split(" ")
        letters = sum(map(str.isalpha, text)) + len(words) - 1
        plain = sum(word.strip("\"'(),.:;").isalpha() for word in words)
        if plain >= 3 and 5 * letters >= 4 * len(text):
            paragraphs.append(text)
    return paragraphs


def gather_documents(files: Sequence[str] | None) -> list[Document]:
    """Read the documents of files, or of the installed documentation.

    Raises:
        DataError: a file cannot be read, or there are fewer than ten documents.
    """
    documents = list(read_documents(files) if files else installed_documentation())
    if len(documents) < 10:
        count = quantity(len(documents), "document(s)")
        message = f"{count}: too few to train on and to hold some out"
        fix = "Give at least ten documents; in a .txt file, blank lines separate documents."
        raise DataError(message, where=", ".join(files or ["installed documentation"]), fix=fix)
    return documents


def labelled_examples(
    train_documents: list[Document], aside: list[Document]
) -> tuple[list[TextExample], list[TextExample]]:
    """Make examples to train and to test on, of the documents set aside.

    Raises:
        DataError: there are fewer than 20 examples, or the text is Chinese.
    """
    where, language = "the documents set aside", detect_language(aside[0].text) if aside else "en"
    if language == "zh":
        message = "the task swaps words between spaces, and Chinese has none"
        raise DataError(message, where=where, fix="Give text of another language.")
    examples = word_order(aside, train_documents, language)
    if len(examples) < 20:
        message = f"{len(examples)} labelled examples are too few"
        raise DataError(message, where=where, fix="Give more text.")
    split = min(TRAINED, len(examples) // 2)
    return examples[:split], examples[split : split + TESTED]


def word_order(
    documents: Iterable[Document], excluded: Iterable[Document], language: str = "en"
) -> list[TextExample]:
    """Make examples of the sentences of `documents` that are not in `excluded`, in a random order.

    Each label is drawn with probability 1/2.
    """

    def key(sentence: str) -> str:
        """Normalise a sentence, so that case and punctuation do not matter."""
        return re.sub(r"\W+", " ", sentence.lower()).strip()

    keys = {key(text) for item in excluded for text in split_sentences(item.text, language)}
    draws = rng(0, "word order")
    examples = []
    for document in documents:
        for sentence in split_sentences(document.text, language):
            words = sentence.split()
            movable = [_MOVABLE.fullmatch(word) is not None for word in words]
            positions = [
                at
                for at in range(1, len(words) - 2)
                if movable[at] and movable[at + 1] and words[at] != words[at + 1]
            ]
            suits = WORDS[0] <= len(words) <= WORDS[1] and positions
            if not suits or key(sentence) in keys:
                continue
            keys.add(key(sentence))
            at, swap = positions[draws.integers(len(positions))], draws.random() < 0.5
            if swap:
                words[at : at + 2] = words[at + 1], words[at]
            label = SWAPPED if swap else AS_WRITTEN
            examples.append(TextExample(" ".join(words), label=label, where=document.where))
    return [examples[index] for index in draws.permutation(len(examples))]
