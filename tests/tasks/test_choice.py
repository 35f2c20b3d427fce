"""Multiple choice: equal to BertForMultipleChoice, any number of choices in a batch, SWAG's and CODAH's files."""

import json
from dataclasses import replace

import numpy as np
import pytest

from bothways.core.errors import DataError
from bothways.prediction.engine import evaluate_task, predict
from bothways.tasks.choice.task import ChoiceColumns, ChoiceExample, ChoiceTask
from bothways.tasks.classification.task import ClassificationTask
from bothways.tasks.text_task import TextExample
from toy_tasks import TOY_TASKS, make_choices


def test_every_choice_is_a_pair_as_classification_makes_it(tokenizer):
    examples = make_choices(30)
    encoded = ChoiceTask().encode(examples, tokenizer, (), 12)
    for example, made in zip(examples, encoded, strict=True):
        texts = [TextExample(example.context, end) for end in example.endings]
        pairs = ClassificationTask().encode(texts, tokenizer, (), 12)
        (sequence,) = made.sequences
        expected = [pair.sequences[0] for pair in pairs]
        assert sequence.ids.tolist() == [id for part in expected for id in part.ids]
        assert sequence.segments.tolist() == [id for part in expected for id in part.segments]
        assert sequence.global_attention_mask.tolist() == (sequence.segments == 1).tolist()
        assert sequence.parts == tuple(map(len, expected))
        sums = (sum(pair.tokens for pair in pairs), sum(pair.cut for pair in pairs))
        assert (made.tokens, made.cut) == sums
    assert ChoiceTask().texts(examples[0]) == (examples[0].context, *examples[0].endings)
    assert ChoiceTask().labels(examples) == ()


def test_scores_are_means_over_predictions(tokenizer):
    task, examples = TOY_TASKS["choice"].bind(tokenizer), make_choices(40, 2)
    alone = [made for _, made in predict(task, examples)]
    for example, made in zip(examples, alone, strict=True):
        assert made.index == int(np.argmax(made.probabilities))
        assert made.ending == example.endings[made.index]
        assert sum(made.probabilities) == pytest.approx(1)
    found, pairs = evaluate_task(task, iter(examples)), list(zip(examples, alone, strict=True))
    accuracy = np.mean([made.index == example.label for example, made in pairs])
    loss = -np.mean([np.log(made.probabilities[example.label]) for example, made in pairs])
    assert found == pytest.approx({"accuracy": accuracy, "loss": loss}, rel=1e-4)
    assert {*ChoiceTask().directions(())} == {*found}
    assert np.mean([task.grade(*pair) for pair in pairs]) == pytest.approx(accuracy)


SWAG = {
    "sent1": "An ape sits.", "sent2": "It", "ending0": "eats.", "ending1": "sleeps.",
    "ending2": "sings.", "label": 1,
}  # fmt: skip


@pytest.mark.parametrize(
    ("row", "columns", "example"),
    [
        (
            SWAG | {"startphrase": "An ape sits. It", "gold-source": "gold", "video-id": "v"},
            ChoiceColumns("sent1", "sent2", ("ending0", "ending1", "ending2"), "label"),
            ChoiceExample("An ape sits.", ("It eats.", "It sleeps.", "It sings."), 1),
        ),
        (
            {"context": "c", "endings": ["a", "b"], "label": "1"},
            ChoiceColumns("context", None, ("endings",), "label"),
            ChoiceExample("c", ("a", "b"), 1),
        ),
        (
            {"question": "c", "choice1": "a", "choice2": "b", "answer": 0.0},
            ChoiceColumns("question", None, ("choice1", "choice2"), "answer"),
            ChoiceExample("c", ("a", "b"), 0),
        ),
        (
            {"ctx": "c", "endings": ["a"], "label": ""},
            ChoiceColumns("ctx", None, ("endings",), "label"),
            ChoiceExample("c", ("a",), None),
        ),
    ],
)
def test_columns_are_guessed_where_that_is_clear(tmp_path, row, columns, example):
    source = tmp_path / "a.jsonl"
    source.write_text(json.dumps(row))
    reading = ChoiceTask().read(str(source))
    assert reading.task == ChoiceTask(columns)
    (found,) = reading.examples
    assert found == replace(example, where=f"{source}:1")
    (bare,) = ChoiceTask(columns).read(str(source), labelled=False).examples
    assert (bare.endings, bare.label) == (example.endings, None)


