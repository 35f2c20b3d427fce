"""Counted parameters against modules, published sizes and the guide; operations against torch's count."""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from bert_peers import draw_config, draw_input
from bothways.core.errors import ConfigError
from bothways.hub.model_folder import load_model, save_model
from bothways.model.attention.patterns import Causal, Full, Window
from bothways.model.config import Dropouts, EncoderConfig, Gated, Sharing
from bothways.model.families import albert, bert
from bothways.model.families.catalogue import preset
from bothways.model.heads import LabelHead, MaskedHead, NextTokenHead, PairHead, PoolerHead
from bothways.model.model import Model
from bothways.model.parameters import parameter_table
from bothways.prediction.prepared_model import prepare_model
from bothways.training.step_cost import forward_flops, seen
from small_models import batch_for

PRETRAINING = (PoolerHead(), MaskedHead(), PairHead())


@pytest.mark.parametrize("page", ["describe.md", "zh/describe.md"])
def test_the_formulas_of_the_guide_give_the_counts_of_bert_base(page):
    guide = Path(__file__).parents[2] / "docs/guide" / page
    rows = re.findall(
        r"^\| ([^|*]+) \| ([^|]+) \| ([0-9,]+) \|$", guide.read_text("utf8"), re.MULTILINE
    )
    config = bert.base()
    letters = dict(V=config.vocab, H=768, L=12, I=3072, P=512, S=2)
    counted = [entry.count for entry in parameter_table(config, PRETRAINING).entries]
    assert len(rows) == len(counted)
    for (_, formula, count), found in zip(rows, counted, strict=True):
        value = eval(formula.replace("·", "*").replace("²", "**2"), dict(letters))
        assert value == int(count.replace(",", "")) == found


def test_equal_shapes_are_written_once():
    entries = {entry.part: entry for entry in parameter_table(bert.base()).entries}
    assert entries["token embedding"].tensors == "(30,522, 768)"
    attention = entries["attention: query, key, value, output"]
    assert attention.tensors == "12 × (2,304, 768) + 12 × (768, 768)"


def test_sizes_beyond_64_bits_are_one_error():
    config = EncoderConfig(9, 2**31 - 1, 1, 1, 2**31 - 1)
    with pytest.raises(ConfigError, match=r"^encoder: the tensors would be too large"):
        parameter_table(config)


@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(0), Window(3), Window(30)])
@pytest.mark.parametrize("length", [1, 2, 9, 40])
def test_what_is_seen_is_counted_pair_by_pair(pattern, length):
    rule: dict[type, Callable[[int, int], bool]] = {
        Full: lambda i, j: True,
        Causal: lambda i, j: j <= i,
        Window: lambda i, j: abs(i - j) <= getattr(pattern, "radius", 0),
    }
    pairs = sum(rule[type(pattern)](i, j) for i in range(length) for j in range(length))
    assert seen(pattern, length) == pytest.approx(pairs / length)


def test_a_window_costs_what_it_sees_and_a_gate_a_matrix():
    config = draw_config(3, "pre")
    plain = forward_flops(config, (), 100)
    windows = replace(config, patterns=(Window(2),))
    assert plain - forward_flops(windows, (), 100) == pytest.approx(
        config.depth * 4 * config.width * (100 - 4.94)
    )
    gated = forward_flops(replace(config, mlp=Gated()), (), 100)
    assert gated - plain == 2 * config.depth * config.width * config.intermediate_size
    assert forward_flops(config, (NextTokenHead(),), 100) - plain == 2 * config.width * config.vocab


