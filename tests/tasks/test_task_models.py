"""What holds for the models of all trainable tasks: losses, gradients and scores of transformers, sums, and packing."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bothways.core.batch import ChoiceTargets, SpanTargets, TokenTargets, pack
from bothways.core.errors import DataError
from bothways.core.source import Sequence
from bothways.prediction.engine import evaluate_task, predict
from bothways.tasks.base import unknown_label
from bothways.tasks.choice.task import ChoiceExample
from bothways.tasks.multilabel.task import MultilabelExample
from bothways.tasks.tagging.examples import TagExample
from bothways.tasks.text_task import TextExample
from parity import batch_of, check_gradients, check_sum, make_theirs, padded
from spread import in_turn
from toy_tasks import TOY_TASKS

ALL = pytest.mark.parametrize("name", TOY_TASKS)


def peer_output(theirs: Any, sequence: Sequence) -> tuple[Tensor, Tensor, int]:
    """The loss and the scores of a sequence by transformers, and the number of its targets."""
    ids, segments = (torch.from_numpy(x).long() for x in (sequence.ids, sequence.segments))
    inputs = {"input_ids": ids[None], "token_type_ids": segments[None]}
    (target,) = sequence.targets.values()
    values = {name: torch.as_tensor(value) for name, value in vars(target).items()}
    match target:
        case SpanTargets():
            inputs |= {"start_positions": values["start"], "end_positions": values["end"]}
            output = theirs(**inputs)
            return output.loss, torch.stack([output.start_logits[0], output.end_logits[0]], 1), 1
        case TokenTargets():
            labels = torch.full_like(ids, -100)
            labels[values["index"]] = values["ids"]
            output = theirs(**inputs, labels=labels[None])
            return output.loss, output.logits[0, values["index"]], len(values["ids"])
        case ChoiceTargets():
            rows, sides = ids.split(sequence.parts), segments.split(sequence.parts)
            columns = (rows, sides, [torch.ones_like(row) for row in rows])
            names = ("input_ids", "token_type_ids", "attention_mask")
            inputs = {n: padded(list(c))[None] for n, c in zip(names, columns, strict=True)}
            output = theirs(**inputs, labels=values["labels"])
            return output.loss, output.logits[0], 1
    labels = values["labels"]
    if theirs.config.problem_type == "multi_label_classification":
        labels = labels.reshape(1, -1)
    output = theirs(**inputs, labels=labels)
    return output.loss, output.logits, labels.numel()


@pytest.mark.parametrize(
    ("name", "training"), in_turn([(name,) for name in TOY_TASKS], [True, False])
)
def test_losses_and_gradients_equal_those_of_transformers(name, training, tokenizer, tmp_path):
    toy = TOY_TASKS[name]
    task = toy.bind(tokenizer).train(training)
    theirs = make_theirs(task, tmp_path / "model", toy.peer).train(training)
    assert theirs.config.problem_type == toy.task.problem
    assert not toy.labels or theirs.config.id2label == dict(enumerate(toy.labels))
    if name == "rerank":  # with one label, its loss is the binary cross-entropy, too
        theirs.config.problem_type = "multi_label_classification"
    examples = toy.make(8, 9)
    sequences = [s for item in task.encode(examples) for s in item.sequences]
    losses, logits, counts = zip(*(peer_output(theirs, s) for s in sequences), strict=True)
    batch = pack(sequences)
    loss, scores = task(batch)[task.loss_name], task.scores(batch)
    expected = torch.cat([x.reshape(-1, *scores.shape[1:]) for x in logits])
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-5)
    assert task.weights(batch) == {task.loss_name: float(sum(counts))}
    total = sum(one * count for one, count in zip(losses, counts, strict=True))
    assert loss.total.item() == pytest.approx(total.item(), rel=1e-5)
    if name in ("classify", "choice"):
        grades = [task.grade(*result) for result in predict(task, examples)]
        assert int(loss.hits) == sum(grades)
    assert (loss.hits is None) == (name in ("regress", "multilabel"))
    (loss.total / sum(counts)).backward()
    (total / sum(counts)).backward()
    check_gradients(task, theirs, tmp_path / "gradients")


@ALL
def test_a_batch_is_the_sum_of_its_examples(name, tokenizer):
    toy = TOY_TASKS[name]
    task = toy.bind(tokenizer)
    inputs = list(task.encode([*toy.make(9, 0), toy.bare]))
    weight = task.weights(batch_of(inputs))
    assert weight == task.weights(batch_of(inputs[:-1])), "an unknown answer has no weight"
    check_sum(task, inputs)


def numbers_of(prediction: Any) -> list[float]:
    """The probabilities or the scores of a prediction."""
    if hasattr(prediction, "spans"):
        return [prediction.confidence, prediction.null_difference, prediction.spans[0].score]
    names = ("logits", "probabilities", "score")
    value = next(getattr(prediction, name) for name in names if hasattr(prediction, name))
    return np.ravel([*value.values()] if isinstance(value, dict) else value).tolist()


@ALL
def test_predictions_are_those_of_each_example_alone_and_in_order(name, tokenizer):
    task, examples = TOY_TASKS[name].bind(tokenizer, dropout=0.1), TOY_TASKS[name].make(10, 3)
    alone = [next(predict(task, [example]))[1] for example in examples]
    for window in (100, 4):
        results = list(predict(task, examples, window=window))
        assert [example for example, _ in results] == examples
        for (_, prediction), expected in zip(results, alone, strict=True):
            assert numbers_of(prediction) == pytest.approx(numbers_of(expected), abs=1e-5)
            answer, wanted = (getattr(made, "answer", 0) for made in (prediction, expected))
            assert answer == pytest.approx(wanted, abs=1e-5)


@ALL
def test_examples_without_an_answer_cannot_be_scored(name, tokenizer):
    task = TOY_TASKS[name].bind(tokenizer)
    with pytest.raises(DataError, match=r"^f:2: has no .*, so it cannot be scored"):
        evaluate_task(task, [TOY_TASKS[name].bare])
    with pytest.raises(DataError, match=r"there is no .* to score"):
        evaluate_task(task, [])


def test_labels_that_stand_for_names_are_to_be_named():
    """As of a model that transformers saved; its data has other labels, such as 0 and 1."""
    for labels, is_unnamed in ((("LABEL_0", "LABEL_1"), True), (("LABEL_0", "b"), False)):
        error = unknown_label("label '0'", "0", labels, "f:3")
        assert ("id2label" in (error.fix or "")) == is_unnamed


@pytest.mark.parametrize(("name", "example", "message"), [
    ("classify", TextExample("ape", None, "w", "f:3"), "label 'w' is not among the 3 labels"),
    ("multilabel", MultilabelExample("ape", None, ("x", "w"), "f:3"), "label 'w' is not among the 3"),
    ("choice", ChoiceExample("ape", ("bee", "cat"), 2, "f:3"), "label 2 is out of range for 2 endings"),
    ("choice", ChoiceExample("ape", ("bee", "cat"), -1, "f:3"), "label -1 is out of range for 2"),
    ("choice", ChoiceExample("ape", (), None, "f:3"), "has no ending to choose from"),
    ("regress", TextExample("ape", None, "two", "f:3"), "label 'two' is not a number\n  Write a number"),
    ("regress", TextExample("ape", None, "inf", "f:3"), "label 'inf' is not a number"),
    ("regress", TextExample("ape", None, "1,5", "f:3"), "label '1,5' is not a number"),
    ("tag", TagExample(("ape", "bee"), ("O", "NN"), "f:3"), "tag 'NN' of word 2 is not among the 5"),
])  # fmt: skip
def test_answers_that_cannot_be_scored_are_refused(name, example, message, tokenizer):
    with pytest.raises(DataError, match=f"^f:3: {message}"):
        evaluate_task(TOY_TASKS[name].bind(tokenizer), [example])
