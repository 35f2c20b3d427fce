"""Predictors have the words of scikit-learn and sentence-transformers."""

import json
import pickle
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from sklearn.base import clone
from sklearn.exceptions import NotFittedError, SkipTestWarning
from sklearn.metrics import r2_score
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks

import bothways
from bothways.core.errors import BothwaysError, ConfigError, DataError, FolderError
from bothways.prediction.opening import rebound
from bothways.sklearn import Classifier
from bothways.tasks.text_task import TextColumns
from closeness import assert_close
from toy_folder import make_examples, make_sentence_encoder

TEXTS = ["a good film", "a bad play", "the film was good"]


@pytest.fixture(scope="module")
def embed(folder) -> Any:
    return bothways.load(folder, "embed")


def test_a_classifier_has_arrays_of_labels_and_probabilities(predictors):
    classify = predictors["classify"]
    found = classify(TEXTS)
    for inputs in (TEXTS, np.array(TEXTS), pandas.Series(TEXTS), pandas.DataFrame({"text": TEXTS})):
        labels, rows = classify.predict(inputs), classify.predict_proba(inputs)
        assert labels.tolist() == [prediction.label for prediction in found]
        assert rows.shape == (3, len(classify.classes_))
        assert classify.classes_[rows.argmax(1)].tolist() == labels.tolist()
    assert classify.predict(TEXTS[0]) == found[0].label
    assert classify.predict([]).shape == (0,)
    assert classify.predict_proba([]).shape == (0, len(classify.classes_))
    assert classify.predict(TEXTS, batch_size=1).tolist() == labels.tolist()
    assert classify.score(TEXTS, labels) == 1.0
    assert classify.evaluate(TEXTS, list(labels))["accuracy"] == 1.0
    assert classify.evaluate(pandas.Series(TEXTS), pandas.Series(labels))["accuracy"] == 1.0
    frame = pandas.DataFrame({"said": TEXTS, "meant": labels})
    assert classify.evaluate(frame, text="said", label="meant")["accuracy"] == 1.0
    with pytest.raises(ConfigError, match=r"^columns\.answer: unknown key"):
        classify.evaluate(frame, answer="meant")
    reading = classify.read([{"text": TEXTS[0], "label": labels[0]}], labelled=True)
    with pytest.raises(ConfigError, match=r"^columns: "):
        classify.evaluate(reading, text="said")


def test_answers_that_do_not_fit_are_refused(predictors):
    classify = predictors["classify"]
    with pytest.raises(DataError) as short:
        classify.score(TEXTS, [classify.classes_[0]])
    assert short.value.where == "answers"
    assert short.value.what == f"1 answer for {len(TEXTS)} inputs"
    with pytest.raises(BothwaysError):
        classify.evaluate(TEXTS, ["no such label"] * 3)
    message = r"^answers: answers of the task 'tag' are part of the rows\n.*to evaluate\(rows\)"
    with pytest.raises(DataError, match=message):
        predictors["tag"].score(["a b"], [["O", "O"]])


def test_other_tasks_have_the_words_that_fit(predictors, embed):
    regress = predictors["regress"]
    numbers = regress.predict(TEXTS)
    assert numbers.dtype == np.float64
    assert regress.score(TEXTS, numbers) == pytest.approx(1.0)
    assert regress.score(TEXTS, [float(numbers.mean())] * 3) != 1.0
    truth = numbers + np.array([0.5, -0.25, 1.0])
    expected = r2_score(truth, numbers)
    assert regress.score(TEXTS, truth) == pytest.approx(expected)
    assert regress.score(iter(TEXTS), iter(truth)) == pytest.approx(expected)
    tag = predictors["tag"]
    assert [len(tags) for tags in tag.predict(TEXTS)] == [3, 3, 4]
    multilabel = predictors["label"]
    assert multilabel.predict_proba(TEXTS).shape == (3, len(multilabel.classes_))
    answers = multilabel.predict(TEXTS)
    pairs = zip(TEXTS, answers, strict=True)
    rows = [{"text": text, "labels": [*labels]} for text, labels in pairs]
    assert multilabel.evaluate(TEXTS, answers) == multilabel.evaluate(rows)
    rows = [{"anchor": "a film", "positive": "film"}, {"anchor": "rain", "positive": "the rain"}]
    assert embed.score(rows, None) == embed.evaluate(rows)["ndcg@10"]
    for method in ("predict", "predict_proba"):
        with pytest.raises(ConfigError, match=f"'embed' has no {method}"):
            getattr(embed, method)(TEXTS)
    with pytest.raises(ConfigError, match=r"encode is for the task 'embed', .* 'tag'"):
        tag.encode(TEXTS)
    assert not hasattr(embed, "classes_")
    assert not hasattr(regress, "classes_")


