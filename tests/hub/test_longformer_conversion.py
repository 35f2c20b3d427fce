"""`bothways convert` of a BERT or RoBERTa: transformers' Longformer of that folder gives what the model gave, where it may."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from bothways.cli.main import app
from bothways.core.errors import ConfigError
from bothways.hub.convert.longformer import lengthened
from bothways.hub.model_folder import load_model
from bothways.model.families.catalogue import preset
from bothways.model.heads import Head, LabelHead, MaskedHead, PoolerHead, TagHead
from bothways.model.model import Model
from bothways.prediction.predictor import open_task
from bothways.text.trainers import ByteBPE, train_tokenizer

SIZES = {
    "vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "initializer_range": 0.4,
}  # fmt: skip


def bert(name: str = "BertForMaskedLM", **more: Any) -> Any:
    return getattr(transformers, name)(
        transformers.BertConfig(**SIZES, max_position_embeddings=20, **more)
    ).eval()


def roberta(name: str = "RobertaForMaskedLM", **more: Any) -> Any:
    config = transformers.RobertaConfig(
        **SIZES, max_position_embeddings=22, type_vocab_size=1, **more
    )
    return getattr(transformers, name)(config).eval()


def converted(source: Path, out: Path, *words: str) -> Any:
    app(["convert", str(source), "--out", str(out), *words], result_action="return_value")
    name = json.loads((out / "config.json").read_text())["architectures"][0]
    found, report = getattr(transformers, name).from_pretrained(out, output_loading_info=True)
    assert not any(report.values())
    return found.eval()


@pytest.mark.parametrize("build", [bert, roberta])
@pytest.mark.parametrize(
    ("kind", "tied"), [("ForMaskedLM", True), ("ForMaskedLM", False), ("Model", True)]
)
def test_without_global_tokens_a_short_text_gives_the_same(
    build: Any, kind: str, tied: bool, tmp_path: Path
) -> None:
    torch.manual_seed(3)
    original = build({bert: "Bert", roberta: "Roberta"}[build] + kind, tie_word_embeddings=tied)
    original.save_pretrained(tmp_path / "short")
    tokenizer = train_tokenizer(["a few words to learn from"], ByteBPE(280))
    tokenizer.save(tmp_path / "short")
    found = converted(tmp_path / "short", tmp_path / "long", "--positions", "47", "--window", "40")
    assert type(found).__name__ == "Longformer" + kind
    assert found.config.attention_window == [40, 40]
    ids = torch.randint(5, 280, (2, 19))
    with torch.no_grad():
        wanted = original(input_ids=ids)
        for name in (
            ("logits",) if kind == "ForMaskedLM" else ("last_hidden_state", "pooler_output")
        ):
            torch.testing.assert_close(found(input_ids=ids)[name], wanted[name], rtol=0, atol=2e-5)
    read = transformers.AutoTokenizer.from_pretrained(tmp_path / "long")
    assert read.model_max_length == 47
    assert (
        read("few words", add_special_tokens=False)["input_ids"]
        == tokenizer.encode(["few words"])[0].tolist()
    )


LABELS = {0: "rain", 1: "sun", 2: "snow"}
TUNED = {
    "ForSequenceClassification": "classify",
    "ForTokenClassification": "tag",
    "ForQuestionAnswering": "answer",
    "ForMultipleChoice": "choice",
}


@pytest.mark.parametrize("build", [bert, roberta])
@pytest.mark.parametrize("kind", TUNED)
def test_a_fine_tuned_model_keeps_its_head_labels_and_task(
    build: Any, kind: str, tmp_path: Path
) -> None:
    torch.manual_seed(5)
    stem = {bert: "Bert", roberta: "Roberta"}[build]
    named = (
        {"id2label": LABELS}
        if kind in ("ForSequenceClassification", "ForTokenClassification")
        else {}
    )
    original = build(stem + kind, **named)
    original.save_pretrained(tmp_path / "short")
    train_tokenizer(["a few words to learn from"], ByteBPE(280)).save(tmp_path / "short")
    record = {"task": {"kind": TUNED[kind]}, "length": 12, "metrics": {"accuracy": 0.9}}
    (tmp_path / "short" / "bothways.json").write_text(json.dumps(record))
    found = converted(tmp_path / "short", tmp_path / "long", "--positions", "47", "--window", "40")
    assert type(found).__name__ == "Longformer" + kind
    if named:
        assert found.config.id2label == LABELS
        assert load_model(tmp_path / "long").labels == tuple(LABELS.values())
    ids = torch.randint(5, 280, (2, 2, 19) if kind == "ForMultipleChoice" else (2, 19))
    nowhere = torch.zeros_like(ids)
    with torch.no_grad():
        given, wanted = found(ids, global_attention_mask=nowhere), original(ids)
    for name in ("start_logits", "end_logits") if kind == "ForQuestionAnswering" else ("logits",):
        torch.testing.assert_close(given[name], wanted[name], rtol=0, atol=2e-5)
    opened = open_task(str(tmp_path / "long"))
    assert (opened.task_model.task.name, opened.task_model.length) == (TUNED[kind], 47)
    new = json.loads((tmp_path / "long" / "bothways.json").read_text())
    assert "metrics" not in new  # they are of the other model


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ((), "a Longformer is made of a model with a masked LM head, a pooler or a tuned"),
        ((LabelHead(2), TagHead(3)), "the model has a label head and tag head, and a Longformer"),
    ],
)
def test_none_or_several_heads(heads: tuple[Head, ...], message: str) -> None:
    with torch.device("meta"):
        model = Model(preset("bert-mini"), heads)
    with pytest.raises(ConfigError, match=f"^heads: {message}"):
        lengthened(model)


def test_positions_repeat_and_global_projections_begin_as_the_others(tmp_path: Path) -> None:
    original = roberta()
    original.save_pretrained(tmp_path / "short")
    model = lengthened(load_model(tmp_path / "short").model, positions=50, window=8)
    before, after = (
        original.roberta.embeddings.position_embeddings.weight,
        model.encoder.embedding.position.weight,
    )
    assert torch.equal(after[:22], before)
    assert torch.equal(after[22:42], before[2:])
    assert torch.equal(after[42:], before[2:12])
    for block in model.encoder.blocks:
        for name in ("weight", "bias"):
            wide, qkv = (
                getattr(block.attention.global_qkv, name),
                getattr(block.attention.qkv, name),
            )
            assert torch.equal(wide, qkv)
            assert wide.data_ptr() != qkv.data_ptr()


def test_of_berts_heads_the_masked_one_stays(tmp_path: Path) -> None:
    bert("BertForPreTraining").save_pretrained(tmp_path / "short")
    assert (
        type(converted(tmp_path / "short", tmp_path / "long", "--window", "8")).__name__
        == "LongformerForMaskedLM"
    )
    assert not list((tmp_path / "long").glob("tokenizer*"))


def test_a_model_folder_does_not_become_one_unasked(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "short")
    with pytest.raises(
        ConfigError,
        match=r"short: is a model folder already; .* a Longformer\n.*--positions 4096, --window",
    ):
        app(
            ["convert", str(tmp_path / "short"), "--out", str(tmp_path / "long")],
            result_action="return_value",
        )
    assert not (tmp_path / "long").exists()


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (bert, {"window": 7}, "window: must be an even number above 0, not 7"),
        (bert, {"window": 0}, "window: must be an even number"),
        (bert, {"positions": 19}, "positions: must be at least the model's 20, not 19"),
        (
            lambda: bert(hidden_act="gelu_new"),
            {},
            "differs from Longformer's by more than the attention",
        ),
    ],
)
def test_what_cannot_be_made(
    model: Any, settings: dict[str, int], message: str, tmp_path: Path
) -> None:
    model().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=message):
        lengthened(load_model(tmp_path).model, **settings)


@pytest.mark.parametrize("name", ["modernbert-base", "albert-base-v2", "megatron-bert-345m"])
def test_encoders_of_another_build(name: str) -> None:
    with torch.device("meta"):
        model = Model(preset(name), (MaskedHead(), PoolerHead()))
    with pytest.raises(ConfigError, match="differs from Longformer's by more than the attention"):
        lengthened(model, 10_000)


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (("--positions", "60"), "--positions"),
        (("--positions", "60", "--window", "8"), "--positions and --window"),
    ],
)
def test_a_checkpoint_of_tensorflow_does_not_become_one_at_once(
    words: tuple[str, ...], named: str, tmp_path: Path
) -> None:
    (tmp_path / "bert_model.ckpt.index").write_bytes(b"")
    with pytest.raises(
        ConfigError,
        match=f"^positions: {named} apply to model folders, and ",
    ):
        app(
            ["convert", str(tmp_path), "--out", str(tmp_path / "out"), *words],
            result_action="return_value",
        )
    assert not (tmp_path / "out").exists()


def test_the_folder_of_a_run_is_its_model(tmp_path: Path) -> None:
    bert().save_pretrained(tmp_path / "run" / "model")
    found = converted(tmp_path / "run", tmp_path / "long", "--window", "40")
    assert type(found).__name__ == "LongformerForMaskedLM"
