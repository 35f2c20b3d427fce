"""Model inputs as they are trained on, token by token: sequences of a corpus, or one text.

The sequences are read by the loader of a run and prepared by its objective: what is shown is what a
run of these settings reads. Changes are found by comparing a sequence with and without targets, so
that objectives from outside the library are shown as well.
"""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence as Many
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from jaxtyping import Float32

from bothways.core.batch import LabelTargets, TokenTargets, pack
from bothways.core.config.values import require_range
from bothways.core.errors import ConfigError, call, render, report_findings
from bothways.core.progress import Progress
from bothways.core.report import html, sections, terminal
from bothways.core.source import Sequence, rng
from bothways.core.terminal import quantity
from bothways.data.corpus import Corpus
from bothways.data.corpus_source import Corpora
from bothways.data.masking import NGrams, Spans, Vocabulary, WholeWords
from bothways.data.sentences import chinese_share
from bothways.model.model import Model
from bothways.objectives.span_boundary import BoundaryTargets
from bothways.pretraining import build
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.run import phases_of, training_documents
from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer
from bothways.training.run import TrainingPhase
from bothways.training.schedules import Hours, RunState

if TYPE_CHECKING:
    from rich.console import Console

TOP = 3
"""Tokens with the highest attention that a table lists."""


def describe_sequence(
    title: str,
    original: Sequence,
    prepared: Sequence,
    tokenizer: Tokenizer,
    classes: Many[str] = (),
) -> sections.TokenSequence:
    """Return a sequence token by token.

    Args:
        original: without the targets of an objective.
        prepared: as a model is trained on it.
        classes: the meaning of each label of a pair.
    """
    targets: list[dict[str, str]] = [{} for _ in prepared.ids]
    labels, spans = dict[str, str](), list[sections.TokenSpan]()
    if prepared.causal:
        labels["attention"] = "left to right"
    for name, target in prepared.targets.items():
        match target:
            case TokenTargets(index, ids):
                for position, id in zip(index.tolist(), ids.tolist(), strict=True):
                    targets[position][name] = tokenizer.token(id)
            case LabelTargets(values):
                [label] = values.tolist()
                labels[name] = classes[label] if 0 <= label < len(classes) else str(label)
            case BoundaryTargets(left, right):
                borders = dict.fromkeys(zip(left.tolist(), right.tolist(), strict=True))
                spans = [sections.TokenSpan(a + 1, b, a, b) for a, b in borders]
            case _:  # weights and draws, which are not of the input
                pass
    columns = zip(
        prepared.ids.tolist(), prepared.segments.tolist(), original.ids.tolist(), targets,
        strict=True,
    )  # fmt: skip
    tokens = []
    for position, (id, segment, text_id, predicted) in enumerate(columns):
        if id != text_id:
            change = "masked" if id == tokenizer.specials.mask else "random"
        else:
            change = "kept" if "masked" in predicted else ""
        pieces = tokenizer.token(id), id, position, segment, tokenizer.token(text_id)
        tokens.append(sections.InputToken(*pieces, change, predicted))
    return sections.TokenSequence(title, tokens, labels, spans)


def state_before(
    phases: Many[TrainingPhase], step: int, progress: Progress
) -> tuple[RunState, int]:
    """Return the state of a run before an update, and the number of sequences that it reads.

    The data of the steps before are read as in the run, without a model.

    Args:
        step: the number of the update, from 1.

    Raises:
        ConfigError: the run has no such step.
        DataError: there are too few documents.
    """
    state = RunState()
    progress.stage("reading the steps before", step)
    for number, phase in enumerate(phases):
        state = state.next_phase() if number else state
        for data in phase.steps(state):
            if state.finished(phase.until):
                break
            if state.steps == step - 1:
                return state, data.sequences
            state = state.after(data)
            progress.advance(state.steps)
    message = f"the run ends with step {state.steps:,}: there is no step {step:,}"
    raise ConfigError(message, where="step")


