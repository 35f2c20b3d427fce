"""The clients that people have, each against a running server."""

import asyncio
import base64
import json
import math
from collections.abc import Iterator
from typing import Any

import cohere
import httpx
import numpy as np
import openai
import pytest
from huggingface_hub import InferenceClient, close_session

from bothways.core.errors import ConfigError
from bothways.serving.app import App, app
from bothways.serving.compatible import info
from running_server import answer, refusal
from toy_predictors import TASKS, TEXTS


@pytest.fixture(scope="module")
def application(predictors) -> Iterator[App]:
    yield app(predictors)
    close_session()


def line(prediction: Any) -> Any:
    return json.loads(json.dumps(prediction.to_json()))


@pytest.mark.parametrize("name", sorted(TASKS.keys() - {"embed", "choice", "rerank"}))
def test_the_own_shape_is_a_line_of_predict(client, predictors, name):
    kind, inputs = predictors[name].task_model.task.name, TASKS[name][1][:5]
    expected = [line(predictors[name](item)) for item in inputs]
    if kind == "answer":  # numbered in their request
        expected = [one | {"id": str(number)} for number, one in enumerate(expected, 1)]
    assert answer(client, f"/{kind}", {"inputs": inputs}) == expected
    assert answer(client, f"/models/{name}/{kind}", {"inputs": inputs[:1]}) == expected[:1]
    if isinstance(inputs[0], str):
        assert answer(client, f"/{kind}", {"inputs": inputs[0]}) == expected[0]
    wrong = "classify" if kind != "classify" else "tag"
    refused = refusal(client, f"/{wrong}", {"inputs": "a", "model": name})
    assert refused[:2] == (422, "wrong_task")


def test_rows_with_columns(client, predictors):
    row = {"context": TEXTS[0], "endings": [TEXTS[1], TEXTS[2]]}
    assert answer(client, "/choice", {"inputs": row}) == line(predictors["choice"](row))
    question = {"question": TEXTS[0], "context": TEXTS[1]}
    assert answer(client, "/answer", {"inputs": [question]}) == [
        line(predictors["answer"](question))
    ]


def test_openai(url, predictors):
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        vectors = predictors["embed"].encode(TEXTS[:3])
        unit = vectors / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
        for encoding in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
            found = client.embeddings.create(model="embed", input=TEXTS[:3], **encoding)
            given = [item.embedding for item in found.data]
            if encoding.get("encoding_format") == "base64":
                given = [np.frombuffer(base64.b64decode(each), "<f4") for each in given]
            assert (np.array(given, np.float32) == unit.astype(np.float32)).all()
        tokenizer = predictors["embed"].task_model.tokenizer
        tokens = sum(len(tokenizer.encode(text)) + 2 for text in TEXTS[:3])
        assert found.usage.prompt_tokens == found.usage.total_tokens == tokens
        short = (
            client.embeddings.create(model="embed", input=TEXTS[0], dimensions=5).data[0].embedding
        )
        assert np.allclose(short, vectors[0, :5] / np.linalg.norm(vectors[0, :5]), atol=1e-6)
        asked = predictors["embed"].encode(TEXTS[0], prompt_name="ask")
        named = {"prompt_name": "ask"}
        prompted = client.embeddings.create(model="embed", input=TEXTS[0], extra_body=named)
        direction = asked / np.linalg.norm(asked.astype(np.float64))
        assert np.array_equal(np.float32(prompted.data[0].embedding), direction.astype(np.float32))
        assert {model.id for model in client.models.list()} == predictors.keys()
        assert client.models.retrieve("embed").id == "embed"
        with pytest.raises(openai.NotFoundError, match="there is no model 'ada'"):
            client.embeddings.create(model="ada", input="a")
        # LangChain's ids are those of another tokenizer, and most are ids of this one, too.
        for ids in ([5, 6], [[5, 6], [7]]):
            with pytest.raises(openai.UnprocessableEntityError, match="ctx_length"):
                client.embeddings.create(model="embed", input=ids)
        with pytest.raises(openai.UnprocessableEntityError, match="at most 32"):
            client.embeddings.create(model="embed", input="a", dimensions=33)


# Python 3.14 deprecates a function that the client calls.
@pytest.mark.filterwarnings("ignore:'asyncio.iscoroutinefunction':DeprecationWarning")
def test_cohere(url, predictors):
    with httpx.Client() as transport:
        client = cohere.ClientV2("none", base_url=url, httpx_client=transport)
        asked = {"query": TEXTS[0], "documents": TEXTS[1:6], "top_n": 3}
        found = client.rerank(model="rerank", **asked).results
    ranking = predictors["rerank"]((TEXTS[0], TEXTS[1:6])).ranking[:3]
    assert [item.index for item in found] == [ranked.index for ranked in ranking]
    assert [item.relevance_score for item in found] == [ranked.score for ranked in ranking]


