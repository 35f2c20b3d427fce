"""How the embeddings of a generator and a discriminator depend on each other: gradients, one update, folders, continued runs."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from bothways.core.batch import pack
from bothways.core.errors import BothwaysError
from bothways.core.source import Sequence
from bothways.data.corpus import Corpus
from bothways.data.loader import ExampleBudget
from bothways.hub.model_folder import load_model, save_model
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.families.catalogue import preset
from bothways.model.model import Model
from bothways.model.parameters import parameter_table
from bothways.objectives.replaced_tokens import (
    Narrower,
    ReplacedTokens,
    ReplacedTokensModule,
    Shallower,
    Sharing,
)
from bothways.pretraining.build import build_models, preflight, vocabulary_of
from bothways.pretraining.config import PretrainConfig
from bothways.pretraining.forecast import shared_parameters
from bothways.pretraining.recipes import deberta_v3
from bothways.pretraining.run import pretrain
from bothways.training.optimizers import AdamW
from bothways.training.schedules import Linear, Steps
from toy_objective import SIZE, VOCABULARY, draw_sequences, short_run

SHARINGS: tuple[Sharing, ...] = ("none", "shared", "disentangled")
ORIGINAL = "parametrizations.weight.original"


def shape_of(name: str, vocab: int = SIZE) -> EncoderConfig:
    base = preset(name)
    small = {"width": 32, "depth": 2, "heads": 4, "intermediate_size": 48, "vocab": vocab}
    return dataclasses.replace(base, **small, embedding=None, dropout=Dropouts(0.0, 0.0))


def build_module(config: EncoderConfig, sharing: Sharing) -> ReplacedTokensModule:
    """In float64, with the same weights in all modes and equal embeddings in both networks."""
    objective = ReplacedTokens(generator=Shallower(), sharing=sharing)
    torch.manual_seed(0)
    models = {role: Model(*spec).double() for role, spec in objective.models(config).items()}
    for model in models.values():
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
    embeddings = [models[role].encoder.embedding for role in ("generator", "model")]
    embeddings[0].load_state_dict(embeddings[1].state_dict())
    return objective.training_module(models, VOCABULARY)


def gradients(module: ReplacedTokensModule, factors: dict[str, float]) -> dict[str, Tensor]:
    """The gradients of a weighted sum of the losses, of the parameters that it reaches."""
    module.zero_grad()
    losses = module(pack(draw_sequences(ReplacedTokens())))
    sum(factor * losses[name].total for name, factor in factors.items()).backward()
    return {n: p.grad.clone() for n, p in module.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["electra-small-discriminator", "deberta-v3-small"])
@pytest.mark.parametrize("sharing", SHARINGS)
def test_each_loss_trains_its_own_network(sharing, name):
    module = build_module(shape_of(name), sharing)
    every = {each for each, _ in module.named_parameters()}
    common = {f"model.encoder.embedding.{each}" for each in COMMON[name] if sharing == "shared"}
    of_generator = {each for each in every if each.startswith("generator.")}
    assert set(gradients(module, {"masked": 1.0})) == of_generator | common
    assert set(gradients(module, {"replaced": 1.0})) == every - of_generator


COMMON = {
    "electra-small-discriminator": [
        "token.weight", "position.weight", "segment.weight", "norm.weight", "norm.bias",
    ],
    "deberta-v3-small": ["token.weight", "norm.weight", "norm.bias"],
}  # fmt: skip


@pytest.mark.parametrize("name", ["electra-small-discriminator", "deberta-v3-small"])
def test_one_joint_update_is_that_of_the_formula(name):
    """By plain gradient descent the generator's table moves as without sharing, the sum as one shared table would."""
    rate, factors = 0.01, {"masked": 1.0, "replaced": 50.0}
    moved = {}
    for sharing in SHARINGS:
        module = build_module(shape_of(name), sharing)
        found = gradients(module, factors)
        with torch.no_grad():
            for each, parameter in module.named_parameters():
                parameter.sub_(rate * found[each])
        moved[sharing] = module
    tables = {
        sharing: [model.encoder.embedding.tables() for model in (module.generator, module.model)]
        for sharing, module in moved.items()
    }
    start = build_module(shape_of(name), "none").model.encoder.embedding.tables()
    for table in start:
        (own, _), (_, shared) = tables["none"], tables["shared"]
        generator, discriminator = (each[table].weight for each in tables["disentangled"])
        torch.testing.assert_close(generator, own[table].weight, rtol=0, atol=1e-13)
        torch.testing.assert_close(discriminator, shared[table].weight, rtol=0, atol=1e-12)
        assert float((discriminator - generator).detach().abs().max()) > 1e-3
        separate = tables["none"][1][table].weight
        difference = separate - start[table].weight
        torch.testing.assert_close(discriminator - generator, difference, rtol=0, atol=1e-12)


