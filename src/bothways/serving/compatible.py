"""Routes compatible with OpenAI, Cohere and Jina, and text-embeddings-inference (TEI).

They are OpenAI's embeddings and list of models; documents ranked for a query, as Cohere, Jina and
TEI do; and TEI's embed, predict, similarity, tokenize and info.

A model that ranks has the task `rerank`. The relevance is σ of its logit, whatever the task's
activation, since these clients expect a number from 0 to 1; `raw_scores` asks for the logit.
"""

from __future__ import annotations

import base64
import functools
import uuid
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, with_config
from typing_extensions import NotRequired, TypedDict

from bothways import __version__
from bothways.serving import shapes
from bothways.serving.errors import RequestError
from bothways.serving.models import Models, ServedModel
from bothways.tasks.metrics import sigmoid
from bothways.tasks.sentence_embedding.task import SentenceEmbeddingTask


class EmbeddingsRequest(shapes.VectorRequest):
    """Texts to embed, as OpenAI's clients send them."""

    input: Annotated[
        shapes.Text | shapes.NonEmpty[shapes.Text],
        shapes.must_be(
            "a text or a list of texts, not token ids, which are other words for the tokenizer of "
            "this model (LangChain sends texts with check_embedding_ctx_length=False)"
        ),
        shapes.BOUNDED,
    ]
    encoding_format: Literal["float", "base64"] = "float"
    # Infinity's client always sends these two.
    dimensions: shapes.Whole | None = Field(default=None, description="0 for all components")
    modality: Literal["text"] | None = None
    user: shapes.Meaningless = None


class EmbeddingObject(TypedDict):
    """A vector, as numbers or in base64."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | list[int] | str


class Usage(TypedDict):
    """Tokens of a request."""

    prompt_tokens: int
    total_tokens: int


class Embeddings(TypedDict):
    """The vectors of texts."""

    object: Literal["list"]
    data: list[EmbeddingObject]
    model: str
    usage: Usage


def embeddings(models: Models, request: EmbeddingsRequest) -> shapes.Query:
    """Read a request of `/v1/embeddings`; vectors have length 1, as OpenAI's.

    `input` is a text or a list of texts. OpenAI's token ids are refused: clients make them with the
    tokenizer of a model of OpenAI's, and most are ids of other words in every vocabulary. The
    prompt is the model's default one, or that of `prompt_name`, which OpenAI does not have.
    """
    model = models.choose(request.model, ("embed",))
    vectors = shapes.vector_writer(model, request, normalise=True)
    texts = [request.input] if isinstance(request.input, str) else request.input
    if not all(texts):
        message = f"input {texts.index('') + 1} is an empty text"
        raise RequestError("empty", message, param="input")
    inputs = shapes.prompted(model, texts, request.prompt_name)

    def write(answer: shapes.Answer) -> Embeddings:
        data: list[Any] = [*vectors(answer)]
        if request.encoding_format == "base64":
            data = [base64.b64encode(vector.tobytes()).decode("ascii") for vector in data]
        return {
            "object": "list",
            "data": [
                {"object": "embedding", "index": n, "embedding": item}
                for n, item in enumerate(data)
            ],
            "model": answer.model.name,
            "usage": {"prompt_tokens": answer.tokens, "total_tokens": answer.tokens},
        }

    return shapes.Query(model, inputs, write, request.truncate)


EMBEDDINGS = shapes.Route(
    EmbeddingsRequest,
    embeddings,
    Embeddings,
    "OpenAI's embeddings: vectors of length 1",
    ("embed",),
    {"input": ["a dog barks", "it rains"]},
)


class ModelObject(TypedDict):
    """A model of the server."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    task: str


class ModelList(TypedDict):
    """The models of the server."""

    object: Literal["list"]
    data: list[ModelObject]


def described(model: ServedModel) -> ModelObject:
    """Describe a model for `/v1/models`."""
    return ModelObject(
        id=model.name, object="model", created=model.created, owned_by="bothways", task=model.kind
    )


@with_config(ConfigDict(extra="forbid"))
class DocumentText(TypedDict):
    """The text of a document."""

    text: shapes.Text


Documents = Annotated[
    shapes.NonEmpty[shapes.Text | DocumentText],
    shapes.must_be('a list of texts, or of objects like {"text": "…"}'),
    shapes.BOUNDED,
]


