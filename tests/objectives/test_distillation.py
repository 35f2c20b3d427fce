"""Distillation: each loss by its formula in float64, its gradient, the frozen teacher, and runs to folders."""

import dataclasses
import functools
import itertools
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import bothways
from bothways.core.batch import Batch, Layout, pack
from bothways.core.config import reader
from bothways.core.errors import BothwaysError, ConfigError, render
from bothways.core.source import Sequence
from bothways.data.corpus import Corpus
from bothways.data.masking import Vocabulary
from bothways.data.segments import FullSentences
from bothways.hub.model_folder import load_model
from bothways.model.attention.patterns import Causal
from bothways.model.config import Dropouts, EncoderConfig, Sharing
from bothways.model.heads import MaskedHead
from bothways.model.model import Model
from bothways.objectives import distillation as distilling
from bothways.objectives.distillation import (
    CosineStates,
    Distillation,
    DistillationModule,
    DistilLoss,
    MaskedTokens,
    Relations,
    SoftTargets,
    relation_divergence,
    soft_divergence,
)
from bothways.pretraining.build import spread_layers, with_layers
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.recipes import distilbert, distillation, minilm
from bothways.pretraining.run import PretrainResult, pretrain
from bothways.training.optimizers import AdamW
from bothways.training.schedules import Linear
from toy_corpora import write_films
from toy_folder import VOCABULARY, make_folder
from toy_objective import draw_sequences
from toy_training import check_splits

SIZE = len(VOCABULARY)
EVERY: tuple[DistilLoss, ...] = (
    MaskedTokens(2.0),
    SoftTargets(5.0, 2.0),
    CosineStates(),
    Relations(1.0, 8, teacher_layer=3),
)


def shape(**changes: object) -> EncoderConfig:
    return dataclasses.replace(
        EncoderConfig(
            SIZE, width=32, depth=2, heads=4, intermediate_size=48, dropout=Dropouts(0.0, 0.0)
        ),
        **changes,
    )


SMALL, DEEP = shape(), shape(depth=4)


def build_module(
    losses: tuple[DistilLoss, ...], student: EncoderConfig = SMALL, teacher: EncoderConfig = DEEP
) -> DistillationModule:
    torch.manual_seed(0)
    models = [Model(each, (MaskedHead(),)) for each in (student, teacher)]
    for parameter in (p for model in models for p in model.parameters()):
        torch.nn.init.normal_(parameter, std=0.3)
    return DistillationModule(*models, Distillation("teacher", losses)).double().eval()


def batch_of(lengths: tuple[int, ...] = (9, 4, 14, 8)) -> Batch:
    return pack(sequences(lengths))


def sequences(lengths: tuple[int, ...]) -> list[Sequence]:
    vocabulary = Vocabulary(np.arange(SIZE) < 5, np.arange(SIZE) == SIZE - 1, 4)
    return draw_sequences(Distillation("teacher"), lengths, vocabulary)


def means(module: DistillationModule, batch: Batch) -> dict[str, float]:
    weights = module.weights(batch)
    return {name: loss.total.item() / weights[name] for name, loss in module(batch).items()}


def dense_projections(model: Model, batch: Batch, layer: int) -> list[tuple[Tensor, ...]]:
    """Queries, keys and values of each sequence `(n, width)`, from the layer's input by its weights."""
    attention = model.encoder.blocks[layer - 1].attention
    x = model.encoder(batch, keep_layers=True).layers[layer - 1]
    qkv = (x @ attention.qkv.weight.T + attention.qkv.bias).split(batch.layout.lengths)
    return [part.chunk(3, 1) for part in qkv]


@pytest.mark.parametrize("rows", [(SIZE, SIZE), (SIZE + 3, SIZE), (SIZE, SIZE + 3)])
def test_soft_targets_of_masked_tokens_are_kl_div_of_torch(rows):
    shapes = (dataclasses.replace(c, vocab=n) for c, n in zip((SMALL, DEEP), rows, strict=True))
    module, batch = build_module((SoftTargets(1.0, 2.0, "masked"),), *shapes), batch_of()
    index, logs = batch.targets["masked"].index, []
    for model in (module.model, module.teacher):
        hidden = model.encoder(batch)
        logits = model.heads["masked"](hidden.last[index], hidden.table)[:, :SIZE]
        logs.append(F.log_softmax(logits / 2, 1))
    expected = F.kl_div(*logs, reduction="batchmean", log_target=True)
    assert means(module, batch)["soft"] == pytest.approx(4 * expected.item(), rel=1e-12)


