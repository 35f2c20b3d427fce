"""The names of weights, ours ↔ Hugging Face's, as rules that are data.

A rule says where one of our modules or tensors is in a Hugging Face file. Loading reads the rules
in one direction and saving in the other, so the two cannot drift apart. `{}` in a name represents
a number, such as that of a layer:

    Rename("encoder.blocks.{}.mlp.up", "bert.encoder.layer.{}.intermediate.dense")
    encoder.blocks.3.mlp.up.weight  ↔  bert.encoder.layer.3.intermediate.dense.weight
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from typing_extensions import assert_never

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Rename:
    """Our tensor is the file's under another name.

    Attributes, of all rules:
        name: our name, with `{}` for a number.
        stored: the name or names in the file.
    """

    name: str
    stored: str


@dataclass(frozen=True)
class Stack:
    """Our tensor is several of the file's, of one size, concatenated along the first axis.

    Example: query, key and value as one matrix.
    """

    name: str
    stored: tuple[str, ...]


@dataclass(frozen=True)
class Transpose:
    """Our matrix is the file's transposed; vectors are equal."""

    name: str
    stored: str


@dataclass(frozen=True)
class Interleave:
    """Our query, key and value follow one another; the file's alternate head by head.

    Attributes:
        heads: the number of heads, which `Family.keys_for` fills in.
    """

    name: str
    stored: str
    heads: int = 1


@dataclass(frozen=True)
class Swap:
    """The file has the two halves of our tensor in the other order."""

    name: str
    stored: str


@dataclass(frozen=True)
class Tie:
    """The file may hold our tensor a second time, in our part `owner`.

    The copy is compared when it is read, and left out when the model is saved.
    """

    name: str
    stored: str
    owner: str


@dataclass(frozen=True)
class Spare:
    """The file holds a second tensor next to ours, which nothing reads.

    It replaces ours where ours is missing, and is written equal to ours.
    """

    name: str
    stored: str
    owner: str


Placed = Rename | Stack | Transpose | Interleave | Swap
Rule = Placed | Tie | Spare

OLD_NAMES = {".gamma": ".weight", ".beta": ".bias"}
"""Names of a LayerNorm's tensors in TensorFlow, and in files that were converted from it early."""


