"""The names of weights, ours ↔ theirs, as rules that are data.

A rule says where one of our modules, or one tensor, lies in a Hugging Face file. Read one way it loads, read the other way it
saves, so the two cannot drift apart. `{}` stands for a number, that of a layer say.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from typing_extensions import assert_never

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rename:
    """Ours is theirs under another name."""

    ours: str
    theirs: str


@dataclass(frozen=True)
class Stack:
    """Ours is several of theirs, of one size, joined along the first axis: query, key and value as one matrix."""

    ours: str
    theirs: tuple[str, ...]


@dataclass(frozen=True)
class Transpose:
    """Ours is theirs with rows and columns swapped; a vector is taken as it is."""

    ours: str
    theirs: str


@dataclass(frozen=True)
class Interleave:
    """Ours is query, key and value one after the other; theirs has them side by side for each head.

    Attributes:
        heads: how many; what `Family.keys_for` fills in.
    """

    ours: str
    theirs: str
    heads: int = 1


@dataclass(frozen=True)
class Tie:
    """Theirs may hold ours a second time, for `part` of ours: the copy is compared when read and left out when written."""

    ours: str
    theirs: str
    part: str


@dataclass(frozen=True)
class Spare:
    """Theirs holds beside ours a tensor that nothing reads: it stands for ours where ours is absent, and is written as ours."""

    ours: str
    theirs: str
    part: str


Rule = Rename | Stack | Transpose | Interleave | Tie | Spare

OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}
"""What a LayerNorm's tensors were called in TensorFlow, and in files converted from it early on."""