def test_encode_takes_the_arguments_of_sentence_transformers(embed):
    plain = embed.encode(TEXTS)
    assert embed.encode(TEXTS[1]) == pytest.approx(plain[1], abs=1e-5)
    assert embed.encode([]).shape == (0, plain.shape[1])
    unit = embed.encode(TEXTS, normalize_embeddings=True, batch_size=2)
    assert np.linalg.norm(unit, axis=1) == pytest.approx(np.ones(3))
    assert unit == pytest.approx(plain / np.linalg.norm(plain, axis=1, keepdims=True), abs=1e-6)
    short = embed.encode(TEXTS, truncate_dim=5)
    assert short.tolist() == plain[:, :5].tolist()
    assert short.flags.c_contiguous  # faiss takes no other arrays
    with pytest.raises(ConfigError, match=rf"^truncate_dim: must be at most {plain.shape[1]}, "):
        embed.encode(TEXTS, truncate_dim=plain.shape[1] + 1)
    assert isinstance(embed.encode(TEXTS, convert_to_tensor=True), torch.Tensor)
    assert len(embed.encode(TEXTS, convert_to_numpy=False)) == 3
    assert embed.similarity(TEXTS[0], TEXTS).shape == (1, 3)
    assert embed.similarity(plain, plain).diagonal() == pytest.approx(np.ones(3))
    assert embed.similarity([], TEXTS).shape == (0, 3)
    vectors = torch.tensor(plain, dtype=torch.bfloat16, requires_grad=True)  # numpy reads neither
    expected = embed.similarity(vectors.detach().float().numpy(), TEXTS)
    assert embed.similarity(vectors, TEXTS).tolist() == expected.tolist()
    with pytest.raises(DataError, match=r"^input 1: "):
        embed.similarity([*vectors.detach()], TEXTS)
    assert embed.similarity_pairwise(plain, plain[::-1]) == pytest.approx(
        embed.similarity(plain, plain[::-1]).diagonal(), abs=1e-6
    )
    with pytest.raises(DataError) as uneven:
        embed.similarity_pairwise(TEXTS, TEXTS[:2])
    assert uneven.value.where == "second"
    with pytest.raises(DataError, match="queries have 5 components"):
        embed.similarity(plain[:, :5], TEXTS)
    with pytest.raises(DataError, match="has two texts") as pair:
        embed.similarity([TEXTS[0], (TEXTS[1], TEXTS[2])], TEXTS)
    for precision in ("int8", "ubinary"):
        with pytest.raises(DataError, match=r"u?int8") as caught:
            embed.similarity(TEXTS, embed.encode(TEXTS, precision=precision))
        assert caught.value.where == "second"
    assert pair.value.where == "input 2"
    with pytest.raises(TypeError, match="normalise"):
        embed.encode(TEXTS, normalise=True)
    with pytest.raises(ConfigError) as size:
        embed.encode(TEXTS, batch_size=0)
    assert size.value.where == "batch_size"


def test_similarity_is_the_function_of_the_folder(embed, folder):
    other = bothways.load(folder, "embed")
    a, b = embed.encode(TEXTS[:1]), embed.encode(TEXTS)
    for name, expected in {
        "dot": a @ b.T,
        "euclidean": -np.linalg.norm(a - b, axis=1)[None],
        "manhattan": -np.abs(a - b).sum(1)[None],
    }.items():
        config = {"similarity_fn_name": name}
        other.task_model.model.kept = {"config_sentence_transformers.json": config}
        assert other.similarity(TEXTS[0], TEXTS) == pytest.approx(expected, abs=1e-5)
        with torch.device("meta"):  # another default device of the calling program
            assert other.similarity(TEXTS[0], TEXTS) == pytest.approx(expected, abs=1e-5)
        pairs = other.similarity_pairwise([TEXTS[0]] * len(TEXTS), TEXTS)
        assert pairs == pytest.approx(expected[0], abs=1e-5)
        many = np.ones((400, 100))
        tracemalloc.start()
        assert other.similarity(many, many).shape == (400, 400)
        assert tracemalloc.get_traced_memory()[1] < 8e6  # of all differences it would be 64e6
        tracemalloc.stop()


