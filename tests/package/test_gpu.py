"""What is computed on a GPU against what the processor computes: make test-gpu.

BOTHWAYS_TEST_DEVICE=cpu runs the same tests on the processor, which shows that they are sound.
"""

import copy
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from torch import Tensor

import bothways
from bothways.core.batch import IGNORED, Batch, LabelTargets, pack, pad_batch
from bothways.core.source import Cursor, Sequence, TrainingStep
from bothways.data.masking import Vocabulary
from bothways.hub.model_folder import load_model
from bothways.model.attention.patterns import Blocks, Causal, Full, Window
from bothways.model.config import Dropouts, EncoderConfig, Gated
from bothways.model.kernels.cross_entropy import cross_entropy
from bothways.model.kernels.linear import to_vocabulary
from bothways.model.model import Model
from bothways.model.positions import Rotary
from bothways.objectives.masked_lm import MaskedLMModule, MaskedLMNextSentence
from bothways.serving.app import app
from bothways.training.loop import Loop
from bothways.training.optimizers import AdamW, build_optimizer
from bothways.training.parallel import Plan
from bothways.training.saved_state import RunTensors
from bothways.training.schedules import RunState, Steps
from commands import run_line
from running_server import running
from small_models import LENGTHS, SHAPES, SMALL, batch_for
from toy_folder import make_examples, make_folder
from toy_predictors import TASKS, predictor
from toy_training import signal_at

DEVICE = os.environ.get("BOTHWAYS_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="no GPU here"),
]
# A head of 64, as in the published models, and sequences of many blocks and of one token.
LONG = replace(
    SMALL, width=128, intermediate_size=256, depth=2, dropout=Dropouts(0.0, 0.0),
    position=replace(SMALL.position, max_positions=2048),
)  # fmt: skip
KERNELS = {
    "full": LONG,
    "causal": replace(LONG, patterns=(Causal(),)),
    "window": replace(LONG, patterns=(Window(64), Full()), position=Rotary(2048)),
    "narrow window": replace(LONG, patterns=(Window(32),), position=Rotary(2048)),
    "global tokens": replace(LONG, patterns=(Window(64, global_attention=True),)),
    "blocks": replace(LONG, patterns=(Blocks(64, 3),)),
    "odd heads": replace(LONG, width=24, heads=2),
}


def quiet(config: EncoderConfig) -> EncoderConfig:
    """The configuration without dropout, whose draws differ between devices."""
    mlp = replace(config.mlp, dropout=0.0) if isinstance(config.mlp, Gated) else config.mlp
    return replace(config, mlp=mlp, dropout=Dropouts(0.0, 0.0))


def states_and_gradients(model: Model, batch: Batch) -> list[Tensor]:
    """The states in training, and the gradients of a weighted sum of them."""
    states = model.train()(batch).last_hidden_state
    weights = torch.randn(states.shape, generator=torch.Generator().manual_seed(5))
    (states * weights.to(states)).sum().backward()
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return [each.detach().cpu().double() for each in (states, *gradients)]


def assert_near(found: list[Tensor], wanted: list[Tensor], tolerances: tuple[float, float]) -> None:
    """Require small differences beside the states, and beside each gradient or the largest one."""
    largest = max(float(each.norm()) for each in wanted[1:])
    assert len(found) == len(wanted)
    for at, (one, other) in enumerate(zip(found, wanted, strict=True)):
        size = max(float(other.norm()), largest / 100) if at else float(other.norm())
        assert float((one - other).norm()) <= tolerances[at > 0] * size


