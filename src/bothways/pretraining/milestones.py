"""The model of a run, saved each time it has read a number of words, under BabyLM's names.

Words of the corpus are separated by white space, as the challenge counts them. An epoch has
those of the documents that are trained on: their share of the tokens, times all words.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from bothways.core.errors import ConfigError, DataError
from bothways.core.progress import Progress
from bothways.data.corpus import Corpus
from bothways.data.corpus_source import Corpora
from bothways.data.epoch_order import AllExcept, DocumentIds
from bothways.pretraining.config import PretrainConfig
from bothways.training.parallel import Plan, Sharded
from bothways.training.run import Event
from bothways.training.schedules import RunState

MILLION = 1_000_000
BABYLM = tuple(MILLION * n for n in (*range(1, 10), *range(10, 101, 10)))
"""The checkpoints of the track strict-small: every million words, then every ten millions."""


def milestone_name(words: int) -> str:
    """Return the name of the folder: 3,000,000 words are chck_3M."""
    return f"chck_{words / MILLION:g}M"


def check_milestones(settings: PretrainConfig, corpora: Corpora, folder: Path | None) -> None:
    """Raise ConfigError or DataError if the words that a run reads cannot be counted or saved."""
    where = "word_milestones"
    if not settings.word_milestones:
        return
    if folder is None:
        message = "are model folders in the folder of the run, and this one has none"
        raise ConfigError(message, where=where, fix="Give the run a folder.")
    if len(corpora.parts) > 1:
        message = "are for one corpus: the words of a mixture are not counted"
        raise ConfigError(message, where=where, fix="Leave them out, or join the corpora.")
    if corpora.first.manifest.counts.words is None:
        message = "was built before words were counted, which word_milestones needs"
        raise DataError(message, where=corpora.first.folder, fix="Build the corpus again.")


def words_of_epoch(corpus: Corpus, documents: DocumentIds) -> float:
    """Return the words that a run on these documents of a corpus reads in an epoch."""
    assert isinstance(documents, AllExcept)
    without, counts = documents.without, corpus.manifest.counts
    begins, ends = (corpus.sentences[corpus.documents[ids]] for ids in (without, without + 1))
    left_out = int((ends - begins).sum())
    return (counts.words or 0) * (1 - left_out / counts.tokens)


@dataclass
class Milestones:
    """Saves model folders in the course of a run; called with its events on every rank.

    Attributes:
        words: of an epoch.
        targets: in words.
        save: writes a folder with the weights as they are, after so many words.
    """

    folder: Path
    words: float
    targets: tuple[int, ...]
    plan: Plan
    save: Callable[[Path, int, RunState], object]
    progress: Progress

    def __post_init__(self) -> None:
        if self.targets and isinstance(self.plan, Sharded):
            message = "cannot be saved by ranks that share a model"
            raise ConfigError(message, where="word_milestones", fix="Set sharding=none.")

    def __call__(self, event: Event) -> None:
        """Save what is due after a step; a resumed run finds what it has saved before."""
        read = event.progress.epochs * self.words
        for target in self.targets if event.kind == "step" and self.plan.rank == 0 else ():
            path = self.folder / milestone_name(target)
            if target <= read and not path.is_dir():
                self.save(path, target, event.progress)

    def report_rest(self, state: RunState) -> None:
        """Report the targets that the run has not reached."""
        read = state.epochs * self.words
        if rest := [milestone_name(target) for target in self.targets if target > read]:
            message = f"note: {read:,.0f} words were read, too few for {', '.join(rest)}"
            self.progress.message(message)
