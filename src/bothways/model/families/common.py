"""What most families share: their classes in transformers, and the weight names of their heads."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bothways.model.families.family import Architecture
from bothways.model.families.weight_names import Rename, Rule, Tie
from bothways.model.heads import HEADS

_CLASSES = {
    head.suffix: kind
    for kind, head in HEADS.items()
    if head.suffix is not None and head.suffix.startswith("For")
}
_OUTPUTS = {
    # One name for three heads: the class in config.json decides.
    "labels.dense": "classifier",
    "tags.dense": "classifier",
    "choice.dense": "classifier",
    "span.dense": "qa_outputs",
}


def classes(
    stem: str,
    pooled: Collection[str] = (),
    pretraining: Collection[str] = (),
    heads: Collection[str] = tuple(_CLASSES.values()),
) -> tuple[Architecture, ...]:
    """Return a class for pre-training if there is one, one for each head, and the bare model.

    Args:
        stem: the beginning of their names.
        pooled: the heads that read the pooler; the bare model has one if there are any.
        pretraining: the heads of the class for pre-training; empty if there is no such class.
        heads: those that have a class.
    """
    pretraining_class = (
        [Architecture(f"{stem}ForPreTraining", frozenset(pretraining))] if pretraining else []
    )
    single = [
        Architecture(stem + name, frozenset({head, "pooler"} if head in pooled else {head}))
        for name, head in _CLASSES.items()
        if head in heads
    ]
    pooler = frozenset[str]({"pooler"} if pooled else ())
    return (
        *pretraining_class,
        *single,
        Architecture(f"{stem}Model", pooler, bare=True, idle=pooler),
    )


def masked_rules(dense: str, norm: str, decoder: str, bias: str | None = None) -> tuple[Rule, ...]:
    """Return the rules of the masked LM head, given the family's names of its parts.

    The bias is the decoder's, or has the name `bias` and a copy in the decoder.
    """
    copy = [Tie("heads.masked.bias", f"{decoder}.bias", owner="heads.masked")] if bias else []
    return (
        Rename("heads.masked.dense", dense),
        Rename("heads.masked.norm", norm),
        Rename("heads.masked.bias", bias or f"{decoder}.bias"),
        Tie("encoder.embedding.token.weight", f"{decoder}.weight", owner="heads.masked"),
        *copy,
    )


def output_rules(extra: Mapping[str, str] | None = None) -> tuple[Rule, ...]:
    """Return the rules of fine-tuning heads; `extra` are the family's deviations from BERT."""
    # "classifier.dense" before "classifier": of a file's name the first rule counts.
    names = {**(extra or {}), **_OUTPUTS, **(extra or {})}
    return tuple(Rename(f"heads.{name}", stored) for name, stored in names.items())


def position_buffers(embeddings: str) -> tuple[str, ...]:
    """Return the names of buffers with position and segment numbers in older files."""
    return f"{embeddings}.position_ids", f"{embeddings}.token_type_ids"
