"""DeBERTa's positions as `config.json` says them: relative ones in each layer, and where absolute ones come in."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

from bothways.core.errors import FolderError
from bothways.families.config_rules import ACTIVATIONS, read_choice, read_flag, read_number
from bothways.model.activation import Activation
from bothways.model.positions import Convolution, Disentangled, Learned, Term

WITH_TANH: dict[str, Any] = {**ACTIVATIONS, "tanh": "tanh"}
"""Those of transformers, and the one that the pooler and the convolution may have beside."""


def activation_said(activation: Activation | str) -> str:
    """How transformers calls it; an empty text if it does not."""
    return next((theirs for theirs, ours in WITH_TANH.items() if ours == activation), "")


def decodes(position: object) -> bool:
    """Whether absolute positions come in where a masked token is predicted."""
    return isinstance(position, Disentangled) and position.absolute == "decoder"


def read_position(
    raw: Mapping[str, Any], most: int, later: bool, where: str
) -> Learned | Disentangled:
    """Of version 1, or a later one; settings that only those know mean nothing in version 1.

    Raises:
        FolderError: a setting, of the file `where`, that has no counterpart here.
    """
    at_input = read_flag(raw, "position_biased_input", True, where)
    terms = _read_terms(raw, where)
    if not read_flag(raw, "relative_attention", False, where):
        if terms or not at_input or (later and read_number(raw, "conv_kernel_size", 0, where) > 0):
            what = "without relative_attention, pos_att_type and a convolution are absent and position_biased_input is true"
            raise FolderError(
                what, where=where, fix="Say relative_attention true, as the published models do."
            )
        return Learned(most)
    decoder = read_flag(raw, "enhanced_mask_decoder", False, where)
    position = Disentangled(
        most,
        terms,
        max_distance=_positive(raw, "max_relative_positions", where),
        absolute="input" if at_input else "decoder" if decoder else "none",
    )
    if not later:
        return position
    size = read_number(raw, "conv_kernel_size", 0, where)
    groups = read_number(raw, "conv_groups", 1, where)
    activation = read_choice(raw, "conv_act", WITH_TANH, "tanh", where)
    return replace(
        position,
        buckets=_positive(raw, "position_buckets", where),
        shared=read_flag(raw, "share_att_key", False, where),
        norm=read_choice(raw, "norm_rel_ebd", {"none": False, "layer_norm": True}, "none", where),
        convolution=Convolution(size, groups, activation) if size > 0 else None,
    )


def _read_terms(raw: Mapping[str, Any], where: str) -> tuple[Term, ...]:
    """A list, or one text with bars between."""
    said = raw.get("pos_att_type") or []
    names = said.lower().split("|") if isinstance(said, str) else said
    terms: dict[Any, Term] = {term: term for term in get_args(Term)}
    if not isinstance(names, list) or not all(
        isinstance(name, str) and name.strip() in terms for name in names
    ):
        raise FolderError(
            f"pos_att_type {said!r} has no counterpart here: it must hold c2p, p2c or both",
            where=where,
        )
    return tuple(terms[name.strip()] for name in names)


def _positive(raw: Mapping[str, Any], key: str, where: str) -> int | None:
    """A number; none where it is below 1, as -1 is."""
    number: int = read_number(raw, key, -1, where)
    return number if number > 0 else None


def write_position(position: Learned | Disentangled) -> dict[str, Any]:
    """The settings that `read_position` reads it from."""
    if isinstance(position, Learned):
        return {
            "relative_attention": False,
            "position_biased_input": True,
            "pos_att_type": None,
            "legacy": True,
        }
    convolution, decoder = position.convolution, position.absolute == "decoder"
    return {
        "relative_attention": True,
        "pos_att_type": list(position.terms),
        "max_relative_positions": position.max_distance or -1,
        "position_biased_input": position.absolute == "input",
        "legacy": not decoder,
        **({"enhanced_mask_decoder": True} if decoder else {}),
        "position_buckets": position.buckets or -1,
        "share_att_key": position.shared,
        "norm_rel_ebd": "layer_norm" if position.norm else "none",
        **({} if convolution is None else _write_convolution(convolution)),
    }


def _write_convolution(convolution: Convolution) -> dict[str, Any]:
    act = activation_said(convolution.activation)
    return {
        "conv_kernel_size": convolution.size,
        "conv_groups": convolution.groups,
        "conv_act": act,
    }
