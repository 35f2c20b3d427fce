"""The objective that belongs to a model folder, by its heads and the record of its training."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import torch

from bothways.core.errors import ConfigError, FolderError
from bothways.hub.model_folder import LoadedModel, load_model
from bothways.hub.resolve import resolve, resolve_run
from bothways.model.families.catalogue import family_for
from bothways.model.heads import token_head
from bothways.objectives import replaced_tokens
from bothways.objectives.catalogue import default_objective
from bothways.objectives.masked_lm import MaskedLM, MaskedLMNextSentence
from bothways.objectives.objective import Objective
from bothways.objectives.sentence_order import MaskedLMSentenceOrder
from bothways.pretraining.build import start_folders
from bothways.pretraining.config import PretrainConfig
from bothways.training.durations import Steps
from bothways.training.optimizers import AdamW
from bothways.training.run import Training
from bothways.training.schedules import Constant


def scored_objective(source: str) -> Objective:
    """Return the objective by which a pre-trained model is scored: it uses all of its heads.

    The labels of a pair head are those that the model was trained on: the order of two segments for
    an ALBERT or where the folder's record says so, else whether they follow each other.

    Raises:
        ConfigError: a discriminator has no generator next to it.
        FolderError: the model has no head that predicts tokens or detects replaced ones.
    """
    loaded = load_model(resolve(resolve_run(source)))
    kinds = {head.kind for head in loaded.model.specification}
    usual = token_head(loaded.model.config).kind
    if usual in kinds:
        if usual != "masked":
            return default_objective(loaded.model.config)
        if not {"pooler", "pair"} <= kinds:
            return MaskedLM()
        return MaskedLMSentenceOrder() if _knows_order(loaded) else MaskedLMNextSentence()
    if "replaced" in kinds:
        return replaced_tokens_of(loaded, source)
    what = f"has no head that predicts tokens: it has {', '.join(sorted(kinds)) or 'none'}"
    fix = "Give a pre-trained model. A fine-tuned one is scored on labelled data."
    raise FolderError(what, where=source, fix=fix)


def _knows_order(loaded: LoadedModel) -> bool:
    """Return True if the pair head was trained on the order of two segments."""
    trained = loaded.extra.get("pretraining")
    objective = trained.get("objective") if isinstance(trained, dict) else None
    if isinstance(objective, dict) and "kind" in objective:
        return bool(objective["kind"] == MaskedLMSentenceOrder.kind)
    family = family_for(loaded.model.config, loaded.tokenizer().kind)
    return family is not None and family.model_type == "albert"


def replaced_tokens_of(loaded: LoadedModel, source: str) -> replaced_tokens.ReplacedTokens:
    """Return the objective of a discriminator and the generator next to it.

    Raises:
        ConfigError: there is no generator.
    """
    encoder = loaded.model.config
    settings = PretrainConfig(
        encoder,
        Training(Steps(1), AdamW(), Constant()),
        replaced_tokens.ReplacedTokens(),
        start=source,
    )
    folder = start_folders(settings).get("generator")
    if folder is None:
        what = (
            f"{source} detects replaced tokens, and the generator that replaces them is not next "
            "to it"
        )
        fix = (
            "Give the folder of a run, which holds model/ and generator/, or put the generator "
            "into generator/; or take the generator alone, which is a masked language model."
        )
        raise ConfigError(what, where="model", fix=fix)
    return _with_generator(loaded, folder)


def _with_generator(loaded: LoadedModel, folder: Path) -> replaced_tokens.ReplacedTokens:
    """Return the objective for a discriminator and the generator in a folder."""
    generator, encoder = load_model(folder).model, loaded.model.config
    other = generator.config
    shapes: list[replaced_tokens.Narrower | replaced_tokens.Shallower] = [
        replaced_tokens.Narrower(min(1.0, other.width / encoder.width)),
        replaced_tokens.Shallower(min(1.0, other.depth / encoder.depth)),
    ]
    plain = dataclasses.replace(other, dropout=encoder.dropout)
    shape = next(
        (one for one in shapes if replaced_tokens.generator_of(encoder, one) == plain), shapes[0]
    )
    name = "encoder.embedding.token.weight"
    tables = [model.state_dict()[name] for model in (loaded.model, generator)]
    shared = tables[0].shape == tables[1].shape and torch.equal(*tables)
    return replaced_tokens.ReplacedTokens(generator=shape, sharing="shared" if shared else "none")