def test_cohere_integrations_send_the_tokens_of_a_document(client, predictors):
    body = {"model": "rerank", "query": TEXTS[0], "documents": TEXTS[1:3]}
    plain = answer(client, "/v2/rerank", body)["results"]
    # LangChain's CohereRerank sends null, Haystack's CohereRanker 4096.
    for tokens in (None, 4096, predictors["rerank"].task_model.length):
        fields = {**body, "top_n": 2, "max_tokens_per_doc": tokens}
        assert answer(client, "/v2/rerank", fields)["results"] == plain
    short = refusal(client, "/v2/rerank", {**body, "max_tokens_per_doc": 2})
    assert short[:3] == (422, "invalid", "max_tokens_per_doc")


def test_jina_and_tei_rerank(client, predictors):
    body = {"query": TEXTS[0], "documents": [TEXTS[1], {"text": TEXTS[2]}]}
    found = answer(client, "/v1/rerank", {**body, "return_documents": True})
    best = found["results"][0]
    assert best["document"]["text"] == TEXTS[1 + best["index"]]
    assert found["usage"]["total_tokens"] > 0
    plain = answer(client, "/v1/rerank", body)["results"]
    assert [{*item} for item in plain] == [{"index", "relevance_score"}] * 2
    texts = {"query": TEXTS[0], "texts": TEXTS[1:3], "return_text": True}
    assert {item["text"] for item in answer(client, "/rerank", texts)} == {*TEXTS[1:3]}
    raw = answer(client, "/rerank", {"query": TEXTS[0], "texts": TEXTS[1:3], "raw_scores": True})
    scores = {item["index"]: item["score"] for item in raw}
    # The same pairs together: without compiled kernels the rounding depends on the batch.
    both = predictors["rerank"]((TEXTS[0], TEXTS[1:3]))
    assert scores[1] == both.logits[1]
    alike = answer(client, "/models/rerank", {"query": TEXTS[0], "texts": TEXTS[1:3]})
    ranked = {item.index: item.score for item in both.ranking}
    assert [{*item} for item in alike] == [{"index", "score"}] * 2
    assert {item["index"]: item["score"] for item in alike} == ranked
    assert ranked[1] == pytest.approx(1 / (1 + math.exp(-both.logits[1])))
    (pair,) = answer(client, "/models/rerank/predict", {"inputs": [TEXTS[0], TEXTS[2]]})
    (alone,) = predictors["rerank"]((TEXTS[0], [TEXTS[2]])).ranking
    assert pair == {"label": "relevance", "score": alone.score}


def test_hugging_face(url, client, predictors):
    def model(name: str) -> InferenceClient:
        return InferenceClient(model=f"{url}/models/{name}")

    labels = model("classify").text_classification(TEXTS[0])
    probabilities = predictors["classify"](TEXTS[0]).probabilities
    assert {item.label: item.score for item in labels} == probabilities
    assert labels[0].score == max(probabilities.values())
    assert len(model("classify").text_classification(TEXTS[0], top_k=1)) == 1

    entities = predictors["tag"](TEXTS[3]).entities
    tags = model("tag").token_classification(TEXTS[3])
    spans = [(entity.type, entity.start, entity.end) for entity in entities]
    assert [(tag.entity_group, tag.start, tag.end) for tag in tags] == spans
    words = model("tag").token_classification(TEXTS[3], aggregation_strategy="none")
    marked = [tag for tag in predictors["tag"](TEXTS[3]).tags if tag != "O"]
    assert [word.entity for word in words] == marked

    question, context = TASKS["answer"][1][0]
    best = model("answer").question_answering(question=question, context=context)
    expected = predictors["answer"]((question, context))
    assert best.answer == expected.text
    assert (best.start, best.end) == (expected.start, expected.end)
    several = model("answer").question_answering(question=question, context=context, top_k=2)
    assert [each.answer for each in several] == [span.text for span in expected.spans[:2]]

    masked = f"{TEXTS[0]} [MASK]"
    fillings = model("fill").fill_mask(masked, top_k=2)
    guesses = predictors["fill"](masked)
    assert [f.score for f in fillings] == [g.probability for g in guesses.masks[0][:2]]
    assert fillings[0].sequence == guesses.text
    both = answer(client, "/models/fill", {"inputs": f"[MASK] {TEXTS[0]} [MASK]"})
    assert [len(each) for each in both] == [3, 3]
    assert both[0][0]["sequence"].endswith(f"{TEXTS[0]} [MASK]")

    vectors = predictors["embed"].encode(TEXTS[:2])
    assert np.array_equal(model("embed").feature_extraction(TEXTS[0]), vectors[:1])
    found = model("embed").sentence_similarity(TEXTS[0], other_sentences=TEXTS[1:3])
    assert found[0] == pytest.approx(predictors["embed"]((TEXTS[0], TEXTS[1])).cosine)
    asked = model("embed").feature_extraction(TEXTS[0], prompt_name="ask")
    assert np.array_equal(asked[0], predictors["embed"].encode(TEXTS[0], prompt_name="ask"))