class RerankRequest(shapes.TruncatedRequest):
    """A query and its documents: `documents` as Cohere and Jina call them, or `texts` as TEI."""

    model_config = ConfigDict(
        json_schema_extra={"oneOf": [{"required": ["documents"]}, {"required": ["texts"]}]}
    )
    query: shapes.Text
    documents: Documents | None = None
    texts: Documents | None = None
    top_n: shapes.Count | None = None
    raw_scores: shapes.Flag = False
    return_documents: shapes.Flag | None = None
    return_text: shapes.Flag | None = None
    max_tokens_per_doc: shapes.Count | None = Field(
        default=None, description="Cohere's: at least the length of the model, which cuts the texts"
    )


class TextScore(TypedDict):
    """A document in TEI's answer."""

    index: int
    score: float
    text: NotRequired[str]


class RerankResult(TypedDict):
    """A document in the answer of Cohere and Jina."""

    index: int
    relevance_score: float
    document: NotRequired[DocumentText]


class Ranking(TypedDict):
    """The answer of Cohere and Jina."""

    id: str
    model: str
    results: list[RerankResult]
    usage: Usage
    meta: dict[str, Any]


def reranking(models: Models, request: RerankRequest) -> shapes.Query:
    """Read a request of `/rerank`.

    The answer to `texts` is TEI's list; to `documents` an object with `results`.
    """
    model = models.choose(request.model, ("rerank",))
    tei = request.texts is not None
    if tei == (request.documents is not None):
        message = "give documents (as Cohere and Jina) or texts (as text-embeddings-inference)"
        raise RequestError("invalid", message, param="documents")
    other = "return_documents" if tei else "return_text"
    if getattr(request, other) is not None:
        message = f"{other} belongs to {'documents' if tei else 'texts'}, which is not given"
        raise RequestError("invalid", message, param=other)
    length, tokens = model.task_model.length, request.max_tokens_per_doc
    if tokens is not None and tokens < length:
        message = f"max_tokens_per_doc must be at least {length}, the model's length, not {tokens}"
        raise RequestError("invalid", message, param="max_tokens_per_doc")
    query, raw, top = request.query, request.raw_scores, request.top_n
    items = request.texts or request.documents or ()
    documents = [item if isinstance(item, str) else item["text"] for item in items]
    with_text = bool(request.return_text or request.return_documents)

    def write(answer: shapes.Answer) -> Ranking | list[TextScore]:
        logits = np.array([prediction.logits[0] for prediction in answer.predictions])
        scores = logits if raw else sigmoid(logits)
        # By logits: σ of large ones is 1 for all.
        order = np.argsort(-logits, kind="stable")[:top]
        pairs = list(zip(order.tolist(), scores[order].tolist(), strict=True))
        if tei:
            rows: list[TextScore] = [{"index": n, "score": score} for n, score in pairs]
            for row in rows if with_text else ():
                row["text"] = documents[row["index"]]
            return rows
        results: list[RerankResult] = [{"index": n, "relevance_score": x} for n, x in pairs]
        for result in results if with_text else ():
            result["document"] = {"text": documents[result["index"]]}
        tokens = answer.tokens
        return {
            "id": f"rerank-{uuid.uuid4().hex}",
            "model": answer.model.name,
            "results": results,
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
            "meta": {"billed_units": {"search_units": 1}},
        }

    pairs, input_name = [(query, text) for text in documents], "text {}" if tei else "document {}"
    return shapes.Query(model, pairs, write, request.truncate, input_name=input_name.format)


RERANK = shapes.Route(
    RerankRequest,
    reranking,
    Ranking | list[TextScore],
    "Documents ranked for a query: Cohere and Jina (documents), TEI (texts)",
    ("rerank",),
    {"query": "who sleeps?", "documents": ["the cat sleeps", "it rains"]},
)


class PromptParameters(shapes.Truncation):
    """Parameters of vectors."""

    prompt_name: shapes.Prompt | None = None


class EmbedParameters(PromptParameters):
    """Parameters of vectors that are answered."""

    normalize: shapes.Flag | None = None


class EmbedRequest(shapes.HostedRequest, shapes.VectorRequest):
    """Texts to embed; Hugging Face's clients send fields at the root or among the parameters."""

    inputs: shapes.TextList
    normalize: shapes.Flag | None = None
    parameters: EmbedParameters = EmbedParameters()


def embed_inputs(models: Models, request: EmbedRequest, *, normalise: bool = True) -> shapes.Query:
    """Read a request of `/embed`; `normalise` is the default of `normalize`."""
    model, parameters = models.choose(request.model, ("embed",)), request.parameters
    for choice in (parameters.normalize, request.normalize):
        normalise = normalise if choice is None else choice
    write = shapes.vector_writer(model, request, normalise=normalise)
    prompt = request.prompt_name or parameters.prompt_name
    texts = shapes.prompted(model, request.inputs, prompt)
    return shapes.Query(model, texts, write, request.cuts)