@dataclass(frozen=True)
class TensorPlacement:
    """The place of one of our tensors in the file.

    Attributes:
        rule: the rule that applies.
        names: the tensor's names there; several for a `Stack`.
    """

    rule: Placed
    names: tuple[str, ...]

    def join(self, pieces: list[Tensor]) -> Tensor:
        """Return our tensor, made of the file's in the order of `names`."""
        import torch

        match self.rule:
            case Rename():
                return pieces[0]
            case Stack():
                return torch.cat(pieces)
            case Transpose():
                return _transposed(pieces[0])
            case Interleave(heads=heads):
                return _swap_groups(pieces[0], heads, 3)
            case Swap():
                return _swapped(pieces[0])
            case _:
                assert_never(self.rule)

    def split(self, tensor: Tensor) -> list[Tensor]:
        """Return the file's tensors, in the order of `names`, made of ours."""
        match self.rule:
            case Rename():
                return [tensor]
            case Stack():
                return list(tensor.chunk(len(self.names)))
            case Transpose():
                return [_transposed(tensor)]
            case Interleave(heads=heads):
                return [_swap_groups(tensor, 3, heads)]
            case Swap():
                return [_swapped(tensor)]
            case _:
                assert_never(self.rule)

    def part_shape(self, shape: Shape) -> Shape:
        """Return the shape of each of the file's tensors, given the shape of ours."""
        match self.rule:
            case Rename() | Interleave() | Swap():
                return shape
            case Stack():
                return (shape[0] // len(self.names), *shape[1:])
            case Transpose():
                return shape[::-1]
            case _:
                assert_never(self.rule)


class _Index:
    """Finds the rules about a name without trying every one of them.

    Numbers become `{}` and every prefix that ends at a dot is looked up:
    "a.layer.3.q.weight" → "a", "a.layer", "a.layer.{}", "a.layer.{}.q", "a.layer.{}.q.weight".
    """

    def __init__(self, names: Iterable[tuple[str, Rule]]) -> None:
        self._rules = defaultdict[str, list[tuple[int, Rule]]](list)
        self._prefixes = set[str]()
        for order, (name, rule) in enumerate(names):
            self._rules[name].append((order, rule))
            pieces = name.split(".")
            self._prefixes |= {".".join(pieces[:stop]) for stop in range(1, len(pieces) + 1)}

    def find(self, name: str) -> list[tuple[Rule, list[str], str]]:
        """Return the rules about a name in their order, with its numbers and what follows."""
        matches, numbers, prefix, end = [], list[str](), "", 0
        for piece in name.split("."):
            number = piece.isascii() and piece.isdigit()
            end += len(piece) + (1 if prefix else 0)
            prefix += ("." if prefix else "") + ("{}" if number else piece)
            if prefix not in self._prefixes:
                break
            numbers += [piece] if number else []
            rules = self._rules.get(prefix, ())
            matches += [(at, rule, list(numbers), name[end:]) for at, rule in rules]
        matches.sort(key=lambda match: match[0])
        return [(rule, values, suffix) for _, rule, values, suffix in matches]


@dataclass(frozen=True)
class KeyTable:
    """The weight names of a family.

    Attributes:
        prefix: the beginning of the names of the encoder's tensors, which a file may leave out.
        rules: one for each of our modules, and one for each copy that a file may hold.
        computed: their buffers that hold no weight, such as position numbers.
        synonyms: other names of modules in some files: (that name, its name in the rules).
    """

    prefix: str
    rules: tuple[Rule, ...]
    computed: tuple[str, ...] = ()
    synonyms: tuple[tuple[str, str], ...] = ()

    def place(self, name: str) -> TensorPlacement:
        """Return the place of our tensor of this name.

        A head that no class of the family has keeps our name: no file of transformers holds it.
        """
        for rule, numbers, suffix in self._by_name.find(name):
            if not isinstance(rule, Tie | Spare):
                names = tuple(name.format(*numbers) + suffix for name in _stored_names(rule))
                return TensorPlacement(rule, names)
        assert name.startswith("heads."), f"no rule for {name}"
        return TensorPlacement(Rename(name, name), (name,))

    @functools.cached_property
    def _by_name(self) -> _Index:
        return _Index((rule.name, rule) for rule in self.rules)

    @functools.cached_property
    def _by_stored(self) -> _Index:
        return _Index((name, rule) for rule in self.rules for name in _stored_names(rule))

    @functools.cached_property
    def _computed(self) -> _Index:
        return _Index((name, Rename(name, name)) for name in self.computed)

    @functools.cached_property
    def _synonyms(self) -> _Index:
        return _Index((old, Rename(old, new)) for old, new in self.synonyms)

    @property
    def ties(self) -> dict[str, Tie]:
        """The rules about copies, by the name of the tensor that the copy must equal."""
        ties = (rule for rule in self.rules if isinstance(rule, Tie))
        return {self.place(rule.name).names[0]: rule for rule in ties}

    @property
    def spares(self) -> dict[str, Spare]:
        """The rules about tensors that nothing reads, by the name of the one that is read."""
        spares = (rule for rule in self.rules if isinstance(rule, Spare))
        return {self.place(rule.name).names[0]: rule for rule in spares}

    def computes(self, stored: str) -> bool:
        """Return True for the full name of a buffer in a file, which holds no weight."""
        return bool(self._computed.find(stored))

    def origins(self, stored: str) -> list[Rule]:
        """Return the rules about a full name of a file: several where heads share a name."""
        return list(dict.fromkeys(rule for rule, _, _ in self._by_stored.find(stored)))

    @functools.cached_property
    def shared(self) -> frozenset[str]:
        """Our modules that share a name in files; only the model's class decides between them."""
        counts = Counter(name for rule in self.rules for name in _stored_names(rule))
        return frozenset(
            rule.name
            for rule in self.rules
            if any(counts[name] > 1 for name in _stored_names(rule))
        )

    def knows(self, name: str) -> bool:
        """Return True if a rule is about a name of a file."""
        return bool(self.origins(self.full_name(name)))

    def full_name(self, name: str) -> str:
        """Return a name of a file, old or without prefix, as the rules have it, or unchanged."""
        head, dot, tail = name.rpartition(".")
        name = head + OLD_NAMES.get(dot + tail, dot + tail)
        for rule, numbers, suffix in self._synonyms.find(name)[:1]:
            name = _stored_names(rule)[0].format(*numbers) + suffix
        prefixed = self.prefix + name
        is_known = self.origins(prefixed) or self.computes(prefixed)
        return prefixed if is_known and not self.origins(name) else name


def _stored_names(rule: Rule) -> tuple[str, ...]:
    return rule.stored if isinstance(rule, Stack) else (rule.stored,)


def untied(table: KeyTable) -> KeyTable:
    """Return the names of a model whose output layer has a matrix of its own.

    A copy in a tied model is a tensor here. Of two biases, the output layer's is read:
    transformers 5 keeps both apart and reads that one. Version 4 had one tensor for both, which
    its files hold under the other name.
    """
    ties = (rule for rule in table.rules if isinstance(rule, Tie))
    # The tensors that the output layer repeats.
    head_names = {rule.name: rule.stored for rule in ties if rule.name.startswith(rule.owner)}
    rules = list[Rule]()
    for rule in table.rules:
        match rule:
            case Tie(name, _, piece) if name in head_names:
                rules.append(Spare(name, table.place(name).names[0], piece))
            case Tie(_, stored, piece):
                rules.append(Rename(f"{piece}.output.weight", stored))
            case Rename(name, _) if name in head_names:
                rules.append(Rename(name, head_names[name]))
            case _:
                rules.append(rule)
    return replace(table, rules=tuple(rules))


def to_file_names(table: KeyTable, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return our tensors under their full names, without copies."""
    result: dict[str, Tensor] = {}
    for name, tensor in state.items():
        placement = table.place(name)
        result.update(zip(placement.names, placement.split(tensor), strict=True))
    return result


def _swap_groups(tensor: Tensor, outer: int, inner: int) -> Tensor:
    """Return rows ordered as `(outer, inner, …)` in the order `(inner, outer, …)`."""
    suffix = (len(tensor) // (outer * inner), *tensor.shape[1:])
    return tensor.reshape(outer, inner, *suffix).transpose(0, 1).reshape(tensor.shape)


def _swapped(tensor: Tensor) -> Tensor:
    return tensor.roll(len(tensor) // 2, 0)


def _transposed(tensor: Tensor) -> Tensor:
    return tensor.t().contiguous() if tensor.dim() == 2 else tensor
