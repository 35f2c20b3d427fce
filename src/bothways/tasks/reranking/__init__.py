"""Reranking: how well each of several documents answers a query."""
