"""Predictors: what they can be called with, and that threads can share one."""

import copy
import io
import itertools
import json
import os
import pickle
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

import bothways
from bothways.core.errors import ConfigError, DataError, DivergedError, ResourceError
from bothways.core.runtime.devices import has_bf16, has_int8
from bothways.prediction.engine import prepare_task_model
from bothways.prediction.opening import open_task, open_task_model
from bothways.prediction.predictor import Predictor
from bothways.prediction.prepared_model import PredictPrecision
from bothways.tasks.choice.task import ChoiceExample
from bothways.tasks.text_task import TextExample
from closeness import assert_close
from commands import run_line
from spread import in_turn
from toy_folder import save_classifier
from toy_predictors import TASKS, TEXTS, predictor

CPU = torch.device("cpu")
PRECISIONS: list[PredictPrecision] = ["fp32"]
PRECISIONS += ["bf16"] if has_bf16(CPU) else []
PRECISIONS += ["int8"] if has_int8(CPU) else []


def plain(prediction: Any) -> Any:
    return json.dumps(prediction.to_json())


@pytest.mark.parametrize(
    ("name", "precision"), in_turn([(name,) for name in TASKS], PRECISIONS, [*TASKS])
)
def test_concurrent_predictions_equal_sequential_ones(folder, name, precision):
    ready, inputs = predictor(folder, name, precision), TASKS[name][1][::12]
    assert ready.precision == precision
    calls = [inputs[at : at + 1 + at % 5] for at in range(len(inputs))] * 2
    wanted = [[plain(prediction) for prediction in ready(call)] for call in calls]
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda call: [plain(each) for each in ready(call)], calls))
    assert found == wanted


def test_one_input_gives_one_prediction_and_several_give_a_list(predictors):
    classify = predictors["classify"]
    one = classify(TEXTS[0])
    assert one.label in {"neg", "pos"}
    assert classify([TEXTS[0]]) == [one]
    assert classify(TextExample(TEXTS[0])) == one
    assert classify(iter(TEXTS[:2])) == classify(TEXTS[:2])
    assert classify([]) == []
    pair = classify((TEXTS[0], TEXTS[1]))
    assert [pair] == classify([(TEXTS[0], TEXTS[1])])
    assert pair != one


@pytest.mark.parametrize(("stated", "length"), [(8, 8), (10**30, 32), (None, 32), (64, 32)])
def test_a_model_of_another_program_reads_as_many_tokens_as_its_tokenizer(
    folder, tmp_path, stated, length
):
    model = save_classifier(tmp_path / "model", folder)
    file = model / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"model_max_length": stated}))
    assert open_task_model(model).length == length
    assert open_task_model(model, length=16).length == 16


def test_a_pickled_predictor_opens_its_folder_again(folder):
    embed = open_task(folder, "embed", device="cpu", precision="fp32", settings={"pooling": "cls"})
    again = pickle.loads(pickle.dumps(embed))
    np.testing.assert_array_equal(again.encode(TEXTS), embed.encode(TEXTS))
    assert copy.deepcopy(embed) is embed
    with pytest.raises(ConfigError, match="no model folder"):
        pickle.dumps(Predictor(embed.task_model))


def test_what_is_opened_by_a_relative_name_works_from_another_folder(folder, tmp_path, monkeypatch):
    """As after %cd in a notebook, or in a process that begins elsewhere."""
    monkeypatch.chdir(folder.parent)
    embed, model = bothways.load(folder.name, "embed"), bothways.load_model(folder.name)
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(
        pickle.loads(pickle.dumps(embed)).encode(TEXTS), embed.encode(TEXTS)
    )
    assert embed.unprepared().tokenizer.size == model.tokenizer.size
    assert (model.save("saved") / "tokenizer.json").exists()


def test_a_forked_process_with_threads_is_refused(folder, predictors, monkeypatch):
    """OpenMP would wait for threads that are in the other process only."""
    classify = predictors["classify"]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    wanted = classify(TEXTS[:2])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert classify(TEXTS[:2]) == wanted
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    for call in (lambda: classify(TEXTS[:2]), lambda: open_task(folder, "embed")):
        with pytest.raises(ResourceError, match=r"forked(.|\n)*set_num_threads\(1\)"):
            call()


