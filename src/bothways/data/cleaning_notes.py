"""Notes and errors about the cleaning of a corpus: steps that do not fit the language of the
documents, and steps that leave out most of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from bothways.core.advice import argument
from bothways.core.errors import DataError
from bothways.data.cleaning.config import Cleaning
from bothways.data.left_out import SHORT
from bothways.data.manifest import StepCounts
from bothways.data.sentences import AUTO

_UNSPACED = ("zh", "ja", "th", "lo", "my", "km")
_MOST = 0.5


def unsuited_steps(cleaning: Cleaning, language: str) -> Iterator[str]:
    """Yield a note for each step that does nothing for documents of a language, or too little."""
    if language == AUTO:
        return
    stop_words = cleaning.stop_words
    if stop_words and stop_words.language != language:
        yield (
            f"stop_words is a list for {stop_words.language}: it leaves out no document in "
            f"{language}. For a list of your own set stop_words.words and stop_words.language."
        )
    if cleaning.unwanted_lines and language != "en":
        yield f"unwanted_lines looks for English phrases; the documents are in {language}."
    if cleaning.mean_word_length and language in _UNSPACED:
        yield f"mean_word_length does not apply to {language}, where words have no spaces."


def large_steps(
    cleaning: Cleaning, language: str, documents: int, steps: Sequence[StepCounts]
) -> Iterator[str]:
    """Yield a note for each rule that left out more than half of the documents.

    Args:
        documents: the number of documents of the inputs.
        steps: counts of dropped documents and lines, by step.
    """
    for step in steps:
        if step.name in cleaning.document_rules and step.documents > _MOST * documents:
            note = f"{step.name} left out {step.documents / documents:.0%} of the documents"
            if step.name == "stop_words" and language == AUTO:
                yield f"{note}. If they are not English, give their {argument(language='CODE')}."
            else:
                yield f"{note}: are its settings right for them?"


def nothing_left(
    folder: Path, cleaning: Cleaning, documents: int, steps: Sequence[StepCounts]
) -> DataError:
    """Return the error about a corpus without documents, which names what left them out.

    Args:
        folder: the folder.
        cleaning: the steps that were taken.
        documents: the number of documents of the inputs.
        steps: counts of dropped documents and lines, by step.
    """
    left = [step for step in steps if step.documents]
    if not left:
        return DataError("the inputs have no document", where=folder, fix="Give other inputs.")
    if [step.name for step in left] == [SHORT]:
        least, short = cleaning.min_tokens, left[0].documents
        message = f"the inputs have no document with {least:,} tokens or more; {short:,} have fewer"
        fix = f"Set a lower {argument(min_tokens='N')}, or give other inputs."
        return DataError(message, where=folder, fix=fix)
    reasons = ", ".join(f"{step.name} {step.documents:,}" for step in left)
    message = f"the cleaning left out all {documents:,} documents: {reasons}"
    fix = "Change the settings of these steps, or leave some out, such as word_count=none."
    return DataError(message, where=folder, fix=fix)
