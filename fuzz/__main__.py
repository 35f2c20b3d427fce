"""Run fuzzers: `python -m fuzz [data] [folders] [checkpoints] [kills] [--seconds N] [--seed N]`.

A case passes if the command succeeds or ends with one of the library's own errors. Any other
exception, a case over its time limit, or a damaged result fails; the case is printed with the seed
that repeats it, and belongs into the tests from then on.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import io
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from bothways.core.errors import BothwaysError
from fuzz.cases import Case, Workshop
from fuzz.targets import TARGETS

CASE_SECONDS = 30
MEMORY = 12 * 2**30


class TooSlowError(Exception):
    """A case that exceeds its time limit."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise TooSlowError after a number of seconds."""

    def expire(*_: object) -> None:
        raise TooSlowError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def outcome_of(case: Case) -> str:
    """Run a case; return "accepted", "refused", or the traceback of a failure."""
    quiet = io.StringIO()
    try:
        with (
            time_limit(CASE_SECONDS),
            contextlib.redirect_stdout(quiet),
            contextlib.redirect_stderr(quiet),
        ):
            case.run()
    except (BothwaysError, SystemExit):
        return "refused"
    except BaseException:
        return traceback.format_exc()
    return "accepted"


def run_target(make: Callable[[Workshop], Iterator[Case]], seconds: float, seed: int) -> int:
    """Run the cases of a target until the time is over; return the number of failures."""
    counts, end = collections.Counter[str](), time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as folder:
        workshop = Workshop(Path(folder), np.random.default_rng(seed))
        for case in make(workshop):
            outcome = outcome_of(case)
            kind = outcome if outcome in {"accepted", "refused"} else "failed"
            counts[kind] += 1
            if kind == "failed":
                number = counts.total()
                print(f"FAILED {case.name} (seed {seed}, case {number})\n{outcome}", flush=True)
            if time.monotonic() > end:
                break
    print(f"{make.__name__}: {dict(counts)}", flush=True)
    return counts["failed"]


def main() -> None:
    """Parse the arguments and run the chosen targets."""
    parser = argparse.ArgumentParser(prog="fuzz", description="Run the fuzzers.")
    parser.add_argument("targets", nargs="*", choices=[[], *TARGETS], default=[])
    parser.add_argument("--seconds", type=float, default=60, help="time per target")
    parser.add_argument("--seed", type=int, default=int.from_bytes(os.urandom(4), "little"))
    given = parser.parse_args()
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    names = given.targets or list(TARGETS)
    failures = sum(run_target(TARGETS[name], given.seconds, given.seed) for name in names)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    main()
