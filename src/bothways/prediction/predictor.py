"""Predictors: a model folder opened for a task, prepared for a precision, called with texts."""

from __future__ import annotations

import functools
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float, Float32, Shaped
from numpy.typing import NDArray

from bothways.core.config import reader as configs
from bothways.core.config.values import (
    Tree,
    checked,
    parse_overrides,
    require_at_least,
    require_choice,
)
from bothways.core.errors import ConfigError, DataError, require_unset
from bothways.core.progress import Progress, shown_progress
from bothways.core.terminal import listed, quantity
from bothways.data.tables import TableLike, TableRow, is_example, iter_rows, plain_value
from bothways.hub import sentence_transformers
from bothways.hub.provenance import digest_of_model
from bothways.hub.resolve import PROGRAM
from bothways.hub.static_embedding import StaticEncoder
from bothways.prediction import PredictPrecision, engine
from bothways.prediction.prepared_model import PreparedModel
from bothways.tasks.base import Metrics, Reading, TaskModel
from bothways.tasks.columns import UnclearColumnError
from bothways.tasks.sentence_embedding.task import Embedder, PromptedText
from bothways.tasks.sentence_embedding.vectors import VectorType, check_widths, quantize, ranges_of
from bothways.tasks.text_task import TextExample

_REOPENING = threading.Lock()
_BLOCK = 4096
"""Texts whose vectors stay in the processor's cache."""
_CLASSES = ("single_label_classification", "multi_label_classification")


class MissingMethod(ConfigError, AttributeError):
    """A method of scikit-learn that predictors of a task do not have."""