@pytest.mark.parametrize("name", ["question", "candidate_labels", "top_k", "batch_size"])
def test_arguments_of_pipelines_are_refused_with_advice(predictors, name):
    for inputs in ((), (TEXTS[0],)):
        with pytest.raises(ConfigError) as caught:
            predictors["classify"](*inputs, **{name: "a"})
        assert caught.value.where == name
    with pytest.raises(ConfigError) as caught:
        predictors["classify"](TEXTS[0], "a")
    assert caught.value.where == "'a'"


def test_tables_are_read_by_row(predictors):
    """Iterating over a DataFrame would predict the names of its columns."""
    import datasets
    import pandas
    import pyarrow

    classify, texts = predictors["classify"], TEXTS[:3]
    wanted = classify(texts)
    frame = pandas.DataFrame({"stars": [1.0, 2.0, None], "text": texts}, index=[4, 4, 9])
    columns = pyarrow.array(texts), pyarrow.chunked_array([texts[:1], texts[1:]])
    for inputs in (
        frame, pyarrow.Table.from_pandas(frame), *columns, frame["text"], np.array(texts),
    ):  # fmt: skip
        assert classify(inputs) == wanted
        assert [prediction for _, prediction in classify.predict_examples(inputs)] == wanted
    assert classify(np.array([texts[:2]])) == [classify((texts[0], texts[1]))]
    frame["label"] = [prediction.label for prediction in wanted]
    assert classify.evaluate(frame)["accuracy"] == 1
    assert classify.evaluate({name: frame[name] for name in frame})["accuracy"] == 1
    named = frame.rename(columns={"label": "opinion"})
    with pytest.raises(DataError, match=r"which column is the label \(stars, text, opinion\)"):
        classify.evaluate(named)
    with pytest.raises(ConfigError, match="columns are named"):
        classify.evaluate(named, frame["label"], text="text")
    assert classify(()) == []
    twice = pandas.DataFrame([texts[:2]], columns=["text", "text"])
    with pytest.raises(DataError, match="two columns are called 'text'"):
        classify(twice)
    with pytest.raises(DataError, match="inputs: is of type bytes, which has no rows"):
        classify(b"text")
    with pytest.raises(DataError, match="inputs: is of type ndarray, which has no rows"):
        classify(np.array("text"))
    splits = datasets.DatasetDict(test=datasets.Dataset.from_dict({"text": texts}))
    embed = predictors["embed"]
    for function in (classify, classify.predict, embed.encode):
        with pytest.raises(DataError, match="is a DatasetDict of test, not of"):
            function(splits)


BATCHES: dict[str, dict[str, list[Any]]] = {
    "classify": {"text": TEXTS[:2], "label": ["pos", "neg"]},
    "regress": {"sentence1": TEXTS[:2], "sentence2": TEXTS[1:3]},
    "rerank": {"query": TEXTS[:2], "documents": [TEXTS[1:3], TEXTS[:3]]},
    "label": {"text": TEXTS[:2], "labels": [["pos"], []]},
    "choice": {"context": TEXTS[:2], "endings": [TEXTS[1:3], TEXTS[:2]]},
    "tag": {"tokens": [["a", "film"], ["rain"]], "tags": [["O", "O"], ["O"]]},
    "answer": {"question": TEXTS[:2], "context": TEXTS[1:3]},
    "fill": {"text": ["a [MASK]", "the [MASK]"]},
    "likelihood": {"text": TEXTS[:2]},
    "zero-shot": {"text": TEXTS[:2]},
    "embed": {"anchor": TEXTS[:2], "positive": TEXTS[1:3]},
}


@pytest.mark.parametrize("task", BATCHES)
def test_a_dict_of_columns_is_a_table(task, predictors):
    """As the batches of datasets' `map(…, batched=True)`."""
    predict, batch = predictors[task], BATCHES[task]
    rows = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    expected = predict(rows)
    arrays = {name: np.array(values, object) for name, values in batch.items()}
    assert repr(predict(batch)) == repr(predict(arrays)) == repr(expected)
    assert type(predict(rows[0])) is type(expected[0])


