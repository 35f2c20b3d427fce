"""Scores: equal to transformers' regression, packed as alone, scored as scipy does, and refused where they are no numbers."""

import numpy as np
import pytest
from scipy import stats

from bothways.prediction.engine import evaluate_task, predict
from bothways.tasks.predictions import ScorePrediction
from bothways.tasks.regression.task import RegressionTask
from bothways.tasks.text_task import TextExample
from toy_tasks import TOY_TASKS, make_scored


def test_scores_are_measured_as_by_scipy(tokenizer):
    task, examples = TOY_TASKS["regress"].bind(tokenizer, 0.1), make_scored(40, 2)
    alone = [made.score for _, made in predict(task, examples)]
    truth = [float(str(example.label)) for example in examples]
    metrics = evaluate_task(task, iter(examples))
    assert metrics["pearson"] == pytest.approx(stats.pearsonr(truth, alone).statistic, rel=1e-4)
    assert metrics["spearman"] == pytest.approx(stats.spearmanr(truth, alone).statistic, rel=1e-4)
    assert metrics["mse"] == pytest.approx(np.square(np.subtract(truth, alone)).mean(), rel=1e-4)
    assert {*RegressionTask().directions(("score",))} == {*metrics}
    assert RegressionTask.metric in metrics
    assert task.grade(examples[0], ScorePrediction(truth[0] - 2)) == pytest.approx(-4)


def test_scores_far_from_0_have_units_of_their_own():
    far = [TextExample(f"t{n}", None, str(100_000 + n), f"a:{n}") for n in range(9)]
    assert RegressionTask().output_scale(far) == (100_004, np.std(range(9)))
    assert RegressionTask().output_scale(make_scored(30)) is None
    assert RegressionTask().output_scale(far[:1]) is None


def test_the_mean_is_what_one_answers_without_reading():
    examples = make_scored(30, 1)
    mean = np.mean([float(str(e.label)) for e in examples])
    constant = [(e, ScorePrediction(float(mean))) for e in examples]
    baseline = dict(RegressionTask().baseline(examples))
    assert baseline.pop("loss") == baseline["mse"]
    assert baseline == pytest.approx(dict(RegressionTask().score(constant, ())))
