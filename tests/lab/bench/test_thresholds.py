"""The measurements of benchmarks/thresholds.py."""

import pytest
import thresholds as tuning
import torch
from thresholds import Measurement, measure_thresholds, snippet

from bothways.core.runtime.tuning import Tuning

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("first", "value"),
    [((1.0, 1.0, 3.0), 20), ((1.0, 2.1, 1.0), 10), ((9.0, 1.0, 1.0), None), ((1.0, 2.05, 1.0), 30)],
)
def test_threshold_is_last_faster_size(first, value, monkeypatch):
    """The second way takes 2 s; noise of 3 % is no difference."""
    seconds = dict(zip((10, 20, 30), first, strict=True))

    def work(size: int) -> tuning.Work:
        return lambda: size

    monkeypatch.setattr(tuning, "_seconds", lambda work, device: seconds.get(work(), 2.0))
    found = tuning._race("compiled", "", (10, 20, 30), work, lambda size: work(0), CPU, 3)
    assert found.value == value
    assert found.speedups == {size: 2.0 / taken for size, taken in seconds.items()}


def test_all_measurements_run(monkeypatch):
    """In one round of each size, on few tokens."""
    monkeypatch.setattr(tuning, "TOKENS", 64)
    race = tuning._race

    def short(field: str, ways: str, sizes: tuple[int, ...], *more: object) -> Measurement:
        return race(field, ways, sizes[:1], *more[:-1], 1)

    monkeypatch.setattr(tuning, "_race", short)
    monkeypatch.setattr(
        tuning, "_batch_tokens", lambda *_: Measurement("predict_tokens_cpu", "", {64: 1.0}, 64)
    )
    found = list(measure_thresholds(CPU, 1))
    fields = {each.field for each in found if each.used is not None}
    assert fields <= set(Tuning.__dataclass_fields__)
    assert {"products_fp32", "in_place_fp32", "masked_window_cpu", "predict_tokens_cpu"} <= fields
    text = snippet([Measurement("compiled", "", {64: 2.0}, 1024), *found[-1:]])
    assert text == "TUNING = Tuning(\n    compiled=1_024,\n    predict_tokens_cpu=64,\n)"