EMBED = shapes.Route(
    EmbedRequest,
    embed_inputs,
    list[list[float]] | list[list[int]],
    "TEI: a vector for each text",
    ("embed",),
    {"inputs": ["a dog barks", "it rains"]},
)


_TextOrPair = Annotated[list[shapes.Text], Field(min_length=1, max_length=2)]


def _read_pairs(value: Any) -> Any:
    """Read lists of one text or two as texts and pairs; a list of texts alone is one input."""
    if isinstance(value, str) or not value:
        return value
    if not all(isinstance(item, str) for item in value):
        return [_read_pairs(item) for item in value]
    if len(value) > 2:
        raise ValueError("a list of texts that is neither a text nor a pair")
    return tuple(value) if len(value) == 2 else value[0]


class PredictRequest(shapes.TruncatedRequest):
    """Texts and pairs to classify or score."""

    inputs: Annotated[
        shapes.Text | shapes.NonEmpty[shapes.Text | _TextOrPair],
        AfterValidator(_read_pairs),
        shapes.must_be(
            "a text, a pair [text, text], or a list of lists of one text or two; "
            "write texts [a, b, c] as [[a], [b], [c]]"
        ),
        shapes.BOUNDED,
    ]
    raw_scores: shapes.Flag = Field(
        default=False, description="true: logits, of models of one score"
    )


def predict(models: Models, request: PredictRequest) -> shapes.Query:
    """Read a request of `/predict`: labels with scores, the highest first.

    A list of two texts is a pair; a batch is a list of lists of one text or two.
    """
    model, value = models.choose(request.model, shapes.CLASSIFIERS), request.inputs
    raw = request.raw_scores
    if raw and model.task_model.scale != "number":
        message = f"raw_scores must be false: the scores for {model.kind} are probabilities"
        raise RequestError("invalid", message, param="raw_scores")
    write = functools.partial(shapes.label_scores, raw=raw)
    return shapes.query_each(model, value, write, request.truncate)


PREDICT = shapes.Route(
    PredictRequest,
    predict,
    list[shapes.LabelScore] | list[list[shapes.LabelScore]],
    "TEI: labels with scores; a list of two texts is a pair",
    shapes.CLASSIFIERS,
    {"inputs": "what a lovely film"},
)


class SimilarityInputs(shapes.Fields):
    """A sentence, and others to compare with it."""

    source_sentence: shapes.Text
    sentences: Annotated[shapes.NonEmpty[shapes.Text], shapes.BOUNDED]


class SimilarityRequest(shapes.HostedRequest):
    """Sentences to compare."""

    inputs: SimilarityInputs
    parameters: PromptParameters = PromptParameters()


def similarity(models: Models, request: SimilarityRequest) -> shapes.Query:
    """Read `{"inputs": {"source_sentence": …, "sentences": […]}}`; the answer is the cosines."""
    model = models.choose(request.model, ("embed",))
    if not request.inputs.sentences:
        path = "inputs.sentences"
        raise RequestError("empty", f"{path} is an empty list", param=path)

    def input_name(number: int) -> str:
        return f"sentence {number - 1}" if number > 1 else "source_sentence"

    def write(answer: shapes.Answer) -> Any:
        a, *_ = vectors = answer.vectors.astype(np.float64)
        lengths = np.linalg.norm(a) * np.linalg.norm(vectors[1:], axis=1)
        return (vectors[1:] @ a / np.maximum(lengths, 1e-24)).tolist()

    texts = [request.inputs.source_sentence, *request.inputs.sentences]
    inputs = shapes.prompted(model, texts, request.parameters.prompt_name)
    return shapes.Query(model, inputs, write, request.cuts, input_name=input_name)


SIMILARITY = shapes.Route(
    SimilarityRequest,
    similarity,
    list[float],
    "TEI: cosines of a sentence with others",
    ("embed",),
    {"inputs": {"source_sentence": "a dog barks", "sentences": ["a hound howls"]}},
)


class TokenizeRequest(shapes.RequestBody):
    """Texts to tokenize."""

    inputs: shapes.TextList
    add_special_tokens: shapes.Flag = True
    prompt_name: shapes.Prompt | None = None


class TextToken(TypedDict):
    """A token of a text; special ones have no characters."""

    id: int
    text: str
    special: bool
    start: int | None
    stop: int | None


