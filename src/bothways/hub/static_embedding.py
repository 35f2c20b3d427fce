"""StaticEmbedding folders of sentence-transformers: a vector for each token, and no encoder.

    modules.json                          StaticEmbedding, then perhaps Dense layers and Normalize
    0_StaticEmbedding/model.safetensors   the table, or that of model2vec
    0_StaticEmbedding/tokenizer.json

The vector of a text is the mean of those of its tokens, without special tokens; that of a text
without tokens is zero. `prediction.static_distillation` makes such folders of an encoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import numpy as np
import safetensors.torch
import tokenizers
import torch
from jaxtyping import Float, Int
from tokenizers import processors
from torch import Tensor, nn

from bothways.core.batch import Batch
from bothways.core.errors import ConfigError, FolderError, TokenizerError
from bothways.core.files import read_json, read_utf8
from bothways.core.source import Ids
from bothways.hub.resolve import MODULES, require_inside
from bothways.hub.weight_files import AGAIN, open_weights
from bothways.model.config import EncoderConfig
from bothways.model.model import Hidden
from bothways.model.positions import Learned
from bothways.text.tokenizer import Tokenizer
from bothways.text.tokenizer_classes import Specials
from bothways.text.tokenizer_files import parse_backend

STATIC = "StaticEmbedding"
TABLE = "embedding.weight"
UNLIMITED = 2**20
"""The longest text in tokens, where the tokenizer has no limit."""


class StaticTokenizer(Tokenizer):
    """A tokenizer that adds no special tokens.

    A text without tokens gets one that is in no vocabulary, whose vector is zero.

    Attributes:
        content: the content of its file, for saving.
    """

    content: str = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return static_tokenizer, (self.content,)

    def encode(self, texts: Any) -> Any:
        """Return the ids of a text, or a list with the ids of each text."""
        rows = super().encode(texts)
        return self._filled(rows) if isinstance(texts, str) else [self._filled(r) for r in rows]

    def _filled(self, ids: Ids) -> Ids:
        return ids if len(ids) else np.array([self.size], dtype=ids.dtype)


class StaticEncoder(nn.Module):
    """The table of vectors, with the interface of an encoder.

    Args:
        table: the vectors of tokens `(vocabulary, width)`.
        max_positions: the longest text, in tokens.
    """

    def __init__(self, table: Float[Tensor, "vocab width"], max_positions: int) -> None:
        super().__init__()
        rows, width = table.shape
        # The last row is the vector of a text without tokens.
        rows_of_all = torch.cat([table, table.new_zeros(1, width)])
        token = nn.Embedding.from_pretrained(rows_of_all, freeze=False, padding_idx=rows)
        # The names that fine-tuning knows of encoders: one embedding, and no blocks.
        self.embedding, self.blocks = nn.ModuleDict({"token": token}), nn.ModuleList()
        # Settings of layers do not matter: there are none.
        self.config = EncoderConfig(
            vocab=rows + 1, width=width, depth=1, heads=1, intermediate_size=1,
            position=Learned(max_positions),
        )  # fmt: skip

    def forward(
        self, batch: Batch, keep_layers: bool = False, only: Int[Tensor, " asked"] | None = None
    ) -> Hidden:
        """Return the vectors of all tokens, whatever `only` is; ConfigError for layers."""
        if keep_layers:
            message = f"a {STATIC} folder has vectors of tokens, and no layers"
            raise ConfigError(message, where="layers", fix="Set layers=[-1].")
        return Hidden(self.token(batch.ids), self.token.weight)

    def mean(
        self, ids: Int[Tensor, " tokens"], starts: Int[Tensor, " texts"]
    ) -> Float[Tensor, "texts width"]:
        """Return the mean of the vectors of each text, which begins at a token of `starts`.

        Gathering and adding are one pass: the vectors of the tokens are nowhere in memory.
        """
        # Only a gradient would change the row of zeros, and torch's fast kernel has no such row.
        empty = self.token.padding_idx if torch.is_grad_enabled() else None
        return nn.functional.embedding_bag(
            ids, self.token.weight, starts.to(ids.dtype), mode="mean", padding_idx=empty,
            sparse=self.token.sparse,
        )  # fmt: skip

    @property
    def token(self) -> nn.Embedding:
        """The vectors of tokens, and a row of zeros."""
        return cast("nn.Embedding", self.embedding["token"])


def static_folder(folder: Path) -> Path | None:
    """Return the folder of the module StaticEmbedding; None where a model has no such module."""
    file = folder / MODULES
    match read_json(file, FolderError) if file.is_file() else None:
        case [{"type": str(kind), "path": str(path)}, *_] if kind.rpartition(".")[2] == STATIC:
            if path not in ("", "."):  # the folder itself, as model2vec writes it
                require_inside(path, file)
            return folder / path
        case _:
            return None


def read_static(folder: Path) -> tuple[StaticEncoder, StaticTokenizer]:
    """Read the folder of the module.

    Raises:
        FolderError: the table is missing, damaged or has fewer rows than there are tokens.
        TokenizerError: the tokenizer cannot be read.
    """
    weights = open_weights(folder)
    # model2vec may share rows among tokens, and weight tokens.
    shapes = weights.shapes
    main = TABLE if TABLE in shapes else "embeddings"
    names = {TABLE} if TABLE in shapes else {"embeddings", "mapping", "weights"} & {*shapes}
    if main not in names or len(shapes.get(main, ())) != 2 or names != {*shapes}:
        message = f"holds {', '.join(sorted(shapes))[:200] or 'nothing'}, not the table of {STATIC}"
        raise FolderError(message, where=weights.file, fix=AGAIN)
    try:
        table = weights.read(main).float()
        if "mapping" in names:
            table = table.index_select(0, weights.read("mapping").long())
        if "weights" in names:
            table = table * weights.read("weights").float().reshape(len(table), 1)
    except (IndexError, RuntimeError) as error:
        message = "holds a mapping or weights that do not fit its vectors"
        raise FolderError(message, where=weights.file, fix=AGAIN) from error
    file = folder / "tokenizer.json"
    content = read_utf8(file, TokenizerError)
    cut = parse_backend(content, file).truncation or {}
    if cut.get("direction", "right").lower() != "right":
        message = "truncates texts at their beginning"
        raise TokenizerError(message, where=file, fix='Set its "truncation" to null.')
    tokenizer, length = static_tokenizer(content), int(cut.get("max_length", UNLIMITED))
    if tokenizer.size > len(table):
        message = f"has {len(table):,} vectors for {tokenizer.size:,} tokens"
        raise FolderError(message, where=weights.file, fix=AGAIN)
    # Rows without a token are dropped: the tokenizer's first unused id has the zeros.
    return StaticEncoder(table[: tokenizer.size], length), tokenizer


def static_tokenizer(content: str) -> StaticTokenizer:
    """Return the tokenizer of the content of a `tokenizer.json`."""
    backend = tokenizers.Tokenizer.from_str(content)
    # Length and padding are the caller's, as for every other tokenizer.
    backend.no_truncation()
    backend.no_padding()
    backend.post_processor = processors.TemplateProcessing("$A", "$A $B", [])
    unknown = backend.token_to_id(getattr(backend.model, "unk_token", None) or "[UNK]") or 0
    special = Specials(pad=0, unknown=unknown, cls=0, sep=0, mask=0)
    tokenizer = StaticTokenizer(backend, special, flat=True)
    tokenizer.content = content
    return tokenizer


def static_files(encoder: StaticEncoder, tokenizer: StaticTokenizer) -> dict[str, bytes]:
    """Return the files of the module, by their names in the folder."""
    table = encoder.token.weight[:-1].detach().cpu().contiguous()
    return {
        f"0_{STATIC}/model.safetensors": safetensors.torch.save({TABLE: table}),
        f"0_{STATIC}/tokenizer.json": tokenizer.content.encode(),
    }