def test_columns_in_place_of_texts_and_words(predictors):
    embed, tag = predictors["embed"], predictors["tag"]
    batch = {"text": TEXTS[:2], "label": ["a", "b"]}
    assert_close(embed.encode(batch), embed.encode(TEXTS[:2]))
    classify = predictors["classify"]
    right, wrong = classify(TEXTS[0]).label, {"pos": "neg", "neg": "pos"}[classify(TEXTS[1]).label]
    assert classify.score(batch, [right, wrong]) == 0.5
    with pytest.raises(DataError, match="of texts, not of words: 'a good film'"):
        tag({"text": ["a good film", "a bad play"]})
    assert tag({"text": ["a", "film"]}).words == ("a", "film")
    uneven = {"text": TEXTS[:2], "label": ["a"]}
    with pytest.raises(DataError, match="columns of different length: text 2, label 1"):
        embed(uneven)


def test_questions_without_an_id_have_the_number_of_their_row(predictors):
    answer, pairs = predictors["answer"], [("who?", "a film"), ("what?", "rain")]
    rows = [{"question": question, "context": context} for question, context in pairs]
    for inputs in (pairs, rows):
        assert [prediction.id for prediction in answer(inputs)] == ["1", "2"]
        assert [question.id for question, _ in answer.predict_examples(inputs)] == ["1", "2"]
    assert [prediction.id for prediction in answer([{**row, "id": "q"} for row in rows])] == [
        "q"
    ] * 2


def test_functions_read_tables_in_memory_and_the_columns_that_are_named(model, tmp_path):
    """A list of a table is one of the names of its columns."""
    import datasets
    import pandas

    classify, texts = bothways.load(model), TEXTS[:8]
    found = [classify(text).label for text in texts]
    frame = pandas.DataFrame({"text": texts[::-1], "label": "no", "other": texts, "gold": found})
    named = {"text": "other", "progress": False}
    classes = datasets.Features(
        {"other": datasets.Value("string"), "gold": datasets.ClassLabel(names=["neg", "pos"])}
    )
    data = datasets.Dataset.from_pandas(frame[["other", "gold"]], features=classes)
    for rows in (frame, frame.to_dict("list"), frame.to_dict("records"), data):
        assert [row["label"] for row in bothways.predict(model, rows, **named)] == found
        assert bothways.evaluate(model, rows, label="gold", **named).metrics["accuracy"] == 1
    numbered = pandas.DataFrame([[text, 1.5] for text in texts]).to_dict("records")
    predicted = bothways.predict(model, numbered, text="0", progress=False)
    assert [row["label"] for row in predicted] == found
    with pytest.raises(DataError, match="input 1: has no column 'nothing'"):
        next(iter(bothways.predict(model, frame, text="nothing", progress=False)))
    with pytest.raises(DataError, match=r"input 1: has no columns, .* text = 'other'"):
        next(iter(bothways.predict(model, [("a good film", "it ends")], **named)))
    for function in (bothways.evaluate, bothways.predict):
        with pytest.raises(ConfigError, match="unknown runtime 'jax'"):
            function(model, frame, runtime="jax", **named)
    with pytest.raises(DataError, match=r"^Is it good\?: matches no file\n.*load\(MODEL\)"):
        bothways.predict(model, "Is it good?", progress=False)
    frame.to_csv(tmp_path / "rows.csv")
    first = next(iter(bothways.predict(model, tmp_path / "rows.csv", keep="gold", **named)))
    assert first["gold"] == found[0]


def test_rows_are_read_by_their_columns(predictors):
    text, other = TEXTS[:2]
    classify = predictors["classify"]
    assert classify({"sentence": text, "label": "neg"}) == classify(text)
    rows = [{"sentence1": text, "sentence2": other, "label": "pos"}]
    assert classify(rows) == [classify((text, other))]
    assert classify.evaluate([{"text": text, "label": classify(text).label}])["accuracy"] == 1
    answer = predictors["answer"]
    assert answer({"question": text, "context": other}).text == answer((text, other)).text
    choose = predictors["choice"]
    row = {"context": text, "ending0": other, "ending1": text}
    assert choose(row) == choose(ChoiceExample(text, (other, text)))