def compare(
    config: EncoderConfig, lengths: list[int], dtype: torch.dtype, compiled: bool = False
) -> None:
    torch.manual_seed(1)
    reference = Model(quiet(config), ())
    model = copy.deepcopy(reference).to(DEVICE)
    for block in model.encoder.blocks:
        block.compiled = compiled
    batch = batch_for(config, lengths)
    wanted = states_and_gradients(reference.double(), batch)
    with torch.autocast(DEVICE, torch.bfloat16, enabled=dtype == torch.bfloat16):
        found = states_and_gradients(model, batch.to(DEVICE))
    assert_near(found, wanted, (2e-6, 5e-6) if dtype == torch.float32 else (0.02, 0.1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", SHAPES)
def test_states_and_gradients_of_every_family(name, dtype):
    compare(SHAPES[name], LENGTHS, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", KERNELS)
def test_states_and_gradients_by_every_kernel(name, dtype):
    compare(KERNELS[name], [1600, 1, 257, 64], dtype)


def test_the_loss_over_a_vocabulary_of_an_odd_size():
    generator = torch.Generator().manual_seed(3)
    inputs = [torch.randn(*shape, generator=generator) for shape in ((40, 64), (97, 64), (97,))]
    labels = torch.randint(97, (40,), generator=generator)
    labels[::5] = IGNORED
    results = []
    for device, dtype in ((DEVICE, torch.float32), ("cpu", torch.float64)):
        own = [each.detach().to(device, dtype).requires_grad_() for each in inputs]
        with torch.autocast(device, torch.bfloat16, enabled=dtype == torch.float32):
            logits = to_vocabulary(*own)
            loss = cross_entropy(logits, labels.to(device)).total
        assert logits.shape == (40, 97)
        (loss / 307).backward()
        results.append([each.detach().cpu().double() for each in (loss, *(x.grad for x in own))])
    assert_near(*results, (0.02, 0.02))


@pytest.mark.skipif(DEVICE == "cpu", reason="on a processor blocks are not compiled")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:The .grad attribute")  # of torch
@pytest.mark.parametrize("name", ["full", "window", "global tokens"])
def test_states_and_gradients_of_compiled_blocks(name):
    for lengths in ([1600, 1, 257, 64], [5, 9]):
        compare(KERNELS[name], lengths, torch.bfloat16, compiled=True)


@pytest.mark.skipif(DEVICE == "cpu", reason="on a processor blocks are not compiled")
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch
def test_a_run_of_compiled_blocks_needs_no_more_programs_than_may_be(corpus):
    small = {"depth": 6, "width": 128, "heads": 2, "intermediate_size": 128}
    training = {"compiled": True, "evaluate": "2 steps", "until": "4 steps"}
    settings = {"encoder": small, "training": training, "phases": [{"length": 64}]}
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for precision in ("bf16", "fp32"):
            training["precision"] = precision
            bothways.pretrain(
                corpus.folder, "modernbert-base", "masked_lm", device=DEVICE, progress=False, **settings
            )  # fmt: skip


@pytest.mark.skipif(DEVICE == "cpu", reason="a processor has no CUDA graphs")
def test_captured_updates_are_those_that_are_not():
    config = replace(LONG, vocab=97, depth=2)
    sizes = [[60, 128, 90], [128, 61, 90], [3, 128], [100, 128, 70]]
    results = []
    for graphs in (False, True):
        torch.manual_seed(1)
        model = Model(*MaskedLMNextSentence().models(config)["model"]).to(DEVICE)
        module = MaskedLMModule(model)
        optimizer = build_optimizer(AdamW(1e-3), module.named_parameters())
        tensors, reports = RunTensors(module, optimizer, Plan()), list[Any]()
        loop = Loop(tensors, lambda at: 1 / (1 + at.steps), on_rest=reports.append, graphs=graphs)
        steps = [pair_step(sizes[number % 4], number) for number in range(12)]
        loop.train(steps, Steps(12), RunState())
        results.append((reports[0], model.state_dict()))
    (usual, weights), (captured, others) = results
    assert captured.scores.losses == pytest.approx(usual.scores.losses, rel=1e-2)
    assert captured.rate == usual.rate
    assert_near([*others.values()], [*weights.values()], (0.02, 0.02))


def pair_step(lengths: list[int], seed: int) -> TrainingStep:
    """Masked pairs of random tokens, padded."""
    rng, special = np.random.default_rng(seed), np.arange(97) < 5
    vocabulary, objective = Vocabulary(special, np.zeros(97, dtype=bool), 4), MaskedLMNextSentence()
    sequences = []
    for length in lengths:
        segments = (np.arange(length) > length // 2).astype(np.int8)
        target = {"pair": LabelTargets(rng.integers(0, 2, 1))}
        plain = Sequence(rng.integers(5, 97, length, dtype=np.int32), segments, target)
        sequences.append(objective.prepare(plain, vocabulary, rng))
    batch = pad_batch(pack(sequences)).pinned()
    return TrainingStep((batch,), Cursor(), sum(lengths), len(lengths), 0.0)


def values(prediction: Any) -> Iterator[Any]:
    """The numbers and words of a prediction, in order."""
    for convert in ("to_json", "tolist"):
        if hasattr(prediction, convert):
            prediction = getattr(prediction, convert)()
    if isinstance(prediction, dict):
        prediction = list(prediction.items())
    if isinstance(prediction, list | tuple):
        for each in prediction:
            yield from values(each)
    else:
        yield prediction


@pytest.mark.parametrize("name", TASKS)
def test_predictions_of_every_task(name, tmp_path):
    folder, inputs = make_folder(tmp_path / "bert"), TASKS[name][1]
    wanted = list(values(predictor(folder, name)(inputs)))
    found = list(values(predictor(folder, name, device=DEVICE)(inputs)))
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == (pytest.approx(other, rel=1e-3, abs=1e-5) if type(other) is float else other)


def test_a_server_answers(tmp_path):
    folder, texts = make_folder(tmp_path / "bert"), TASKS["classify"][1]
    with running(app(predictor(folder, "classify", batch_invariant=True, device=DEVICE))) as url:
        answer = httpx.post(f"{url}/classify", json={"inputs": texts}, timeout=60)
    found = [each["label"] for each in answer.json()]
    assert found == [each.label for each in predictor(folder, "classify")(texts)]


@pytest.mark.parametrize("objective", ["masked_lm", "replaced_tokens", "gpt_bert"])
def test_pre_training_goes_on_after_a_stop(objective, corpus, tmp_path):
    def train(name: str, **more: Any) -> Any:
        return bothways.pretrain(
            corpus.folder, "bert-tiny", objective, until="8 steps", out=tmp_path / name,
            device=DEVICE, progress=False, **more,
        )  # fmt: skip

    whole = train("whole")
    with pytest.raises(KeyboardInterrupt):
        train("parts", on_event=signal_at(4))
    assert not (tmp_path / "parts" / "model").exists()
    parts = train("parts", resume=True)
    assert parts.progress.steps == whole.progress.steps == 8
    for file in (tmp_path / "whole").glob("*/config.json"):
        assert_same_run(file.parent, tmp_path / "parts" / file.parent.name)


def assert_same_run(one: Path, other: Path) -> None:
    """Require equal weights, but for what a GPU adds in no fixed order.

    Adam makes a step of full size of a gradient that is 0 but for rounding, in either direction.
    """
    wanted, found = (load_model(folder).model.state_dict() for folder in (one, other))
    share = 0.02 if DEVICE == "cuda" else 1e-5
    distance = sum(float((found[name] - wanted[name]).square().sum()) for name in wanted)
    assert distance <= share**2 * sum(float(tensor.square().sum()) for tensor in wanted.values())


@pytest.mark.parametrize("kind", ["sharding", "replication"])
def test_one_rank_trains_as_a_process_alone(kind, corpus, tmp_path):
    words = [
        "pretrain", str(corpus.folder), "--model", "bert-tiny", "--until", "4 steps", "--device", DEVICE,
    ]  # fmt: skip
    run_line(*words, "--out", str(tmp_path / "alone"))
    more = [] if kind == "replication" else ["sharding.kind=sharding"]
    launch = "-m torch.distributed.run --nproc-per-node=1 -m bothways"
    ranks = [sys.executable, *launch.split(), *words, "--out", str(tmp_path / "ranks"), *more]
    subprocess.run(ranks, check=True, capture_output=True, timeout=300)
    assert_same_run(tmp_path / "alone" / "model", tmp_path / "ranks" / "model")


@pytest.mark.parametrize("settings", [{}, {"lora": {"rank": 4}}, {"training.precision": "fp32"}])
def test_fine_tuning_learns_and_its_folder_opens_on_the_processor(settings, tmp_path):
    folder = make_folder(tmp_path / "bert")
    rows = [{"text": each.text, "label": each.label} for each in make_examples(400, 1)]
    found = bothways.finetune(
        folder, rows, 0.2, out=tmp_path / "run", device=DEVICE, progress=False, seed=0,
        **{"training.until": "10 epochs", "training.optimizer.lr": 3e-3, **settings},
    )  # fmt: skip
    assert found.metrics["accuracy"] > 0.9
    texts = [row["text"] for row in rows[:50]]
    there = bothways.load(tmp_path / "run", device=DEVICE, precision="fp32").predict(texts)
    here = bothways.load(tmp_path / "run", device="cpu", precision="fp32").predict(texts)
    assert [*there] == [*here]


def test_a_student_is_distilled(corpus, tmp_path):
    common = {"device": DEVICE, "progress": False}
    bothways.pretrain(corpus.folder, "bert-tiny", until="2 steps", out=tmp_path / "t", **common)
    common["encoder.depth"] = 1
    done = bothways.distil(
        tmp_path / "t", corpus.folder, until="3 steps", out=tmp_path / "s", **common
    )
    assert done.progress.steps == 3
    assert load_model(tmp_path / "s" / "model").model.config.depth == 1


@pytest.mark.skipif(DEVICE == "cpu", reason="bf16 is for processors that multiply it")
def test_vectors_in_bf16_are_near(tmp_path):
    folder, texts = make_folder(tmp_path / "bert"), TASKS["embed"][1]
    wanted = torch.from_numpy(predictor(folder, "embed").encode(texts))
    found = torch.from_numpy(predictor(folder, "embed", "bf16", device=DEVICE).encode(texts))
    assert float(torch.cosine_similarity(found, wanted).min()) > 0.999


@pytest.mark.skipif(DEVICE == "cpu", reason="takes minutes on a processor")
def test_the_benchmark_ends_within_three_minutes():
    start = time.monotonic()
    run_line("bench")
    assert time.monotonic() - start < 180