def test_no_cosine_is_above_one(embed):
    vectors = np.random.default_rng(0).standard_normal((200, 384)).astype(np.float32)
    assert np.diag(embed.similarity(vectors, vectors)) == pytest.approx(1)
    assert embed.similarity(vectors, vectors).max() <= 1
    assert embed.similarity_pairwise(vectors, vectors).max() <= 1
    many = np.ones((1000, 2), dtype=np.float32)
    tracemalloc.start()
    assert embed.similarity(many, many).shape == (1000, 1000)
    assert tracemalloc.get_traced_memory()[1] < 6e6  # 4e6 for the cosines, which have no copy
    tracemalloc.stop()


@pytest.mark.parametrize("prompts", [
    {"query": "the old ", "document": "rain "}, {"query": "the old "}, {},
])  # fmt: skip
def test_queries_and_documents_have_their_vectors_of_sentence_transformers(prompts, tmp_path):
    from sentence_transformers import SentenceTransformer

    folder = make_sentence_encoder(tmp_path / "folder")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts}))
    embed = bothways.load(folder)
    reference = SentenceTransformer(str(folder), device="cpu")
    assert_close(embed.encode_query(TEXTS), reference.encode_query(TEXTS))
    assert_close(embed.encode_document(TEXTS[0]), reference.encode_document(TEXTS[0]))
    cut = {"truncate_dim": 8, "normalize_embeddings": True}
    assert_close(embed.encode_query(TEXTS, **cut), reference.encode_query(TEXTS, **cut))
    for given in ({"prompt": "a "}, {"prompt": ""}, *({"prompt_name": name} for name in prompts)):
        assert_close(
            embed.encode_document(TEXTS, **given), reference.encode_document(TEXTS, **given)
        )
    pairs = embed.encode(TEXTS), embed.encode_query(TEXTS)
    assert_close(embed.similarity_pairwise(*pairs), reference.similarity_pairwise(*pairs))


def test_roles_have_the_prompts_of_search(embed, predictors):
    """E5's name of documents; and the default prompt where a role has none of its own."""
    prompts = {"query": "the ", "passage": "rain ", "other": "a "}
    for name, query, document in ((None, "the ", "rain "), ("other", "the ", "rain ")):
        other = rebound(embed.task_model, {"prompts": prompts, "prompt_name": name})
        predict = bothways.Predictor(other)
        assert_close(predict.encode_query(TEXTS), embed.encode(TEXTS, prompt=query))
        assert_close(predict.encode_document(TEXTS), embed.encode(TEXTS, prompt=document))
    only = rebound(embed.task_model, {"prompts": {"other": "a "}, "prompt_name": "other"})
    expected = embed.encode(TEXTS, prompt="a ")
    assert_close(bothways.Predictor(only).encode_query(TEXTS), expected)
    with pytest.raises(ConfigError, match=r"encode is for the task 'embed', .* 'tag'"):
        predictors["tag"].encode_query(TEXTS)


def test_models_are_opened_with_settings_of_other_libraries(folder):
    embed = bothways.load(folder, "embed", max_seq_length=8, truncate_dim=4)
    assert embed.task_model.length == 8
    assert embed.encode(TEXTS).shape == (3, 4)
    assert bothways.load(folder, "embed", normalize_embeddings=True).task_model.task.normalised
    with pytest.raises(ConfigError, match="another name of 'components'"):
        bothways.load(folder, "embed", components=4, truncate_dim=4)
    with pytest.raises(ConfigError, match="length: is given twice"):
        bothways.load(folder, "embed", length=8, max_seq_length=16)


