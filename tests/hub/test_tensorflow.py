"""`bothways convert`: checkpoints made of transformers' models, under names of the test's own, give what they give."""

import json
import re
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from torch import Tensor

from bothways.core.errors import ConfigError, FolderError
from bothways.hub.convert.tensorflow import read_tensorflow
from bothways.hub.model_folder import load_model
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import SPECIALS
from bundle_writer import write_checkpoint
from commands import run_line
from model_folders import TEXT, VOCAB
from protobuf_writer import field, varint
from random_weights import perturb

WORDS = [*SPECIALS, "the", "cat", "##s", *(f"[unused{at}]" for at in range(VOCAB - 8))]
Variables = dict[str, NDArray[Any]]


def stirred(model: Any) -> Any:
    """Every parameter moved away from where it starts."""
    torch.manual_seed(5)
    return perturb(model, 0.2).eval()


def settings_in(folder: Path, name: str = "config.json") -> dict[str, Any]:
    return json.loads((folder / name).read_text())


def variables(state: Mapping[str, Tensor], *changes: tuple[str, str]) -> Variables:
    """Weights under TensorFlow's names: the changes are regular expressions, made in this order, after the common ones."""
    common = (
        (r"_embeddings\.weight$", "_embeddings"), (r"LayerNorm\.weight$", "LayerNorm/gamma"),
        (r"LayerNorm\.bias$", "LayerNorm/beta"), (r"\.weight$", "/kernel"), (r"\blayer\.(\d+)", r"layer_\1"), (r"\.", "/"),
    )  # fmt: skip
    found = {}
    for name, tensor in state.items():
        new = name
        for pattern, into in (*common, *changes):
            new = re.sub(pattern, into, new)
        found[new] = (tensor.T if new.endswith("/kernel") else tensor).numpy().copy()
    return found


def without_ties(model: Any) -> dict[str, Tensor]:
    return {
        name: tensor
        for name, tensor in model.state_dict().items()
        if "decoder" not in name and "lm_head.weight" not in name
    }


def with_slots(found: Variables) -> Variables:
    slots = {
        f"{name}/adam_{moment}": np.ones_like(array)
        for name, array in found.items()
        for moment in "mv"
    }
    return {**found, **slots, "global_step": np.array(1_000_000, dtype=np.int64)}


BERT_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "max_position_embeddings": 20, "type_vocab_size": 2,
}  # fmt: skip
BERT_NAMES = (
    ("cls/predictions/bias", "cls/predictions/output_bias"),
    ("seq_relationship/kernel", "seq_relationship/output_weights"),
    ("seq_relationship/bias", "seq_relationship/output_bias"),
    ("^classifier/kernel", "output_weights"),
    ("^classifier/bias", "output_bias"),
    ("^qa_outputs/kernel", "cls/squad/output_weights"),
    ("^qa_outputs/bias", "cls/squad/output_bias"),
)


def bert(name: str = "ForPreTraining", **more: Any) -> Any:
    config = transformers.BertConfig(**BERT_SIZES, hidden_act="gelu_new", **more)
    return stirred(getattr(transformers, f"Bert{name}")(config))


def bert_variables(model: Any) -> Variables:
    return variables(without_ties(model), *BERT_NAMES)


def write_folder(
    place: Path, found: Variables, config: Mapping[str, Any] | None, name: str = "bert_config.json"
) -> Path:
    write_checkpoint(place / "bert_model.ckpt", found, shards=2)
    if config is not None:
        (place / name).write_text(json.dumps(config))
    (place / "vocab.txt").write_text("".join(f"{word}\n" for word in WORDS))
    return place


def google(**more: Any) -> dict[str, Any]:
    """As google-research/bert writes it."""
    return {
        **BERT_SIZES, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1,
        "initializer_range": 0.02, **more,
    }  # fmt: skip


def converted(source: Path, out: Path, *words: str) -> Any:
    """transformers' model of the folder that the command makes."""
    run_line("convert", source, "--out", out, *words)
    [name] = settings_in(out)["architectures"]
    return getattr(transformers, name).from_pretrained(out).eval()