def test_the_gradient_of_soft_targets_is_that_of_the_formula():
    draw = torch.Generator().manual_seed(1)
    z, t = torch.randn(2, 6, 50, generator=draw, dtype=torch.float64)
    z.requires_grad_()
    weight = torch.tensor([1.0, 1, 0, 1, 1, 1], dtype=torch.float64)
    (7 * soft_divergence(z, t, weight, 3.0)).backward()
    slope = 3.0 * ((z / 3).softmax(1) - (t / 3).softmax(1)) * weight[:, None]
    assert torch.allclose(z.grad, 7 * slope, atol=1e-14)


@pytest.mark.parametrize("rows", [1, 5, 1000])
def test_logits_in_parts_give_the_gradients_of_the_whole(rows, monkeypatch):
    monkeypatch.setattr(distilling, "LOGIT_ROWS", rows)
    module = build_module((SoftTargets(1.0, 2.0),))
    batch = batch_of()
    assert module.weights(batch) == {"soft": len(batch.ids)}
    loss = module(batch)["soft"].total
    loss.backward()
    found = {n: p.grad for n, p in module.trained_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)
    hidden, theirs = module.model.encoder(batch), module.teacher.encoder(batch)
    z = module.model.heads["masked"](hidden.last, hidden.table)
    t = module.teacher.heads["masked"](theirs.last, theirs.table)
    whole = 4 * F.kl_div(F.log_softmax(z / 2, 1), F.softmax(t / 2, 1).detach(), reduction="sum")
    whole.backward()
    assert loss.item() == pytest.approx(whole.item(), rel=1e-12)
    expected = {n: p.grad for n, p in module.trained_parameters() if p.grad is not None}
    assert found.keys() == expected.keys()
    assert all(torch.allclose(found[n], expected[n], atol=1e-10) for n in expected)


@pytest.mark.parametrize(("widths", "layer"), [((32, 32), None), ((16, 48), 1)])
def test_relations_are_those_of_dense_matrices(widths, layer):
    """MiniLMv2, section 3: of a student and a teacher of other widths and numbers of heads."""
    student, teacher = (
        shape(width=widths[0]),
        shape(width=widths[1], depth=4, heads=3 if widths[1] == 48 else 2),
    )
    module = build_module((Relations(1.0, 8, 3, layer),), student, teacher)
    batch = batch_of()
    ours = dense_projections(module.model, batch, layer or 2)
    theirs = dense_projections(module.teacher, batch, 3)
    sums, tokens = [0.0, 0.0, 0.0], sum(batch.layout.lengths)
    for mine, other in zip(ours, theirs, strict=True):
        for kind in range(3):
            for a, t in zip(mine[kind].chunk(8, 1), other[kind].chunk(8, 1), strict=True):
                p, q = ((x @ x.T / math.sqrt(x.shape[1])).softmax(1) for x in (t, a))
                sums[kind] += (p * (p / q).log()).sum().item()
    expected = dict(
        zip(("queries", "keys", "values"), (s / (8 * tokens) for s in sums), strict=True)
    )
    assert means(module, batch) == pytest.approx(expected, rel=1e-9)


def test_relations_have_the_gradient_of_autograd():
    """Padded rectangles, weights and several parts, against one sequence at a time."""
    draw, lengths = torch.Generator().manual_seed(4), [5, 9, 8, 2]
    a, t = (torch.randn(24, 3, d, generator=draw, dtype=torch.float64) for d in (4, 6))
    weight = torch.rand(24, generator=draw, dtype=torch.float64)
    value = relation_divergence(Layout.of(lengths), weight, a.requires_grad_(), t)
    (found,) = torch.autograd.grad(3 * value, a)
    expected = torch.zeros((), dtype=torch.float64)
    for mine, other, w in zip(*(x.split(lengths) for x in (a, t, weight)), strict=True):
        z, s = (
            x.transpose(0, 1) @ x.permute(1, 2, 0) / math.sqrt(x.shape[2]) for x in (mine, other)
        )
        each = F.kl_div(z.log_softmax(-1), s.softmax(-1), reduction="none")
        expected = expected + (each.sum(-1) * w).sum()
    assert value.item() == pytest.approx(expected.item(), rel=1e-12)
    (slope,) = torch.autograd.grad(3 * expected, a)
    assert torch.allclose(found, slope, atol=1e-12)


