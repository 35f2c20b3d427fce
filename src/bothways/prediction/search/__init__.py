"""Search: indexes of texts, BM25, and the evaluation of retrieval."""

from typing import Literal

Mode = Literal["vectors", "bm25", "hybrid"]
"""How documents are ranked."""
Stored = Literal["fp32", "bf16", "int8", "binary"]
"""How an index stores its vectors."""
MiningMode = Literal["vectors", "bm25"]
"""How candidates for negatives are ranked."""
CandidateChoice = Literal["best", "random"]
"""Which of the candidates become negatives."""
