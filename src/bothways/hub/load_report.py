"""The strict report of loading: what becomes of every tensor of a file and of every tensor of a model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from bothways.families.weight_names import KeyTable, Shape, Spare, Tie

SHOWN = 8
"""How many names a message lists before it only counts."""


@dataclass(frozen=True)
class LoadReport:
    """Names are theirs, in full, except in `fresh`.

    Attributes:
        loaded: tensors of the model that the file holds.
        missing: tensors that it does not hold.
        misshapen: tensors of another shape than the model's: (theirs, the model's).
        unused: tensors of the file that the model does not take, with the reason.
        fresh: our tensors that start at random because that was asked for.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    misshapen: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    fresh: tuple[str, ...] = ()

    @property
    def faults(self) -> list[str]:
        """What is missing or of another shape, a line each."""
        pairs = [
            f"{name} is {list(found)}, not {list(wanted)}"
            for name, (found, wanted) in self.misshapen.items()
        ]
        lines = [f"{len(self.missing)} missing: {listed(self.missing)}"] if self.missing else []
        return lines + ([f"{len(pairs)} of another shape: {listed(pairs)}"] if pairs else [])

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} tensors loaded", *self.faults]
        if self.fresh:
            lines.append(f"{len(self.fresh)} start at random, as asked: {listed(self.fresh)}")
        for reason in dict.fromkeys(self.unused.values()):
            names = [name for name, why in self.unused.items() if why == reason]
            lines.append(f"{len(names)} unused ({reason}): {listed(names)}")
        return "\n".join(lines)


@dataclass(frozen=True)
class LoadPlan:
    """Attributes:
    report: what will become of every tensor.
    found: the file's own names, by full name.
    copies: (name of a copy, name of the tensor that it must equal), in full.
    """

    report: LoadReport
    found: Mapping[str, str]
    copies: tuple[tuple[str, str], ...]


def plan_loading(
    table: KeyTable,
    wanted: Mapping[str, Shape],
    held: Mapping[str, Shape],
    fresh: Collection[str],
    has: Collection[str] | None = None,
) -> LoadPlan:
    """What loading will do, from names and shapes alone.

    Args:
        table: the family's names.
        wanted: the shapes of the model's tensors by our names.
        held: the shapes of the file's tensors by its own names.
        fresh: kinds of heads that are to start at random.
        has: kinds of heads of the file's class; none where it is unknown. It decides between heads whose names are the same.
    """
    shared = set() if has is None else {head_of(module) for module in table.shared} - set(has)
    found = _full_names(table, held)
    loaded, missing, misshapen = [], [], {}
    random = tuple(ours for ours in wanted if head_of(ours) in fresh)
    for ours in wanted.keys() - set(random):
        place = table.place(ours)
        for name in place.names:
            shape = place.part_shape(wanted[ours])
            if name not in found or head_of(ours) in shared:
                missing.append(name)
            elif held[found[name]] == shape:
                loaded.append(name)
            else:
                misshapen[name] = (held[found[name]], shape)
    heads = {head_of(ours) for ours in wanted}
    ties = [
        (tie, name) for name, tie in table.ties.items() if head_of(tie.part) in heads - set(fresh)
    ]
    copies = tuple((tie.theirs, name) for tie, name in ties if tie.theirs in found)
    taken = {found[name] for name in (*loaded, *misshapen)}
    unused = {name: _why(table, name, found, heads, fresh) for name in held if name not in taken}
    report = LoadReport(tuple(sorted(loaded)), tuple(sorted(missing)), misshapen, unused, random)
    return LoadPlan(report, found, copies)


def head_of(name: str) -> str | None:
    """The kind of head that a tensor or part of ours belongs to; none for the encoder's."""
    first, _, rest = name.partition(".")
    return {"heads": rest.partition(".")[0]}.get(first)


def _full_names(table: KeyTable, held: Iterable[str]) -> dict[str, str]:
    """Names in full → as the file has them. A tensor that lies there only as a copy, or spare, stands for the original."""
    found: dict[str, str] = {}
    # Names that are full as they stand come first, so that they are preferred to any that would become the same.
    for name in sorted(held, key=lambda name: (table.full_name(name) != name, name)):
        found.setdefault(table.full_name(name), name)
    for name, other in (table.ties | table.spares).items():
        if other.theirs in found:
            found.setdefault(name, found[other.theirs])
    return found


def _why(
    table: KeyTable,
    name: str,
    found: Mapping[str, str],
    heads: Collection[str | None],
    fresh: Collection[str],
) -> str:
    """Why a tensor of the file is not taken."""
    full = table.full_name(name)
    rules = table.origins(full)
    if found[full] != name:
        return f"{found[full]} is the same"
    if not rules:
        return (
            "numbers that are computed here"
            if table.computes(full)
            else "no part of this family that is known here"
        )
    by_head = {
        head_of(rule.part if isinstance(rule, Tie | Spare) else rule.ours): rule for rule in rules
    }
    asked = next((head for head in by_head if head in heads), None)
    if asked is not None and asked in fresh:
        return f"the {asked} head starts at random, as asked"
    rule = by_head.get(asked, rules[0])
    if asked not in by_head:
        return f"the {' or '.join(map(str, by_head))} head was not asked for"
    match rule:
        case Tie(ours):
            return f"a copy of {ours}"
        case Spare(ours):
            return f"nothing reads it beside {ours}"
        case _:
            return "the configuration has no place for it"


def listed(names: Iterable[str]) -> str:
    """The first names, and how many more there are."""
    shown = list(names)
    return ", ".join(shown[:SHOWN]) + (
        f" and {len(shown) - SHOWN} more" if len(shown) > SHOWN else ""
    )
