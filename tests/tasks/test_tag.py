"""Token classification: every word once, in windows and context; equal to transformers; entities with their places."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
from hypothesis import given, strategies as st
from tokenizers import pre_tokenizers

from bothways.core.batch import IGNORED
from bothways.core.config import reader as configs
from bothways.core.errors import ConfigError, DataError
from bothways.prediction.engine import evaluate_task, predict
from bothways.tasks.base import EncodedExample
from bothways.tasks.predictions import Entity
from bothways.tasks.tagging.examples import TagColumns, TagExample, with_context
from bothways.tasks.tagging.schemes import respell
from bothways.tasks.tagging.task import Tagger, TaggingTask
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import ByteBPE, train_vocabulary
from toy_task import VOCABULARY, bind_small
from toy_tasks import TAGS as LABELS, make_sentences

UNKNOWN = 1


def make_task(tokenizer: Tokenizer, labels: tuple[str, ...] = LABELS) -> Tagger:
    return bind_small(TaggingTask(), tokenizer, labels, dropout=0.1, spread=0.5)


def tokens_of(tokenizer: Tokenizer, word: str) -> list[int]:
    return tokenizer.backend.encode(word, add_special_tokens=False).ids or [UNKNOWN]


def targets_of(made: EncodedExample) -> list[tuple[int, int]]:
    """(the token at the place, its label) of all targets in order."""
    pairs = [(sequence.ids, sequence.targets["tag"]) for sequence in made.sequences]
    places = np.concatenate([ids[target.index] for ids, target in pairs]).tolist()
    return list(zip(places, np.concatenate([x.ids for _, x in pairs]).tolist(), strict=True))


@given(st.data())
def test_every_word_is_tagged_once_in_any_window(tokenizer, data):
    kinds = st.sampled_from(("ape", "bees", "cat-ss", "\u200b", "", "\u0301", "x" * 120, "-" * 40))
    words = data.draw(st.lists(kinds, max_size=25))
    labels = data.draw(st.lists(st.sampled_from(LABELS), min_size=len(words), max_size=len(words)))
    length, stride = data.draw(st.tuples(st.integers(5, 24), st.none() | st.integers(1, 30)))
    example = TagExample(tuple(words), tuple(labels))
    (made,) = TaggingTask(stride=stride).encode([example], tokenizer, LABELS, length)
    firsts = [tokens_of(tokenizer, word)[0] for word in words]
    targets = [LABELS.index(tag) for tag in respell(labels, "iob2")]
    assert targets_of(made) == list(zip(firsts, targets, strict=True))
    assert all(len(sequence) <= length for sequence in made.sequences)
    assert len(made.sequences) == 1 or all(len(sequence) == length for sequence in made.sequences)
    tokens = [id for word in words for id in tokens_of(tokenizer, word)]
    assert made.tokens == len(tokens)
    read = {int(id) for sequence in made.sequences for id in sequence.ids[1:-1]}
    assert read <= set(tokens)
    if made.cut:  # nothing is lost but of words that are long for the window
        assert max(len(tokens_of(tokenizer, word)) for word in words) > (length - 2) // 3


def test_what_of_a_word_without_end_is_read_by_no_window_is_counted(tokenizer):
    example = TagExample(("ape", "-" * 30, "bee"))
    (made,) = TaggingTask(stride=4).encode([example], tokenizer, LABELS, 6)
    assert [sequence.ids[1] for sequence in made.sequences[1:]] == [UNKNOWN]
    assert (made.tokens, made.cut) == (32, 32 - 8)
    ids = (VOCABULARY.index("ape"), UNKNOWN, VOCABULARY.index("bee"))
    assert targets_of(made) == [(id, IGNORED) for id in ids]


def test_the_document_fills_the_window(tokenizer):
    document = [("ape", "bee"), ("cat", "dogs"), ("elk", "fox", "gnu")]
    examples = list(with_context(iter([(1, TagExample(words)) for words in document])))

    def read(length: int) -> list[tuple[str, list[int]]]:
        made = TaggingTask(context="document").encode(examples, tokenizer, LABELS, length)
        sequences = [sequence for item in made for sequence in item.sequences]
        texts = [" ".join(VOCABULARY[id] for id in sequence.ids[1:-1]) for sequence in sequences]
        places = [sequence.targets["tag"].index.tolist() for sequence in sequences]
        return list(zip(texts, places, strict=True))

    whole = "ape bee cat dog ##s elk fox gnu"
    assert read(10) == [(whole, [1, 2]), (whole, [3, 4]), (whole, [6, 7, 8])]
    places = [1, 2], [2, 3], [3, 4, 5]
    texts = "ape bee cat dog ##s", "bee cat dog ##s elk", "dog ##s elk fox gnu"
    assert read(7) == list(zip(texts, places, strict=True))
    assert read(5) == [("ape bee cat", [1, 2]), ("cat dog ##s", [1, 2]), ("elk fox gnu", [1, 2, 3])]


def test_an_empty_sentence_has_an_empty_answer(tokenizer):
    task = make_task(tokenizer)
    examples = [TagExample(()), TagExample(("ape",)), TagExample(())]
    predictions = [prediction for _, prediction in predict(task, examples)]
    assert [len(prediction.tags) for prediction in predictions] == [0, 1, 0]
    assert predictions[0].to_json() == {"entities": [], "words": [], "tags": []}


def test_entities_say_where_they_stand(tokenizer):
    task = make_task(tokenizer)
    logits = np.full((5, 5), -9, dtype=np.float32)
    logits[range(5), [3, 4, 0, 2, 0]] = 9  # B-PER I-PER O I-LOC O
    sentence = TagExample(("Anna", "Berg", "in", "Oslo", "!"))
    prediction = task.decode(sentence, EncodedExample((), 0, 0), [logits[:2], logits[2:]])
    assert prediction.tags == ("B-PER", "I-PER", "O", "I-LOC", "O")  # nothing is repaired
    person, place = prediction.entities or ()
    assert (person.score, place.score) == pytest.approx((1 / (1 + 4 * math.exp(-18)),) * 2)
    assert person == Entity("PER", "Anna Berg", 0, 9, person.score)
    assert place == Entity("LOC", "Oslo", 13, 17, place.score)
    text, starts = " Anna\u00a0 Berg in Oslo!", (1, 7, 12, 15, 19)
    spoken = TagExample(sentence.words, text=text, starts=starts)
    found = task.decode(spoken, EncodedExample((), 0, 0), [logits]).entities or ()
    places = [(entity.text, entity.start, entity.end) for entity in found]
    assert places == [("Anna\u00a0 Berg", 1, 11), ("Oslo", 15, 19)]
    # An entity is as certain as its words on average.
    logits = np.zeros((2, 5), dtype=np.float32)
    logits[range(2), [3, 4]] = 1, 3  # B-PER I-PER
    pair = TagExample(("Anna", "Berg"))
    (entity,) = task.decode(pair, EncodedExample((), 0, 0), [logits]).entities or ()
    assert entity.score == pytest.approx(np.mean([math.exp(z) / (math.exp(z) + 4) for z in (1, 3)]))


@pytest.mark.parametrize(
    ("labels", "entities"),
    [
        (("O", "LOC", "PER"), [("PER", "Anna Berg"), ("LOC", "Oslo")]),
        (("O", "LOC-B", "PER-B"), [("PER", "Anna"), ("PER", "Berg"), ("LOC", "Oslo")]),
        (("O", "I_LOC", "I_PER"), [("PER", "Anna Berg"), ("LOC", "Oslo")]),
        (("O", "B-LOC", "X"), [("X", "Anna Berg"), ("LOC", "Oslo")]),
        (("O", "S", "VERB"), [("VERB", "Anna Berg"), ("S", "Oslo")]),
        (("O", "DOSE", "VITAMIN-E"), [("VITAMIN-E", "Anna Berg"), ("DOSE", "Oslo")]),
    ],
)
def test_labels_in_another_spelling_next_to_o_have_entities(tokenizer, labels, entities):
    """As of models of other programs, whose pipelines give entities, too."""
    task = make_task(tokenizer, labels)
    logits = np.eye(3, dtype=np.float32)[[2, 2, 0, 1]]
    sentence = TagExample(("Anna", "Berg", "in", "Oslo"))
    prediction = task.decode(sentence, EncodedExample((), 0, 0), [logits])
    assert [(entity.type, entity.text) for entity in prediction.entities or ()] == entities
    task = bind_small(TaggingTask(scheme="plain"), tokenizer, labels, dropout=0.1, spread=0.5)
    assert task.decode(sentence, EncodedExample((), 0, 0), [logits]).entities is None


def test_words_are_tokenized_as_they_stand_in_a_text():
    """A tokenizer of bytes writes a word behind a blank otherwise than one at the beginning, which hardly any word is."""
    tokenizer = train_vocabulary(["the rain in the film", "film and rain"], ByteBPE(270))
    tokenizer.backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    (item,) = TaggingTask().encode([TagExample(("film", "rain"))], tokenizer, ("O",), 40)
    (blank, bare), template = tokenizer.encode([" film rain", "film rain"]), tokenizer.template
    assert blank.tolist() != bare.tolist()
    ids = item.sequences[0].ids.tolist()
    assert ids[len(template.before) : len(ids) - len(template.after)] == blank.tolist()


def test_a_sentence_without_entities_is_right_if_none_are_predicted(tokenizer):
    task, example = make_task(tokenizer), TagExample(("ape", "bee"), ("O", "O"))
    for places, grade in (([0, 0], 1.0), ([0, 1], 0.0)):
        logits = np.eye(5, dtype=np.float32)[places]
        prediction = task.decode(example, EncodedExample((), 0, 0), [logits])
        assert task.grade(example, prediction) == grade


def test_plain_tags_have_no_entities(tokenizer):
    labels = ("NN", "VB")
    task = make_task(tokenizer, labels)
    examples = make_sentences(10, labels=labels)
    results = list(predict(task, examples))
    assert all(prediction.entities is None for _, prediction in results)
    assert results[0][1].to_json().keys() == {"words", "tags"}
    metrics = task.score(results)
    assert metrics.keys() == TaggingTask().directions(labels).keys() == {"f1", "accuracy", "loss"}
    pairs = [[*zip(example.tags, made.tags, strict=True)] for example, made in results]
    for result, words in zip(results, pairs, strict=True):
        assert task.grade(*result) == pytest.approx(np.mean([a == b for a, b in words]))
    assert task.grade(TagExample((), ()), next(predict(task, [TagExample(())]))[1]) == 1.0


def test_scores_are_of_all_sentences(tokenizer):
    from seqeval.metrics import f1_score

    task, examples = make_task(tokenizer), make_sentences(30, seed=4)
    metrics = task.score(predict(task, iter(examples), window=16))
    results = list(predict(task, examples))
    truth = [list(respell(e.tags or (), "iob2")) for e, _ in results]
    predicted = [list(prediction.tags) for _, prediction in results]
    assert metrics["f1"] == pytest.approx(f1_score(truth, predicted))
    rows = np.concatenate([prediction.probabilities for _, prediction in results])
    columns = [LABELS.index(tag) for tag in itertools.chain.from_iterable(truth)]
    chosen = rows[np.arange(len(rows)), columns]
    assert metrics["loss"] == pytest.approx(-np.mean(np.log(chosen)))
    assert metrics.keys() == task.task.directions(LABELS).keys()
    grades = [task.grade(example, prediction) for example, prediction in results]
    pairs = zip(truth, predicted, strict=True)
    assert grades == pytest.approx([f1_score([t], [p], zero_division=1.0) for t, p in pairs])


def test_what_cannot_be_scored_is_refused(tokenizer):
    task = make_task(tokenizer)
    with pytest.raises(DataError, match="there is no word to score"):
        evaluate_task(task, [TagExample((), ())])
    with pytest.raises(DataError, match=r"^a:5: has 2 words and 1 tag\n  Give each word one tag"):
        TagExample(("ape", "bee"), ("O",), "a:5")
    with pytest.raises(ConfigError, match=r"^task\.stride: must be at least 1, not 0"):
        TaggingTask(stride=0)


def test_labels_are_iob2_of_every_type_or_plain():
    def labels(definition: TaggingTask, *rows: str) -> tuple[str, ...]:
        return definition.labels(
            [TagExample(("w",) * len(row.split()), tuple(row.split())) for row in rows]
        )

    assert labels(TaggingTask(), "I-PER O", "S-LOC") == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert labels(TaggingTask(scheme="plain"), "I-PER O", "S-LOC") == ("I-PER", "O", "S-LOC")
    assert labels(TaggingTask(), "NN O") == ("NN", "O")
    assert TaggingTask().labels([TagExample(("w",))]) == ("O",)


def test_a_definition_is_saved_and_read_with_its_columns(tmp_path):
    definition = TaggingTask(TagColumns("1", "3"), "bioes", "document", 32)
    assert configs.read(TaggingTask, configs.to_dict(definition)) == definition
    file = tmp_path / "a.conll"
    file.write_text("1 Anna NN S-PER\n2 sings VB O\n\n1 Oslo NN S-LOC\n")
    reading = definition.read(str(file))
    assert reading.task == definition
    first, second = reading.examples
    assert first.words == ("Anna", "sings")
    assert (first.after, second.before) == ((("Oslo",),), (("Anna", "sings"),))
    (first, _) = TaggingTask().read(str(file), TagColumns("1")).examples
    assert first.after == ()
    assert TaggingTask().texts(first) == ("Anna sings",)


def test_the_baseline_answers_the_most_frequent_tag(tokenizer):
    examples = [TagExample(("a", "b", "c", "d"), ("O", "O", "O", "I-X")), TagExample(("a",))]
    baseline = TaggingTask().baseline(examples)
    assert (baseline["f1"], baseline["accuracy"]) == (0.0, 0.75)
    assert baseline["loss"] == pytest.approx(-(3 * math.log(0.75) + math.log(0.25)) / 4)
    task = make_task(tokenizer)
    (_, prediction), *_ = predict(task, make_sentences(1))
    assert len(set(prediction.tags)) > 1
    assert prediction.signature == prediction.tags
    assert dataclasses.replace(prediction, tags=("O",)).signature == "O"
