"""What a model card says of limits and data, from what a run knows of itself.

Nothing is claimed that was not looked at: language and domain are those of the data, which nobody here reads.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

from bothways.core.finding import Finding
from bothways.data.corpus import Corpus
from bothways.model.head_config import BiLMHead, MaskedHead, NextTokenHead
from bothways.model.lstm_config import LSTMConfig, ModelConfig
from bothways.model.model import token_head
from bothways.training.durations import Duration
from bothways.training.state import RunState

if TYPE_CHECKING:
    from bothways.finetuning.prepare import ModelSource

_PREDICTS = {
    MaskedHead: "masked tokens",
    NextTokenHead: "the token that follows",
    BiLMHead: "the token that follows and the one before, each from one side alone",
}
LIMITS = "## Limits\n\n"
"""What the limits in a card begin with."""
UNSEEN = "Language and domain are those of its data; how it does on others was not measured."


def data_of(sources: Mapping[str, ModelSource]) -> dict[str, object]:
    """Each data set by its use: name, size, and the sha256 of its texts and answers."""
    return {
        name: f"{source.name}, {source.examples:,} examples, sha256 {source.sha256}"
        for name, source in sources.items()
    }


def limits_of_finetuned(
    length: int, seed: int, findings: Iterable[Finding], scored: bool
) -> tuple[str, ...]:
    """What one cannot rely on a fine-tuned model for.

    Args:
        length: the most tokens that it reads of a text.
        findings: of the preflight; its warnings are of this model as well as of its training.
        scored: whether there was dev data.
    """
    chosen = "The weights were chosen by the metrics above, so on new data expect somewhat less."
    warnings = (
        f"{finding.what[:1].upper()}{finding.what[1:]}."
        for finding in findings
        if finding.severity == "warning"
    )
    return (
        UNSEEN,
        f"It was trained on sequences of at most {length} tokens.",
        *(said.replace("..", ".") for said in warnings),
        chosen if scored else "Nothing was measured: there was no dev data.",
        f"This is one run, of seed {seed}; other seeds give somewhat other metrics.",
    )


def run_of(until: Duration, progress: RunState) -> str:
    """How long a run was, which may have ended before its length."""
    return (
        f"{progress.amount(until):.4g} of at most {until}, ended early"
        if progress.early
        else str(until)
    )


def chosen_of(card: str, metric: str, values: Many[float]) -> str:
    """The written card of a run as that of the best of several: their number and mean become its first limit."""
    mean = statistics.fmean(values)
    said = f"It was chosen as the best of {len(values)} runs by dev {metric}, whose mean over them is {mean:.4g}: expect that."
    return card.replace(LIMITS, f"{LIMITS}- {said}\n", 1)


def limits_of_pretrained(
    encoder: ModelConfig, lengths: Iterable[int], tokens: int, corpus: Corpus
) -> tuple[str, ...]:
    """What one cannot rely on a pre-trained model for.

    Args:
        lengths: of the sequences that it was trained on.
        tokens: that were read.
    """
    longest, epochs = max(lengths), tokens / max(1, corpus.manifest.counts.tokens)
    unread = 0 if isinstance(encoder, LSTMConfig) else encoder.max_positions - longest
    return (
        UNSEEN,
        f"It predicts {_PREDICTS[type(token_head(encoder))]}; for anything else it is to be fine-tuned.",
        f"It was trained on sequences of at most {longest} tokens"
        + (
            f"; the last {unread} of its positions are as they were at the start."
            if unread > 0
            else "."
        ),
        f"It has read {tokens:,} tokens, {epochs:.2g} times its corpus; BERT itself read about 1.3 · 10¹¹.",
        "What is in its text, true or not, fair or not, it may repeat: nothing was filtered for that.",
    )


def data_of_corpus(corpus: Corpus, fingerprint: str) -> dict[str, object]:
    """Sizes, origins and fingerprint of a corpus."""
    counts = corpus.manifest.counts
    size = (
        f"{counts.documents:,} documents, {counts.sentences:,} sentences, {counts.tokens:,} tokens"
    )
    origins = ", ".join(origin.name for origin in corpus.manifest.origins) or "not known"
    return {"corpus": size, "from": origins, "sha256": fingerprint}
