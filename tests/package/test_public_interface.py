"""Every public name has a docstring with an example, and the examples run."""

import doctest
import inspect
import math
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pandas
import pytest

import bothways
from bothways.core.errors import BothwaysError
from bothways.core.progress import Progress, shown_progress
from bothways.finetuning.run import FinetuneResult
from bothways.hub.model_folder import LoadedModel
from bothways.lab.sweeps.folds import CrossValidation
from bothways.pretraining.run import PretrainResult
from bothways.training.run import Event
from toy_animals import WORDS, document
from toy_folder import BAD, GOOD, make_folder

SOURCE = Path(bothways.__file__).parent
PREDICTOR: bothways.Predictor = object.__new__(bothways.Predictor)
"""A predictor without a model, given where its folder is meant."""
NAMES = [name for name in bothways.__all__ if name != "__version__"]


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A folder with what the examples name: text, a tokenizer, a corpus, two models, data."""
    folder, rng = tmp_path_factory.mktemp("examples"), np.random.default_rng(0)
    (folder / "text.txt").write_text("\n\n".join(document(rng) for _ in range(60)) + "\n", "utf8")
    (folder / "tokenizer").mkdir()
    (folder / "tokenizer" / "vocab.txt").write_text("\n".join(WORDS) + "\n", "utf8")
    bothways.build_corpus(folder / "text.txt", folder / "tokenizer", folder / "corpus", workers=1)
    make_folder(folder / "my-bert", dropout=0.0, max_position_embeddings=128)
    rows = [{"text": f"a {word} film", "label": "positive"} for word in GOOD]
    rows += [{"text": f"a {word} play", "label": "negative"} for word in BAD]
    tuned = bothways.finetune(folder / "my-bert", rows * 10, epochs=4, lr=1e-2, batch_size=4)
    tuned.save(folder / "my-classifier")
    lines = "".join(f"{row['text']}\t{row['label']}\n" for row in rows * 4)
    for name in ("train.tsv", "dev.tsv"):
        (folder / name).write_text(f"text\tlabel\n{lines}", "utf8")
    return folder


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_of_a_public_name_run(name, place, monkeypatch):
    monkeypatch.chdir(place)
    runner, value = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS), getattr(bothways, name)
    names = {"bothways": bothways, name: value}
    test = doctest.DocTestParser().get_doctest(value.__doc__ or "", names, name, None, 0)
    assert test.examples, f"{name} has no example"
    assert runner.run(test).failed == 0


def docstrings(value: object) -> Iterator[str]:
    """The docstrings of an object that users get, and of its public members."""
    yield inspect.getdoc(value) or ""
    for name, member in vars(value).items() if inspect.isclass(value) else ():
        if not name.startswith("_") and (callable(member) or isinstance(member, property)):
            yield inspect.getdoc(member) or ""


def test_docstrings_name_what_users_can_import():
    results = [FinetuneResult, CrossValidation, PretrainResult, LoadedModel, Event, Progress]
    values = [*(getattr(bothways, name) for name in NAMES), *results]
    definition = re.compile(r"^(?:def|class) (\w+)", re.MULTILINE)
    texts = (file.read_text("utf8") for file in SOURCE.rglob("*.py"))
    defined = {name for text in texts for name in definition.findall(text)}
    hidden = defined - set(NAMES) - {value.__name__ for value in results}
    pattern = r"`([A-Z]\w*|[a-z_]\w*(?=[`(]))"  # `Task.read`, `open_task`, `load(…)`
    fields = {name for result in results for name in result.__annotations__}
    for value in values:
        known = {*dir(value), *getattr(value, "__annotations__", ()), *fields}
        found = {name for doc in docstrings(value) for name in re.findall(pattern, doc)}
        assert not found & hidden - known, value


def test_files_and_folders_may_be_strings(place, tmp_path):
    folder = str(tmp_path / "run")
    files = str(place / "train.tsv"), str(place / "dev.tsv")
    result = bothways.finetune(str(place / "my-bert"), *files, out=folder, epochs=1)
    assert "in_features" not in repr(result)  # the whole network
    assert repr(result).count("\n") == 0
    classify = bothways.load(folder)
    assert classify.evaluate(files[1]) == pytest.approx(dict(result.metrics))
    assert classify("a good film").label in {"positive", "negative"}
    assert [each.label for each in classify.stream(iter(["a good film"]))]


def test_an_argument_is_suggested_for_a_setting_that_there_is_not(place):
    for name, near in (("lenght", "length"), ("devcie", "device")):
        with pytest.raises(BothwaysError, match=f"^{name}: unknown argument.* {near}"):
            bothways.load(place / "my-bert", "embed", **{name: "cpu"})
    with pytest.raises(BothwaysError, match=r"^learning_rat: .* learning_rate\?"):
        bothways.finetune(place / "my-bert", place / "train.tsv", learning_rat=1)
    with pytest.raises(BothwaysError, match=r"^settings: unknown key"):  # `**settings` is no name
        bothways.finetune(place / "my-bert", place / "train.tsv", settings=["lr=1e-5"])


def test_columns_are_named_as_the_advice_says(place):
    rows = [{"said": "a good film", "meant": "yes"}, {"said": "a bad play", "meant": "no"}] * 4
    with pytest.raises(BothwaysError, match=r"use text=NAME"):
        bothways.finetune(place / "my-bert", rows, epochs=1)
    result = bothways.finetune(place / "my-bert", rows, epochs=1, text="said", label="meant")
    assert set(result.predictor().classes_) == {"yes", "no"}


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: bothways.train_tokenizer(["a"], kind="words"), "kind: unknown kind"),
        (lambda: bothways.train_tokenizer(["a"], colour=1), r"^colour: unknown key"),
        (lambda: bothways.train_tokenizer(["a"], size=60.5), r"^size: must be a whole number"),
        (lambda: bothways.load("x", length="12"), r"^length: must be a whole number or None, not"),
        (lambda: bothways.load("x", length=True), r"^length: .* not True"),
        (lambda: bothways.load(None), r"^folder: must be a text or a path, not NoneType"),
        (lambda: bothways.save_model(bothways, "folder"), r"^folder: must be .* path, not module"),
        (lambda: bothways.load("x", "classify", precision=3), r"^precision: unknown"),
        # From Python 3.14 on, a path whose name is too long does not exist.
        (lambda: bothways.load("x" * 300), r"config\.json: is longer than|: no such folder"),
        (lambda: bothways.finetune("x", [], folds=2.5), r"^folds: .* not 2\.5"),
        (
            lambda: bothways.finetune("x", [], resume="no"),
            r"^resume: must be True or False, not 'no'",
        ),
        (lambda: bothways.adapt("x", "y", "z", until=5), r"^until: must be a text or None, not 5"),
        (lambda: bothways.adapt("x", "y", replay_share="1", out="z"), r"^replay_share: must be a"),
        (lambda: bothways.adapt("x", [{"text": "a"}], "z"), r"^texts: must be .*, not dict\n"),
        (lambda: bothways.adapt("x", None, "z"), r"^texts: is of type NoneType"),
        (lambda: bothways.EncoderConfig(vocab="5"), r"^encoder\.vocab: must be a number, not '5'"),
        (lambda: PREDICTOR.predict([], batch_size="2"), "^batch_size: must be a whole number"),
        (
            lambda: bothways.train_tokenizer(["a"], strip_accents=3),
            r"^strip_accents: 3 is",
        ),
        (lambda: bothways.train_tokenizer(["a"], ceiling=math.inf), "ceiling: must be a number of"),
        (lambda: bothways.train_tokenizer(["a", None]), "text 2: is of type NoneType: give"),
        (
            lambda: bothways.train_tokenizer(pandas.DataFrame({"body": ["a"]})),
            "text 1: has no column 'text'; it has body\n.*: column=NAME",
        ),
        (lambda: bothways.build_corpus(["a dog"], "x", "y"), r"rows: \[{\"text\": \"…\"}\]"),
        (
            lambda: bothways.build_corpus(["a dog " * 999], "x", "y"),
            r"^a dog.{60,80} …: (cannot|no )",
        ),
        (lambda: bothways.build_corpus([{"text": "a"}], "x", "y", boundary="line"), "^boundary:"),
        (lambda: bothways.train_tokenizer(["a"], column="body"), "^column: does nothing"),
        (lambda: bothways.build_corpus([], pandas.DataFrame(), "y"), "^tokenizer: .* DataFrame"),
        (lambda: bothways.pretrain(5), "corpus: is of type int, neither a corpus nor its folder"),
        (lambda: bothways.show([None]), "corpus: is of type NoneType, neither"),
        (lambda: bothways.average([PREDICTOR], "y"), "models: must be .*, not Predictor"),
        (lambda: bothways.average(None, "y"), "models: is of type NoneType"),
        (lambda: bothways.average(["x", "y"], 5), "out: must be a text or a path, not 5"),
        *(
            (lambda function=function: function(PREDICTOR, []), "model: must be .*, not Predictor")
            for function in (bothways.predict, bothways.evaluate, bothways.calibrate)
        ),
        (lambda: bothways.distil(PREDICTOR, []), "teacher: must be .*, not Predictor"),
        (lambda: bothways.predict("x", [{"text": "a"}], "y.jsonl"), "out: is for files, and rows"),
        (lambda: bothways.predict("x", [{"a": "a"}], keep="a"), "keep: is for files, and rows"),
        (lambda: bothways.predict("x", "y", best=0), "best: must be at least 1, not 0"),
        (lambda: bothways.finetune("x", [], recipe="old"), r"recipe: unknown recipe 'old'"),
        (shown_progress(print).__enter__, r"progress: is .*, which has no methods stage"),
    ],
)
def test_a_wrong_argument_is_one_message(call, message):
    with pytest.raises(BothwaysError, match=message):
        call()


@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python forgets overloads")
@pytest.mark.parametrize("function", [bothways.predict, bothways.finetune])
def test_overloads_have_the_parameters_of_their_function(function):
    parameters = inspect.signature(function).parameters
    overloads = typing.get_overloads(inspect.unwrap(function))
    assert len(overloads) == 2
    for name, overloaded in (i for o in overloads for i in inspect.signature(o).parameters.items()):
        if overloaded.kind is not inspect.Parameter.VAR_KEYWORD and name not in ("out", "folds"):
            assert overloaded.annotation == parameters[name].annotation, name
            assert overloaded.default in (parameters[name].default, ...), name
