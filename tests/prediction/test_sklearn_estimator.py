"""`bothways.sklearn.Classifier` is an estimator of scikit-learn."""

import pickle
from typing import Any

import numpy as np
import pandas
import pytest
from sklearn.base import clone
from sklearn.exceptions import NotFittedError, SkipTestWarning
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer
from sklearn.utils import estimator_checks

from bothways.core.errors import ConfigError
from bothways.sklearn import Classifier
from toy_folder import make_examples, make_folder

EXAMPLES = make_examples(24, 1)
TEXTS = [example.text for example in EXAMPLES]
LABELS = [example.label for example in EXAMPLES]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    return str(make_folder(tmp_path_factory.mktemp("estimator") / "bert", dropout=0.0))


def make(folder: str, **settings: Any) -> Classifier:
    return Classifier(folder, device="cpu", epochs=1, lr=1e-3, max_length=16, **settings)


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
    search = GridSearchCV(make(folder), {"lr": [1e-4, 1e-3]}, cv=2, error_score="raise")
    search.fit(TEXTS, LABELS)
    assert set(search.predict(TEXTS)) <= {*LABELS}
    assert clone(search.best_estimator_).get_params() == search.best_estimator_.get_params()
    pipeline = make_pipeline(FunctionTransformer(validate=False), make(folder))
    scores = cross_val_score(pipeline, np.array(TEXTS), LABELS, cv=2, error_score="raise")
    assert scores.shape == (2,)


@pytest.mark.parametrize("kind", [str, int, bool])
def test_labels_keep_their_type_and_a_pickle_its_predictions(kind, folder):
    first = LABELS[0]
    labels = LABELS if kind is str else [kind(label == first) for label in LABELS]
    classifier = make(folder).fit(pandas.DataFrame({"message": TEXTS}), labels)
    assert classifier.classes_.tolist() == sorted(set(labels))
    rows = classifier.predict_proba(TEXTS)
    assert rows.sum(1) == pytest.approx(np.ones(len(TEXTS)))
    assert {*classifier.predict(TEXTS).tolist()} <= {*labels}
    assert classifier.score(TEXTS, labels) == np.mean(classifier.predict(TEXTS) == labels)
    again = pickle.loads(pickle.dumps(pickle.loads(pickle.dumps(classifier))))
    assert again.predict_proba(TEXTS) == pytest.approx(rows, abs=1e-5)


def test_pairs_are_two_columns(folder):
    frame = pandas.DataFrame({"a": TEXTS, "b": TEXTS[::-1]})
    classifier = make(folder).fit(frame, LABELS)
    assert classifier.predict([*zip(TEXTS, TEXTS[::-1], strict=True)]).tolist() == (
        classifier.predict(frame).tolist()
    )


def test_mistakes_are_those_of_scikit_learn_and_of_finetune(folder):
    with pytest.raises(NotFittedError):
        make(folder).predict(TEXTS)
    with pytest.raises(ValueError, match="inconsistent numbers"):
        make(folder).fit(TEXTS, LABELS[:-1])
    with pytest.raises(ValueError, match="X must hold texts"):
        make(folder).fit(np.ones((2, 3)), LABELS[:2])
    with pytest.raises(ConfigError, match="lrr"):
        make(folder, lrr=1).fit(TEXTS, LABELS)