@pytest.mark.parametrize(
    ("name", "heads", "count"),
    [
        ("bert-tiny", (PoolerHead(),), 4_385_920),
        ("bert-mini", (PoolerHead(),), 11_170_560),
        ("bert-small", (PoolerHead(),), 28_763_648),
        ("bert-medium", (PoolerHead(),), 41_373_184),
        ("bert-base", (PoolerHead(),), 109_482_240),
        ("bert-base-cased", (PoolerHead(),), 108_310_272),
        ("bert-base-multilingual-cased", (PoolerHead(),), 177_853_440),
        ("bert-base-chinese", (PoolerHead(),), 102_267_648),
        ("bert-large", (PoolerHead(),), 335_141_888),
        ("bert-base", PRETRAINING, 110_106_428),
        # Table 1 of ALBERT's paper has 12, 18, 60 and 235 million.
        ("albert-base-v2", (PoolerHead(),), 11_683_584),
        ("albert-large-v2", (PoolerHead(),), 17_683_968),
        ("albert-xlarge-v2", (PoolerHead(),), 58_724_864),
        ("albert-xxlarge-v2", (PoolerHead(),), 222_595_584),
        ("roberta-base", (), 124_055_040),
        ("distilbert-base-uncased", (), 66_362_880),
        ("deberta-base", (), 138_601_728),
        ("deberta-v2-xlarge", (), 884_593_152),
        ("deberta-v3-xsmall", (), 70_682_112),
        ("mdeberta-v3-base", (), 278_218_752),
        ("longformer-base-4096", (), 148_068_864),
        ("longformer-large-4096", (), 433_551_360),
        ("bigbird-roberta-base", (), 126_878_208),
        ("bigbird-roberta-large", (), 358_074_368),
        ("modernbert-base", (), 149_014_272),
        ("modernbert-large", (), 394_781_696),
        ("openai-gpt", (), 116_534_784),
        ("gpt2", (), 124_439_808),
        ("gpt2-xl", (), 1_557_611_200),
    ],
)
def test_published_sizes(name, heads, count):
    """As many parameters as transformers' models have."""
    assert parameter_table(preset(name), heads).total == count


def test_the_textbook_formula_and_what_it_leaves_out():
    base = parameter_table(bert.base())
    assert base.textbook == 30_522 * 768 + 12 * 12 * 768**2
    assert base.total - base.textbook == 516_096


def test_operations_equal_what_torch_counts():
    config = draw_config(3, "post", dropout=0.1)
    length, copies, predicted = 10, 4, 0.2
    heads = (*PRETRAINING, LabelHead(3))
    model = Model(config, heads)
    batch = draw_input(config, [length] * copies).batch
    with FlopCounterMode(display=False) as counter:
        masked = torch.arange(1, 9)
        x = model.encoder(batch, only=torch.cat([batch.layout.first_tokens, masked])).last
        pooled = model.heads["pooler"](x, batch.layout)
        loss = model.heads["masked"](x[masked], model.encoder.embedding.token.weight).sum()
        loss = loss + model.heads["pair"](pooled).sum() + model.heads["labels"](pooled).sum()
        forward = counter.get_total_flops()
        loss.backward()
    assert forward == pytest.approx(
        forward_flops(config, heads, length, predicted) * length * copies
    )
    # The first block's input is an embedding, which needs no product of its own to be learned: all else is twice the forward.
    assert counter.get_total_flops() == pytest.approx(3 * forward)


PARTS = ("attention", "mlp")
TINY = EncoderConfig(30, 16, 4, 2, 24, embedding=8, dropout=Dropouts(0.0, 0.0))


BATCH = batch_for(TINY, [9, 5])


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
        last = model(BATCH).last_hidden_state
        (last * torch.arange(16)).sin().sum().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    torch.testing.assert_close(shared(BATCH).last_hidden_state, last, rtol=0, atol=0)
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
    expected = model(BATCH).last_hidden_state
    for each in (back, twin):
        torch.testing.assert_close(each(BATCH).last_hidden_state, expected, rtol=0, atol=0)
        first, last = (getattr(each.encoder.blocks[at], parts) for at in (0, 3))
        assert first is last
    with torch.inference_mode():
        found = prepare_model(model)(BATCH).last_hidden_state
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
