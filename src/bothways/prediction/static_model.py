"""A StaticEmbedding folder with the interface of a prepared model; see `hub.static_embedding`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bothways.core.errors import ConfigError, FolderError
from bothways.core.files import read_object
from bothways.hub.load_report import LoadReport
from bothways.hub.model_folder import LoadedModel, read_record
from bothways.hub.resolve import PROGRAM, resolve
from bothways.hub.static_embedding import TABLE, read_static, static_folder
from bothways.prediction.prepared_model import UnpackedModel
from bothways.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class StaticFolder(LoadedModel):
    """A StaticEmbedding folder in memory.

    Attributes:
        texts: its tokenizer, which is not one of an encoder.
    """

    texts: Tokenizer | None = None

    def tokenizer(self) -> Tokenizer:
        assert self.texts is not None
        return self.texts


def open_static(name: str | Path, device: str) -> LoadedModel | None:
    """Open a StaticEmbedding folder; None for another one.

    Raises:
        FolderError, TokenizerError: a file is missing or damaged.
        ConfigError: the device is not the CPU.
    """
    folder = resolve(name)
    if (inner := static_folder(folder)) is None:
        return None
    if device not in ("auto", "cpu"):
        message = f"vectors of a StaticEmbedding folder are computed on the CPU, not on {device}"
        raise ConfigError(message, where="device", fix="Set the device to cpu.")
    encoder, tokenizer = read_static(inner)
    model, program = UnpackedModel(encoder, {}), folder / PROGRAM
    program_config = read_object(program, FolderError) if program.is_file() else {}
    model.kept = {"config.json": {}, PROGRAM: program_config}
    report = LoadReport((TABLE,))
    return StaticFolder(model, report, folder, extra=read_record(folder), texts=tokenizer)
