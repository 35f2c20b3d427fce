"""A receiver of progress that keeps what it hears."""


class Heard:
    """The stages of a job with what was done of each, its notes, and its messages."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, float | None, list[float]]] = []
        self.notes: list[str] = []
        self.messages: list[str] = []

    def stage(self, name: str, total: float | int | None = None) -> None:
        self.stages.append((name, total, []))

    def advance(self, done: float | int, note: str | None = None) -> None:
        self.stages[-1][2].append(done)
        if note is not None:
            self.notes.append(note)

    def message(self, text: str) -> None:
        self.messages.append(text)

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.stages]

    @property
    def text(self) -> str:
        return "".join(f"{line}\n" for line in self.messages)

    def done(self, name: str) -> list[float]:
        """What was done in the stages of a name."""
        return [done for each, _, advances in self.stages if each == name for done in advances]