def same_model(found: Any, wanted: Any) -> None:
    """Of one class, with the same weights and outputs, in transformers."""
    assert type(found) is type(wanted)
    theirs = found.state_dict()
    assert theirs.keys() == wanted.state_dict().keys()
    assert all(torch.equal(theirs[name], tensor) for name, tensor in wanted.state_dict().items())
    with torch.no_grad():
        models = (found, wanted)
        pairs = zip(*(model(**TEXT.padded).to_tuple() for model in models), strict=True)
        for one, other in pairs:
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    ["ForPreTraining", "ForMaskedLM", "ForSequenceClassification", "ForQuestionAnswering", "Model"],
)
def test_bert(name, tmp_path, capsys):
    model = bert(name, num_labels=3 if name == "ForSequenceClassification" else 2)
    found = bert_variables(model)
    if name == "Model":
        found = {f"bert/{variable}": array for variable, array in found.items()}
    # What is not transposed there: only matrices called kernel are.
    assert any(variable.endswith("/attention/self/query/kernel") for variable in found)
    source = write_folder(tmp_path / "google", with_slots(found), google())
    same_model(converted(source, tmp_path / "out"), model)
    report = capsys.readouterr().out
    assert f"{len(found)} tensors loaded" in report
    assert f"{2 * len(found) + 1} unused (the optimizer's state)" in report
    assert settings_in(tmp_path / "out")["hidden_act"] == "gelu_pytorch_tanh"


ALBERT_NAMES = (
    ("^albert/", "bert/"),
    (r"albert_layer_groups/(\d+)/albert_layers/(\d+)", r"transformer/group_\1/inner_group_\2"),
    ("/full_layer_layer_norm/kernel", "/LayerNorm_1/gamma"),
    ("/full_layer_layer_norm/bias", "/LayerNorm_1/beta"),
    ("attention/LayerNorm", "LayerNorm"),
    ("attention/dense", "attention_1/output/dense"),
    ("attention/(query|key|value)", r"attention_1/self/\1"),
    ("/ffn/", "/ffn_1/intermediate/dense/"),
    ("/ffn_output/", "/ffn_1/intermediate/output/dense/"),
    ("^bert/pooler", "bert/pooler/dense"),
    ("^predictions/bias", "cls/predictions/output_bias"),
    ("^predictions/", "cls/predictions/transform/"),
    ("^sop_classifier/classifier/kernel", "cls/seq_relationship/output_weights"),
    ("^sop_classifier/classifier/bias", "cls/seq_relationship/output_bias"),
    ("^classifier/kernel", "output_weights"),
    ("^classifier/bias", "output_bias"),
)


@pytest.mark.parametrize(
    ("name", "groups", "inner"),
    [("ForPreTraining", 1, 1), ("ForPreTraining", 2, 2), ("ForSequenceClassification", 1, 1)],
)
def test_albert(name, groups, inner, tmp_path):
    groups_of = {"num_hidden_layers": 4, "num_hidden_groups": groups, "inner_group_num": inner}
    rates = {"hidden_dropout_prob": 0, "attention_probs_dropout_prob": 0}
    sizes = BERT_SIZES | {"embedding_size": 8} | groups_of | rates
    config = transformers.AlbertConfig(**sizes, hidden_act="gelu_new")
    model = stirred(getattr(transformers, f"Albert{name}")(config))
    found = variables(without_ties(model), *ALBERT_NAMES)
    written = {**sizes, "hidden_act": "gelu", "gap_size": 0}
    source = write_folder(tmp_path / "google", found, written, "albert_config.json")
    same_model(converted(source, tmp_path / "out"), model)
    assert read_tensorflow(source).model.config.activation == "gelu_tanh"


