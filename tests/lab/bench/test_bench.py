"""The benchmark of this machine: both sides are given the same work, it is counted as the paper's shapes say, and told."""

import itertools
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import BertForPreTraining

from bothways.cli.lab import bench
from bothways.core.errors import ResourceError
from bothways.hub.model_folder import save_model
from bothways.lab.bench import race as recipe
from bothways.lab.bench.race import WORKLOADS, Workload, make_batch
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.heads import MaskedHead, PairHead, PoolerHead
from bothways.model.model import Model
from bothways.objectives.masked_lm import MaskedLMModule

CPU = torch.device("cpu")
TINY = Workload("tiny", EncoderConfig(60, 16, 2, 2, 32), 3, 20)


def test_contenders_read_same_batch(tmp_path):
    config = EncoderConfig(60, 16, 2, 2, 32, dropout=Dropouts(0.0, 0.0))
    model, batch = Model(config, (MaskedHead(), PoolerHead(), PairHead())).eval(), make_batch(TINY)
    save_model(tmp_path, model)
    theirs = BertForPreTraining.from_pretrained(tmp_path).eval()
    losses = MaskedLMModule(model)(batch)
    weights = {"masked": 3 * recipe.Masking().count(20), "pair": 3}
    expected = sum(loss.total / weights[name] for name, loss in losses.items())
    assert losses.keys() == weights.keys()
    torch.testing.assert_close(theirs(**recipe._padded(batch)).loss, expected, rtol=0, atol=1e-5)


def test_operations_match_matrix_products():
    work = WORKLOADS["base"]
    h, n, masked, vocab = 768, 128, 19, 30522
    asked = masked + 1  # of the last block after its attention: masked tokens and [CLS]
    block = 3 * h * h * 2 + 2 * 2 * n * h
    rest = (h * h + 2 * 4 * h * h) * 2
    heads = masked * 2 * (h * h + h * vocab) + 2 * (h * h + 2 * h)
    forward = n * 12 * block + (n * 11 + asked) * rest + heads
    assert work.operations == pytest.approx(3 * work.rows * forward, rel=1e-3)


def test_contenders_take_turns(monkeypatch):
    turns: list[tuple[str, str]] = []

    def turn(pool: object, device: object, work: object, *name: str) -> tuple[float, int]:
        turns.append((name[0], name[1]))
        return float(len(turns)), 100 - len(turns)

    monkeypatch.setattr(recipe, "_turn", turn)
    monkeypatch.setattr(recipe, "has_bf16", lambda _: True)
    timings = recipe.race(TINY, 3, CPU)
    every = [*itertools.product(("bothways", "transformers"), ("fp32", "bf16"))]
    assert turns == every * 3
    assert [(timing.contender, timing.precision) for timing in timings] == every
    assert timings[1].rounds == (2.0, 6.0, 10.0)
    assert timings[1].memory == 90  # what it has held at last is the most


def test_a_gpu_is_measured_in_bf16_alone(monkeypatch):
    monkeypatch.setattr(recipe, "_turn", lambda *_: (0.5, 1))
    monkeypatch.setattr(recipe, "has_bf16", lambda _: True)
    monkeypatch.setattr(recipe, "gemm_rate", lambda *_: 1e12)
    table = recipe.measure(TINY, 1, torch.device("cuda"))
    assert [row[0] for row in table.rows] == [f"{name} bf16" for name in recipe.CONTENDERS]
    assert table.columns[3:5] == ["× same", "of GEMM"]
    assert {len(row) for row in table.rows} == {len(table.columns)}


@pytest.mark.parametrize("contender", ["bothways", "transformers"])
def test_an_update_changes_the_weights(contender, monkeypatch):
    made: list[torch.nn.Module] = []
    usual = torch.nn.Module.to

    def note(module: torch.nn.Module, *given: object) -> torch.nn.Module:
        made.append(module)
        return usual(module, *given)

    monkeypatch.setattr(torch.nn.Module, "to", note)
    update = recipe.CONTENDERS[contender](TINY, make_batch(TINY), "fp32", CPU)
    before = [parameter.detach().clone() for parameter in made[0].parameters()]
    update()
    pairs = zip(made[0].parameters(), before, strict=True)
    assert not any(torch.equal(one, other) for one, other in pairs)


def test_bench_command_prints_table(monkeypatch, capsys):
    """In threads: each process would import transformers."""
    monkeypatch.setattr(recipe, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(recipe.signal, "signal", lambda *_: None)  # for the main thread alone
    monkeypatch.setitem(WORKLOADS, "small", TINY)
    monkeypatch.setattr(recipe, "gemm_rate", lambda *_: 1e12)
    monkeypatch.setattr(recipe, "has_bf16", lambda _: False)
    monkeypatch.setenv("COLUMNS", "150")
    bench(rounds=1, device="cpu")
    said = capsys.readouterr().out
    assert "Pre-training step, tiny, 3 × 20 tokens" in said
    assert all(f"{name} fp32" in said for name in ("bothways", "transformers"))
    assert "MiB" in said
    assert f"torch {torch.__version__}" in said


@pytest.mark.slow
def test_dead_process_is_reported(monkeypatch, capfd):
    monkeypatch.setattr(recipe, "CONTENDERS", {"nobody": None})
    message = r"(?s)nobody in fp32 failed on 3 × 20 tokens of tiny: out of memory.*bench small"
    with pytest.raises(ResourceError, match=message):
        recipe.race(TINY, 1, CPU)
    assert "KeyError: 'nobody'" in capfd.readouterr().err


def test_missing_transformers_is_reported(monkeypatch):
    monkeypatch.setattr(recipe.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ResourceError, match="transformers is not installed"):
        recipe.measure(TINY, 1, CPU)
