"""An estimator of scikit-learn that fine-tunes a model: for `GridSearchCV`, `Pipeline`, and so on.

    from bothways.sklearn import Classifier

    search = GridSearchCV(Classifier("bert-base-uncased", epochs=3), {"lr": [2e-5, 5e-5]})
    search.fit(texts, labels).best_estimator_.predict(["a good film"])

Only this module imports scikit-learn (the extra "report").
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import bothways
from bothways.core.errors import optional
from bothways.core.progress import Progress
from bothways.data.tables import iter_rows, plain_value
from bothways.tasks.columns import label_of

with optional("report", "the estimator of scikit-learn"):
    from sklearn.base import BaseEstimator, ClassifierMixin
    from sklearn.utils.multiclass import check_classification_targets
    from sklearn.utils.validation import check_consistent_length, check_is_fitted, column_or_1d


class Classifier(ClassifierMixin, BaseEstimator):
    """A classifier of texts or pairs of texts, fine-tuned by `fit` in memory.

    Inputs are a list, an array or a column of texts, a list of pairs, or a DataFrame with one or
    two columns of texts. Labels have any type that scikit-learn's classifiers take.

    Args:
        model: a model folder, the folder of a run, or a Hub id.
        recipe, device, progress: as of `bothways.finetune`.
        random_state: seed of the new head and of the order of the data, or a generator that draws
            it; None for 0.
        settings: further settings of `bothways.finetune`, such as `lr`, `epochs` or `batch_size`,
            which `get_params` and `set_params` know, too.

    Attributes:
        classes_: the labels, sorted.
        predictor_: the `bothways.Predictor` of the fine-tuned model.
    """

    def __init__(
        self,
        model: str | Path = "bert-base-uncased",
        *,
        recipe: str = "modern",
        random_state: int | np.random.RandomState | None = None,
        device: str = "auto",
        progress: Progress | bool = False,
        **settings: Any,
    ) -> None:
        self.model, self.recipe, self.random_state = model, recipe, random_state
        self.device, self.progress = device, progress
        for name, value in settings.items():
            setattr(self, name, value)

    def _settings(self) -> dict[str, Any]:
        known = {*self._get_param_names()}
        return {
            name: value
            for name, value in vars(self).items()
            if name not in known and not name.startswith("_") and not name.endswith("_")
        }

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the parameters with the further settings by name."""
        return {**super().get_params(deep), **self._settings()}

    def set_params(self, **params: Any) -> Classifier:
        """Change parameters; a name that is none is a setting of `bothways.finetune`."""
        for name, value in params.items():
            setattr(self, name, value)
        return self

    def __sklearn_tags__(self) -> Any:
        """Return the tags of an estimator whose inputs are texts."""
        tags = super().__sklearn_tags__()
        tags.input_tags.two_d_array = False
        tags.input_tags.string = True
        return tags

    def fit(self, X: Any, y: Any) -> Classifier:
        """Fine-tune the model on texts with their labels.

        Raises:
            ValueError: there are no labels, not as many as inputs, or not one for each.
            BothwaysError: the data, a setting or the machine is not suitable.
        """
        if y is None:
            raise ValueError("requires y to be passed, but the target y is None")
        inputs, labels = _rows(X), np.asarray(plain_value(y))
        check_consistent_length(inputs, labels)
        labels = column_or_1d(labels)
        if None in labels.tolist():  # which cannot be sorted
            raise ValueError("y holds None: leave out inputs without a label")
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        names = self._names()
        rows = [{**row, "label": names[code]} for row, code in zip(inputs, codes.flat, strict=True)]
        self._files: dict[str, bytes] = {}
        options = self._settings() | {"recipe": self.recipe, "progress": self.progress}
        seed: Any = self.random_state or 0
        if isinstance(seed, np.random.RandomState):
            seed = int(seed.randint(2**31 - 1))
        self._result = bothways.finetune(self.model, rows, seed=seed, device=self.device, **options)
        self.predictor_ = self._result.predictor()
        return self

    def _names(self) -> list[str]:
        """Return the labels as the model names them."""
        return [str(label_of(plain_value(item), "y", "labels")) for item in self.classes_]

    def predict_proba(self, X: Any) -> Any:
        """Return the probabilities `(inputs, classes)`, in the order of `classes_`."""
        check_is_fitted(self, "predictor_")
        known = self.predictor_.classes_.tolist()
        columns = [known.index(name) for name in self._names()]
        texts = [tuple(row.values()) for row in _rows(X)]  # one or two, as in training
        return self.predictor_.predict_proba(texts)[:, columns]

    def predict(self, X: Any) -> Any:
        """Return the most probable label of each input."""
        best = self.predict_proba(X).argmax(axis=1)
        return self.classes_[best]

    def __getstate__(self) -> dict[str, Any]:
        """Pickle a fitted estimator with the files of its model."""
        state = dict(super().__getstate__())
        if "predictor_" in state:
            result = state.pop("_result", None)
            del state["predictor_"]
            if result is not None:
                with tempfile.TemporaryDirectory() as scratch:
                    folder = result.save(Path(scratch) / "model")
                    files = [file for file in sorted(folder.rglob("*")) if file.is_file()]
                    state["_files"] = {
                        str(file.relative_to(folder)): file.read_bytes() for file in files
                    }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the model of a fitted estimator again."""
        super().__setstate__(state)
        if state.get("_files"):
            with tempfile.TemporaryDirectory() as scratch:
                for name, content in state["_files"].items():
                    file = Path(scratch) / name
                    file.parent.mkdir(parents=True, exist_ok=True)
                    file.write_bytes(content)
                self.predictor_ = bothways.load(scratch, device=self.device)


def _rows(inputs: Any) -> list[dict[str, Any]]:
    """Return inputs as rows with the columns text and text_b."""
    rows = []
    for number, item in enumerate(iter_rows(inputs, "X"), 1):
        value = plain_value(item)
        texts = [*value.values()] if isinstance(value, dict) else value
        texts = [texts] if isinstance(texts, str) else texts
        if not isinstance(texts, list | tuple) or not 1 <= len(texts) <= 2:
            message = "X must hold texts, pairs of texts, or one or two columns of these"
            raise ValueError(f"{message}; row {number} is of type {type(value).__name__}")
        rows.append(dict(zip(("text", "text_b"), texts, strict=False)))
    return rows