def electra(name: str, width: int, embedding: int) -> Any:
    sizes = {"hidden_size": width, "num_attention_heads": width // 64, "embedding_size": embedding}
    config = transformers.ElectraConfig(**(BERT_SIZES | sizes), hidden_act="gelu_new")
    return stirred(getattr(transformers, f"Electra{name}")(config))


def electra_variables(discriminator: Any, generator: Any, untied: bool) -> Variables:
    """Both in one file: the generator reads the discriminator's embeddings, unless it is untied."""
    found = variables(without_ties(discriminator), ("dense_prediction", "dense_1"))
    names = (
        ("^electra/", "generator/"),
        ("generator_lm_head/bias", "generator_predictions/output_bias"),
    )
    other = variables(without_ties(generator), *names)
    return found | {
        name: array
        for name, array in other.items()
        if untied or not name.startswith("generator/embeddings/")
    }


@pytest.mark.parametrize(("untied", "embedding"), [(False, 16), (True, 128)])
def test_electra(untied, embedding, tmp_path, capsys):
    discriminator = electra("ForPreTraining", 128, embedding)
    generator = electra("ForMaskedLM", 64, embedding)
    if not untied:
        generator.electra.embeddings.load_state_dict(discriminator.electra.embeddings.state_dict())
    found = electra_variables(discriminator, generator, untied)
    source = write_folder(tmp_path / "google", found, None)
    same_model(converted(source, tmp_path / "discriminator"), discriminator)
    assert "unused (the generator's)" in capsys.readouterr().out
    same_model(converted(source, tmp_path / "generator", "--part", "generator"), generator)
    assert "unused (the discriminator's)" in capsys.readouterr().out


@pytest.mark.parametrize(("words", "lowercase"), [(WORDS, True), ([*WORDS[:-1], "Cat"], False)])
def test_a_capital_letter_in_the_vocabulary_tells_that_it_is_cased(words, lowercase, tmp_path):
    source = write_folder(tmp_path / "google", bert_variables(bert()), google())
    (source / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    converted(source, tmp_path / "out")
    assert settings_in(tmp_path / "out", "tokenizer_config.json")["do_lower_case"] is lowercase
    peer = transformers.BertTokenizer(str(source / "vocab.txt"), do_lower_case=lowercase)
    lines = ["the Cats", "Cat cats"]
    found = [list(map(int, ids)) for ids in Tokenizer.load(tmp_path / "out").encode(lines)]
    assert found == [peer.encode(line, add_special_tokens=False) for line in lines]
    (source / "tokenizer_config.json").write_text('{"do_lower_case": true}')
    converted(source, tmp_path / "other")
    assert settings_in(tmp_path / "other", "tokenizer_config.json")["do_lower_case"] is True


def sentencepiece(*pieces: str) -> bytes:
    """A file of SentencePiece, of the kind that ALBERT has: pieces with falling scores."""
    scored = ((piece.encode(), struct.pack("<f", -at / 4)) for at, piece in enumerate(pieces))
    return b"".join(
        field(1, field(1, piece) + varint(2 << 3 | 5) + score) for piece, score in scored
    ) + field(2, field(3, 1))


def test_an_alberts_tokenizer_is_its_sentencepiece_file(tmp_path):
    config = transformers.AlbertConfig(**BERT_SIZES, embedding_size=8, hidden_act="gelu_new")
    model = stirred(transformers.AlbertForPreTraining(config))
    found, settings = variables(without_ties(model), *ALBERT_NAMES), google(embedding_size=8)
    source = write_folder(tmp_path / "google", found, settings, "albert_config.json")
    (source / "vocab.txt").unlink()
    pieces = sentencepiece("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]", "▁the", "▁cat", "s")
    (source / "30k-clean.model").write_bytes(pieces)
    converted(source, tmp_path / "out")
    [ids] = Tokenizer.load(tmp_path / "out").encode(["The cats"])
    assert ids.tolist() == [5, 6, 7]
    peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert peer("The cats")["input_ids"] == [2, 5, 6, 7, 3]
    (source / "other.model").write_bytes(b"")
    assert read_tensorflow(source).tokenizer is None


def test_a_checkpoint_is_named_by_folder_index_or_prefix(tmp_path):
    bare = bert_variables(bert("Model"))
    source = write_folder(tmp_path / "google", bare, google())
    with pytest.raises(FolderError, match="holds no BERT, ALBERT or ELECTRA"):
        read_tensorflow(source)
    found = bert_variables(bert())
    odd = {**found, "odd/one": np.zeros(1, np.float32)}
    write_checkpoint(source / "bert_model.ckpt", odd, shards=2)
    for name in ("", "bert_model.ckpt", "bert_model.ckpt.index"):
        report = read_tensorflow(source / name).report
        assert report.unused == {"odd/one": "not a known part of this family"}
        run_line("convert", source / name, "--out", tmp_path / "new")
    write_checkpoint(source / "model.ckpt-5", found)
    with pytest.raises(FolderError, match=r"checkpoints: bert_model.ckpt.index, model.ckpt-5"):
        read_tensorflow(source)
    assert len(read_tensorflow(source / "model.ckpt-5").report.loaded) == len(found)
    for name, what in (("", "holds no checkpoint of TensorFlow"), ("nothing", "no such folder")):
        with pytest.raises(FolderError, match=rf"{what}.*: there is no \.index file"):
            read_tensorflow(tmp_path / name)


def test_a_folder_that_is_not_converted_says_how(tmp_path):
    source = write_folder(tmp_path / "google", bert_variables(bert()), google())
    with pytest.raises(FolderError, match=f"bothways convert {source} --out FOLDER"):
        load_model(source)
    with pytest.raises(ConfigError, match=r"part: 'generator' is a part of an ELECTRA, which .*in"):
        run_line("convert", source, "--out", tmp_path / "new", "--part", "generator")
    (source / "bert_config.json").unlink()
    with pytest.raises(
        FolderError, match=r"google: holds no bert_config\.json, .* number of heads"
    ):
        run_line("convert", source, "--out", tmp_path / "new")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_size": 32}, r"tensors of bert_model.ckpt.index: it says hidden_size 32, not 16"),
        ({"num_hidden_layers": 10**12}, "it says num_hidden_layers 1000000000000, not 2"),
        ({"vocab_size": "60"}, "it says vocab_size '60', not 60"),
        ({"num_attention_heads": 3}, "width 16 cannot be divided among 3 heads"),
        ({"num_attention_heads": None}, "num_attention_heads must be a whole number"),
        ({"hidden_act": "tanh"}, "hidden_act 'tanh' has no .*: it must be one of 'gelu', 'relu'"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused(settings, message, tmp_path):
    source = write_folder(tmp_path / "google", bert_variables(bert()), google(**settings))
    with pytest.raises(FolderError, match=message):
        read_tensorflow(source)


def test_what_the_configuration_leaves_out_is_read_off_the_tensors(tmp_path):
    config = google()
    del config["type_vocab_size"], config["max_position_embeddings"]
    found = read_tensorflow(write_folder(tmp_path / "google", bert_variables(bert()), config))
    assert (found.model.config.segments, found.model.config.position.max_positions) == (2, 20)


def lacking(*patterns: str) -> Variables:
    found, pattern = bert_variables(bert()), "|".join(patterns) or "^$"
    return {name: array for name, array in found.items() if not re.search(pattern, name)}


EMBEDDING, POOLER = "bert/embeddings/word_embeddings", "bert/pooler/dense/bias"
WIDE = np.zeros((2**40, 0), np.float32)


@pytest.mark.parametrize(
    ("without", "changed", "message"),
    [
        (["layer_0/output/dense/bias"], {}, "no tensor for bert.encoder.layer.0.output.dense.bias"),
        (["layer_0/attention/self/query/bias"], {}, r"1 missing: .*\.0\.attention.self.query.bias"),
        (["pooler", "cls"], {}, "has the heads none, for which transformers has no class"),
        ([], {EMBEDDING: np.ones(VOCAB, np.float32)}, "another shape: .*word_embeddings.weight is"),
        ([], {EMBEDDING: np.float32(1)}, "no tensor for bert.embeddings.word_embeddings.weight"),
        ([], {EMBEDDING: WIDE}, r"of 1 axes or more: it is \[1099511627776, 0\]"),
        (["cls"], {"output_weights": WIDE[:3], "output_bias": WIDE}, "1099511627776"),
        ([], {POOLER: np.zeros(16, np.int32)}, "holds bert.pooler.dense.bias as int32"),
    ],
)
def test_a_checkpoint_that_lacks_something_is_refused(without, changed, message, tmp_path):
    found = {**lacking(*without), **changed}
    with pytest.raises(FolderError, match=message):
        read_tensorflow(write_folder(tmp_path / "google", found, google()))


def test_of_heads_without_a_class_the_most_are_kept(tmp_path):
    source = write_folder(tmp_path / "google", lacking("seq_relationship"), google())
    found = read_tensorflow(source)
    assert list(found.model.heads) == ["masked"]
    assert found.report.unused["bert.pooler.dense.weight"] == "the pooler head was not requested"
