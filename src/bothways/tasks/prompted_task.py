"""Tasks that may put a prompt before each text, such as "query: " (Wang et al. 2022, section 3.2).

The prompts of a model are named, as in sentence-transformers. One of them may be the default.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from bothways.core.errors import ConfigError
from bothways.tasks.base import P, did_you_mean
from bothways.tasks.text_task import LongTextTask


@dataclass(frozen=True)
class PromptedTask(LongTextTask[P]):
    """A task on texts with a prompt before them.

    Attributes:
        prompts: prompts by name.
        prompt_name: the one that is used by default; None for none.
        prompt: a prompt in its place; "" for none.
    """

    prompts: Mapping[str, str] = dataclasses.field(default_factory=dict, hash=False)
    prompt_name: str | None = None
    prompt: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.prompt_text(self.prompt_name)

    def prompt_text(self, name: str | None = None, text: str | None = None) -> str:
        """Return the prompt with this name, or this text; without either the default one.

        Raises:
            ConfigError: both are given, or no prompt has this name.
        """
        if text is not None:
            if name is not None:
                message = "a prompt is given, and the name of one"
                raise ConfigError(message, where="prompt", fix="Leave one of them out.")
            return text
        if name is None:
            return self.default_prompt
        if name not in self.prompts:
            names = ", ".join(map(repr, self.prompts)) or "none"
            message = f"the model has no prompt {name!r:.80}; it has {names}"
            fix = "Name one of these, or give the text of a prompt."
            raise ConfigError(
                message + did_you_mean(name, self.prompts), where="prompt_name", fix=fix
            )
        return self.prompts[name]

    @property
    def default_prompt(self) -> str:
        """The prompt before every text; empty for none."""
        if self.prompt is not None:
            return self.prompt
        return "" if self.prompt_name is None else self.prompts[self.prompt_name]

    @property
    def named_prompts(self) -> tuple[dict[str, str], str | None]:
        """All prompts by name, and the name of the default one: "default" for an unnamed one."""
        if not self.prompt:
            name = self.prompt_name if self.prompt is None else None
            return dict(self.prompts), name
        return {**self.prompts, "default": self.prompt}, "default"