def tokenize(models: Models, request: TokenizeRequest) -> list[list[TextToken]]:
    """Tokenize texts: each token with its id, its characters, and whether it is special."""
    model = models.choose(request.model)
    if not request.inputs:
        raise RequestError("empty", "there is no input: give at least one text", param="inputs")
    models.limits.check("text_characters", "characters", sum(map(len, request.inputs)))
    items = shapes.prompted(model, request.inputs, request.prompt_name)
    tokenizer, answer = model.task_model.tokenizer, list[list[TextToken]]()
    for item in items:
        (encoded,) = tokenizer.encode_with_offsets([item.prompt + item.text])
        pairs = zip(encoded.ids.tolist(), encoded.offsets.tolist(), strict=True)
        tokens = [(id, False, start, stop) for id, (start, stop) in pairs]
        if request.add_special_tokens:
            head, tail = (
                [(int(id), True, None, None) for id in gap.ids]
                for gap in (tokenizer.template.before, tokenizer.template.after)
            )
            tokens = [*head, *tokens, *tail]
        answer.append(
            [
                {"id": id, "text": tokenizer.token(id), "special": special, "start": a, "stop": b}
                for id, special, a, b in tokens
            ]
        )
    return answer


TOKENIZE = shapes.Route(
    TokenizeRequest,
    tokenize,
    list[list[TextToken]],
    "TEI: the tokens of texts",
    example={"inputs": "a dog barks"},
    computes=False,
)
"""The route `/tokenize`, which needs no queue."""


class ModelInfo(TypedDict):
    """A model of the server."""

    name: str
    task: str
    length: int
    precision: str
    labels: list[str]
    since: int
    digest: str | None
    facts: dict[str, str]
    prompts: NotRequired[list[str]]
    pairs: bool
    layers: int
    mask: str
    specials: dict[Literal["single", "pair"], int]
    long_texts: str


class IndexInfo(TypedDict):
    """An index of the server; `version` counts its changes."""

    name: str
    model: str
    documents: int
    version: int
    stored: str
    bm25: bool


class ServerInfo(TypedDict):
    """The server: TEI's names for the first model, then all models and limits."""

    model_id: str
    served_model_name: str
    model_dtype: str
    model_type: dict[str, Any]
    max_input_length: int
    max_batch_tokens: int
    max_client_batch_size: int
    auto_truncate: bool
    version: str
    limits: dict[str, float]
    models: list[ModelInfo]
    indexes: list[IndexInfo]


_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "int8": "int8"}


def info(models: Models) -> ServerInfo:
    """Describe the server: TEI's names for the first model, then all models and limits."""
    described, limits = list[ModelInfo](), models.limits
    for model in models:
        task, tokenizer = model.task_model.task, model.task_model.tokenizer
        model_info: ModelInfo = {
            "name": model.name,
            "task": model.kind,
            "length": model.task_model.length,
            "precision": model.predictor.precision,
            "labels": list(model.task_model.labels),
            "since": model.created,
            "digest": model.digest or None,
            "facts": dict(model.facts),
            "pairs": getattr(task.columns, "text_b", None) is not None,
            "layers": model.task_model.model.config.depth,
            "mask": tokenizer.token(tokenizer.specials.mask),
            "specials": {"single": tokenizer.template.single, "pair": tokenizer.template.pair},
            "long_texts": task.long_texts,
        }
        if isinstance(task, SentenceEmbeddingTask):
            model_info["prompts"] = list(task.prompts)
        described.append(model_info)
    first = next(iter(models))
    if isinstance(first.task_model.task, SentenceEmbeddingTask):
        model_type: dict[str, Any] = {"embedding": {"pooling": first.task_model.task.pooling}}
    else:
        labels = [*first.task_model.labels]
        names = {
            "id2label": {str(n): label for n, label in enumerate(labels)},
            "label2id": {label: n for n, label in enumerate(labels)},
        }
        model_type = {"reranker" if first.kind == "rerank" else "classifier": names}
    return {
        "model_id": first.name,
        "served_model_name": first.name,
        "model_dtype": _DTYPES[first.predictor.precision],
        "model_type": model_type,
        "max_input_length": first.task_model.length,
        "max_batch_tokens": limits.batch_tokens,
        "max_client_batch_size": limits.texts,
        "auto_truncate": True,
        "version": __version__,
        "limits": vars(limits),
        "models": described,
        "indexes": [
            {
                "name": name,
                "model": served.model.name,
                "documents": len(served.index),
                "version": served.index.record.changes,
                "stored": served.index.record.stored,
                "bm25": served.index.record.bm25 is not None,
            }
            for name, served in models.indexes.items()
        ],
    }
