"""A model of a folder with its tokenizer and labels, for a training loop of one's own."""

from __future__ import annotations

import functools
from pathlib import Path

from torch import nn

from bothways.hub.model_folder import LoadedModel, save_model
from bothways.model.model import Model
from bothways.text.tokenizer import Tokenizer

_STILL_TRUE = ("task", "length")
"""The parts of the folder's record that hold after further training."""


class PretrainedModel(Model):
    """A `Model` with the tokenizer and the labels of its folder, in evaluation mode.

        model = bothways.load_model("bert-base-uncased")
        output = model(model.tokenizer.batch(["A good film.", "A bad play."]))
        output.last_hidden_state, output.logits, output.pooler_output

    Args:
        loaded: the folder in memory; its modules become those of this model.

    Attributes:
        labels: names of the outputs of the label or tag head, in order; empty without such a head
            or with a fresh one.
        report: the fate of every tensor of the folder.

    Examples:
        >>> model = bothways.load_model("my-classifier")
        >>> isinstance(model, bothways.PretrainedModel), model.labels
        (True, ('negative', 'positive'))
    """

    def __init__(self, loaded: LoadedModel) -> None:
        nn.Module.__init__(self)
        model = loaded.model
        self.config, self.specification, self.kept = model.config, model.specification, model.kept
        self.encoder, self.heads = model.encoder, model.heads
        self.labels, self.report = loaded.labels, loaded.report
        self._loaded = loaded
        self.eval()

    def __repr__(self) -> str:
        shape = self.config
        parameters = sum(parameter.numel() for parameter in self.parameters())
        return (
            f"PretrainedModel(layers={shape.depth}, width={shape.width}, "
            f"parameters={parameters:,}, heads=[{', '.join(self.heads)}], labels={self.labels})"
        )

    @functools.cached_property
    def tokenizer(self) -> Tokenizer:
        """The folder's tokenizer.

        Raises:
            TokenizerError: the folder has no tokenizer, or one that cannot be read.
            FolderError: the vocabulary is not the one that the model was saved with.
        """
        return self._loaded.tokenizer()

    def save(self, folder: str | Path) -> Path:
        """Save model, tokenizer and labels as a Hugging Face folder; return its path.

        `bothways.save_model` has more settings, such as the model card.

        Raises:
            FolderError: the labels do not fit the outputs, or the folder holds something else.
            ResourceError: the folder cannot be written.
        """
        loaded, fresh = self._loaded, bool(self.report.fresh)
        record = {} if fresh else {k: v for k, v in loaded.extra.items() if k in _STILL_TRUE}
        problem = None if fresh else loaded.problem
        save_model(folder, self, self.tokenizer, labels=self.labels, problem=problem, extra=record)
        return Path(folder)