def test_tei(client, predictors):
    vectors = predictors["embed"].encode(TEXTS[:2])
    plain = answer(client, "/embed", {"inputs": TEXTS[:2], "normalize": False})
    assert np.array_equal(np.float32(plain), vectors)
    both = {"inputs": TEXTS[:2], "normalize": False, "prompt_name": "ask"}
    asked = predictors["embed"].encode(TEXTS[:2], prompt_name="ask")
    assert np.array_equal(np.float32(answer(client, "/embed", both)), asked)
    (ids,) = answer(client, "/models/embed/tokenize", {"inputs": "old", "prompt_name": "ask"})
    assert [token["text"] for token in ids[1:-1]] == ["the", "film", "old"]
    pair = {"source_sentence": TEXTS[0], "sentences": [TEXTS[1]]}
    similar = {"inputs": pair, "parameters": {"prompt_name": "ask"}}
    cosine = asked[0] @ asked[1] / np.prod(np.linalg.norm(asked, axis=1))
    assert answer(client, "/similarity", similar) == [pytest.approx(cosine, abs=1e-6)]
    wrong = {"inputs": "a", "prompt_name": "asq"}
    assert "did you mean 'ask'" in refusal(client, "/embed", wrong)[3]
    assert refusal(client, "/models/tag/tokenize", wrong)[2] == "prompt_name"
    (unit,) = answer(client, "/embed", {"inputs": TEXTS[0]})
    assert np.linalg.norm(unit) == pytest.approx(1, abs=1e-6)
    single = answer(client, "/models/classify/predict", {"inputs": TEXTS[0]})
    chances = predictors["classify"](TEXTS[0]).probabilities.values()
    assert [item["score"] for item in single] == sorted(chances, reverse=True)
    pair = answer(client, "/predict", {"inputs": TEXTS[:2], "model": "regress"})
    assert pair[0]["score"] == predictors["regress"]((TEXTS[0], TEXTS[1])).score
    batch = [[TEXTS[0], TEXTS[1]], [TEXTS[2], TEXTS[3]]]
    assert len(answer(client, "/models/regress/predict", {"inputs": batch})) == 2
    three = refusal(client, "/models/classify/predict", {"inputs": TEXTS[:3]})
    assert "[[a], [b], [c]]" in three[3]
    tokens = answer(client, "/models/embed/tokenize", {"inputs": TEXTS[0]})[0]
    assert [token["special"] for token in tokens[:2]] == [True, False]
    assert TEXTS[0][tokens[1]["start"] : tokens[1]["stop"]] == tokens[1]["text"]
    without = {"inputs": TEXTS[0], "add_special_tokens": False}
    assert answer(client, "/models/embed/tokenize", without)[0] == tokens[1:-1]
    shown = client.get("/info").json()
    assert {model["name"] for model in shown["models"]} == predictors.keys()
    assert shown["limits"]["queue_tokens"] == 131_072
    (embed,) = [model for model in shown["models"] if model["task"] == "embed"]
    assert embed["prompts"] == ["ask", "passage"]


def test_info_has_the_kind_of_the_first_model_as_tei_names_it(predictors):
    def labels(*names: str) -> dict[str, Any]:
        numbers = {name: at for at, name in enumerate(names)}
        return {"id2label": {str(at): name for name, at in numbers.items()}, "label2id": numbers}

    for name, kind in {
        "classify": {"classifier": labels("neg", "pos")},
        "rerank": {"reranker": labels("relevance")},
        "embed": {"embedding": {"pooling": "mean"}},
    }.items():
        assert info(app(predictors[name]).models)["model_type"] == kind


def test_an_app_answers_in_several_event_loops(predictors):
    application = app(predictors["classify"])

    async def ask() -> int:
        transport, headers = httpx.ASGITransport(application), {"x-request-timeout": "20"}
        async with httpx.AsyncClient(transport=transport, base_url="http://app") as client:
            response = await client.post("/classify", json={"inputs": "a"}, headers=headers)
            return response.status_code

    # Clients that tests of web frameworks use have a loop for each request, and start and stop an
    # app for each test.
    for _ in range(2):
        assert [asyncio.run(ask()) for _ in range(2)] == [200, 200]
        asyncio.run(application.stop())


def test_an_app_without_a_model_is_refused():
    with pytest.raises(ConfigError, match="there is no model to serve"):
        App({})


def test_metrics_count_what_was_answered(client):
    def texts() -> float:
        text = client.get("/metrics").text
        rows = [row for row in text.splitlines() if 'bothways_texts_total{model="embed"}' in row]
        return float(rows[0].rpartition(" ")[2])

    answer(client, "/embed", {"inputs": "a"})
    before = texts()
    answer(client, "/embed", {"inputs": ["a", "b", "c"]})
    assert texts() == before + 3
