"""`bothways describe`: for a preset, a folder and an id on the Hub."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from bothways.core.config.reader import load
from bothways.core.errors import ConfigError, FolderError
from bothways.hub.provenance import model_facts
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import preset
from commands import run_line
from model_folders import VOCAB, WIDTH, change_settings, folder_of, peer, with_decoder
from toy_folder import make_folder


def described(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    run_line("describe", *words)
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def wide(monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")


def rows(text: str) -> dict[str, list[str]]:
    lines = [
        [cell.strip() for cell in line.split("│")[1:-1]]
        for line in text.splitlines()
        if line.startswith("│")
    ]
    return {first: rest for first, *rest in lines}


def test_a_folder_says_what_the_model_was_made_of(tmp_path, capsys):
    make_folder(tmp_path / "bert")
    assert [*model_facts(tmp_path / "bert")] == ["size"]
    examples = {"name": "train.tsv", "examples": 1200, "sha256": "0"}
    record = {"base": {"name": "bert-base"}, "data": {"train": examples}, "date": "2026-11-27"}
    (tmp_path / "bert" / "bothways.json").write_text(json.dumps(record))
    facts = model_facts(tmp_path / "bert", ["bad", "good"])
    size = (tmp_path / "bert" / "model.safetensors").stat().st_size
    assert facts == {
        "base": "bert-base", "data": "train.tsv, 1,200 examples", "date": "2026-11-27",
        "labels": "bad, good", "size": f"{size / 2**20:.1f} MiB",
    }  # fmt: skip
    (tmp_path / "bert" / "2_Dense").mkdir()
    (tmp_path / "bert" / "2_Dense" / "model.safetensors").write_bytes(bytes(2**20))
    facts = model_facts(tmp_path / "bert", ["bad", "good"])
    assert facts["size"] == f"{size / 2**20 + 1:.1f} MiB"
    table = rows(described(capsys, str(tmp_path / "bert")))
    assert [table[name] for name in ("base", "data")] == [[facts["base"]], [facts["data"]]]


@pytest.mark.parametrize(
    "record", [{"base": "bert"}, {"data": [1]}, {"data": {"train": 3}}, {"tokens": "many"}]
)
def test_a_record_of_another_form_says_nothing(record, tmp_path):
    make_folder(tmp_path / "bert")
    (tmp_path / "bert" / "bothways.json").write_text(json.dumps(record))
    assert [*model_facts(tmp_path / "bert")] == ["size"]


def test_a_preset_is_counted_to_the_last_parameter(capsys):
    text = described(capsys, "bert-base")
    table = rows(text)
    assert "a preset of bert, with the heads of BertForPreTraining" in text
    assert table["position"] == ["learned (max_positions 512, offset 0, scaled False, bias None)"]
    assert table["order"] == ["post (embedding True, projected False)"]
    assert table["patterns"] == ["full"]
    assert table["textbook: V·H + 12·L·H², where I = 4·H"][1:] == ["108,375,552", "98.43%"]
    assert table["encoder + pooler"][1] == "109,482,240"
    assert table["encoder + pooler + masked LM head + next sentence head"][1:] == [
        "110,106,428",
        "100.00%",
    ]
    assert table["memory, inference, weights in fp32"] == ["420.0 MiB"]
    assert table["memory, training with AdamW in fp32"] == ["1,680.1 MiB"]
    assert "Against bert-base" not in text


def test_operations_are_defined_and_grow_with_the_length(capsys):
    text = described(capsys, "bert-base", "--length", "512")
    # 2·12·(4·768² + 8·768²) + 4·12·768·512, the heads' share on top of it.
    blocks = 2 * 12 * 12 * 768**2 + 4 * 12 * 768 * 512
    heads = 0.15 * 2 * (768**2 + 768 * 30_522) + 2 * (768**2 + 2 * 768) / 512
    # After the last attention only [CLS] and what is predicted is computed.
    left_out = (1 - 0.15 - 1 / 512) * 2 * 9 * 768**2
    forward = (blocks + heads - left_out) / 1e6
    assert rows(text)["operations per token, inference, length 512"] == [f"{forward:,.1f} million"]
    assert rows(text)["operations per token, training, length 512"] == [
        f"{3 * forward:,.1f} million"
    ]
    assert "An operation (FLOP) is " in text
    for length in ("0", "513"):
        with pytest.raises(ConfigError, match=f"from 1 to 512, not {length}"):
            described(capsys, "bert-base", "--length", length)


def test_a_folder_is_described_with_what_loading_it_would_do(capsys, tmp_path):
    folder = folder_of(peer("MegatronBert", "ForSequenceClassification"), tmp_path / "theirs")
    text = described(capsys, str(folder))
    assert "megatron-bert, MegatronBertForSequenceClassification" in text.replace("\n", "")
    assert rows(text)["order"] == ["pre (embedding False)"]
    assert rows(text)["(heads)"] == ["pooler, labels (count 3)"]
    assert "41 tensors loaded" in text
    assert rows(text)["label head"][1] == str(3 * 16 + 3)


def test_of_a_run_the_model_is_described(capsys, tmp_path):
    folder = folder_of(
        peer("MegatronBert", "ForSequenceClassification"), tmp_path / "run" / "model"
    )
    assert described(capsys, str(folder.parent)).replace(
        str(folder.parent), str(folder)
    ) == described(capsys, str(folder))


def test_of_a_model_on_the_hub_only_the_settings_are_fetched(capsys, tmp_path, monkeypatch):
    folder = folder_of(peer("Bert", "Model"), tmp_path / "theirs")
    (folder / "model.safetensors").unlink()
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda *_, allow_patterns: folder if "model.safetensors" not in allow_patterns else "",
    )
    monkeypatch.setattr("huggingface_hub.HfApi.model_info", lambda *_, **__: None)
    assert rows(described(capsys, "some/model"))["(heads)"] == ["pooler"]


def test_a_folder_goes_before_a_preset_of_its_name(capsys, tmp_path, monkeypatch):
    folder_of(peer("Bert", "ForMaskedLM"), tmp_path / "bert-base")
    monkeypatch.chdir(tmp_path)
    assert rows(described(capsys, "bert-base"))["width"] == ["16"]


def test_a_mistyped_preset_is_named(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(FolderError, match=r"bert-bse: no such folder[\s\S]*Did you mean"):
        run_line("describe", "bert-bse")


def test_an_output_layer_of_its_own_is_counted(capsys, tmp_path):
    theirs = peer("Bert", "ForMaskedLM")
    folder = folder_of(theirs, tmp_path / "tied")
    tied = described(capsys, str(folder))
    tensors = with_decoder(load_file(folder / "model.safetensors"))
    save_file(
        {**tensors, "cls.predictions.decoder.weight": torch.ones(VOCAB, WIDTH)},
        folder / "model.safetensors",
    )
    change_settings(folder, tie_word_embeddings=False)
    text = described(capsys, str(folder))
    counts = [int(rows(said)["masked LM head"][1].replace(",", "")) for said in (text, tied)]
    assert f"({VOCAB}, {WIDTH})" in rows(text)["masked LM head"][0]
    assert counts[0] - counts[1] == VOCAB * WIDTH
    assert 'readout.output = "own"' in text


@pytest.mark.parametrize("name", ["albert-base-v2", "modernbert-base", "gpt2"])
def test_the_lines_against_bert_make_the_model(capsys, name, tmp_path):
    text = described(capsys, name)
    assert text.startswith(f"{name}: a preset of {name.partition('-')[0]},")
    lines = text.split("Against bert-base, as lines of a TOML file under [encoder]\n")[1].split(
        "\n\n"
    )[0]
    (tmp_path / "lines.toml").write_text(lines)
    assert load(EncoderConfig, base=preset("bert-base"), file=tmp_path / "lines.toml") == preset(
        name
    )
