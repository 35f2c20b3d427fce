"""The model card: `README.md` of a model folder, with the limits of a trained model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bothways._version import __version__
from bothways.core.errors import Finding
from bothways.core.terminal import printable
from bothways.hub.static_embedding import STATIC
from bothways.model.config import EncoderConfig
from bothways.model.families.family import Architecture
from bothways.model.heads import MaskedHead, NextTokenHead, token_head
from bothways.training.schedules import Duration, RunState

if TYPE_CHECKING:
    from bothways.data.corpus import Corpus

_PIPELINES = {
    "labels": "text-classification", "tags": "token-classification", "span": "question-answering",
    "choice": "multiple-choice", "masked": "fill-mask", "causal": "text-generation",
}  # fmt: skip
"""The Hub's names for what a head does; the first one that a model has is its tag."""
_PREDICTS = {MaskedHead: "masked tokens", NextTokenHead: "the next token"}
_LIMITS = "## Limits\n\n"
UNSEEN = "Language and domain are those of its data; other languages and domains were not measured."
"""The first limit of every trained model."""


@dataclass(frozen=True)
class Card:
    """The content of a model card.

    Attributes:
        title: one line.
        summary: the purpose of the model and what it was trained on.
        settings: the settings of its training, with seeds.
        metrics: the metrics that it reached.
        data: the data that it was trained and evaluated on, with digests.
        limits: what it cannot be relied on for, one sentence each.
    """

    title: str = "A BERT encoder"
    summary: str = ""
    settings: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    data: Mapping[str, object] = field(default_factory=dict)
    limits: Sequence[str] = ()


def render_card(card: Card, architecture: Architecture) -> str:
    """Return the card as Markdown, with the header that the Hub reads."""
    import torch

    name = architecture.name
    if architecture.own:
        library = "bothways"
        code = 'from bothways import load_model\n\nmodel = load_model("…")'
    elif name == STATIC:
        library = "sentence-transformers"
        code = "from sentence_transformers import SentenceTransformer\n\n"
        code += 'model = SentenceTransformer("…")'
    else:
        library = "transformers"
        code = f"from transformers import AutoTokenizer, {name}\n\n"
        code += 'tokenizer = AutoTokenizer.from_pretrained("…")\n'
        code += f'model = {name}.from_pretrained("…")'
    usage = f"```python\n{code}\n```"
    if architecture.own:
        usage += "\n\ntransformers has no class for this model and does not open the folder."
    versions = {
        "bothways": __version__,
        "torch": torch.__version__,
        "format": f"Hugging Face transformers, {name}" if library == "transformers" else name,
    }
    # The first head with a pipeline decides, in the order of the table.
    tags = (pipeline for kind, pipeline in _PIPELINES.items() if kind in architecture.heads)
    tag = next(tags, "feature-extraction")
    header = f"---\nlibrary_name: {library}\npipeline_tag: {tag}\ntags:\n- bothways\n---\n\n"
    limits = "".join(f"- {_line(limit)}\n" for limit in card.limits)
    body = [
        f"# {_line(card.title)}",
        _line(card.summary),
        usage,
        _table("Metrics", {metric: f"{value:.4g}" for metric, value in card.metrics.items()}),
        (_LIMITS + limits).rstrip() if limits else "",
        _table("Data", card.data),
        _table("Settings", card.settings),
        _table("Versions", versions),
    ]
    return header + "\n\n".join(filter(None, body)) + "\n"


def with_first_limit(card: str, limit: str) -> str:
    """Return a rendered card with another limit in front of the others."""
    return card.replace(_LIMITS, f"{_LIMITS}- {limit}\n", 1)


def _table(title: str, rows: Mapping[str, object]) -> str:
    lines = "".join(f"\n| {_cell(name)} | {_cell(value)} |" for name, value in rows.items())
    return f"## {title}\n\n| | |\n|---|---|{lines}" if lines else ""


def _cell(value: object) -> str:
    return _line(value).replace("|", "\\|")


def _line(value: object) -> str:
    # Labels and names of files may hold anything.
    return " ".join(printable(str(value)).split()).replace("<", "&lt;")


def limits_of_finetuned(
    length: int, seed: int, findings: Iterable[Finding], evaluated: bool
) -> tuple[str, ...]:
    """Return the limits of a fine-tuned model.

    Args:
        length: maximum length of a text in tokens.
        findings: of the preflight; its warnings apply to the model as well.
        evaluated: True if there was dev data.
    """
    warnings = [finding.what for finding in findings if finding.severity == "warning"]
    selection = "The weights were selected by the metrics above: expect less on new data."
    return (
        UNSEEN,
        f"It was trained on sequences of at most {length} tokens.",
        *(f"{message[:1].upper()}{message[1:].removesuffix('.')}." for message in warnings),
        selection if evaluated else "Nothing was measured: there was no dev data.",
        f"This is one run, with seed {seed}; other seeds give other metrics.",
    )


def run_of(until: Duration, progress: RunState) -> str:
    """Return the length of a run, and if it ended early."""
    done = f"{progress.amount(until):.4g} of at most {until}, ended early"
    return done if progress.early else str(until)


def limits_of_pretrained(
    encoder: EncoderConfig, lengths: Iterable[int], tokens: int, corpus_tokens: int
) -> tuple[str, ...]:
    """Return the limits of a pre-trained model.

    Args:
        lengths: of the sequences that it was trained on.
        tokens: the number of tokens that it has read.
        corpus_tokens: those of all its text.
    """
    max_length, epochs = max(lengths), tokens / max(1, corpus_tokens)
    unread = encoder.max_positions - max_length
    untrained = f"; its last {unread} positions are untrained" if unread > 0 else ""
    predicts = _PREDICTS[type(token_head(encoder))]
    if encoder.readout.shifted:
        predicts = "at each token the one after it, in masked texts and from left to right"
    return (
        UNSEEN,
        f"It predicts {predicts}; for anything else, fine-tune it.",
        f"It was trained on sequences of at most {max_length} tokens{untrained}.",
        f"It has read {tokens:,} tokens, {epochs:.2g} times its corpus; "
        "the original BERT read about 1.3 · 10¹¹.",
        "It may repeat anything in its text, true or not, fair or not: nothing was filtered.",
    )


def data_of_corpus(corpus: Corpus, fingerprint: str) -> dict[str, object]:
    """Return size, origins and fingerprint of a corpus."""
    counts = corpus.manifest.counts
    size = f"{counts.documents:,} documents, {counts.sentences:,} sentences"
    size += f", {counts.tokens:,} tokens"
    origins = ", ".join(origin.name for origin in corpus.manifest.origins) or "unknown"
    return {"corpus": size, "from": origins, "sha256": fingerprint}