class Predictor:
    """A model prepared for predictions in one precision, with its tokenizer and task.

    Calls do not change it: any number of threads can share a predictor.

        classify = bothways.load("runs/sst")
        classify("A wonderful film.").label          # one input, one prediction
        classify(["Good.", "Bad."])                  # a list of predictions
        for prediction in classify.stream(lines):    # lazily, in constant memory
            ...
        classify.predict(texts), classify.predict_proba(texts), classify.score(texts, labels)

    Args:
        task: the task with its model, on its device.
        precision: of matrix products; a model that is prepared already keeps its own.
        batch_invariant: a text has the same result in every batch, to the bit; a short text alone
            may then take twice as long. Vectors always are.
        reopen: returns the task with the model as it is saved, for `unprepared`.
        source: what `identity` returns for a model that was exported.

    Attributes:
        task_model: the task in evaluation mode, with the prepared model.

    Examples:
        >>> classify = bothways.load("my-classifier")
        >>> isinstance(classify, bothways.Predictor), classify("a good film").label
        (True, 'positive')
    """

    def __init__(
        self,
        task_model: TaskModel[Any, Any],
        precision: PredictPrecision = "fp32",
        *,
        batch_invariant: bool = False,
        reopen: Callable[[], TaskModel[Any, Any]] | None = None,
        source: tuple[str, int | None, Tree] | None = None,
    ) -> None:
        # `bothways embed` and `encode` take the same kernels, and give the same bits.
        batch_invariant = batch_invariant or isinstance(task_model, Embedder)
        self._reopen, self._asked = reopen, (precision, batch_invariant)
        self._source = source
        self._unprepared: TaskModel[Any, Any] | None = None
        if not isinstance(task_model.model, PreparedModel):
            task_model = engine.prepare_task_model(
                task_model, precision, batch_invariant=batch_invariant
            )
        self.task_model = task_model.eval()

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the name of the folder, which is opened again.

        Raises:
            ConfigError: there is no folder.
        """
        return _reopened, (self._folder_reader(), *self._asked)

    def __deepcopy__(self, memo: object) -> Predictor:
        """Return the predictor itself: calls do not change it."""
        return self

    @property
    def precision(self) -> Literal["fp32", "bf16", "int8"]:
        """The precision in use: "fp32", "bf16" or "int8"."""
        assert isinstance(self.task_model.model, PreparedModel)
        return self.task_model.model.precision

    def unprepared(self) -> TaskModel[Any, Any]:
        """Return the task with the model as it is saved, for gradients and attentions.

        It is read from its folder at the first call, and then kept: memory holds the weights twice.

        Raises:
            ConfigError: the predictor is not from a model folder, or runs an exported model.
        """
        with _REOPENING:
            if self._unprepared is None:
                self._unprepared = self._folder_reader()().eval().requires_grad_(False)
            return self._unprepared

    def _folder_reader(self) -> Callable[[], TaskModel[Any, Any]]:
        if self._reopen is None:
            message = "this predictor has no model folder to read its weights from again: it is "
            message += "of a model in memory, or of an exported graph"
            fix = "Open the folder in which the model itself is saved."
            raise ConfigError(message, where="predictor", fix=fix)
        return self._reopen

    def opened_from(self) -> tuple[str, int | None, Tree]:
        """Return the folder, and the length and the settings that it was opened with.

        Raises:
            ConfigError: the predictor is not from a model folder, or runs an exported model.
        """
        reader = self._folder_reader()
        assert isinstance(reader, functools.partial)
        settings = parse_overrides(reader.keywords["settings"])
        return str(reader.args[0]), reader.keywords["length"], settings

    def identity(self) -> tuple[str, int | None, Tree]:
        """Return the SHA-256 of the model's folder, and the length and settings of its opening.

        Those of an exported model are of the folder that it was exported from.

        Raises:
            ConfigError: the predictor is not from a model folder, or from an export without them.
        """
        if self._source is not None:
            return self._source
        folder, length, settings = self.opened_from()
        return digest_of_model(folder), length, settings

    def __repr__(self) -> str:
        task_model = self.task_model
        labels = f", labels=[{listed(task_model.labels, 5)}]" if len(task_model.labels) else ""
        shape = task_model.model.config
        return (
            f"Predictor(task={task_model.task.name!r}{labels}, layers={shape.depth}, "
            f"width={shape.width}, length={task_model.length}, precision={self.precision!r}, "
            f"device={str(task_model.model.device)!r})"
        )

    def __call__(self, inputs: Any = None, *others: Any, **unknown: Any) -> Any:
        """Return the prediction for one input, or the list of predictions for several.

        Args:
            inputs: a text, a pair of texts as a tuple, a query and its documents as a tuple
                `(query, [document, …])`, a row as a dict, an example of the task, an iterable of
                these, or a table such as a DataFrame or a dict of columns, whose rows are the
                inputs.
            others, unknown: further arguments, such as those of transformers' pipelines, which are
                refused.

        Raises:
            ConfigError: another argument than the inputs.
            DataError: an input that the task cannot read.
        """
        require_unset(
            "is not an argument: a model is called with its inputs alone",
            'Give a pair as a tuple, columns as a row, such as {"question": "…", "context": "…"}, '
            "and settings, such as top_k or candidate_labels, to bothways.load.",
            **dict.fromkeys([*(f"{other!r:.40}" for other in others), *unknown], True),
        )
        if self._is_one(inputs):
            example = read_input(self.task_model, inputs, 1)
            [(_, prediction)] = engine.predict(self.task_model, [example])
            return prediction
        return list(self.stream(inputs))

    @checked
    def predict(self, inputs: Any, *, batch_size: int | None = None) -> Any:
        """Return the answer for one input, or an array of answers for several, as scikit-learn.

        An answer is a label (classify), a number (regress), the index of an ending (choice), the
        text of an answer or of a filling; several labels or tags are a tuple in a list of these.
        A call of the predictor returns the same with probabilities.

        Args:
            inputs: as for a call, such as a list, an array or a column of texts.
            batch_size: maximum number of texts that are computed together; None for the best one.

        Raises:
            ConfigError: the predictor's task has no such answers.
            DataError: an input that the task cannot read.

        Examples:
            >>> classify = bothways.load("my-classifier")
            >>> classify.predict(["a good film", "a bad play"]).tolist()
            ['positive', 'negative']
        """
        answers = []
        for prediction in self._all(inputs, batch_size):
            if not hasattr(prediction, "answer"):
                raise self._missing("predict")
            answers.append(prediction.answer)
        if self._is_one(inputs):
            return answers[0]
        if answers and isinstance(answers[0], tuple):
            return answers
        # An abstention is None, which an array of texts would hold as "None".
        text = self.task_model.task.problem == _CLASSES[0] and None not in answers
        return np.array(answers, dtype=str if text else None)

    @checked
    def predict_proba(
        self, inputs: Any, *, batch_size: int | None = None
    ) -> Float[np.ndarray, "texts classes"]:
        """Return the probabilities of the classes `(texts, classes)`, in the order of `classes_`.

        Raises:
            ConfigError: the predictor's task has no classes.
            DataError: an input that the task cannot read.

        Examples:
            >>> classify = bothways.load("my-classifier")
            >>> classify.predict_proba(["a good film", "a bad play"]).shape
            (2, 2)
        """
        if self.task_model.task.problem not in _CLASSES:
            raise self._missing("predict_proba")
        classes = self.classes_
        rows = [[*item.probabilities.values()] for item in self._all(inputs, batch_size)]
        return np.array(rows, dtype=np.float64).reshape(-1, len(classes))

    @property
    def classes_(self) -> Shaped[np.ndarray, " classes"]:
        """The labels, in the order of `predict_proba`.

        Raises:
            ConfigError: the predictor's task has none.
        """
        task = self.task_model.task
        if not len(self.task_model.labels) or task.problem == "regression":
            raise self._missing("classes_")
        return np.array(self.task_model.classes, dtype=str)

    def score(self, inputs: Any, answers: Any) -> float:
        """Return one number for predictions, as scikit-learn: accuracy, or R² of a regression.

        Other tasks return their own metric, such as the F1 of entities; `evaluate` returns all.

        Args:
            answers: the right answer for each input, such as labels.

        Raises:
            DataError: an input without an answer, or with one that the model does not have.

        Examples:
            >>> classify = bothways.load("my-classifier")
            >>> classify.score(["a good film", "a bad play"], ["positive", "negative"])
            1.0
        """
        task, examples = self.task_model.task, [*self._labelled(inputs, answers)]
        metrics = engine.evaluate_task(self.task_model, examples)
        if task.problem != "regression":
            return metrics["accuracy" if "accuracy" in metrics else task.metric_for(examples)]
        variance = task.baseline(examples)["mse"]
        return 1.0 - metrics["mse"] / variance if variance else float("nan")

    def _all(
        self, inputs: Any, batch_size: int | None, counts: engine.PredictionCounts | None = None
    ) -> Iterator[Any]:
        require_at_least(1, batch_size=batch_size)
        items = [inputs] if self._is_one(inputs) else inputs
        return self.stream(items, counts, window=batch_size or engine.WINDOW)

    def _is_one(self, inputs: Any) -> bool:
        match inputs:
            case tuple((str(), list())):  # a query with its documents
                return True
            case Mapping():  # a row, or the columns of a batch, or a DatasetDict, tables by name
                values = [plain_value(value) for value in inputs.values()]
                if any(hasattr(value, "column_names") for value in values):
                    return False
                if not values or not all(isinstance(value, list | tuple) for value in values):
                    return True
                # A row of words and tags has lists, too, and a batch of such rows lists of lists.
                nested = any(isinstance(item, list | tuple) for value in values for item in value)
                return self.task_model.task.rows_of_lists and not nested
        texts = isinstance(inputs, tuple) and all(isinstance(item, str) for item in inputs)
        return (texts and len(inputs) > 0) or isinstance(inputs, str) or is_example(inputs)

    def _missing(self, name: str) -> MissingMethod:
        message = f"a predictor for the task {self.task_model.task.name!r} has no {name}"
        return MissingMethod(message, where="task", fix="Call it: predictor(inputs).")

    def stream(
        self,
        inputs: TableLike,
        counts: engine.PredictionCounts | None = None,
        *,
        window: int = engine.WINDOW,
    ) -> Iterator[Any]:
        """Yield a prediction for each input, in order; a window of inputs is read at a time."""
        rows = enumerate(iter_rows(inputs, "inputs"), 1)
        examples = (read_input(self.task_model, item, number) for number, item in rows)
        predicted = engine.predict(self.task_model, examples, counts, window=window)
        return (prediction for _, prediction in predicted)

    @checked
    def encode(  # noqa: PLR0913 – the names of sentence-transformers
        self,
        texts: str | TableLike,
        *,
        prompt_name: str | None = None,
        prompt: str | None = None,
        batch_size: int | None = None,
        normalize_embeddings: bool = False,
        truncate_dim: int | None = None,
        precision: VectorType = "float32",
        ranges: Any = None,
        convert_to_numpy: bool = True,
        convert_to_tensor: bool = False,
        show_progress_bar: bool | None = False,
        counts: engine.PredictionCounts | None = None,
    ) -> Any:
        """Return the vectors of texts `(texts, width)`, or that of one text `(width,)`.

        Args:
            texts: one text, or several; also rows with a column of texts, such as a DataFrame.
            prompt_name: the prompt of the model to put before each text; None for its default one.
            prompt: a prompt instead of a named one; "" for none.
            batch_size: maximum number of texts that are computed together; None for the best one.
            normalize_embeddings: return vectors of length 1.
            truncate_dim: number of the first components to return.
            precision: float32; int8 or uint8, a byte a component; binary or ubinary, a bit.
            ranges: the lowest and the highest value of each component `(2, width)`, for int8 and
                uint8; None for the ranges of the texts themselves, two or more.
            convert_to_numpy: return an array; False returns a list of arrays.
            convert_to_tensor: return a tensor instead.
            show_progress_bar: show progress on standard error; None does not.
            counts: receives the number of texts, and of those that were cut.

        Raises:
            ConfigError: the predictor was opened for another task, or has no such prompt; one text
                has no ranges.
            DataError: an input has two texts.
        """
        if not isinstance(self.task_model, Embedder):
            name = self.task_model.task.name
            message = f"encode is for the task 'embed', and this predictor has {name!r}"
            raise ConfigError(message, where="task", fix='Open the model with task="embed".')
        require_at_least(1, truncate_dim=truncate_dim, batch_size=batch_size)
        require_choice(VectorType, "precision", precision)
        width = self.task_model.task.width(self.task_model.model)
        if truncate_dim is not None and truncate_dim > width:
            message = f"must be at most {width}, the width of the vectors, not {truncate_dim}"
            raise ConfigError(message, where="truncate_dim")
        lead = self.task_model.task.prompt_text(prompt_name, prompt)
        single = isinstance(texts, str | Mapping) and self._is_one(texts)
        rows = [texts] if single else iter_rows(texts, "texts")
        with shown_progress(bool(show_progress_bar)) as progress:
            progress.stage("encoding", len(rows) if isinstance(rows, Sized) else None)
            matrix: Any = self._look_up(rows, lead, progress) if isinstance(rows, list) else None
            if matrix is None:
                vectors = list[NDArray[np.float32]]()
                for prediction in self._all(self._prompted(rows, lead), batch_size, counts):
                    vectors.append(prediction.vectors[0])
                    progress.advance(len(vectors))
                matrix = np.stack(vectors) if vectors else np.empty((0, width), np.float32)
            elif counts is not None:
                counts.examples += len(matrix)
                counts.blank += sum(not str(row).strip() for row in rows)
        # Other libraries take arrays in one piece, and a view would hold all components in memory.
        matrix = np.ascontiguousarray(matrix[:, :truncate_dim])
        if normalize_embeddings:
            matrix = unit(matrix)
        # As sentence-transformers: without ranges, those of these vectors; a single one has none.
        if precision in ("int8", "uint8") and ranges is None and len(matrix) != 1:
            ranges = ranges_of(matrix) if len(matrix) else np.zeros((2, matrix.shape[1]))
        matrix = quantize(matrix, precision, ranges)
        if convert_to_tensor:
            return torch.from_numpy(matrix[0] if single else matrix)
        return matrix[0] if single else matrix if convert_to_numpy else list(matrix)

    def encode_query(self, texts: str | TableLike, **options: Any) -> Any:
        """Return the vectors of queries: those of `encode`, with the model's prompt for them.

        It is the prompt "query" of the folder, else its default one.

        Args:
            options: arguments of `encode`; a `prompt` or a `prompt_name` replaces the model's.

        Examples:
            >>> embed = bothways.load("my-bert", task="embed", prompts={"query": "query: "})
            >>> embed.encode_query(["who sleeps?"]).shape[0]
            1
        """
        return self._encode_role("query", texts, options)

    def encode_document(self, texts: str | TableLike, **options: Any) -> Any:
        """Return the vectors of documents, as `encode_query`.

        The prompt is "document", "passage" or "corpus" of the folder, else its default one.
        """
        return self._encode_role("document", texts, options)

    def _encode_role(
        self, role: Literal["query", "document"], texts: str | TableLike, options: dict[str, Any]
    ) -> Any:
        stated = [options.get(name) for name in ("prompt", "prompt_name")]
        if isinstance(self.task_model, Embedder) and stated == [None, None]:
            options["prompt"] = self.task_model.task.role_prompt(role)
        return self.encode(texts, **options)

    def _prompted(self, rows: Iterable[Any], prompt: str) -> Iterator[Any]:
        """Yield examples of one text with a prompt, unless they have one of their own.

        Raises:
            DataError: one has two texts, of which `encode` would leave one out.
        """
        for number, row in enumerate(rows, 1):
            example = read_input(self.task_model, row, number)
            if isinstance(example, TextExample) and example.text_b is not None:
                message = "has two texts, and encode returns one vector for each input"
                raise DataError(
                    message, where=f"input {number}",
                    fix="Give one text, or call the predictor, which returns a vector for each of "
                    "the two.",
                )  # fmt: skip
            if isinstance(example, TextExample) and not isinstance(example, PromptedText):
                example = PromptedText(**vars(example), prompt=prompt)
            yield example

    @torch.inference_mode()
    def _look_up(
        self, rows: list[Any], lead: str, progress: Progress
    ) -> Float32[np.ndarray, "texts width"] | None:
        """Return the vectors of texts by a static model, from blocks of texts to blocks of vectors.

        None where only the general way gives them, or a message: for other models and inputs, for
        texts that are too long.
        """
        embedder: Any = self.task_model
        encoder, task = embedder.model.encoder, embedder.task
        if (
            not isinstance(encoder, StaticEncoder)
            or not embedder.reads_mean
            or (lead and not task.include_prompt)
            or {*map(type, rows)} - {str}
        ):
            return None
        embedder.model.check_process()
        matrix = np.empty((len(rows), task.width(embedder.model)), np.float32)
        for at in range(0, len(rows), _BLOCK):
            block = [lead + row for row in rows[at : at + _BLOCK]]
            try:
                ids, lengths = embedder.tokenizer.encode_flat(block)
            except DataError:
                return None
            if lengths.max() > embedder.length:
                return None
            # The first token of each text: lengths 3 2 4 → 0 3 5.
            starts = torch.from_numpy(np.cumsum(lengths) - lengths)
            vectors = embedder.finished(encoder.mean(torch.from_numpy(ids), starts))
            matrix[at : at + len(block)] = vectors[:, : task.components].numpy()
            progress.advance(at + len(block))
        return matrix if np.isfinite(matrix).all() else None

    def similarity(self, first: Any, second: Any) -> Float32[np.ndarray, "first second"]:
        """Return the similarity of each of the first texts or vectors with each of the second.

        It is the function that a folder of sentence-transformers names, else the cosine.

        Raises:
            ConfigError: the predictor was opened for another task.
            DataError: vectors have different widths, or are codes of whole numbers.

        Examples:
            >>> embed = bothways.load("my-bert", task="embed")
            >>> embed.similarity("a good film", ["a good film", "a bad play"]).shape
            (1, 2)
        """
        a, b = self._compared(first, second)
        result: NDArray[np.float32]
        if power := {"euclidean": 2.0, "manhattan": 1.0}.get(self.similarity_name):
            # In numpy the differences would be an array `(first, second, width)`.
            exact = "donot_use_mm_for_euclid_dist"
            left, right = (torch.tensor(matrix, device="cpu") for matrix in (a, b))
            result = -torch.cdist(left, right, power, exact).numpy()
        else:
            result = a @ b.T
        # A cosine may be rounded above 1: its distance would be negative, its angle no number.
        return result.clip(-1, 1, out=result) if self.similarity_name == "cosine" else result

    def similarity_pairwise(self, first: Any, second: Any) -> Float32[np.ndarray, " pairs"]:
        """Return the similarity of pairs: the first with the first, the second with the second …

        Raises:
            ConfigError: the predictor was opened for another task.
            DataError: vectors have different widths, or there are more of one than of the other.
        """
        a, b = self._compared(first, second)
        if len(a) != len(b):
            message = f"there are {len(a)} of the first and {len(b)} of the second"
            fix = "Give pairs, or call similarity, which compares each with each."
            raise DataError(message, where="second", fix=fix)
        result: NDArray[np.float32] = (a * b).sum(axis=1)
        if self.similarity_name == "euclidean":
            result = -np.linalg.norm(a - b, axis=1)
        elif self.similarity_name == "manhattan":
            result = -np.abs(a - b).sum(axis=1)
        return result.clip(-1, 1) if self.similarity_name == "cosine" else result

    @property
    def similarity_name(self) -> str:
        """The similarity that a folder of sentence-transformers names, else "cosine"."""
        kept = self.task_model.model.kept.get(PROGRAM, {})
        name = str(kept.get(sentence_transformers.SIMILARITY) or "cosine")
        return name.removesuffix("_score")

    def _compared(self, *sides: Any) -> list[NDArray[np.float32]]:
        """Return texts or vectors as vectors `(texts, width)`, for cosines with length 1."""
        matrices = list[NDArray[np.float32]]()
        for name, side in zip(("first", "second"), sides, strict=True):
            # numpy reads no bf16, no tensor with a gradient and no memory of a GPU.
            is_float = isinstance(side, torch.Tensor) and side.is_floating_point()
            items = side.detach().float().cpu() if is_float else side
            try:
                array = np.asarray(items)
            except (TypeError, ValueError):  # of bf16, pairs: `encode` names what it cannot read
                array = np.empty(0)
            if array.dtype.kind in "biu" and array.size:  # codes of `encode(…, precision="int8")`
                message = f"is of type {array.dtype}: codes are not compared as vectors"
                fix = 'Give texts, or their vectors: encode(texts, precision="float32").'
                raise DataError(message, where=name, fix=fix)
            # No texts make an empty array of floats, too.
            vectors = array if array.dtype.kind == "f" and array.size else self.encode(items)
            matrices.append(np.atleast_2d(vectors).astype(np.float32, copy=False))
        check_widths(*(matrix.shape[1] for matrix in matrices))
        is_raw = self.similarity_name in ("dot", "euclidean", "manhattan")
        return matrices if is_raw else [*map(unit, matrices)]

    def read(
        self, data: str | Path | Reading[Any] | TableLike, columns: Any = None, *, labelled: bool
    ) -> Reading[Any]:
        """Open a file, a Hub data set, stdin ("-") or rows, and stream the examples.

        Args:
            columns: the columns to read; None for those of training, if the data has them.
            labelled: whether to read answers.

        Raises:
            ConfigError: columns are named next to a reading, which has its own.
            DataError: the data cannot be read, or a column is missing or cannot be guessed.
        """
        if isinstance(data, Reading):  # has its columns and answers
            if columns is not None:
                fix = "Leave them out."
                raise ConfigError("a reading has its own columns", where="columns", fix=fix)
            return data
        if isinstance(data, str | Path):
            return self.task_model.task.read(str(data), columns, labelled=labelled)
        items = enumerate(iter_rows(data, "data"), 1)
        rows = (TableRow(item, f"input {number}") for number, item in items)
        parse = functools.partial(_read_row, self.task_model, columns=columns, labelled=labelled)
        return self.task_model.task.read_rows(rows, parse, columns, labelled=labelled)

    def evaluate(
        self,
        data: str | Path | Reading[Any] | TableLike,
        answers: Any = None,
        counts: engine.PredictionCounts | None = None,
        **columns: str,
    ) -> Metrics:
        """Return the metrics on labelled data, in constant memory.

        Args:
            data: a file, a Hub data set, a reading, or rows; with answers inputs as for a call.
            answers: the right answer for each input, such as labels; None if the data has them.
            columns: names of columns, such as `label="stars"`; by default as in training.

        Raises:
            ConfigError: the task has no such column; columns are named next to answers.
            DataError: an example has no label, or a label that the model does not have; or there
                are more or fewer answers than inputs.
        """
        if columns and answers is not None:
            fix = "Give rows that have the answers, or inputs such as frame['body'] without names."
            raise ConfigError("are given, and columns are named", where="answers", fix=fix)
        if columns:
            data = self.read(data, named_columns(self.task_model.task, **columns), labelled=True)
        examples = self._labelled(data, answers)
        return engine.evaluate_task(self.task_model, examples, counts)

    def predict_examples(
        self,
        data: str | Path | Reading[Any] | TableLike,
        counts: engine.PredictionCounts | None = None,
    ) -> Iterator[tuple[Any, Any]]:
        """Yield (example, prediction) for a file, a reading or rows in order; constant memory."""
        examples = self.read(data, labelled=False).examples
        return engine.predict(self.task_model, examples, counts)

    def _labelled(self, inputs: Any, answers: Any) -> Iterable[Any]:
        """Return the examples of inputs with their answers, which the data has if they are None."""
        if answers is None:
            return self.read(inputs, labelled=True).examples
        items = [inputs] if self._is_one(inputs) else [*iter_rows(inputs, "inputs")]
        values = [answers] if self._is_one(inputs) else [*iter_rows(answers, "answers")]
        if len(items) != len(values):
            count = quantity(len(items), "input(s)")
            message = f"{quantity(len(values), 'answer(s)')} for {count}"
            raise DataError(message, where="answers", fix="Give one for each input.")
        examples = (read_input(self.task_model, item, n) for n, item in enumerate(items, 1))
        answered = zip(examples, map(plain_value, values), strict=True)
        return list(itertools.starmap(self.task_model.task.answered, answered))


def named_columns(task: Any, **columns: str | None) -> Any:
    """Return the named columns as the column type of the task; None if there are none.

    Raises:
        ConfigError: the task has no such column.
    """
    names = {role: name for role, name in columns.items() if name is not None}
    return configs.read(type(task.columns), names, where="columns") if names else None


def _reopened(
    reopen: Callable[[], TaskModel[Any, Any]], precision: PredictPrecision, invariant: bool
) -> Predictor:
    """Return the predictor that was pickled."""
    return Predictor(reopen(), precision, batch_invariant=invariant, reopen=reopen)


def unit(vectors: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return vectors with length 1; those of zeros stay."""
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    result: NDArray[np.float32] = vectors / lengths.clip(min=1e-12)
    return result


