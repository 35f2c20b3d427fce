"""Longformer and BigBird: where dropout acts, what is read in blocks, and what ranks do about global tokens."""

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from bothways.core.batch import Batch, Layout
from bothways.core.training_module import TrainingModule
from bothways.hub.model_folder import save_model
from bothways.model.attention.patterns import Blocks, Window
from bothways.model.config import EncoderConfig
from bothways.model.families.bigbird import BIGBIRD
from bothways.model.families.catalogue import preset
from bothways.model.families.longformer import LONGFORMER
from bothways.model.heads import MaskedHead, TagHead
from bothways.model.model import Model
from bothways.training.parallel import Plan, replicate
from bothways.training.step_cost import forward_flops, seen
from drawn_settings import draw_settings
from family_peers import answers, assert_drops_alike
from spread import first_of

ARCHITECTURES = {a.name: a for family in (LONGFORMER, BIGBIRD) for a in family.architectures}
DROPPING = [
    ("LongformerModel", {"attention_window": 4}),
    ("BigBirdModel", {"block_size": 1, "num_random_blocks": 1}),
    *(
        (name, {"attention_window": 4} if "Long" in name else {"attention_type": "original_full"})
        for name in ARCHITECTURES
    ),
]


@pytest.mark.parametrize(
    ("name", "settings"),
    first_of(
        DROPPING,
        [("SequenceClassification" in name, *more) for name, more in DROPPING],
        [f"{name}-{'-'.join(more)}" for name, more in DROPPING],
    ),
)
def test_dropout_acts_where_theirs_does(name, settings, tmp_path):
    """In the encoder and in the head of every class."""
    cls, architecture, copies, length = getattr(transformers, name), ARCHITECTURES[name], 3000, 9
    torch.manual_seed(1)
    config = cls.config_class(
        vocab_size=50, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=12,
        max_position_embeddings=20, pad_token_id=1, sep_token_id=2, hidden_dropout_prob=0.3,
        attention_probs_dropout_prob=0.3, initializer_range=0.5, **settings,
    )  # fmt: skip
    theirs = cls(config)
    with torch.no_grad():
        # That of the padding: else one logit is always 0.
        theirs.get_input_embeddings().weight[1] += 0.5
    ids, named = torch.randint(4, 50, (length,)), torch.arange(length) < 2
    ids = ids.repeat(copies)
    row = {
        "input_ids": ids.view(copies, -1),
        "token_type_ids": torch.zeros_like(ids).view(copies, -1),
    }
    named = named.repeat(copies) if "Longformer" in name else None
    if named is not None:
        row["global_attention_mask"] = named.long().view(copies, -1)
    batch = Batch(ids, torch.zeros_like(ids), Layout.of([length] * copies), {}, named)
    if "choice" in architecture.heads:
        row = {key: value.view(-1, 3, length) for key, value in row.items()}
    kept = torch.ones(copies, length, dtype=torch.bool)
    assert_drops_alike(
        theirs, batch, lambda model: answers(model(**row), architecture, kept), copies, tmp_path
    )


@pytest.mark.parametrize("length", [29, 33, 60])
def test_what_is_seen_in_blocks_is_what_theirs_attends_to(length):
    """Every probability is 1 / (keys read) where all scores are 0; a key read twice has twice that."""
    pattern = Blocks(4, 1)
    config = transformers.BigBirdConfig(
        vocab_size=80, hidden_size=4, num_hidden_layers=1, num_attention_heads=1, block_size=4, num_random_blocks=1,
        max_position_embeddings=64,
    )  # fmt: skip
    theirs = transformers.BigBirdModel(config)
    with torch.no_grad():
        for parameter in theirs.encoder.layer[0].attention.self.parameters():
            parameter.zero_()
        output = theirs.eval()(torch.full((1, length), 7), output_attentions=True)
        shares = output.attentions[0][0, 0, :length, :length]
    # No query reads the second block twice, and the last block least of all.
    keys = 1 / torch.where(shares > 0, shares, torch.inf).amin(1)
    assert seen(pattern, length) == pytest.approx(float(keys.mean()), rel=1e-5)
    assert seen(pattern, pattern.dense) == pattern.dense


def test_blocks_cost_time_linear_in_the_length():
    config = preset("bigbird-roberta-base")
    assert forward_flops(config, (), 16384) < 1.1 * forward_flops(config, (), 2048)


def test_a_pooler_that_was_never_read_is_written_as_a_new_one(tmp_path):
    """Where the folder has one, `test_a_folder_comes_back_as_it_was` finds it again. Equal models give equal files."""
    config = BIGBIRD.config_rules.read(
        draw_settings("big_bird", 1) | {"hidden_size": 64, "initializer_range": 0.3}, ""
    )
    model = Model(config, (MaskedHead(),))
    before = torch.get_rng_state()
    for name in ("once", "again"):
        save_model(tmp_path / name, model)
        torch.rand(3)
    torch.set_rng_state(before)
    files = [load_file(tmp_path / name / "model.safetensors") for name in ("once", "again")]
    assert all(torch.equal(tensor, files[1][name]) for name, tensor in files[0].items())
    weight = files[0]["bert.pooler.weight"]
    assert float(weight.std()) == pytest.approx(
        0.3 * 0.88, rel=0.1
    )  # of a normal distribution cut off at 2 σ
    assert not files[0]["bert.pooler.bias"].any()
    drawn = torch.rand(3)
    torch.set_rng_state(before)
    save_model(tmp_path / "third", model)
    assert torch.equal(torch.rand(3), drawn)
    _, report = transformers.BigBirdForMaskedLM.from_pretrained(
        tmp_path / "once", output_loading_info=True
    )
    assert not any(report.values())


class Tagger(TrainingModule):
    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.model = Model(config, (TagHead(3),))

    def forward(self, batch: Batch) -> Tensor:
        result: Tensor = self.model.heads["tags"](self.model.encoder(batch).last).sum()
        return result


def test_ranks_agree_on_batches_with_global_tokens_and_without(tmp_path):
    """torch's wrapper would wait for gradients that never come."""
    training_module = Tagger(
        EncoderConfig(50, 8, 2, 2, 8, patterns=(Window(2, global_attention=True),))
    )
    assert training_module.partial
    assert not Tagger(EncoderConfig(50, 8, 2, 2, 8)).partial
    wide = training_module.model.encoder.blocks[0].attention.global_qkv.weight
    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.FileStore(str(tmp_path / "s"), 1), rank=0, world_size=1
    )
    try:
        replica = replicate(training_module, Plan(0, 1, 0))
        for named in (None, torch.arange(9) == 0, None):
            replica(
                Batch(torch.arange(9), torch.zeros(9, dtype=torch.int64), Layout.of([9]), {}, named)
            ).backward()
            assert (wide.grad is None) == (named is None)
            training_module.zero_grad()
    finally:
        torch.distributed.destroy_process_group()
