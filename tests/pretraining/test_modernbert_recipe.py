"""ModernBERT's recipe: phases with rotary bases and rates of their own, and a start from a smaller model."""

import dataclasses
import math
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import bothways
from bothways.core.errors import ConfigError
from bothways.hub.model_folder import load_model
from bothways.model.config import Bias, EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.pretraining.build import grow
from bothways.pretraining.config import PretrainPhase
from bothways.pretraining.inspect_step import repeat_step
from bothways.pretraining.recipes import modernbert
from bothways.training.optimizers import StableAdamW
from bothways.training.run import Event
from bothways.training.schedules import RunState, Tokens, rate_factor
from toy_training import equal, stop_at

BILLION = 10**9


def small(**changes: object) -> EncoderConfig:
    shape = preset("modernbert-base")
    position = dataclasses.replace(shape.position, max_positions=64)
    sizes = {"width": 32, "depth": 3, "heads": 2, "intermediate_size": 48, "position": position}
    return dataclasses.replace(shape, **{"pad": 0, **sizes, **changes})


def test_the_recipe_has_the_papers_tokens_rates_and_bases():
    config = modernbert(preset("modernbert-base"))
    factor, peak = rate_factor(config.training.schedule, config.training.end), 8e-4
    assert isinstance(config.training.optimizer, StableAdamW)
    ends = np.cumsum([phase.share for phase in config.phases]) * config.training.end.count / BILLION
    assert ends == pytest.approx([1719, 1969, 2019])

    def rate(billions: float) -> float:
        phase = config.phases[np.searchsorted(ends, billions, side="right")]
        return peak * phase.rate * factor(RunState(tokens=round(billions * BILLION)))

    rates = [rate(n) for n in (1.5, 3, 1718, 1720, 1968)]
    assert rates == pytest.approx([4e-4, 8e-4, 8e-4, 3e-4, 3e-4])
    for done in (0.25, 0.5, 0.9):
        assert rate(1969 + 50 * done) == pytest.approx(3e-4 * (1 - math.sqrt(done)))
    assert [config.batch.start / 1024, config.batch.n / 1024] == [768, 4608]
    # An update at the peak takes 1e-5 of each matrix away, as in the authors' code.
    assert config.training.optimizer.decay * peak == pytest.approx(1e-5)
    assert [config.encoder_of(phase).position.bases for phase in config.phases] == [
        (10_000.0,), (160_000.0, 10_000.0, 10_000.0), (160_000.0, 10_000.0, 10_000.0),
    ]  # fmt: skip


def test_a_run_extends_the_context_and_opens_in_transformers(corpus, tmp_path):
    """Each phase computes with its bases; the folder has those of the last one."""
    shape, seen = small(), {}
    settings = {
        "batch": {"start": 128, "n": 256, "over": 2000}, 
        "training": {"report": "1 steps", "schedule": {"decay": 0.2}},
        "phases": [
            {"length": 16, "share": 0.5, "bases": [10_000.0]},
            {"length": 64, "share": 0.3, "rate": 0.375},
            {"length": 64, "share": 0.2, "rate": 0.375},
        ],
    }  # fmt: skip

    def note(event: Event) -> None:
        if event.kind == "report":
            seen[event.progress.phase] = event.values["learning_rate"]

    run = bothways.pretrain(
        corpus, shape, recipe="modernbert", until="5000 tokens", out=tmp_path / "run", on_event=note,
        **settings,
    )  # fmt: skip
    assert set(seen) == {0, 1, 2}
    assert seen[2] < seen[1] == pytest.approx(3e-4)
    reference = transformers.AutoModelForMaskedLM.from_pretrained(run.folder).eval()
    assert isinstance(reference, transformers.ModernBertForMaskedLM)
    thetas = {kind: rope["rope_theta"] for kind, rope in reference.config.rope_parameters.items()}
    assert thetas == {"full_attention": 160_000, "sliding_attention": 10_000}
    model = load_model(run.folder, (MaskedHead(),)).model.eval()
    assert equal(model, run.model)
    batch = corpus.tokenizer.batch(["the cat sleeps in the house"])
    with torch.no_grad():
        logits = model(batch, heads=("masked",)).logits["masked"]
        assert torch.allclose(reference(batch.ids[None].long()).logits[0], logits, atol=1e-5)


def test_a_phase_computes_with_its_bases(corpus):
    """A run in one phase equals one of an encoder with these bases."""

    def trained(shape: EncoderConfig, **bases: list[float]) -> bothways.Model:
        return bothways.pretrain(
            corpus, shape, "masked-lm", until="6 steps", batch={"kind": "examples", "n": 8},
            phases=[{"length": 32, "share": 0.5, **bases}] * 2, precision="fp32",
        ).model  # fmt: skip

    changed = trained(small(), bases=[100.0, 50.0])
    position = dataclasses.replace(small().position, bases=(100.0, 50.0))
    assert changed.config.position == changed.encoder.config.position == position
    assert equal(changed, trained(small(position=position)))
    assert not equal(changed, trained(small()))


def run_with_bases(corpus, folder, **options) -> bothways.Model:
    """Six steps, a record of each; the base changes after the third, with weights that feel it."""
    phases = [{"length": 32, "share": 0.5, "bases": [100.0]}, {"length": 32, "share": 0.5}]
    return bothways.pretrain(
        corpus, small(initial_range=0.5), "masked-lm", until="6 steps", phases=phases, precision="fp32", out=folder,
        batch={"kind": "examples", "n": 8}, training={"report": "1 steps", "save": "2 steps"}, **options,
    ).model  # fmt: skip


