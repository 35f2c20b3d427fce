"""What most families have alike: their classes in transformers, and the weight names of their heads."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from bothways.families.family import Architecture, HeadKind
from bothways.families.weight_names import Rename, Rule, Tie

_CLASSES: Mapping[str, HeadKind] = {
    "ForMaskedLM": "masked",
    "ForSequenceClassification": "labels",
    "ForTokenClassification": "tags",
    "ForQuestionAnswering": "span",
    "ForMultipleChoice": "choice",
}
_OUTPUTS = {
    # One name for three heads: which it is, the class in config.json says.
    "labels.dense": "classifier",
    "tags.dense": "classifier",
    "choice.dense": "classifier",
    "span.dense": "qa_outputs",
}


def classes(
    stem: str, pooled: Collection[HeadKind] = (), pretraining: Collection[HeadKind] = ()
) -> tuple[Architecture, ...]:
    """A class for pre-training if there is one, one for each head, and the bare model.

    Args:
        stem: what their names begin with.
        pooled: the heads that read the pooler; the bare model has one if there are any.
        pretraining: what the class for pre-training has; nothing if there is no such class.
    """
    first = [Architecture(f"{stem}ForPreTraining", frozenset(pretraining))] if pretraining else []
    single = [
        Architecture(stem + name, frozenset({head, "pooler"} if head in pooled else {head}))
        for name, head in _CLASSES.items()
    ]
    return (
        *first,
        *single,
        Architecture(f"{stem}Model", frozenset({"pooler"} if pooled else ()), bare=True),
    )


def masked_rules(dense: str, norm: str, decoder: str, bias: str | None = None) -> tuple[Rule, ...]:
    """The masked LM head by their names of its parts; the bias is the decoder's, or has a name of its own and a copy there."""
    copy = [Tie("heads.masked.bias", f"{decoder}.bias", part="heads.masked")] if bias else []
    return (
        Rename("heads.masked.dense", dense),
        Rename("heads.masked.norm", norm),
        Rename("heads.masked.bias", bias or f"{decoder}.bias"),
        Tie("encoder.embedding.token.weight", f"{decoder}.weight", part="heads.masked"),
        *copy,
    )


def output_rules(others: Mapping[str, str] | None = None) -> tuple[Rule, ...]:
    """The heads of fine-tuning: what a family calls otherwise than BERT, or has beside it, comes first."""
    names = {**(others or {}), **_OUTPUTS, **(others or {})}
    return tuple(Rename(f"heads.{ours}", theirs) for ours, theirs in names.items())