def test_the_networks_are_those_that_were_given():
    """Of two different embeddings, such as those of a run that goes on, both stay as they are."""
    config = shape_of("electra-small-discriminator")
    objective = ReplacedTokens(sharing="disentangled")
    models = {role: Model(*spec).double() for role, spec in objective.models(config).items()}
    before = {role: model.encoder.embedding.token.weight.clone() for role, model in models.items()}
    module = objective.training_module(models, VOCABULARY)
    for role, model in module.saved().items():
        table = model.encoder.embedding.token.weight
        torch.testing.assert_close(table, before[role], rtol=0, atol=1e-16)
    token = module.model.encoder.embedding.token
    assert token.parametrizations.weight.original.any()


def test_the_saved_discriminator_has_the_sum_and_shares_the_rest():
    module = build_module(shape_of("electra-small-discriminator"), "disentangled")
    with torch.no_grad():
        for name, parameter in module.model.named_parameters():
            if name.endswith(ORIGINAL):
                parameter.normal_()
    saved = module.saved()["model"]
    assert not any("parametrizations" in name for name in saved.state_dict())
    batch = pack(draw_sequences(ReplacedTokens()))
    assert torch.equal(saved.encoder(batch).last, module.model.encoder(batch).last)
    ours = module.model.encoder.blocks[0].mlp.up.weight
    assert saved.encoder.blocks[0].mlp.up.weight.data_ptr() == ours.data_ptr()


@pytest.mark.parametrize("sharing", SHARINGS)
@pytest.mark.parametrize("size", [Narrower(0.5), Shallower()])
def test_parameters_are_forecast_for_both_networks(sharing, size):
    config = shape_of("electra-small-discriminator")
    objective = ReplacedTokens(generator=size, sharing=sharing)
    specs = objective.models(config)
    models = {role: Model(*spec) for role, spec in specs.items()}
    module = objective.training_module(models, VOCABULARY)
    trained = sum(parameter.numel() for parameter in module.parameters())
    counted = sum(parameter_table(*spec).total for spec in specs.values())
    assert counted - shared_parameters(objective, config) == trained


def config_of(corpus: Corpus, sharing: Sharing, start: str | None = None) -> PretrainConfig:
    objective = ReplacedTokens(generator=Shallower(), sharing=sharing)
    return short_run(
        corpus, objective, "deberta-v3-small", start=start, heads=4, intermediate_size=48,
        dropout=Dropouts(0.0, 0.0),
    )  # fmt: skip


