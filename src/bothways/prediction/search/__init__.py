"""Search: indexes of texts, BM25, and the evaluation of retrieval."""