def test_a_pair_is_refused_where_the_model_reads_one_text(folder, tmp_path):
    rows = [{"text": text, "label": label} for text, label in zip(TEXTS, "aba", strict=True)]
    settings: Any = {"epochs": 1, "device": "cpu", "progress": False}
    pandas.DataFrame(rows).to_csv(tmp_path / "one.csv", index=False)
    result = bothways.finetune(folder, tmp_path / "one.csv", **settings)
    with pytest.raises(ConfigError, match=r"result\.predictor\(\)\(inputs\)"):
        result.predictor(TEXTS[0])  # in place of a precision
    classify = result.predictor()
    with pytest.raises(DataError, match="has 2 texts"):
        classify((TEXTS[0], TEXTS[1]))
    assert len(classify.predict(TEXTS[:2])) == 2
    pairs = pandas.DataFrame([{**row, "text_b": "it ends"} for row in rows])
    pairs.to_csv(tmp_path / "two.csv", index=False)
    compare = bothways.finetune(folder, tmp_path / "two.csv", **settings).predictor()
    with pytest.raises(DataError, match="has 1 text; the model was trained on 2"):
        compare(TEXTS[0])
    assert compare((TEXTS[0], "it ends")).label in {"a", "b"}
    assert len([*classify.predict_examples(tmp_path / "two.csv")]) == 3  # the column of training
    other = pairs.rename(columns={"text": "sentence1", "text_b": "sentence2"})
    other.to_csv(tmp_path / "other.csv", index=False)
    with pytest.raises(DataError, match=r"the model was trained on 1\n  .* or by text=NAME"):
        classify.read(tmp_path / "other.csv", labelled=False)
    with pytest.raises(DataError, match=r"Give one, as column 'text'\.$"):
        classify({"sentence1": TEXTS[0], "sentence2": TEXTS[1]})
    with pytest.raises(DataError, match="columns 'text' and 'text_b' or by text=NAME, text_b=NAME"):
        compare.read(tmp_path / "two.csv", TextColumns("text"), labelled=False)


def test_predictors_models_and_tokenizers_are_shown_in_one_line(folder, embed, predictors):
    shown, model = repr(predictors["classify"]), bothways.load_model(folder)
    assert shown.startswith("Predictor(task='classify', labels=[")
    assert "precision='fp32', device='cpu'" in shown
    assert repr(model).startswith("PretrainedModel(layers=2, width=32, parameters=")
    assert repr(model.tokenizer).startswith("Tokenizer(WordPiece, size=")
    assert "\n" not in shown + repr(model)
    with pytest.raises(AttributeError):
        _ = embed.other


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("to", lambda folder, out: bothways.export_model(folder, out, to="graph")),
        ("to", lambda folder, out: bothways.export_model(folder, out, to=["onnx", "both"])),
        ("to", lambda folder, out: bothways.export_model(folder, out, to=[])),
        ("runtime", lambda folder, out: bothways.load(folder, runtime="tensorrt")),
        ("precision", lambda folder, out: bothways.load(folder, precision="fp8")),
        ("boundary", lambda folder, out: bothways.build_corpus(["t"], folder, out, boundary="x")),
        ("task", lambda folder, out: bothways.load(folder, "fly")),
    ],
)
def test_names_outside_a_closed_set_are_refused(name, call, folder, tmp_path):
    with pytest.raises(BothwaysError) as refused:
        call(folder, tmp_path / "out")
    assert refused.value.where == name
    assert not (tmp_path / "out").exists()


def test_dir_lists_public_names():
    assert dir(bothways) == sorted(bothways.__all__)
    with pytest.raises(AttributeError, match="SentenceTransformer"):
        _ = bothways.SentenceTransformer


@pytest.mark.parametrize("client", ["httpx", "httpx2"])  # the Hub's, older and newer
def test_an_upload_without_a_network_is_one_message(folder, monkeypatch, client):
    httpx = pytest.importorskip(client)

    def refuse(*_: object, **__: object) -> None:
        raise httpx.ConnectError("Name or service not known")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    with pytest.raises(FolderError) as refused:
        bothways.push_to_hub(folder, "me/my-model")
    assert refused.value.where == "me/my-model"


def test_vectors_have_the_same_bits_in_any_company(folder, embed):
    """As those of `bothways embed`."""
    command = bothways.load(folder, "embed", batch_invariant=True)
    assert embed.task_model.model.batch_invariant == command.task_model.model.batch_invariant
    many = embed.encode(TEXTS)
    np.testing.assert_array_equal(many, command.encode(TEXTS))
    if embed.task_model.model.batch_invariant:  # with the compiled kernels
        np.testing.assert_array_equal(embed.encode(TEXTS[0]), many[0])


EXAMPLES = make_examples(24, 1)
SENTENCES = [example.text for example in EXAMPLES]
LABELS = [example.label for example in EXAMPLES]


