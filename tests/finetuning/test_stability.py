"""The stability kit: levels as ELECTRA has them, exactly the tensors that are meant, and runs that can be broken off."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from bothways.core.errors import ConfigError
from bothways.finetuning import run as job
from bothways.finetuning.config import FinetuneConfig, finetune_adam
from bothways.finetuning.data import LabelledData
from bothways.finetuning.prepare import start_from
from bothways.finetuning.run import finetune
from bothways.finetuning.stability import (
    Stability,
    apply_stability,
    is_pretrained,
    level,
    parameter_rules,
)
from bothways.hub.model_folder import load_model
from bothways.model.config import EncoderConfig, PreNorm
from bothways.model.heads import LabelHead, PoolerHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.tasks.classification.task import TextClassifier
from bothways.training.optimizers import AdamW, ParameterRule
from bothways.training.run import TrainingRun
from bothways.training.schedules import Constant, Steps
from toy_folder import VOCABULARY, make_data, make_examples, write_tsv
from toy_task import fit_task

FAST = replace(
    finetune_adam(), until=Steps(12), evaluate=Steps(3), optimizer=AdamW(lr=3e-3), precision="fp32"
)
METHOD = FinetuneConfig(FAST, 16)


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> LabelledData:
    return make_data(tmp_path_factory.mktemp("tokenizer"), 96, 40)


def shape(depth: int = 4, **changes: object) -> EncoderConfig:
    return EncoderConfig(len(VOCABULARY), 8, depth, 2, 16, position=Learned(16), **changes)


def state(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def changed(before: dict[str, torch.Tensor], model: torch.nn.Module) -> set[str]:
    tensors = model.state_dict().items()
    return {name for name, tensor in tensors if not torch.equal(tensor, before[name])}


def electra_rates(rate: float, decay: float, layers: int) -> dict[str, float]:
    """Rates by parts, as google-research/electra sets them: rate · decay^(layers + 2 − depth of the part)."""
    depths = {"encoder.embedding.": 0, "heads.labels.": layers + 2}
    depths |= {f"encoder.blocks.{layer}.": layer + 1 for layer in range(layers)}
    return {part: rate * decay ** (layers + 2 - depth) for part, depth in depths.items()}


@pytest.mark.parametrize(("decay", "depth"), [(0.8, 4), (0.9, 2), (1.0, 3)])
def test_rates_decay_by_layers_as_electras(decay, depth):
    model = Model(shape(depth), (PoolerHead(), LabelHead(2)))
    expected, seen = electra_rates(1e-4, decay, depth), set()
    rule = parameter_rules(Stability(layer_decay=decay), model)
    for name, _ in model.named_parameters():
        part = next((part for part in expected if name.startswith(part)), None)
        if part is None:
            # Between the last block and the head; ELECTRA has none.
            assert name.startswith("heads.pooler.")
            assert rule(name) == ParameterRule(decay)
        else:
            seen.add(part)
            assert 1e-4 * rule(f"model.{name}").factor == pytest.approx(expected[part], rel=1e-12)
    assert seen == set(expected)


def test_the_last_norm_of_a_pre_norm_encoder_lies_above_its_blocks():
    model = Model(shape(2, order=PreNorm()), (PoolerHead(),))
    names = [name for name, _ in model.named_parameters() if name.startswith("encoder.norm")]
    assert {level(name, 2) for name in names} == {3}
    assert not is_pretrained("encoder.norm.weight", Stability(reinitialise=1), 2, ())


def test_starting_anew_changes_the_top_blocks_and_the_pooler_alone(folder):
    def begun(count: int, seed: int) -> tuple[Model, dict[str, torch.Tensor]]:
        model = start_from(load_model(folder).model, (PoolerHead(), LabelHead(2)), seed=3)
        norm = model.encoder.blocks[1].mlp_norm
        torch.nn.init.constant_(norm.weight, 2.0)
        torch.nn.init.constant_(norm.bias, 1.0)
        before, draws = state(model), torch.get_rng_state()
        apply_stability(model, Stability(reinitialise=count), seed)
        assert torch.equal(torch.get_rng_state(), draws)
        return model, before

    model, before = begun(1, 0)
    names = changed(before, model)
    new = {name for name in before if name.startswith(("encoder.blocks.1.", "heads.pooler."))}
    # Other norms and biases of the toy are as a new model's already.
    assert names == {name for name in new if before[name].ndim == 2 or "mlp_norm" in name}
    block = model.encoder.blocks[1]
    assert torch.equal(block.mlp_norm.weight, torch.ones(32))
    assert 0.5 * 0.1 < block.mlp.up.weight.std() < 0.1
    assert block.mlp.up.weight.abs().max() <= 0.2  # 2σ of its initializer_range
    assert not changed(state(begun(1, 0)[0]), model)
    assert changed(state(begun(1, 1)[0]), model) == {n for n in names if before[n].ndim == 2}
    assert not changed(*reversed(begun(0, 0)))


@pytest.mark.parametrize("frozen", [0, 2])
def test_frozen_parts_stay_to_the_last_bit(folder, data, frozen):
    before = state(load_model(folder).model)
    training = replace(FAST, evaluate=None)
    method = replace(METHOD, stability=Stability(frozen=frozen), training=training)
    task = fit_task(load_model(folder).model, data, method, device="cpu").task_model
    parts = ("encoder.embedding.", "encoder.blocks.0.", "encoder.blocks.1.")
    for name, parameter in task.model.named_parameters():
        kept = name.startswith(parts[:frozen])
        assert parameter.requires_grad != kept
        assert not kept or (parameter.grad is None and torch.equal(parameter, before[name])), name
        if not kept and not name.startswith("heads.labels"):
            assert not torch.equal(parameter, before[name]), name


def test_the_pull_is_of_pretrained_parts():
    model = Model(shape(2), (PoolerHead(), LabelHead(2)))
    for stability, fresh, pulled in (
        (Stability(pull=0.1), (), ("encoder.", "heads.pooler.")),
        (Stability(pull=0.1), ("pooler",), ("encoder.",)),
        (Stability(pull=0.1, reinitialise=1), (), ("encoder.embedding.", "encoder.blocks.0.")),
    ):
        rule = parameter_rules(stability, model, fresh)
        for name, _ in model.named_parameters():
            assert rule(name).pull == (0.1 if name.startswith(pulled) else 0.0), (name, stability)


def test_a_strong_pull_keeps_a_run_at_its_start(folder, data):
    def distance(pull: float) -> float:
        start = load_model(folder).model
        even = replace(FAST, schedule=Constant(), evaluate=None)
        method = replace(METHOD, training=even, stability=Stability(pull=pull))
        done = fit_task(start, data, method, device="cpu").task_model.model.encoder
        pairs = zip(done.parameters(), start.encoder.parameters(), strict=True)
        return sum((a - b).square().sum().item() for a, b in pairs)

    # 0.9 of the way back in each step: what is left is about one step of Adam, beside twelve.
    assert distance(300.0) < 0.3 * distance(0.0)


def test_a_fresh_head_and_blocks_are_of_the_seed_of_the_start(folder, data):
    """With next to no rate a run ends where it began."""
    still = replace(FAST, until=Steps(1), evaluate=None, optimizer=AdamW(lr=1e-12, decay=0.0))
    method = replace(METHOD, training=still, stability=Stability(reinitialise=1))

    def begin(seed: int, order_seed: int | None) -> dict[str, torch.Tensor]:
        start, seeds = load_model(folder).model, {"seed": seed, "order_seed": order_seed}
        return state(fit_task(start, data, method, device="cpu", **seeds).task_model)

    base, ordered, other = begin(1, None), begin(1, 2), begin(2, 1)
    for name, tensor in base.items():
        torch.testing.assert_close(tensor, ordered[name], rtol=0, atol=1e-9)
    for name in ("model.heads.labels.dense.weight", "model.encoder.blocks.1.mlp.up.weight"):
        assert not torch.allclose(base[name], other[name], atol=1e-3), name


def test_the_order_and_dropout_are_of_the_seed_of_the_order(folder, data, tmp_path, monkeypatch):
    seen = list[tuple[str, int]]()

    def watched(home: object, name: str, kind: str, seed: Callable[..., int]) -> None:
        real = getattr(home, name)

        def call(*arguments: object, **options: object) -> object:
            seen.append((kind, seed(*arguments)))
            return real(*arguments, **options)

        monkeypatch.setattr(home, name, call)

    watched(job, "train_loader", "order", lambda data, method, seed, *more: seed)
    watched(TrainingRun, "train", "draws", lambda run: torch.initial_seed())
    brief = replace(METHOD, training=replace(FAST, until=Steps(1), evaluate=None))
    fit_task(load_model(folder).model, data, brief, seed=1, order_seed=5, device="cpu")
    fit_task(load_model(folder).model, data, brief, seed=1, device="cpu")
    train = str(write_tsv(tmp_path / "train.tsv", make_examples(32, 0)))
    for order_seed in (5, None):
        settings = replace(brief, model=str(folder), train=train, seed=1, order_seed=order_seed)
        finetune(settings, tmp_path / f"run-{order_seed}", device="cpu")
    assert seen == [("order", 5), ("draws", 6), ("order", 1), ("draws", 2)] * 2


def test_patience_needs_dev_data_in_memory_too(folder, data):
    method = replace(METHOD, training=replace(FAST, early_stopping=2))
    bare = replace(data, dev=(), dev_examples=())
    with pytest.raises(ConfigError, match=r"^training\.early_stopping: early stopping needs"):
        fit_task(load_model(folder).model, bare, method, device="cpu")


@pytest.mark.parametrize(("until", "early"), [(30, True), (12, False)])
def test_patience_counts_evaluations_that_were_not_better(folder, data, monkeypatch, until, early):
    """Every third step, with 0.3 as the best one: two later it is over, be that before the run's own end or at it."""
    values = iter([0.1, 0.3, 0.2, 0.3, 0.9])
    for name in ("score", "score_tuned"):
        monkeypatch.setattr(
            TextClassifier,
            name,
            lambda task, results, metric="": {"accuracy": next(values), "count": len([*results])},
        )
    patient = replace(FAST, early_stopping=2, until=Steps(until))
    done = fit_task(load_model(folder).model, data, replace(METHOD, training=patient), device="cpu")
    assert (done.progress.steps, done.progress.early) == (12, early)
    assert [metrics["accuracy"] for _, metrics in done.history] == [0.1, 0.3, 0.2, 0.3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layer_decay": 0.0}, r"^stability\.layer_decay: must be above 0 and at most 1, not 0\.0"),
        ({"pull": -1.0}, r"^stability\.pull: must be at least 0, not -1\.0"),
        ({"frozen": -1}, r"^stability\.frozen: must be at least 0"),
        ({"reinitialise": 3}, r"^stability\.reinitialise: the encoder has 2 blocks, not 3"),
        ({"frozen": 4}, r"^stability\.frozen: there are 3 parts to freeze"),
        ({"frozen": 3, "reinitialise": 1}, r"^stability\.frozen: there are 2 parts to freeze"),
    ],
)
def test_what_cannot_be_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        apply_stability(Model(shape(2), (PoolerHead(), LabelHead(2))), Stability(**changes), 0)


@pytest.mark.parametrize("name", ["reinitialise", "frozen", "pull"])
def test_random_weights_have_no_start_to_keep(data, name):
    value = {"reinitialise": 1, "frozen": 1, "pull": 0.5}[name]
    method = replace(METHOD, stability=Stability(**{name: value}))
    with pytest.raises(ConfigError, match=rf"^stability\.{name}: needs pre-trained weights"):
        fit_task(shape(2), data, method, device="cpu")