def input_notes(settings: PretrainConfig, of_corpus: bool) -> list[str]:
    """Return notes on settings that the sequences do not show."""
    notes, objective = [], settings.objective
    if objective.kind == "replaced_tokens":
        notes.append(
            "the discriminator reads predictions of the generator where these sequences have "
            "[MASK]; the generator learns in the run"
        )
    if not of_corpus and objective.segments.classes:
        classes = " or ".join(objective.segments.classes)
        notes.append(f"pairs with a label ({classes}) are made of the documents of a corpus")
    if of_corpus and len(settings.phases) > 1 and isinstance(settings.training.end, Hours):
        notes.append(
            "a run of a length in hours ends its phases by the clock: all steps are of the "
            f"first, of {settings.phases[0].length} tokens; give the length in steps to see others"
        )
    return notes


@dataclass(frozen=True)
class LayerView:
    """The attention and the vectors of a layer for one text.

    Attributes:
        heads: the share of each token (second axis) that reads each token (third axis).
        norms: the mean norm of the token vectors, of the embeddings and after each layer.
        cosines: between the token vectors after this layer.
        similarity: the mean cosine between different tokens, as `norms`.
    """

    number: int
    heads: Float32[np.ndarray, "heads n n"]
    norms: list[float]
    cosines: Float32[np.ndarray, "n n"]
    similarity: list[float]

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        arrays = {"heads": self.heads, "cosines": self.cosines}
        plain = {name: np.round(array, 4).tolist() for name, array in arrays.items()}
        return {"layer": self.number, "norms": self.norms, "similarity": self.similarity, **plain}


def view_layer(model: Model, sequence: Sequence, layer: int) -> LayerView:
    """Compute the attention of a layer, and the vectors after it.

    Raises:
        ConfigError: there is no such layer, or the encoder has no attention probabilities.
    """
    depth = model.config.depth
    require_range(f"[1, {depth}]", layer=layer)
    batch = pack([dataclasses.replace(sequence, targets={})])
    with torch.no_grad():
        output = model(batch, heads=(), output_hidden_states=True, output_attentions=True)
    norms, similarity, cosines = [], [], []
    for vectors in output.hidden_states:
        unit = torch.nn.functional.normalize(vectors.float(), dim=1)
        cosines.append((unit @ unit.T).numpy())
        count = len(unit)
        others = (cosines[-1].sum() - np.trace(cosines[-1])) / max(1, count * (count - 1))
        norms.append(float(vectors.norm(dim=1).mean()))
        similarity.append(float(others))
    [heads] = output.attentions[layer - 1]
    return LayerView(layer, heads.numpy(), norms, cosines[layer], similarity)