def make(folder: Path, **settings: Any) -> Classifier:
    return Classifier(str(folder), device="cpu", epochs=1, lr=1e-3, max_length=16, **settings)


@pytest.mark.parametrize(
    "check",
    [
        "check_estimator_cloneable", "check_estimator_repr", "check_valid_tag_types",
        "check_no_attributes_set_in_init", "check_get_params_invariance", "check_set_params",
        "check_parameters_default_constructible",
    ],
)  # fmt: skip
def test_checks_of_scikit_learn_without_arrays_of_numbers_pass(check):
    getattr(estimator_checks, check)("Classifier", Classifier())


def test_checks_with_arrays_of_numbers_are_left_out_by_the_tags():
    with pytest.warns(SkipTestWarning, match="requires input"):
        estimator_checks.check_estimator(Classifier())


def test_search_pipelines_clones_and_scores(folder):
    search = GridSearchCV(make(folder), {"lr": [1e-3]}, cv=2, error_score="raise")
    search.fit(SENTENCES, LABELS)
    assert set(search.predict(SENTENCES)) <= {*LABELS}
    assert clone(search.best_estimator_).get_params() == search.best_estimator_.get_params()
    pipeline = make_pipeline(FunctionTransformer(validate=False), make(folder))
    scores = cross_val_score(pipeline, np.array(SENTENCES), LABELS, cv=2, error_score="raise")
    assert scores.shape == (2,)


@pytest.mark.parametrize("kind", [str, int, bool])
def test_labels_keep_their_type_and_a_pickle_its_predictions(kind, folder):
    first = LABELS[0]
    labels = LABELS if kind is str else [kind(label == first) for label in LABELS]
    classifier = make(folder).fit(pandas.DataFrame({"message": SENTENCES}), labels)
    assert classifier.classes_.tolist() == sorted(set(labels))
    rows = classifier.predict_proba(SENTENCES)
    assert rows.sum(1) == pytest.approx(np.ones(len(SENTENCES)))
    assert {*classifier.predict(SENTENCES).tolist()} <= {*labels}
    assert classifier.score(SENTENCES, labels) == np.mean(classifier.predict(SENTENCES) == labels)
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(classifier))))
    assert again.predict_proba(SENTENCES) == pytest.approx(rows, abs=1e-5)


def test_pairs_are_two_columns(folder):
    frame = pandas.DataFrame({"a": SENTENCES, "b": SENTENCES[::-1]})
    classifier = make(folder).fit(frame, LABELS)
    pairs = [*zip(SENTENCES, SENTENCES[::-1], strict=True)]
    assert classifier.predict(pairs).tolist() == classifier.predict(frame).tolist()


def test_mistakes_are_those_of_scikit_learn_and_of_finetune(folder):
    with pytest.raises(NotFittedError):
        make(folder).predict(SENTENCES)
    with pytest.raises(ValueError, match="inconsistent numbers"):
        make(folder).fit(SENTENCES, LABELS[:-1])
    with pytest.raises(ValueError, match="X must hold texts"):
        make(folder).fit(np.ones((2, 3)), LABELS[:2])
    with pytest.raises(ConfigError, match="lrr"):
        make(folder, lrr=1).fit(SENTENCES, LABELS)


@pytest.mark.parametrize(
    ("inputs", "labels", "message"),
    [
        (SENTENCES, [[0, 1]] * 24, "y should be a 1d array"),
        (SENTENCES, [*LABELS[1:], None], "^y holds None"),
        ([*SENTENCES[1:], None], LABELS, "; row 24 is of type NoneType$"),
    ],
)
def test_what_fit_cannot_read_is_one_message(inputs, labels, message):
    with pytest.raises(ValueError, match=message):
        Classifier("bert").fit(inputs, labels)


def test_a_generator_draws_the_seed_and_pairs_are_no_single_texts(folder):
    state = np.random.RandomState(3)
    one, two = (make(folder, random_state=state).fit(SENTENCES, LABELS) for _ in range(2))
    assert not np.array_equal(one.predict_proba(SENTENCES), two.predict_proba(SENTENCES))
    again = make(folder, random_state=np.random.RandomState(3)).fit(SENTENCES, LABELS)
    assert np.array_equal(one.predict_proba(SENTENCES), again.predict_proba(SENTENCES))
    with pytest.raises(DataError, match="has 2 texts; the model was trained on 1"):
        one.predict([("a film", "a play")])