def test_the_cosine_and_masked_tokens_are_those_of_torch():
    module = build_module((CosineStates(), MaskedTokens()))
    batch = batch_of()
    hidden, theirs = module.model.encoder(batch), module.teacher.encoder(batch)
    one = torch.ones(len(batch.ids), dtype=torch.float64)
    cosine = F.cosine_embedding_loss(hidden.last, theirs.last, one)
    masked = batch.targets["masked"]
    logits = module.model.heads["masked"](hidden.last[masked.index], hidden.table)
    expected = {"cosine": cosine.item(), "masked": F.cross_entropy(logits, masked.ids).item()}
    assert means(module, batch) == pytest.approx(expected, rel=1e-9)


def test_splits_of_a_step_do_not_change_its_gradient():
    module = build_module(EVERY)
    check_splits(module, sequences((9, 4, 14, 8)))
    assert module.coefficients == {"masked": 2.0, "soft": 5.0}


def test_the_teacher_stays_as_it_is():
    module = build_module(EVERY, teacher=shape(depth=4, dropout=Dropouts(0.5, 0.5))).train()
    assert module.model.training
    assert not any(module.training for module in module.teacher.modules())
    batch, graphs = batch_of(), []
    hook = module.teacher.encoder.register_forward_hook(
        lambda module, arguments, output: graphs.append(output.last.requires_grad)
    )
    first, second = means(module, batch), means(module, batch)
    assert first == second  # the student has no dropout, and the teacher's is off
    torch.stack([loss.total for loss in module(batch).values()]).sum().backward()
    hook.remove()
    assert graphs == [False] * 3
    assert all(p.grad is None and not p.requires_grad for p in module.teacher.parameters())
    assert not any(name.startswith("teacher") for name, _ in module.trained_parameters())


def test_blocks_that_are_computed_again_give_the_same_gradients():
    module = build_module(EVERY, shape(depth=4), shape(depth=4)).train()
    batch = batch_of()

    def gradient() -> list[Tensor]:
        module.zero_grad(set_to_none=True)
        torch.stack([loss.total for loss in module(batch).values()]).sum().backward()
        return [p.grad for _, p in module.trained_parameters()]

    once = gradient()
    module.model.encoder.recompute = True
    assert all(torch.equal(*two) for two in zip(once, gradient(), strict=True))


def test_layers_are_spread_as_distilbert_s():
    assert spread_layers(6, 12) == (1, 3, 5, 8, 10, 12)
    assert spread_layers(1, 12) == (1,)
    assert spread_layers(4, 4) == (1, 2, 3, 4)


@torch.no_grad()
def test_a_student_starts_from_layers_and_loses_no_segment():
    torch.manual_seed(1)
    teacher = Model(shape(depth=4, initial_range=0.5), (MaskedHead(),)).eval()
    student = with_layers(teacher, shape(segments=0, initial_range=0.5), (1, 4)).eval()
    batch = batch_of()
    x, y = (model.encoder.embedding(batch)[0] for model in (student, teacher))
    assert torch.allclose(x, y, atol=1e-6)
    for ours, theirs in ((0, 0), (1, 3)):
        pairs = zip(
            student.encoder.blocks[ours].parameters(),
            teacher.encoder.blocks[theirs].parameters(),
            strict=True,
        )
        assert all(torch.equal(*pair) for pair in pairs)
    whole = with_layers(teacher, teacher.config, range(1, 5)).eval()
    assert torch.equal(whole.encoder(batch).last, teacher.encoder(batch).last)
    for layers, changes, match, fix in (
        ((1, 5), {}, "from 1 to 4, not 1, 5", 'Set start_layers="1,4".'),
        ((1,), {}, "must be 2 layers", 'Set start_layers="1,4", or **{"encoder.depth": 1}.'),
        ((1,), {"depth": 5}, "must be 5 layers", 'Set **{"encoder.depth": 1}.'),
        ((1, 2), {"width": 16}, "it starts from in width", 'start_layers="none"'),
    ):
        with pytest.raises(ConfigError, match=match) as raised:
            with_layers(teacher, shape(**{"initial_range": 0.5, **changes}), layers)
        assert fix in raised.value.fix
    with pytest.raises(ConfigError, match=r"start_layers: .* layers of this model share"):
        with_layers(Model(shape(sharing=Sharing()), (MaskedHead(),)), shape(), (1, 2))


