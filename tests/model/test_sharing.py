"""Layers that share attention or the feed-forward layer alone: sizes, outputs, gradients, folders."""

import copy
import re
from dataclasses import replace

import pytest
import torch
import transformers

from bothways.core.batch import Batch, Layout
from bothways.core.errors import ConfigError
from bothways.hub.model_folder import load_model, save_model
from bothways.model.config import Dropouts, EncoderConfig, Sharing
from bothways.model.families import albert
from bothways.model.heads import MaskedHead, PoolerHead
from bothways.model.model import Model
from bothways.model.parameters import parameter_table
from bothways.prediction.prepared_model import prepare_model

PARTS = ("attention", "mlp")
TINY = EncoderConfig(30, 16, 4, 2, 24, embedding=8, dropout=Dropouts(0.0, 0.0))


def batch() -> Batch:
    ids = torch.randint(5, 30, (14,), generator=torch.Generator().manual_seed(0))
    return Batch(ids, torch.zeros_like(ids), Layout.of([9, 5]), {})


@pytest.mark.parametrize(
    ("embedding", "published"), [(128, (12, 64, 38, 89)), (None, (31, 83, 57, 108))]
)
def test_sizes_are_those_of_the_paper(embedding, published):
    """Table 4, in millions, within the rounding of counts with and without the pooler."""
    shared = (Sharing(), Sharing(parts="attention"), Sharing(parts="mlp"), None)
    for sharing, millions in zip(shared, published, strict=True):
        config = replace(albert.base(), sharing=sharing, embedding=embedding)
        total = parameter_table(config, (PoolerHead(),)).total
        assert abs(total - 1e6 * millions) < 1.1e6


@pytest.mark.parametrize(
    ("name", "millions"),
    [("base", 11.7), ("large", 17.7), ("xlarge", 58.7), ("xxlarge", 222.6)],
)
def test_presets_are_as_large_as_transformers_makes_them(name, millions):
    """The paper's table 1 has 12, 18, 60 and 235."""
    config = albert.PRESETS[f"albert-{name}-v2"]()
    total = parameter_table(config, (PoolerHead(),)).total
    settings = albert.ALBERT.config_rules.write(config)
    with torch.device("meta"):
        theirs = transformers.AlbertModel(transformers.AlbertConfig(**settings))
    assert total == sum(parameter.numel() for parameter in theirs.parameters())
    assert round(total / 1e6, 1) == millions


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("groups", [1, 2])
def test_a_shared_part_computes_as_equal_parts_do_and_gets_the_sum_of_their_gradients(
    parts, groups
):
    torch.manual_seed(1)
    shared = Model(replace(TINY, sharing=Sharing(groups, parts=parts)), (MaskedHead(),)).double()
    own = Model(TINY, (MaskedHead(),)).double()

    def owner(name: str) -> str:
        """The name under which the shared model has a tensor of the other."""
        found = re.fullmatch(rf"(encoder\.blocks\.)(\d)(\.{parts}(_norm)?\..*)", name)
        if found is None:
            return name
        size = TINY.depth // groups
        return f"{found[1]}{int(found[2]) // size * size}{found[3]}"

    state = shared.state_dict()
    own.load_state_dict({name: state[owner(name)] for name in own.state_dict()})
    assert {owner(name) for name in own.state_dict()} == {*state}
    gradients = []
    for model in (shared, own):
        last = model(batch()).last_hidden_state
        (last * torch.arange(16)).sin().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(shared(batch()).last_hidden_state, last, rtol=0, atol=0)
    sums: dict[str, torch.Tensor] = {}
    for name, gradient in gradients[1].items():
        sums[owner(name)] = sums.get(owner(name), 0) + gradient
    assert sums.keys() == gradients[0].keys()
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradient, sums[name], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("parts", PARTS)
def test_folders_are_our_own_and_copies_and_prepared_models_share_alike(tmp_path, parts):
    torch.manual_seed(2)
    model = Model(replace(TINY, sharing=Sharing(parts=parts)), (MaskedHead(),)).eval()
    architecture = save_model(tmp_path / "model", model)
    assert architecture.own
    assert "library_name: bothways" in (tmp_path / "model" / "README.md").read_text("utf8")
    back, twin = load_model(tmp_path / "model").model.eval(), copy.deepcopy(model)
    assert back.config == model.config
    expected = model(batch()).last_hidden_state
    for each in (back, twin):
        torch.testing.assert_close(each(batch()).last_hidden_state, expected, rtol=0, atol=0)
        first, last = (getattr(each.encoder.blocks[at], parts) for at in (0, 3))
        assert first is last
    with torch.inference_mode():
        found = prepare_model(model)(batch()).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_a_layer_of_several_blocks_shares_all_or_nothing():
    with pytest.raises(ConfigError, match="must be 1 where layers share attention alone, not 2"):
        Sharing(layers_per_group=2, parts="attention")
