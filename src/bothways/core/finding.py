"""Findings: problems with data, model or machine that are reported before a long run starts."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass
from typing import Literal

from bothways.core.advice import render
from bothways.core.errors import BothwaysError
from bothways.core.terminal import listed

Check = Literal[
    "ids", "positions", "casing", "truncation", "unknown", "disk", "memory", "time",
    "rows", "labels", "pairs", "balance", "overlap", "heads", "masking", "training",
]  # fmt: skip
SHOWN = 5


@dataclass(frozen=True)
class Finding:
    """A problem that a check found.

    Attributes:
        check: the kind of check.
        severity: an error stops the run, a warning probably harms it, a note is information.
        what: the problem, as one sentence.
        where: a setting, a file or a line.
        fix: what to change; parameters by `advice.argument`.
    """

    check: Check
    severity: Literal["error", "warning", "note"]
    what: str
    where: str | None = None
    fix: str | None = None

    def __str__(self) -> str:
        prefix = f"{self.where}: " if self.where else ""
        return render(f"{prefix}{self.what}" + (f". {self.fix}" if self.fix else ""))


def report_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Return the warnings and notes, warnings first.

    Raises:
        BothwaysError: there are errors; the message lists all of them.
    """
    findings = list(findings)
    errors = [finding for finding in findings if finding.severity == "error"]
    if len(errors) == 1:
        raise BothwaysError(errors[0].what, where=errors[0].where, fix=errors[0].fix)
    if errors:
        lines = "".join(f"\n  {number}. {error}" for number, error in enumerate(errors, 1))
        raise BothwaysError(f"{len(errors)} errors must be corrected before training:{lines}")
    return sorted(findings, key=lambda finding: finding.severity != "warning")


def places(items: Many[str]) -> str:
    """Join the first five places with commas, followed by the number of others."""
    return listed(items, SHOWN)