def test_columns_by_name_and_by_number(tmp_path):
    source = tmp_path / "codah.tsv"
    source.write_text(
        "o\tA boy runs. He\tsmiles\tfalls\tsings\teats\t0\ni\tThe sun\tis hot\tis wet\tis cold\tis blue\t1\n"
    )
    asked = ChoiceColumns("1", None, ("2", "3", "4", "5"), "6")
    first, second = ChoiceTask().read(str(source), asked).examples
    endings = ("smiles", "falls", "sings", "eats")
    assert first == ChoiceExample("A boy runs. He", endings, 0, f"{source}:1")
    assert second.label == 1
    assert len(list(ChoiceTask(asked).read(str(source)).examples)) == 2  # as in training
    assert str(asked) == "context = '1', endings = '2', '3', '4', '5', label = '6'"
    swag = tmp_path / "swag.csv"
    swag.write_text(",sent1,sent2,ending0,ending1,label\n0,An ape sits.,It,eats.,sleeps.,1\n")
    (whole,) = ChoiceTask().read(str(swag), ChoiceColumns("sent1")).examples
    assert whole.endings == ("eats.", "sleeps.")  # no continuation was asked for


def test_a_header_is_no_example_where_columns_go_by_number(tmp_path):
    (tmp_path / "a.csv").write_text("context,ending0,ending1\nHe sat,down,up\n")
    columns = ChoiceColumns("0", None, ("1", "2"))
    with pytest.raises(DataError, match=r"a.csv:1: is a header.*\n.*ending0,ending1"):
        ChoiceTask().read(str(tmp_path / "a.csv"), columns, labelled=False)


def test_a_question_may_have_more_endings_than_those_of_training():
    task = ChoiceTask(columns=ChoiceColumns("context", None, ("ending0", "ending1"), "label"))
    for count in (2, 3):
        row = {"context": "c", **{f"ending{at}": str(at) for at in range(count)}}
        assert task.example(row).endings == tuple(map(str, range(count)))
    requested = ChoiceColumns("context", None, ("ending2", "ending1"))
    assert task.example(row, requested).endings == ("2", "1")
    trained = ChoiceTask(replace(requested, endings=("ending1", "ending0")))
    assert trained.example({**row, "ending2": ""}, labelled=False).endings == ("0", "1", "")
    assert trained.example({name: row[name] for name in list(row)[:3]}).endings == ("1", "0")


NONE = ChoiceColumns()


@pytest.mark.parametrize(
    ("row", "asked", "message"),
    [
        (SWAG, ChoiceColumns("text"), r"a\.jsonl: has no column 'text'; it has sent1, "),
        (
            SWAG | {"label": "two"},
            NONE,
            r"a\.jsonl:1: column 'label' holds 'two', not an ending's place",
        ),
        (SWAG | {"label": "1" * 5000}, NONE, "not an ending's place"),
        (SWAG | {"label": ".0"}, NONE, r"'label' holds '\.0', not an ending's place"),
        (SWAG | {"ending1": 3}, NONE, r"a\.jsonl:1: column 'ending1' holds int, not text"),
        (SWAG | {"answer": 3}, NONE, "is the label .label, answer.; use label=NAME"),
        (SWAG | {"choices": ["a"]}, NONE, 'has the endings .choices, .*columns.endings": NAME'),
        ({"context": "c", "label": 1}, NONE, r"the endings \(context, label\)"),
        ({"text": "c", "endings": []}, NONE, r"the context \(text, endings\)"),
        ({"ctx": "c", "question": "c", "endings": []}, NONE, r"the context \(ctx, question\)"),
        ({"ctx": "c", "endings": "a", "label": 0}, NONE, "'endings' holds str, not a list"),
        ({"ctx": "c", "endings": [1], "label": 0}, NONE, "'endings' holds list, not a list"),
    ],
)
def test_files_that_cannot_be_read_are_refused(tmp_path, row, asked, message):
    (tmp_path / "a.jsonl").write_text(json.dumps(row))
    with pytest.raises(DataError, match=message):
        list(ChoiceTask().read(str(tmp_path / "a.jsonl"), asked).examples)


def test_the_usual_place_is_what_one_answers_without_reading():
    examples = make_choices(30, 3)
    counts = np.bincount([e.label for e in examples])
    baseline = ChoiceTask().baseline(examples)
    assert baseline["accuracy"] == counts.max() / 30
    assert baseline["loss"] == pytest.approx(np.mean([np.log(len(e.endings)) for e in examples]))