@dataclass(frozen=True)
class TrainingInputs:
    """Model inputs, to print, to save as a page, or to read as data.

    Attributes:
        title: where they are from, and under which objective.
        notes: what they do not show.
        of_text: whether they are of a text that was given, not of a corpus.
    """

    title: str
    sequences: tuple[sections.TokenSequence, ...]
    notes: tuple[str, ...] = ()
    of_text: bool = False
    layer: LayerView | None = None

    def __repr__(self) -> str:
        return f"TrainingInputs({self.title!r}, {quantity(len(self.sequences), 'sequence(s)')})"

    def __str__(self) -> str:
        from rich.console import Console

        file = io.StringIO()
        # Not as a notebook or FORCE_COLOR would have it, which are of standard output.
        self.print(Console(file=file, width=80, force_jupyter=False, force_terminal=False))
        return file.getvalue()

    def print(self, console: Console, head: int | None = None) -> None:
        """Print the sequences: a text as rows of tokens, segments and positions, those of a corpus
        as running text.

        Args:
            head: the head, from 1, whose attention is printed; None for the mean of all.

        Raises:
            ConfigError: there is no such head.
        """
        from rich.text import Text

        tables = self._tables(head)
        console.print(Text(self.title, style="dim"))
        for sequence in self.sequences:
            shown = terminal.TokenRows if self.of_text else terminal.token_text
            console.print(Text(), shown(sequence))
        for section in tables:
            console.print(Text(), terminal.render_report(section))

    def _tables(self, head: int | None) -> list[sections.TableSection]:
        """Return a table of each token's attention, and one of the vectors with a line a layer."""
        if self.layer is None:
            return []
        heads, tokens = self.layer.heads, [token.token for token in self.sequences[0].tokens]
        weights, name = heads.mean(0), f"the mean of {len(heads)} heads"
        if head is not None:
            require_range(f"[1, {len(heads)}]", head=head)
            weights, name = heads[head - 1], f"head {head}"
        rows = []
        for position, row in enumerate(weights):
            highest = np.argsort(-row, kind="stable")[:TOP]
            cells = [f"{tokens[at]} ({at}) {sections.percentage(row[at])}" for at in highest]
            rows.append((f"{position} {tokens[position]}", *cells, *[""] * (TOP - len(cells))))
        title = f"Attention of layer {self.layer.number}, {name}"
        columns = ["token", "reads most", "second", "third"]
        return [sections.TableSection(title, columns, rows), self._vectors(self.layer)]

    def _vectors(self, layer: LayerView) -> sections.TableSection:
        names = ["embeddings", *(f"layer {n}" for n in range(1, len(layer.norms)))]
        rows = list(zip(names, layer.norms, layer.similarity, strict=True))
        columns = ["vectors of the tokens", "mean norm", "mean cosine between tokens"]
        return sections.TableSection("Hidden states", columns, rows)

    def to_json(self) -> list[dict[str, Any]]:
        """Return each sequence as plain values, the first with the layer."""
        values = [dataclasses.asdict(sequence) for sequence in self.sequences]
        if self.layer is not None:
            values[0]["layer"] = self.layer.to_json()
        return values

    def save(self, file: str | Path) -> None:
        """Write a self-contained HTML page.

        Raises:
            ResourceError: the file cannot be written, or a package for pages is missing.
        """
        parts: list[sections.Section] = [*self.sequences]
        if self.layer is not None:
            labels = [token.token for token in self.sequences[0].tokens]
            number, highest = self.layer.number, self.layer.heads.max()
            maps = {f"head {n}": heads / highest for n, heads in enumerate(self.layer.heads, 1)}
            rows = (
                "A row is a token that reads, a column a token that is read, by their positions. "
                f"The darkest cell is {sections.percentage(float(highest))}."
            )
            cosines: Mapping[str, Any] = {"cosine": self.layer.cosines.clip(0, 1)}
            vectors = f"Cosines between the token vectors of layer {number}"
            parts += [
                sections.HeatMaps(f"Attention of layer {number}", labels, maps, rows),
                sections.HeatMaps(vectors, labels, cosines, "Negative cosines are drawn as 0."),
                self._vectors(self.layer),
            ]
        lead = " ".join(f"{note[:1].upper()}{note[1:]}." for note in self.notes)
        legend = "" if self.of_text and not any(
            token.change for sequence in self.sequences for token in sequence.tokens
        ) else "A marked token is predicted; the token of the text is below it. "  # fmt: skip
        report = sections.Report("What the model reads", self.title, legend + lead, parts)
        html.write_html(report, Path(file))