@pytest.mark.parametrize(
    ("task", "settings", "message"),
    [
        (None, {"normalize_embeddings": True}, "is a setting of embed; the task here is classify"),
        ("embed", {"abstain": 0.9}, "is a setting of classify and zero-shot; the task .* embed"),
        ("embed", {"top_k": 3}, "is a setting of fill; the task here is embed\n  Leave it out"),
        (None, {"top_k": 3}, r"is a setting of fill; .*\n  .* give predict best=2\.$"),
        ("embed", {"stripe": 3}, "unknown key 'stripe'"),
    ],
)
def test_settings_of_other_tasks_are_named_as_they_were_given(model, task, settings, message):
    (name,) = settings
    with pytest.raises(ConfigError, match=f"^{name}: {message}"):
        bothways.load(model, task, **settings)


def test_streams_are_lazy(predictors):
    taken = []
    inputs = (taken.append(number) or TEXTS[0] for number in itertools.count())
    stream = predictors["classify"].stream(inputs, window=4)
    next(stream)
    assert taken == [0, 1, 2, 3]


def test_inputs_of_another_shape_are_one_message(predictors):
    with pytest.raises(DataError, match="input 2: is of type int: it must be a text"):
        predictors["classify"](["a", 5])
    with pytest.raises(DataError, match="input 1: is of type tuple with NoneType"):
        predictors["classify"]([("a", None)])
    with pytest.raises(DataError, match="input 1: a tuple with a list needs"):  # not a text alone
        predictors["classify"](("a", []))
    with pytest.raises(DataError, match="input 1: is one text, and the task 'answer' needs"):
        predictors["answer"]("who?")
    needs = r"input 1: is 2 texts, and the task 'tag' needs one text, or words: \{\"words\""
    with pytest.raises(DataError, match=needs):
        predictors["tag"](("a", "b"))
    for row, message in (
        ({"body of it": "a"}, r"is the text \(body of it\)\n  Call it 'text'"),
        ({"text": "a", "sentence": "b"}, r"is the text \(text, sentence\)\n  Give one"),
    ):
        with pytest.raises(DataError, match=message):  # a call takes no names of columns
            predictors["classify"](row)
    with pytest.raises(DataError, match="use text=NAME"):
        predictors["classify"].evaluate([{"body of it": "a", "label": "a"}])


def test_outputs_that_are_not_finite_are_an_error(folder, tmp_path, capsys):
    """Finite weights give infinite logits."""

    def overflow(model):
        model.heads["labels"].dense.weight.data[0] = 3e38

    place = save_classifier(tmp_path / "model", folder, change=overflow)
    with pytest.raises(DivergedError, match=r"input 1: the model's output is not finite"):
        open_task(place, device="cpu")("the film was good")
    (tmp_path / "texts.txt").write_text("the film was good\n")
    with pytest.raises(DivergedError, match=r"not finite"):
        run_line("predict", place, tmp_path / "texts.txt", "--device", "cpu")
    assert "NaN" not in capsys.readouterr().out


def test_bf16_without_its_instructions_is_refused_everywhere_and_auto_takes_fp32(
    folder, monkeypatch, capsys
):
    monkeypatch.setattr("bothways.core.runtime.devices.has_bf16", lambda device: False)
    words = ["predict", str(folder), "-", "--task", "fill", "--device", "cpu", "--precision"]
    scored = ["evaluate", str(folder), "x.txt", "--task", "likelihood", "--device", "cpu"]
    task_model = open_task_model(folder, "embed", device="cpu")
    calls = (
        lambda: open_task(folder, "embed", precision="bf16", device="cpu"),
        lambda: prepare_task_model(task_model, "bf16"),
        lambda: run_line(*words, "bf16"),
        lambda: run_line(*scored, "--precision", "bf16"),
    )
    for call in calls:
        with pytest.raises(ConfigError, match=r"^precision: .* has no bf16 instructions"):
            call()
    assert open_task(folder, "embed", precision="auto", device="cpu").precision == "fp32"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"the [MASK] was good\n")))
    run_line(*words, "auto")
    assert "note: predicted in fp32" in capsys.readouterr().err


def test_predict_prints_the_most_probable_labels(folder, tmp_path, capsys):
    model = save_classifier(tmp_path / "m", folder, ("a", "b", "c"))
    (tmp_path / "texts.txt").write_text("the film was good\n")
    run_line("predict", model, tmp_path / "texts.txt", "--device", "cpu", "--top", "2")
    found = json.loads(capsys.readouterr().out)
    assert len(found["probabilities"]) == 2
    assert next(iter(found["probabilities"])) == found["label"]
