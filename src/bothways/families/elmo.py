"""ELMo, BERT's other contrast: two LSTM language models, one from each side, joined by nothing but a head (Peters et al. 2018).

Against BERT: no attention and no positions, since order is the order of reading; no layer sees both sides of a token; it is
pre-trained to predict the next token and the previous one. Tokens are word pieces, where the original reads characters. No
family of transformers has it: its folder is of our own type.

Source: Devlin et al. 2018, section 2.1 and figure 3.
"""

from __future__ import annotations

from collections.abc import Callable

from bothways.model.lstm_config import LSTMConfig

VOCABULARY = 30_522
"""BERT's, so that the two are compared on the same tokens."""

PRESETS: dict[str, Callable[[], LSTMConfig]] = {
    # Peters et al. 2018, section 3.4: two layers of 4096 cells, projected to 512 features.
    "elmo-original": lambda: LSTMConfig(VOCABULARY),
    # The smaller ones that its authors published, in the same proportions.
    "elmo-medium": lambda: LSTMConfig(VOCABULARY, projection=256, cells=2048),
    "elmo-small": lambda: LSTMConfig(VOCABULARY, projection=128, cells=1024),
}