@pytest.fixture(scope="module")
def with_bases(corpus, tmp_path_factory) -> tuple[Path, bothways.Model]:
    """A run, and the model at its end."""
    folder = tmp_path_factory.mktemp("bases") / "run"
    return folder, run_with_bases(corpus, folder)


def test_a_run_that_ends_in_a_phase_resumes_with_its_bases(corpus, with_bases, tmp_path):
    for steps in (3, 5):
        folder = tmp_path / f"cut-{steps}"
        with pytest.raises(InterruptedError):
            run_with_bases(corpus, folder, on_event=stop_at(steps, "step"))
        assert equal(run_with_bases(corpus, folder, resume=True), with_bases[1]), steps


def test_an_inspected_step_has_the_bases_of_its_phase(corpus, with_bases):
    """The first step of a phase, too, which no step of that phase precedes."""
    for step in (3, 4, 5):
        inspected = repeat_step(with_bases[0], step, corpus)
        read = inspected.sequences
        counts = [sum("masked" in token.targets for token in item.read.tokens) for item in read]
        losses = [item.losses["masked"] for item in read]
        mean = np.average(losses, weights=counts)
        assert mean == pytest.approx(inspected.losses["masked"], rel=1e-5)
        assert inspected.difference is None


def test_bases_of_an_encoder_without_rotary_positions_are_refused(corpus):
    for shape, wrong, message in (
        ("bert-tiny", {"bases": [10.0]}, r"phases\.0\.bases: are of rotary positions, .* learned"),
        (small(), {"bases": [0.5]}, "position.bases"),
        (small(), {"rate": 0.0}, r"phases\.0\.rate"),
    ):
        phases = [{"length": 16, **wrong}]
        with pytest.raises(ConfigError, match=message):
            bothways.pretrain(corpus, shape, "masked-lm", until="1 steps", phases=phases)
    # The recipe leaves them out by itself.
    assert modernbert(preset("bert-mini")).phases[0] == PretrainPhase(512, 1719 / 2019)
    assert modernbert(preset("modernbert-base")).training.until == Tokens(2019 * BILLION)


def tiled(matrix: np.ndarray, size: int, axis: int) -> np.ndarray:
    """The matrix in the middle, what is beside it repeated, element by element."""
    length = matrix.shape[axis]
    offset = (size - length) // 2
    return np.stack([np.take(matrix, (n - offset) % length, axis) for n in range(size)], axis)


def test_a_larger_model_repeats_the_smaller_one(corpus):
    torch.manual_seed(0)
    start = Model(small(vocab=corpus.tokenizer.size), [MaskedHead()])
    larger = small(vocab=corpus.tokenizer.size, width=64, depth=5, heads=4, intermediate_size=80)
    keyless = {"bias": Bias(key=False), "vocab": corpus.tokenizer.size}
    biased = Model(small(**keyless), [MaskedHead()])
    torch.nn.init.normal_(biased.encoder.blocks[0].attention.bias)
    bias = grow(biased, dataclasses.replace(larger, **keyless)).encoder.blocks[0].attention.bias
    halves = np.split(biased.encoder.blocks[0].attention.bias.detach().numpy(), 2)
    assert np.array_equal(bias.detach(), np.concatenate([tiled(half, 64, 0) for half in halves]))
    start.kept = {"config.json": {"reference": "no bit of a weight"}}
    assert grow(start, larger).kept == start.kept
    grown = grow(start, larger).state_dict()
    state = {name: tensor.double().numpy() for name, tensor in start.state_dict().items()}
    for layer, origin in enumerate((0, 1, 1, 2, 2)):  # 1 + int(n · 2/4 + ½) of 1 … 3
        name, source = f"encoder.blocks.{layer}.", f"encoder.blocks.{origin}."
        queries, keys, values = np.split(state[f"{source}attention.qkv.weight"], 3)
        parts = [tiled(tiled(part, 64, 0), 64, 1) for part in (queries, keys, values)]
        expected = np.concatenate(parts)
        assert np.array_equal(grown[f"{name}attention.qkv.weight"].double(), expected)
        up = np.split(state[f"{source}mlp.up.weight"], 2)
        expected = np.concatenate([tiled(tiled(part, 80, 0), 64, 1) for part in up])
        assert np.array_equal(grown[f"{name}mlp.up.weight"].double(), expected)
        expected = tiled(tiled(state[f"{source}mlp.down.weight"], 64, 0), 80, 1)
        assert np.array_equal(grown[f"{name}mlp.down.weight"].double(), expected)
    table = "encoder.embedding.token.weight"
    assert np.array_equal(grown[table].double(), tiled(state[table], 64, 1))


def test_training_starts_from_a_smaller_model(corpus, tmp_path):
    shape, phases = small(vocab=corpus.tokenizer.size), [{"length": 32}]
    base = bothways.pretrain(
        corpus, shape, "masked-lm", until="2 steps", out=tmp_path / "base", phases=phases
    )
    larger = dataclasses.replace(shape, width=48, heads=3, depth=4)
    run = bothways.pretrain(  # with a rate that changes no bit
        corpus, larger, "masked-lm", until="2 steps", start=base.folder, phases=phases, lr=1e-30
    )
    assert run.model.config == larger
    assert equal(run.model, grow(base.model, larger))
    with pytest.raises(ConfigError, match=r"encoder: is not a larger shape .*: depth"):
        grow(base.model, dataclasses.replace(larger, depth=2))
