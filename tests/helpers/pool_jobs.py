"""Jobs of worker processes, in a module that is imported fast."""

import os
import signal
import time
from pathlib import Path


def slow_square(number: int) -> int:
    time.sleep(0.02 * (number % 3))
    print("printing must not disturb the replies")
    return number * number


def process_id(_: int) -> int:
    time.sleep(0.02)
    return os.getpid()


def sleepy_id(number: int) -> int:
    time.sleep(0.05 if number < 2 else 60)
    return os.getpid()


def scaled(scale: int, numbers: list[int]) -> list[int]:
    return [scale * number for number in numbers]


def fail(number: int) -> int:
    raise ValueError(f"job {number} is bad")


def die(number: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(mark: str, number: int) -> tuple[int, str]:
    """End this process at the first call of all processes with this number."""
    place = Path(f"{mark}-{number}")
    if number % 3 == 0 and not place.exists():
        place.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return number, os.environ["BOTHWAYS_WORKER"]
