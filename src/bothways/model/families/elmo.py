"""ELMo, another contrast to BERT: two LSTM language models, one per direction (Peters et al. 2018).

Differences from BERT: no attention and no positions; no layer combines both sides of a token; it is
pre-trained to predict the next and the previous token. Tokens are word pieces, where the original
reads characters. transformers has no class for it: it is saved in our own format.

Source: Devlin et al. 2018, section 2.1 and figure 3.
"""

from __future__ import annotations

from collections.abc import Callable

from bothways.model.config import LSTMConfig

VOCABULARY = 30_522
"""The vocabulary of BERT, for comparisons on equal tokens."""

PRESETS: dict[str, Callable[[], LSTMConfig]] = {
    # Peters et al. 2018, section 3.4: two layers of 4096 cells, projected to 512 features.
    "elmo-original": lambda: LSTMConfig(VOCABULARY),
    # The smaller sizes of the same authors, in the same proportions.
    "elmo-medium": lambda: LSTMConfig(VOCABULARY, projection=256, cells=2048),
    "elmo-small": lambda: LSTMConfig(VOCABULARY, projection=128, cells=1024),
}