@pytest.fixture(scope="module")
def run(corpus, tmp_path_factory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("made") / "run"
    return folder, pretrain(config_of(corpus, "disentangled"), corpus, folder)


def test_the_differences_begin_at_zero(corpus):
    settings = config_of(corpus, "disentangled")
    models = build_models(settings, corpus)
    module = settings.objective.training_module(models, VOCABULARY)
    (difference,) = (p for n, p in module.named_parameters() if n.endswith(ORIGINAL))
    assert not difference.any()


def test_a_run_saves_folders_of_transformers(run):
    from transformers import AutoModel, AutoModelForMaskedLM, DebertaV2Model

    folder, done = run
    module = done.training_module
    raw = json.loads((folder / "model" / "config.json").read_text())
    assert (raw["model_type"], "architectures" in raw) == ("deberta-v2", False)
    theirs, info = AutoModel.from_pretrained(folder / "model", output_loading_info=True)
    assert isinstance(theirs, DebertaV2Model)
    assert not info["missing_keys"]
    assert not info["mismatched_keys"]
    assert {name.split(".")[0] for name in info["unexpected_keys"]} == {"mask_predictions"}
    assert "DebertaV2Model" in (folder / "model" / "README.md").read_text("utf8")
    text = draw_sequences(ReplacedTokens(), [20])[0]
    batch = pack([Sequence(text.ids % 20, text.segments)])
    with torch.no_grad():
        wanted = module.eval().model.encoder(batch).last
        found = theirs.eval()(input_ids=batch.ids[None]).last_hidden_state[0]
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-5)
        loaded = load_model(folder / "model")
        assert list(loaded.model.heads) == ["replaced"]
        assert not loaded.report.unused
        again = loaded.model.heads["replaced"](loaded.model.encoder(batch).last, batch.layout)
        scores = module.model.heads["replaced"](wanted, batch.layout)
        assert torch.equal(again, scores)
    _, info = AutoModelForMaskedLM.from_pretrained(folder / "generator", output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize("place", ["run/model", "copy"])
def test_a_run_goes_on_with_both_networks(run, corpus, tmp_path, place):
    """The generator is next to the `model/` of a run, or in the folder of the model."""
    folder, done = run
    if place == "copy":
        folder = tmp_path
        saved = done.training_module.saved()
        save_model(folder / "m", saved["model"], corpus.tokenizer)
        save_model(folder / "m" / "generator", saved["generator"], corpus.tokenizer)
    start = str(folder / ("m" if place == "copy" else "model"))
    settings = config_of(corpus, "disentangled", start=start)
    assert not [each for each in preflight(settings, corpus, None, CPU) if each.where == "start"]
    models = build_models(settings, corpus)
    module = settings.objective.training_module(models, VOCABULARY).eval()
    vocabulary = vocabulary_of(corpus, settings.objective)
    batch = pack(draw_sequences(settings.objective, [20, 9], vocabulary))
    with torch.no_grad():
        found, wanted = module(batch), done.training_module.eval()(batch)
    for name, loss in wanted.items():
        torch.testing.assert_close(found[name].total, loss.total)


CPU = torch.device("cpu")


@pytest.mark.parametrize("sharing", SHARINGS)
def test_without_a_generator_a_run_goes_on_with_a_new_one(run, corpus, tmp_path, sharing):
    saved = run[1].training_module.saved()["model"]
    save_model(tmp_path / "alone", saved, corpus.tokenizer)
    settings = config_of(corpus, sharing, start=str(tmp_path / "alone"))
    notes = [str(each) for each in preflight(settings, corpus, None, CPU) if each.where == "start"]
    assert len(notes) == 1
    assert "there is no generator/ in" in notes[0]
    module = settings.objective.training_module(build_models(settings, corpus), VOCABULARY)
    tables = [m.encoder.embedding.token.weight for m in module.saved().values()]
    assert torch.equal(tables[0], saved.encoder.embedding.token.weight)
    assert torch.equal(*tables) == (sharing != "none")


def test_a_generator_of_another_shape_is_refused(run, corpus):
    settings = config_of(corpus, "disentangled", start=str(run[0] / "model"))
    objective = dataclasses.replace(settings.objective, generator=Shallower(1.0))
    with pytest.raises(BothwaysError, match=r"objective.generator: is not that of .*generator"):
        build_models(dataclasses.replace(settings, objective=objective), corpus)


def test_the_recipes_are_the_papers():
    third = deberta_v3(preset("deberta-v3-base"))
    assert third.objective == ReplacedTokens(generator=Shallower(0.5), sharing="disentangled")
    assert third.objective.models(third.encoder)["generator"].encoder.depth == 6
    assert (third.batch, third.training.until) == (ExampleBudget(8192), Steps(500_000))
    assert third.training.optimizer == AdamW(lr=6e-4, betas=(0.9, 0.98), eps=1e-6, decay=0.01)
    assert (third.training.schedule, third.training.clip_norm) == (Linear(10_000 / 500_000), 1.0)
    assert third.evaluation_masking == third.objective.masking