@pytest.fixture(scope="module")
def teacher(tmp_path_factory) -> Path:
    return make_folder(tmp_path_factory.mktemp("teacher") / "teacher", num_hidden_layers=4)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Corpus:
    return write_films(tmp_path_factory.mktemp("distilled") / "c")


SHORT = (
    "training.until=6 steps", "batch.n=8", "held_out=0.1", "training.save=3 steps",
    "training.schedule.warmup=0.2", "training.report=1 steps", "training.precision=fp32",
)  # fmt: skip


def settings_of(
    teacher: Path, corpus: Corpus, recipe: str, *more: str, **named: str
) -> PretrainConfig:
    base = distillation(str(teacher), recipe=recipe, **named)
    return reader.load(PretrainConfig, base=base, overrides=[*SHORT, *more])


@pytest.fixture(scope="module")
def run_recipe(teacher, corpus, tmp_path_factory) -> Callable[[str], tuple[Path, PretrainResult]]:
    """The folder and the result of a recipe's run, which is made once."""

    @functools.cache
    def run(recipe: str) -> tuple[Path, PretrainResult]:
        folder = tmp_path_factory.mktemp(recipe) / "run"
        settings = settings_of(teacher, corpus, recipe, "training.keep.last=9")
        assert settings.start_layers == (1, 4)
        return folder, pretrain(settings, corpus, folder)

    return run


@pytest.mark.parametrize(
    ("recipe", "name"), [("distilbert", "BertForMaskedLM"), ("minilm", "BertModel")]
)
def test_a_run_saves_a_student_that_transformers_opens(recipe, name, run_recipe):
    import transformers

    folder, done = run_recipe(recipe)
    theirs = getattr(transformers, name).from_pretrained(folder / "model").eval()
    batch = batch_of((9,))
    with torch.no_grad():
        last = theirs.base_model(batch.ids[None]).last_hidden_state[0]
        assert torch.allclose(done.model.eval().encoder(batch).last, last, atol=1e-5)
    state = load_model(folder / "model").model.encoder.state_dict()
    assert len(done.model.encoder.blocks) == 2
    assert all(torch.equal(state[n], t) for n, t in done.model.encoder.state_dict().items())
    expected = {
        "distilbert": {"soft", "masked", "cosine"},
        "minilm": {"queries", "keys", "values"},
    }[recipe]
    losses = {
        n.removeprefix("held-out/loss/") for n in done.metrics if n.startswith("held-out/loss")
    }
    assert losses == expected


def test_a_resumed_run_ends_with_the_weights_of_one_that_never_stopped(
    run_recipe, teacher, corpus, tmp_path
):
    from safetensors.torch import load_file

    settings = settings_of(teacher, corpus, "distilbert", "training.keep.last=9")
    folder, whole = run_recipe("distilbert")
    shutil.copytree(folder, tmp_path / "run")
    checkpoint = tmp_path / "run" / "step-6" / "model.safetensors"
    assert not any(name.startswith("teacher") for name in load_file(checkpoint))
    for left in ("step-6", "model"):
        (tmp_path / "run" / left).rename(tmp_path / left)
    again = pretrain(settings, corpus, tmp_path / "run", resume=True)
    assert again.progress.steps == 6
    state = whole.model.state_dict()
    assert all(torch.equal(state[n], t) for n, t in again.model.state_dict().items())
    # A teacher is known by its content, not by its path.
    moved = make_folder(tmp_path / "moved", num_hidden_layers=4)
    other = make_folder(tmp_path / "other", num_hidden_layers=4, seed=1)

    def taught_by(folder: Path) -> PretrainConfig:
        objective = dataclasses.replace(settings.objective, teacher=str(folder))
        return dataclasses.replace(settings, objective=objective)

    pretrain(taught_by(moved), corpus, tmp_path / "run", resume=True)
    with pytest.raises(BothwaysError, match="is of another run: teacher is not the same"):
        pretrain(taught_by(other), corpus, tmp_path / "run", resume=True)


def test_the_teacher_is_read_no_deeper_than_the_losses_need(teacher):
    def depth(*losses: DistilLoss) -> int:
        objective = Distillation(str(teacher), losses)
        return objective.models(shape())["teacher"].encoder.depth

    assert depth(Relations(heads=8, teacher_layer=2)) == 2
    assert depth(Relations(heads=8)) == 4
    assert depth(Relations(heads=8, teacher_layer=2), SoftTargets()) == 4


