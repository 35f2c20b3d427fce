"""BabyLM's zero-shot evaluation of a run, checkpoint by checkpoint.

| data | rows | mean over |
|---|---|---|
| BLiMP and its supplement | `sentence_good`, `sentence_bad` | phenomena |
| entity tracking | `input_prefix`, `options` (the first is right), `numops` | files, `numops` |
| EWoK | `Context1`, `Target1`, `Target2` | domains |
| word acquisition (.json) | words with their contexts | surprisal of each |

An option counts by the log probability of its own tokens, given the text before it. A model is
right if the first one is the most likely.

Source: BabyLM's evaluation pipeline of 2025, `sentence_zero_shot` and `AoA_word`.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bothways.core.config.values import Tree
from bothways.core.errors import DataError, FolderError
from bothways.core.files import local_path, make_folder, read_json, replace_text
from bothways.core.progress import SILENT, Progress
from bothways.data.tables import TableRow, open_table
from bothways.data.text_io import COMPRESSED
from bothways.hub.resolve import is_model_folder, resolve_run
from bothways.prediction import PredictPrecision
from bothways.prediction.opening import open_task_model
from bothways.prediction.predictor import Predictor
from bothways.tasks.masked_lm.task import CompletionTask
from bothways.tasks.text_task import TextExample

FORMS = "sentence_good and sentence_bad, input_prefix and options, or Context1, Target1 and Target2"
_COLUMNS = (
    {"sentence_good", "sentence_bad"},
    {"input_prefix", "options", "numops"},
    {"Context1", "Target1", "Target2"},
)


@dataclass(frozen=True)
class CompletionChoice:
    """Ends of one text, the first of which is right.

    Attributes:
        group: what its accuracy counts under: first the part that means are taken over last.
    """

    beginning: str
    options: tuple[str, ...]
    group: tuple[str, str]
    where: str


@dataclass
class CheckpointScores:
    """The scores of one checkpoint.

    Attributes:
        accuracies: by suite and by group.
        surprisals: of words in contexts, as rows of the pipeline's `surprisal.json`.
    """

    accuracies: dict[str, dict[tuple[str, str], float]] = field(default_factory=dict)
    surprisals: list[dict[str, Any]] = field(default_factory=list)

    @property
    def metrics(self) -> dict[str, float]:
        """The accuracy of each suite, and the mean surprisal in nats."""
        means = dict[str, float]()
        for suite, groups in self.accuracies.items():
            categories = defaultdict[str, list[float]](list)
            for (category, _), value in groups.items():
                categories[category].append(value)
            means[suite] = statistics.fmean(map(statistics.fmean, categories.values()))
        if self.surprisals:
            means["surprisal"] = statistics.fmean(row["surprisal"] for row in self.surprisals)
        return means

    def to_json(self) -> dict[str, Any]:
        """Return plain values."""
        groups = {
            name: {" ".join(filter(None, group)): value for group, value in sorted(values.items())}
            for name, values in self.accuracies.items()
        }
        return {**self.metrics, "groups": groups}


def evaluate_run(
    model: str,
    data: Path,
    out: Path | None = None,
    settings: Tree | Iterable[str] = (),
    *,
    device: str = "auto",
    precision: PredictPrecision = "fp32",
    progress: Progress = SILENT,
) -> dict[str, CheckpointScores]:
    """Score every checkpoint of a run on the folder of the evaluation's data.

    Args:
        model: the folder of a run with `chck_…` folders, or one model.
        data: the folder, with its suites in folders of their own; files that have another form are
            named in a message.
        out: where to write `results.json` and `surprisal.json`; None for nowhere.
        settings: of the likelihood, such as variant=both.

    Raises:
        DataError: the folder has nothing that is read, or a file is malformed.
        FolderError: a model cannot be opened.
    """
    settings = settings if isinstance(settings, Mapping) else tuple(settings)
    checkpoints, suites, words = find_checkpoints(model), *find_suites(data, progress)
    results = {}
    if out is not None:
        if out.is_file():
            raise FolderError("is a file, not a folder", where=out, fix="Name a folder.")
        make_folder(out)
    for number, (name, folder) in enumerate(checkpoints.items(), 1):
        progress.stage(f"{name}, {number} of {len(checkpoints)}", len(suites) + bool(words))
        # The likelihood of ends of texts, in the variant that fits the model's head.
        pairs = open_task_model(folder, "prefer", device=device, settings=settings)
        task = CompletionTask(variant=pairs.task.variant)  # type: ignore[attr-defined]
        scorer = task.bind(pairs.model, pairs.tokenizer, (), pairs.length).eval()
        predictor = Predictor(scorer, precision)
        scores = results[name] = CheckpointScores()
        for done, (suite, choices) in enumerate(suites.items()):
            progress.advance(done, suite)
            scores.accuracies[suite] = score_choices(predictor, choices)
        scores.surprisals = [{"step": name, **row} for row in surprisals(predictor, words)]
        if out is None:
            continue
        tree = {checkpoint: entry.to_json() for checkpoint, entry in results.items()}
        replace_text(out / "results.json", json.dumps(tree, indent=2, ensure_ascii=False))
        rows = [row for entry in results.values() for row in entry.surprisals]
        if rows:
            counts = {"total_steps": len(checkpoints), "completed_steps": len(results)}
            metadata = {"model_name": model, "use_bos_only": False, **counts}
            table = json.dumps({"metadata": metadata, "results": rows}, ensure_ascii=False)
            replace_text(out / "surprisal.json", table)
    return results


def find_checkpoints(model: str) -> dict[str, Path | str]:
    """Return the models of a run by name: `chck_…` by words read, then "main"."""
    folder = local_path(model)
    folders = [path for path in folder.glob("chck_*M") if is_model_folder(path)]
    by_words = sorted(folders, key=_words_read)
    checkpoints: dict[str, Path | str] = {path.name: path for path in by_words}
    inner = resolve_run(model)
    if not checkpoints or inner != model:
        checkpoints["main"] = inner
    return checkpoints


def _words_read(folder: Path) -> tuple[float, str]:
    """Return the sort key of a checkpoint by its name; one without a number is last."""
    number = re.fullmatch(r"chck_(\d+\.?\d*)M", folder.name)
    return float(number[1]) if number else math.inf, folder.name


def find_suites(
    data: Path, progress: Progress = SILENT
) -> tuple[dict[str, list[CompletionChoice]], dict[str, list[str]]]:
    """Return the choices of each suite by the name of its folder, and words with contexts.

    Raises:
        DataError: the folder has none of them; a row lacks what the others have.
    """
    if not data.is_dir():
        raise DataError("is not a folder", where=data, fix="Give the evaluation's data.")
    suites, words = defaultdict[str, list[CompletionChoice]](list), dict[str, list[str]]()
    endings = tuple(f".jsonl{suffix}" for suffix in ("", *COMPRESSED))
    for file in sorted(path for path in data.rglob("*") if path.is_file()):
        if file.name.endswith(endings):
            rows = list(open_table(str(file)).rows)
            choices = [_choice(row, file.name.split(".jsonl")[0]) for row in rows]
            if read := [choice for choice in choices if choice is not None]:
                if len(read) < len(choices):
                    message = f"lacks {FORMS}, which other rows of the file have"
                    where = rows[choices.index(None)].where
                    raise DataError(message, where=where, fix="Correct the row.")
                inner = file.parent.relative_to(data).as_posix()
                suites[data.name if inner == "." else inner] += read
                continue
        elif file.suffix == ".json" and (contexts := _contexts(file)):
            for word, sentences in contexts.items():
                words.setdefault(word, []).extend(sentences)
            continue
        progress.message(f"note: {file} is not read: it has neither rows with {FORMS} nor words")
    if not suites and not words:
        message = f"has no .jsonl file with {FORMS}, and no .json file of words with contexts"
        raise DataError(message, where=data, fix="Give the evaluation's data.")
    return suites, words


def _choice(row: TableRow, stem: str) -> CompletionChoice | None:
    """Return the choice of a row; None for another form."""
    match row.values:
        case {"sentence_good": str(good), "sentence_bad": str(bad)}:
            name = str(row.values.get("UID", stem))
            return CompletionChoice("", (good, bad), (name, ""), row.where)
        case {"input_prefix": str(beginning), "options": [_, _, *_] as options, "numops": count}:
            group = (stem, f"{count} operations")
            return CompletionChoice(beginning, tuple(map(str, options)), group, row.where)
        case {"Context1": str(context), "Target1": str(right), "Target2": str(wrong)}:
            domain = str(row.values.get("Domain", stem))
            return CompletionChoice(context, (f" {right}", f" {wrong}"), (domain, ""), row.where)
        case _ if any(columns <= row.values.keys() for columns in _COLUMNS):
            message = "has a value that is not a text, or fewer than two options"
            raise DataError(message, where=row.where, fix="Correct the row.")
        case _:
            return None


def _contexts(file: Path) -> dict[str, list[str]]:
    """Return words of two letters or more with their contexts; {} for a file of another form."""
    words = {}
    table = read_json(file)
    for word, rows in table.items() if isinstance(table, dict) else ():
        if not isinstance(rows, list) or not all(
            isinstance(row, dict) and isinstance(row.get("context"), str) for row in rows
        ):
            return {}
        if len(word) > 1:
            words[word] = [row["context"] for row in rows]
    return words


def score_choices(
    predictor: Predictor, choices: list[CompletionChoice]
) -> dict[tuple[str, str], float]:
    """Return the accuracy of each group: how often the first option is the most likely one."""
    examples = (
        TextExample(choice.beginning, option, where=choice.where)
        for choice in choices
        for option in choice.options
    )
    logs = (result.log_likelihood for _, result in predictor.predict_examples(examples))
    correct = defaultdict[tuple[str, str], list[bool]](list)
    for choice in choices:
        first, *others = [next(logs) for _ in choice.options]
        correct[choice.group].append(first > max(others, default=-math.inf))
    return {group: statistics.fmean(values) for group, values in correct.items()}


def surprisals(predictor: Predictor, words: Mapping[str, list[str]]) -> list[dict[str, Any]]:
    """Return −log p(word | context) in nats of each word in each of its contexts."""
    rows = [
        {"target_word": word, "context_id": number, "context": context}
        for word, contexts in words.items()
        for number, context in enumerate(contexts)
    ]
    where = "the word {target_word!r} in context {context_id}"
    contexts = (f"{str(row['context']).strip()} " for row in rows)
    examples = (
        TextExample(context, str(row["target_word"]).strip(), where=where.format_map(row))
        for context, row in zip(contexts, rows, strict=True)
    )
    results = zip(rows, predictor.predict_examples(examples), strict=True)
    return [{**row, "surprisal": -result.log_likelihood} for row, (_, result) in results]
