"""The encoder of the original Transformer, which BERT's is based on (Vaswani et al. 2017).

Differences from BERT: sines and cosines instead of learned positions, added to tokens that are
multiplied by √width; no segments and no LayerNorm after the embeddings; ReLU; no dropout on
attention. transformers has no class for it: it is saved in our own format.

Source: Vaswani et al. 2017, sections 3 and 5.4; for what BERT kept, Devlin et al. 2018, section 3.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from bothways.model.config import Dropouts, EncoderConfig, PostNorm
from bothways.model.positions import Sinusoidal

VOCABULARY = 37_000
"""The BPE vocabulary of the paper's English and German; a corpus has its own."""


def base() -> EncoderConfig:
    """Return 6 layers of 512.

    Tokens start with variance 1 / 512, so that after scaling they are as large as positions.
    """
    return EncoderConfig(
        VOCABULARY, width=512, depth=6, heads=8, intermediate_size=2048, segments=0,
        position=Sinusoidal(scaled=True), order=PostNorm(embedding=False), activation="relu",
        norm_epsilon=1e-6, dropout=Dropouts(attention=0.0), initial_range=512**-0.5,
    )  # fmt: skip


PRESETS: dict[str, Callable[[], EncoderConfig]] = {
    "transformer-base": base,
    # More dropout, as for English to German.
    "transformer-big": lambda: replace(
        base(), width=1024, heads=16, intermediate_size=4096, dropout=Dropouts(0.3, 0.0),
        initial_range=1024**-0.5,
    ),
}  # fmt: skip
