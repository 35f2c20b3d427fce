"""Runs under torchrun, seen from outside."""

import json
from pathlib import Path


def ranks_of(agent: int) -> list[int]:
    """The processes that torchrun has started; none once it has ended."""
    try:
        text = Path(f"/proc/{agent}/task/{agent}/children").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return []
    return [int(word) for word in text.split()]


def newest(out: Path) -> int:
    """The step of the newest checkpoint of a run."""
    return max(
        (int(path.name[5:]) for path in out.glob("step-*") if path.name[5:].isdecimal()), default=0
    )


def records(out: Path) -> list[dict[str, float]]:
    """The records that are complete; none before the first."""
    file = out / "metrics.jsonl"
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