@dataclass(frozen=True)
class TensorPlacement:
    """Where one of our tensors lies in their file.

    Attributes:
        rule: how it lies there.
        names: under which names; several for a stack.
    """

    rule: Rename | Stack | Transpose | Interleave
    names: tuple[str, ...]

    def join(self, parts: list[Tensor]) -> Tensor:
        """Their tensors, in the order of `names` → ours."""
        import torch

        match self.rule:
            case Rename():
                return parts[0]
            case Stack():
                return torch.cat(parts)
            case Transpose():
                return _transposed(parts[0])
            case Interleave(heads=heads):
                return _turned(parts[0], heads, 3)
            case _:
                assert_never(self.rule)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Our tensor → theirs, in the order of `names`."""
        match self.rule:
            case Rename():
                return [tensor]
            case Stack():
                return list(tensor.chunk(len(self.names)))
            case Transpose():
                return [_transposed(tensor)]
            case Interleave(heads=heads):
                return [_turned(tensor, 3, heads)]
            case _:
                assert_never(self.rule)

    def part_shape(self, shape: Shape) -> Shape:
        """The shape of our tensor → that of each of theirs."""
        match self.rule:
            case Rename() | Interleave():
                return shape
            case Stack():
                return (shape[0] // len(self.names), *shape[1:])
            case Transpose():
                return shape[::-1]
            case _:
                assert_never(self.rule)


@dataclass(frozen=True)
class KeyTable:
    """A family's weight names.

    Attributes:
        prefix: what the names of the encoder's tensors begin with; a file may leave it out.
        rules: one for each of our modules, and one for each copy that a file may hold.
        computed: their buffers that hold no weight, such as position numbers; `{}` stands for a number here, too.
        synonyms: what some files call a module otherwise: (that name, its name in the rules).
    """

    prefix: str
    rules: tuple[Rule, ...]
    computed: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, str], ...] = ()

    def place(self, ours: str) -> TensorPlacement:
        """Where our tensor of this name lies. Every family has a rule for each of the tensors that its configurations have."""
        for rule in self.rules:
            if isinstance(rule, Tie | Spare):
                continue
            names = _follow(rule.ours, _theirs(rule), ours)
            if names:
                return TensorPlacement(rule, names)
        raise AssertionError(f"no rule for {ours}")

    @property
    def ties(self) -> dict[str, Tie]:
        """The rules about copies, by the name of the tensor that the copy must equal."""
        return {
            self.place(rule.ours).names[0]: rule for rule in self.rules if isinstance(rule, Tie)
        }

    @property
    def spares(self) -> dict[str, Spare]:
        """The rules about tensors that nothing reads, by the name of the one that is read."""
        return {
            self.place(rule.ours).names[0]: rule for rule in self.rules if isinstance(rule, Spare)
        }

    def computes(self, theirs: str) -> bool:
        """Whether a full name of theirs is that of a buffer without a weight."""
        return any(_pattern(name).fullmatch(theirs) for name in self.computed)

    def origins(self, theirs: str) -> list[Rule]:
        """The rules that a full name of theirs may belong to: none for an unknown one, several where heads share a name."""
        return [
            rule
            for rule in self.rules
            if any(_pattern(name).fullmatch(theirs) for name in _theirs(rule))
        ]

    def origin(self, theirs: str) -> Rule | None:
        """The first rule that a full name of theirs may belong to; none for a name that the family does not have."""
        return next(iter(self.origins(theirs)), None)

    @functools.cached_property
    def shared(self) -> frozenset[str]:
        """Our modules that have a name of theirs in common with another: which it is, only the class of the model says."""
        counts = Counter(name for rule in self.rules for name in _theirs(rule))
        return frozenset(
            rule.ours for rule in self.rules if any(counts[name] > 1 for name in _theirs(rule))
        )

    def full_name(self, found: str) -> str:
        """A name as some file has it, old or without prefix, as the rules have it; a name unknown to them as it is."""
        head, dot, tail = found.rpartition(".")
        name = head + OLD_NAMES.get(dot + tail, dot + tail)
        name = next(
            (same[0] for old, new in self.synonyms if (same := _follow(old, (new,), name))), name
        )
        prefixed = self.prefix + name
        if self.origin(name) is None and (
            self.origin(prefixed) is not None or self.computes(prefixed)
        ):
            return prefixed
        return name


def _theirs(rule: Rule) -> tuple[str, ...]:
    return rule.theirs if isinstance(rule, Stack) else (rule.theirs,)


def untied(table: KeyTable) -> KeyTable:
    """The names of a model whose output layer has a matrix of its own: what is a copy in a tied one is a tensor here.

    A bias that lies there twice is read from the output layer: transformers 5 keeps two apart, and reads that one. Version 4
    had one tensor for both, and its files hold it under the other name.
    """
    own = {
        rule.ours: rule.theirs
        for rule in table.rules
        if isinstance(rule, Tie) and rule.ours.startswith(rule.part)
    }
    return replace(table, rules=tuple(_untied(rule, table, own) for rule in table.rules))


def _untied(rule: Rule, table: KeyTable, own: Mapping[str, str]) -> Rule:
    """A tied model's rule → an untied one's. `own`: what of a head lies in its output layer, too, and where."""
    match rule:
        case Tie(ours, _, part) if ours in own:
            return Spare(ours, table.place(ours).names[0], part)
        case Tie(_, theirs, part):
            return Rename(f"{part}.output.weight", theirs)
        case Rename(ours, _) if ours in own:
            return Rename(ours, own[ours])
        case _:
            return rule


def to_theirs(table: KeyTable, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Our tensors by our names → theirs by their full names; copies are left out."""
    result: dict[str, Tensor] = {}
    for ours, tensor in state.items():
        place = table.place(ours)
        result.update(zip(place.names, place.split(tensor), strict=True))
    return result


def _follow(ours: str, theirs: tuple[str, ...], name: str) -> tuple[str, ...]:
    """Their names for a tensor of ours, by one rule; nothing if the rule is about another."""
    match = _pattern(ours).fullmatch(name)
    if match is None:
        return ()
    *numbers, rest = match.groups()
    return tuple(their.format(*numbers) + rest for their in theirs)


@functools.lru_cache(maxsize=1024)
def _pattern(name: str) -> re.Pattern[str]:
    """A module's or tensor's name → what matches it and the tensors below it; groups: the numbers, then the rest."""
    return re.compile(re.escape(name).replace(r"\{\}", r"(\d+)") + r"((?:\..+)?)")


def _turned(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Rows that lie as `(outer, inner, …)` → as `(inner, outer, …)`."""
    rest = (len(tensor) // (outer * inner), *tensor.shape[1:])
    return tensor.reshape(outer, inner, *rest).transpose(0, 1).reshape(tensor.shape)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous() if tensor.dim() == 2 else tensor