def test_mistakes_are_one_message(teacher, corpus, tmp_path):
    def refused(match: str, losses: tuple[DistilLoss, ...], **changes: object) -> None:
        with pytest.raises(ConfigError, match=match):
            Distillation(str(teacher), losses).models(shape(**{"heads": 2, **changes}))

    refused("16 of the student and 32 of the teacher", (CosineStates(),), width=16)
    refused("5 relation heads must divide the widths 32", (Relations(heads=5),))
    refused("must be from 1 to 4, not 5", (Relations(heads=8, teacher_layer=5),))
    refused("heads: must be at least 1, not 0", (Relations(heads=0),))
    refused("does not fit this encoder", (MaskedTokens(),), patterns=(Causal(),))
    causal = shape(heads=2, patterns=(Causal(),))
    assert Distillation(str(teacher), (Relations(heads=8),)).models(causal)["model"].heads == ()
    refused("each kind once, not cosine, cosine", (CosineStates(), CosineStates()))
    refused("each kind once, not none", ())
    refused("must be above 0, not -1", (CosineStates(-1.0),))
    refused("must be above 0, not 0", (SoftTargets(1.0, 0.0),))
    with pytest.raises(ConfigError, match="a loss is about masked tokens") as raised:
        Distillation(str(teacher), (MaskedTokens(),), masking=None)
    assert raised.value.fix == 'Set **{"objective.masking.rate": 0.15}.'
    long = Distillation(str(teacher), segments=FullSentences(999)).check(corpus)
    fixes = [str(finding.fix) for finding in long if finding.where == "objective.teacher"]
    assert [render(fix, "command") for fix in fixes] == ["Set phases.0.length=32, or less."]
    with pytest.raises(ConfigError, match="does not start from"):
        dataclasses.replace(settings_of(teacher, corpus, "minilm"), start=None)
    other = make_folder(tmp_path / "other", num_hidden_layers=4)
    lines = (other / "vocab.txt").read_text("utf8").splitlines()
    lines[5], lines[6] = lines[6], lines[5]
    (other / "vocab.txt").write_text("\n".join(lines) + "\n", "utf8")
    (other / "tokenizer.json").unlink()
    bothways.Tokenizer.load(other / "vocab.txt").save(other)
    match = r"2 tokens differ, such as 'fine' \(5, not 6\), 'good' \(6, not 5\)"
    with pytest.raises(BothwaysError, match=match):
        pretrain(settings_of(other, corpus, "minilm"), corpus)
    headless = load_model(teacher).model
    bothways.save_model(
        tmp_path / "bare", Model(headless.config, (), headless.encoder), corpus.tokenizer
    )
    with pytest.raises(ConfigError, match="has no masked LM head") as raised:
        settings_of(tmp_path / "bare", corpus, "distilbert")
    relations = 'recipe="minilm" of distil, or **{"objective.losses": "[\\"relations\\"]"}'
    assert relations in raised.value.fix
    settings_of(tmp_path / "bare", corpus, "minilm")


def test_recipes_are_the_settings_of_the_papers(teacher, tmp_path):
    student = shape(heads=2)
    settings = distilbert(student, str(teacher))
    assert settings.objective.losses == (
        SoftTargets(5.0, 2.0),
        MaskedTokens(2.0),
        CosineStates(1.0),
    )
    assert settings.training.optimizer == AdamW(lr=5e-4, betas=(0.9, 0.98), eps=1e-6, decay=0.0)
    assert (settings.training.clip_norm, settings.training.schedule) == (5.0, Linear(0.05))
    [relations] = minilm(student, str(teacher)).objective.losses
    assert relations == Relations(1.0, 32, None)  # the most that divide both widths, up to 48
    deep = make_folder(tmp_path / "deep", num_hidden_layers=24)
    [relations] = minilm(student, str(deep)).objective.losses
    assert relations.teacher_layer == 21
    assert distillation(str(teacher), "bert-tiny", "minilm").encoder.vocab == SIZE


def test_every_pair_of_losses_is_one_objective(teacher):
    """Losses mix: each has its own weight in the batch, whatever the others make it read."""
    batch = batch_of()
    alone = dict[str, float]()
    for loss in EVERY:
        alone |= means(build_module((loss,)), batch)
    for pair in itertools.combinations(EVERY, 2):
        found = means(build_module(pair), batch)
        assert found == pytest.approx({name: alone[name] for name in found}, rel=1e-9)
