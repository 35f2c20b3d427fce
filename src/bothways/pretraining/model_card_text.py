"""The text of a pre-trained model's card: its corpus and its limits."""

from __future__ import annotations

from collections.abc import Iterable

from bothways.data.corpus import Corpus
from bothways.hub.model_card import UNSEEN
from bothways.model.config import LSTMConfig, ModelConfig
from bothways.model.heads import BiLMHead, MaskedHead, NextTokenHead, token_head

_PREDICTS = {
    MaskedHead: "masked tokens",
    NextTokenHead: "the next token",
    BiLMHead: "the next and the previous token, each from one side alone",
}


def limits_of_pretrained(
    encoder: ModelConfig, lengths: Iterable[int], tokens: int, corpus: Corpus
) -> tuple[str, ...]:
    """Return what a pre-trained model cannot be relied on for.

    Args:
        lengths: of the sequences that it was trained on.
        tokens: the number of tokens that it has read.
    """
    longest, epochs = max(lengths), tokens / max(1, corpus.manifest.counts.tokens)
    unread = 0 if isinstance(encoder, LSTMConfig) else encoder.max_positions - longest
    untrained = f"; its last {unread} positions are untrained" if unread > 0 else ""
    predicts = _PREDICTS[type(token_head(encoder))]
    return (
        UNSEEN,
        f"It predicts {predicts}; for anything else, fine-tune it.",
        f"It was trained on sequences of at most {longest} tokens{untrained}.",
        f"It has read {tokens:,} tokens, {epochs:.2g} times its corpus; "
        "the original BERT read about 1.3 · 10¹¹.",
        "It may repeat anything in its text, true or not, fair or not: nothing was filtered.",
    )


def data_of_corpus(corpus: Corpus, fingerprint: str) -> dict[str, object]:
    """Return size, origins and fingerprint of a corpus."""
    counts = corpus.manifest.counts
    size = (
        f"{counts.documents:,} documents, {counts.sentences:,} sentences, {counts.tokens:,} tokens"
    )
    origins = ", ".join(origin.name for origin in corpus.manifest.origins) or "unknown"
    return {"corpus": size, "from": origins, "sha256": fingerprint}
