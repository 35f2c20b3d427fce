"""The strict report of loading: the fate of every tensor of a file and of a model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from bothways.core.terminal import listed, quantity
from bothways.model.families.weight_names import KeyTable, Shape, Spare, Tie

NO_PLACE = "the configuration has no place for it"
NOT_KNOWN = "not a known part of this family"


@dataclass(frozen=True)
class LoadReport:
    """Names are Hugging Face's, in full, except in `fresh`.

    Attributes:
        loaded: tensors of the model that the file holds.
        missing: tensors that it does not hold.
        misshapen: tensors of another shape than the model's: (theirs, the model's).
        unused: tensors of the file that the model does not take, with the reason.
        fresh: our tensors that start at random as requested.
        unknown_settings: settings of `config.json` that the family is not known to have.
        unread_files: files of the folder that may hold a part of the model and were not read.
        wrappers: prefixes such as `module.` that were removed from the file's names.
        adapter: a note on the adapter that changed tensors; empty without one.
        sources: the file's own names, by full name.
        copies: (name of a copy, name of the tensor that it must equal), in full.
    """

    loaded: tuple[str, ...]
    missing: tuple[str, ...] = ()
    misshapen: Mapping[str, tuple[Shape, Shape]] = field(default_factory=dict)
    unused: Mapping[str, str] = field(default_factory=dict)
    fresh: tuple[str, ...] = ()
    unknown_settings: Mapping[str, Any] = field(default_factory=dict)
    wrappers: tuple[str, ...] = ()
    unread_files: tuple[str, ...] = ()
    adapter: str = ""
    sources: Mapping[str, str] = field(default_factory=dict, repr=False)
    copies: tuple[tuple[str, str], ...] = field(default=(), repr=False)

    @property
    def fresh_heads(self) -> tuple[str, ...]:
        """The kinds of heads that start at random."""
        return tuple(sorted({str(head_of(name)) for name in self.fresh}))

    @property
    def faults(self) -> list[str]:
        """A line for missing tensors, and one for those of another shape."""
        pairs = [
            f"{name} is {list(actual)}, not {list(expected)}"
            for name, (actual, expected) in self.misshapen.items()
        ]
        lines = [f"{len(self.missing)} missing: {listed(self.missing)}"] if self.missing else []
        return lines + ([f"{len(pairs)} of another shape: {listed(pairs)}"] if pairs else [])

    @property
    def warnings(self) -> list[str]:
        """A line for each part of the folder that was passed over though it may change outputs."""
        foreign = [name for name, reason in self.unused.items() if reason in (NO_PLACE, NOT_KNOWN)]
        lines = [f"{quantity(len(foreign), 'tensor(s)')} not used: {listed(foreign)}"] * bool(
            foreign
        )
        return lines + self._unread

    @property
    def _unread(self) -> list[str]:
        """A line for files that were not read, and one for unknown settings."""
        lines = [f"files not read: {listed(self.unread_files)}"] if self.unread_files else []
        if self.unknown_settings:
            pairs = [f"{key} = {value!r:.40}" for key, value in self.unknown_settings.items()]
            count = quantity(len(pairs), "unknown setting(s)")
            lines.append(f"config.json has {count}, not used: {listed(pairs)}")
        return lines

    def __str__(self) -> str:
        lines = [f"{len(self.loaded)} tensors loaded", *self.faults]
        if self.adapter:
            lines.append(self.adapter)
        if self.wrappers:
            lines.append(f"names were read without {' and '.join(self.wrappers)}")
        if self.fresh:
            lines.append(f"{len(self.fresh)} start at random, as requested: {listed(self.fresh)}")
        by_reason = defaultdict[str, list[str]](list)
        for name, reason in self.unused.items():
            by_reason[reason].append(name)
        lines += [f"{len(n)} unused ({reason}): {listed(n)}" for reason, n in by_reason.items()]
        return "\n".join(lines + self._unread)


def plan_loading(
    table: KeyTable,
    expected: Mapping[str, Shape],
    actual: Mapping[str, Shape],
    fresh: Collection[str],
    has: Collection[str] | None = None,
) -> LoadReport:
    """Plan the loading of a file, from names and shapes alone.

    Args:
        table: the family's names.
        expected: the shapes of the model's tensors by our names.
        actual: the shapes of the file's tensors by its own names.
        fresh: kinds of heads that start at random.
        has: kinds of heads of the file's class, None where it is unknown. It decides between
            heads with the same names.
    """
    # Heads of several classes may have one name in files: the class decides which one it is.
    shared = set() if has is None else {head_of(module) for module in table.shared} - set(has)
    full = {name: table.full_name(name) for name in actual}
    sources = dict[str, str]()  # the file's names by full name
    # A name that is already full has priority over others that become the same.
    for name in sorted(full, key=lambda name: (full[name] != name, name)):
        sources.setdefault(full[name], name)
    # A lone copy or spare replaces the original.
    for name, other in (table.ties | table.spares).items():
        if other.stored in sources:
            sources.setdefault(name, sources[other.stored])
    loaded, missing, misshapen = [], [], {}
    random = tuple(tensor_name for tensor_name in expected if head_of(tensor_name) in fresh)
    for tensor_name in expected.keys() - set(random):
        placement = table.place(tensor_name)
        for name in placement.names:
            shape = placement.part_shape(expected[tensor_name])
            if name not in sources or head_of(tensor_name) in shared:
                missing.append(name)
            elif actual[sources[name]] == shape:
                loaded.append(name)
            else:
                misshapen[name] = (actual[sources[name]], shape)
    heads = {head_of(tensor_name) for tensor_name in expected}
    loaded_heads = heads - set(fresh)
    # A copy matters only if its head is read: an unused one may hold anything.
    ties = [
        (tie.stored, name) for name, tie in table.ties.items() if head_of(tie.owner) in loaded_heads
    ]
    copies = tuple((source, name) for source, name in ties if source in sources)
    # A tensor of another shape is a fault of its own, not an unused one.
    taken = {sources[name] for name in (*loaded, *misshapen)}
    remaining = [name for name in actual if name not in taken]
    unused = {n: _reason(table, n, full[n], sources, heads, fresh) for n in remaining}
    return LoadReport(
        tuple(sorted(loaded)), tuple(sorted(missing)), misshapen, unused, random,
        sources=sources, copies=copies,
    )  # fmt: skip


def head_of(name: str) -> str | None:
    """Return the kind of head of one of our tensors or parts, None for the encoder's."""
    root, _, remainder = name.partition(".")
    return remainder.partition(".")[0] if root == "heads" else None


def _reason(
    table: KeyTable,
    name: str,
    full: str,
    sources: Mapping[str, str],
    heads: Collection[str | None],
    fresh: Collection[str],
) -> str:
    """Return the reason why a tensor of the file is not taken."""
    # Two names of one tensor in the file: the other was read.
    if sources[full] != name:
        return f"{sources[full]} is the same"
    rules = table.origins(full)
    if not rules:
        return "computed here" if table.computes(full) else NOT_KNOWN
    by_head = {
        head_of(rule.owner if isinstance(rule, Tie | Spare) else rule.name): rule for rule in rules
    }
    kind = next((head for head in by_head if head in heads), None)
    if kind is not None and kind in fresh:
        return f"the {kind} head starts at random, as requested"
    if kind not in by_head:
        return f"the {' or '.join(map(str, by_head))} head was not requested"
    match by_head[kind]:
        case Tie(tensor_name):
            return f"a copy of {tensor_name}"
        case Spare(tensor_name):
            return f"{tensor_name} is read in its place"
        case _:
            return NO_PLACE
