"""The POST routes. Each also exists as `/models/NAME/…` for one model."""

from __future__ import annotations

from typing import Any

from bothways.serving import explain, hugging_face, openai, rerank, tei
from bothways.serving.shapes import LabelScore, Route, own
from bothways.tasks.catalogue import ALL_TASKS

TEXTS = ["a dog barks", "it rains"]
RERANK = Route(
    rerank.RerankRequest,
    rerank.rerank,
    rerank.Ranking | list[rerank.TextScore],
    "Documents ranked for a query: Cohere and Jina (documents), TEI (texts)",
    ("rerank",),
    {"query": "who sleeps?", "documents": ["the cat sleeps", "it rains"]},
)
EMBEDDINGS = Route(
    openai.EmbeddingsRequest,
    openai.embeddings,
    openai.Embeddings,
    "OpenAI's embeddings: vectors of length 1",
    ("embed",),
    {"input": TEXTS},
)
ROUTES: dict[str, Route] = {
    **{f"/{kind}": own(kind) for kind in ALL_TASKS if kind not in ("embed", "rerank")},
    "/embed": Route(
        tei.EmbedRequest,
        tei.tei_embed,
        list[list[float]],
        "TEI: a vector for each text",
        ("embed",),
        {"inputs": TEXTS},
    ),
    "/predict": Route(
        tei.PredictRequest,
        tei.predict,
        list[LabelScore] | list[list[LabelScore]],
        "TEI: labels with scores; a list of two texts is a pair",
        tei.CLASSIFIERS,
        {"inputs": "what a lovely film"},
    ),
    "/similarity": Route(
        tei.SimilarityRequest,
        tei.similarity,
        list[float],
        "TEI: cosines of a sentence with others",
        ("embed",),
        {"inputs": {"source_sentence": "a dog barks", "sentences": ["a hound howls"]}},
    ),
    **dict.fromkeys(("/rerank", "/v1/rerank", "/v2/rerank"), RERANK),
    **dict.fromkeys(("/v1/embeddings", "/embeddings"), EMBEDDINGS),
    "/": Route(
        hugging_face.request_of, hugging_face.pipeline, Any, "Hugging Face: the task of the model"
    ),
}
"""The routes that compute."""
TOKENIZE = Route(
    tei.TokenizeRequest,
    tei.tokenize,
    list[list[tei.TextToken]],
    "TEI: the tokens of texts",
    (),
    {"inputs": "a dog barks"},
)
"""The route `/tokenize`, which needs no queue."""
EXPLAIN = Route(
    explain.ExplainRequest,
    explain.explain,
    explain.WordEffects | explain.Attentions,
    "Why the model answers so: words left out, attention",
    explain.KINDS,
    {"method": "attention", "inputs": None},
)
"""The route `/explain` of the playground."""