def show_corpus(
    settings: PretrainConfig,
    corpora: Corpus | Mapping[str, Corpus],
    step: int,
    count: int,
    progress: Progress,
) -> TrainingInputs:
    """Return the first `count` sequences of an update, from 1.

    Raises:
        BothwaysError: the corpora do not suit the settings; the run has no such step.
    """
    parts = Corpora.of(corpora, settings.mixture)
    for finding in report_findings(dict.fromkeys(build.check_data(settings, parts))):
        progress.message(f"{finding.severity}: {finding}")
    documents = training_documents(settings, parts)
    phases = phases_of(settings, parts, documents, build.SINGLE, None)
    state, available = state_before(phases, step, progress)
    loader = build.loader_of(settings, parts, documents, build.SINGLE, state.phase, state.ends)
    phase = settings.phases[state.phase]
    segments, masking = settings.segments_of(phase), settings.objective_of(phase).masking
    pairs = itertools.islice(loader.sequences(state.cursor), min(count, available))
    sequences = [
        describe_sequence(
            f"Step {step:,}, sequence {number:,} of {available:,}",
            original, prepared, parts.tokenizer, segments.classes,
        )
        for number, (original, prepared) in enumerate(pairs, 1)
    ]  # fmt: skip
    title = ", ".join(str(corpus.folder) for corpus in parts.parts.values())
    title += f": {settings.objective.kind}, phase {state.phase + 1} of {len(phases)}"
    title += f" ({segments.kind} of {phase.length} tokens"
    title += ")" if masking is None else f", masking.rate={masking.rate:g})"
    return TrainingInputs(title, tuple(sequences), tuple(input_notes(settings, of_corpus=True)))


def show_text(
    texts: tuple[str, ...],
    tokenizer: Tokenizer,
    model: Model | None,
    corpora: Corpus | Mapping[str, Corpus] | None,
    settings: PretrainConfig | None,
    draws: Iterable[int],
    layer: int | None,
) -> TrainingInputs:
    """Return a text or a pair as the model reads it, in training once for each draw of the masks.

    Args:
        model: the model that reads it, if there is one; with a layer there is.
        corpora: the corpora whose token counts an objective reads.
        settings: None for the text in use, without masks.

    Raises:
        ConfigError: a text is empty or too long, or the objective reads counts of a corpus.
    """
    ids = tokenizer.encode(texts)
    for name, text in zip(("text", "text_b"), ids, strict=False):
        if not len(text):
            raise ConfigError("has no tokens", where=name, fix="Write something.")
    original = assemble(ids[0], ids[1] if len(ids) == 2 else None, tokenizer.template)
    if model is not None and len(original) > model.config.max_positions:
        most = model.config.max_positions
        message = f"has {len(original):,} tokens, and the model reads {most:,}"
        raise ConfigError(message, where="text", fix="Give a shorter one.")
    if settings is None:
        title, prepared, notes = "As in use, without masks", [original], []
    else:
        objective = settings.objective_of(settings.phases[0])
        title, notes = f"Objective {objective.kind}", input_notes(settings, of_corpus=False)
        masking = objective.masking
        by_words = masking is not None and isinstance(masking.unit, WholeWords | NGrams | Spans)
        if by_words and chinese_share(original.ids, tokenizer):
            notes.append(
                "the words of this text are those that the vocabulary shows, in Chinese mostly one "
                "character; a run masks the words that its corpus stores "
                f"({render(call('corpus build', 'FILES', words='jieba'))})"
            )
        if corpora is not None:
            vocabulary = build.vocabulary_of(Corpora.of(corpora, None), objective)
        elif masking is not None and masking.needs_counts:
            message = f"the masking of {objective.kind} reads how often a corpus has each token"
            fix = f"Name a corpus: {call('show', 'CORPUS', 'TEXT')}"
            raise ConfigError(message, where="source", fix=fix)
        else:
            vocabulary = Vocabulary.of(tokenizer)
        prepared = [
            objective.prepare(original, vocabulary, rng(settings.seed, "prepare", epoch=draw - 1))
            for draw in draws
        ]
    sequences = [
        describe_sequence(f"Draw {n}" if settings else "Text", original, sequence, tokenizer)
        for n, sequence in zip(draws, prepared, strict=False)
    ]
    view = None if layer is None or model is None else view_layer(model, prepared[0], layer)
    return TrainingInputs(title, tuple(sequences), tuple(notes), True, view)