def read_input(
    task_model: TaskModel[Any, Any], value: Any, number: int, labelled: bool | None = False
) -> Any:
    """Return the example of the task in an input, the `number`-th of a call.

    The label of a row is not part of an input, and may be one that the model does not have: it is
    not read, or with `labelled` None read if it is there.

    Raises:
        DataError: the task cannot read it.
    """
    try:
        return _read_row(task_model, TableRow(value, f"input {number}"), labelled=labelled)
    except UnclearColumnError as error:
        # A call and a request name no columns.
        raise error.unnamed from None


def _read_row(
    task_model: TaskModel[Any, Any],
    row: TableRow,
    columns: Any = None,
    labelled: bool | None = False,
) -> Any:
    task, location = task_model.task, row.where
    value = row.values if isinstance(row.values, str) else plain_value(row.values)
    if columns is not None and not isinstance(value, Mapping):
        message = f"has no columns, and columns are named: {columns}"
        raise DataError(message, where=location, fix="Leave them out, or give rows as dicts.")
    match value:
        case str():
            return task.from_texts((value,), where=location)
        case (str(),) | (str(), str()):
            return task.from_texts(tuple(value), where=location)
        case (str(), []):
            message = "a tuple with a list needs a query with documents, and the list is empty"
            raise DataError(message, where=location)
        case (str(query), [*documents]) if all(isinstance(text, str) for text in documents):
            return task.from_texts((query, *documents), where=location)
        case Mapping():
            # Numbers, as pandas has them. Others are not copied: the server counts what is read.
            if not all(isinstance(name, str) for name in value):
                value = {str(name): item for name, item in value.items()}
            return task.example(value, columns, labelled, where=location)
        case _ if is_example(value):
            return value
        case _:
            allowed = "a text, a tuple of two texts or of a query and its documents, or a dict"
            items = value if isinstance(value, list | tuple) else ()
            parts = [x for y in items for x in (y if isinstance(y, list) else [y])]
            wrong = [f" with {type(x).__name__}" for x in parts if not isinstance(x, str)]
            message = f"is of type {type(value).__name__}{''.join(wrong[:1])}: it must be {allowed}"
            raise DataError(message, where=location)
