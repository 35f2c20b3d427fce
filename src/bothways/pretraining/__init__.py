"""Pre-training: settings and recipes, the run, evaluation on held-out documents."""

from typing import Literal

PretrainRecipe = Literal[
    "modern", "paper", "short", "electra", "roberta", "albert", "spanbert", "deberta", "deberta_v3",
    "modernbert", "babylm",
]  # fmt: skip
"""The only list of these names, here for commands that load no torch: `recipes` looks its
functions up by them."""
DistilRecipe = Literal["distilbert", "minilm", "modern", "paper"]
"""With a corpus the first two, with labelled data the last two."""
