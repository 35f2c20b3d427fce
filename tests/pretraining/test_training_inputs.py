"""Sequences as they are shown, against those that a run reads; and texts."""

import dataclasses
import io
import itertools
import json

import numpy as np
import pytest
import torch
from rich.console import Console

import bothways
from bothways.core.errors import BothwaysError, ConfigError, DataError
from bothways.core.report import sections, terminal
from bothways.data.corpus import write_corpus
from bothways.data.documents import Document
from bothways.model.config import EncoderConfig
from bothways.pretraining.training_inputs import TrainingInputs
from bothways.training.loop import Loop
from commands import run_line
from spread import in_turn
from toy_animals import ANIMALS
from toy_folder import make_folder


@pytest.fixture(scope="module")
def my_bert(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shown") / "my-bert"
    make_folder(folder, dropout=0.0, max_position_embeddings=32)
    return folder


def data_of_run(monkeypatch, *arguments, **settings):
    """The data of each step of a real run, phase by phase; the last of a phase was not used."""
    phases, train = [], Loop.train

    def recorded(self, steps, *others):
        phases.append(read := [])
        return train(self, (read.append(step) or step for step in steps), *others)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "train", recorded)
        bothways.pretrain(*arguments, progress=False, device="cpu", **settings)
    return [step for phase in phases for step in phase[:-1]]


def rows(sequence: sections.TokenSequence) -> tuple[object, ...]:
    """What a batch holds of a sequence, in a form that can be compared."""
    tokens = sequence.tokens
    ids, segments = tuple(t.id for t in tokens), tuple(t.segment for t in tokens)
    targets = tuple((t.position, *sorted(t.targets.items())) for t in tokens if t.targets)
    return ids, segments, targets, tuple(sorted(sequence.labels.items()))


OBJECTIVES = {
    "masked_lm_nsp": {},
    "masked_lm": {"objective.masking.unit": "whole_words"},
    "masked_lm_sop": {"objective.masking.unit": "ngrams"},
    "masked_lm_sbo": {},
    "replaced_tokens": {},
    "gpt_bert": {"objective.causal": 0.5},
    "causal_lm": {},
}


@pytest.mark.parametrize(("kind", "step"), in_turn([(value,) for value in OBJECTIVES], [1, 3]))
def test_shown_sequences_are_those_that_a_run_reads(corpus, monkeypatch, kind, step):
    shape = EncoderConfig(corpus.tokenizer.size, 32, 1, 2, 64)
    if kind == "causal_lm":
        sizes = {"width": 32, "depth": 1, "heads": 2, "intermediate_size": 64}
        shape = dataclasses.replace(bothways.preset("openai-gpt"), **sizes)
    settings = {
        **OBJECTIVES[kind], "seed": 5, "batch": {"kind": "examples", "n": 6}, "until": "4 steps",
        "phases": [{"length": 16, "share": 0.5}, {"length": 32, "share": 0.5}],
    }  # fmt: skip
    data = data_of_run(monkeypatch, corpus, shape, kind, **settings)[step - 1]
    settings |= {"step": step, "count": 99, "progress": False}
    shown = bothways.show(corpus, model=shape, objective=kind, **settings)
    classes = {"masked_lm_nsp": ("is next", "random"), "masked_lm_sop": ("in order", "swapped")}
    token = corpus.tokenizer.token
    expected = []
    for batch in data.microbatches:
        bounds = batch.layout.cu_seqlens.tolist()
        for number, (start, stop) in enumerate(itertools.pairwise(bounds)):
            targets = {}
            for name, target in batch.targets.items():
                if hasattr(target, "index"):
                    for at, id in zip(target.index.tolist(), target.ids.tolist(), strict=True):
                        if start <= at < stop:
                            targets.setdefault(at - start, {})[name] = token(id)
            labels = {}
            if batch.causal is not None and batch.causal[start]:
                labels["attention"] = "left to right"
            if "pair" in batch.targets and kind in classes:
                labels = {"pair": classes[kind][int(batch.targets["pair"].labels[number])]}
            expected.append((
                tuple(batch.ids[start:stop].tolist()), tuple(batch.segments[start:stop].tolist()),
                tuple((at, *sorted(targets[at].items())) for at in sorted(targets)), tuple(labels.items()),
            ))  # fmt: skip
    assert sorted(map(rows, shown.sequences)) == sorted(expected)
    assert bool(shown.notes) == (kind == "replaced_tokens")
    assert len(expected) == 6
    changes = {t.change for sequence in shown.sequences for t in sequence.tokens}
    assert changes - {"", "masked", "random", "kept"} == set()
    assert ("masked" in changes) == (kind != "causal_lm")
    for sequence in shown.sequences:
        for t in sequence.tokens:
            assert t.targets.get("masked", t.original) == t.original
            assert (t.change in ("masked", "random")) == (t.token != t.original)


def test_spans_are_between_their_borders(corpus):
    shown = bothways.show(corpus, objective="masked-lm-sbo", count=5, progress=False)
    spans = [(sequence, span) for sequence in shown.sequences for span in sequence.spans]
    assert spans
    for sequence, span in spans:
        assert (span.left, span.right) == (span.start - 1, span.stop)
        assert all("masked" in sequence.tokens[at].targets for at in range(span.start, span.stop))


def test_steps_of_later_phases_have_their_length(corpus):
    settings = {
        "phases": [{"length": 16, "share": 0.5}, {"length": 32, "share": 0.5}],
        "batch": {"kind": "examples", "n": 8}, "until": "6 steps", "progress": False, "count": 8,
    }  # fmt: skip
    shown = [bothways.show(corpus, step=step, **settings).sequences for step in (3, 4)]
    lengths = [max(len(sequence.tokens) for sequence in sequences) for sequences in shown]
    assert lengths[0] <= 16 < lengths[1] <= 32
    with pytest.raises(ConfigError, match=r"step: the run ends with step 6: there is no step 7"):
        bothways.show(corpus, step=7, **settings)


def test_draws_of_a_text_differ_and_repeat(my_bert):
    def draw(**settings):
        settings |= {"objective": "masked-lm", "progress": False}
        shown = bothways.show(my_bert, "a good film was bad", **settings)
        return [[t.token for t in sequence.tokens] for sequence in shown.sequences]

    three = draw(count=3)
    assert len({*map(tuple, three)}) > 1
    assert draw(count=1, step=2) == [three[1]]
    kinds = ("masked-lm", "masked-lm-nsp")
    notes = [
        bothways.show(my_bert, "a film", objective=kind, progress=False).notes for kind in kinds
    ]
    assert [*map(len, notes)] == [0, 1]  # its pairs need documents


def test_a_pair_in_use_has_the_rows_of_the_figure(my_bert):
    shown = bothways.show(my_bert, "a good film", "it ends", progress=False)
    [sequence] = shown.sequences
    tokens = bothways.load_model(my_bert).tokenizer.batch([("a good film", "it ends")])
    assert [t.id for t in sequence.tokens] == tokens.ids.tolist()
    assert [t.segment for t in sequence.tokens] == tokens.segments.tolist()
    assert [t.position for t in sequence.tokens] == [*range(8)]
    assert not any(t.change or t.targets for t in sequence.tokens)
    assert "segment   A     A A    A    A     B  B    B" in str(shown)


def test_a_layer_is_that_of_transformers(my_bert):
    from transformers import AutoModel, AutoTokenizer

    shown = bothways.show(my_bert, "a good film", "it ends", layer=2, progress=False)
    model = AutoModel.from_pretrained(my_bert, attn_implementation="eager").eval()
    inputs = AutoTokenizer.from_pretrained(my_bert)("a good film", "it ends", return_tensors="pt")
    with torch.no_grad():
        output = model(**inputs, output_attentions=True, output_hidden_states=True)
    vectors = output.hidden_states[2][0].numpy().astype(np.float64)
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(shown.layer.heads, output.attentions[1][0], atol=1e-5)
    np.testing.assert_allclose(shown.layer.cosines, unit @ unit.T, atol=1e-5)
    norms = [float(layer[0].norm(dim=1).mean()) for layer in output.hidden_states]
    np.testing.assert_allclose(shown.layer.norms, norms, rtol=1e-5)
    others = (unit @ unit.T)[~np.eye(8, dtype=bool)].mean()
    assert shown.layer.similarity[2] == pytest.approx(others, abs=1e-5)


def test_what_cannot_be_shown_is_refused(corpus, my_bert, tmp_path):
    def refused(*words, match, error=ConfigError, **settings):
        with pytest.raises(error, match=match):
            bothways.show(*words, progress=False, **settings)

    refused(corpus, objective="no-such", match="no_such")
    refused(my_bert, match=r"text: is missing")
    refused(my_bert, "  ", match=r"text: has no tokens")
    refused(my_bert, "a film", "", match=r"text_b: has no tokens")
    refused(my_bert, "a film " * 20, match=r"text: has 42 tokens, and the model reads 32")
    refused(my_bert, "a film", layer=3, match=r"layer: must be from 1 to 2, not 3")
    refused(corpus, text_b="a film", match=r"text_b: is the second text of a pair")
    refused(corpus, layer=1, match=r"layer: is of a model that reads a text")
    refused(my_bert, "a film", objective="masked-lm-sbo", match="how often a corpus has each token")
    refused(tmp_path, match="is not a corpus", error=DataError)
    refused(tmp_path, "a film", match=str(tmp_path), error=BothwaysError)
    for unread in ({"count": 2}, {"step": 2}, {"model": "bert-tiny"}, {"start": str(my_bert)}):
        [name] = unread
        refused(my_bert, "a film", match=f"{name}: is of a text in training", **unread)
    refused(corpus, count=0, match=r"count: must be at least 1")
    short = [Document(f"the {word} sleeps.", word) for word in ANIMALS]
    orders = {"objective": "masked-lm-sop", "objective.segments.single": "drop"}
    for name, documents, settings, message in (
        ("single", short, orders, "there are no pairs"),
        ("two", short[:2], {"objective": "masked-lm-nsp"}, "and the corpus has 2 documents"),
    ):
        few = write_corpus(documents, corpus.tokenizer, tmp_path / name, workers=1)
        refused(few, match=message, error=BothwaysError, **settings)
    assert bothways.show(corpus, "the dog sleeps", objective="masked-lm-sbo", progress=False)


def test_the_command_prints_and_writes(corpus, my_bert, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    run_line("show", corpus.folder, "objective=masked_lm", "--count", 2)
    output = capsys.readouterr().out
    assert "Step 1, sequence 2 of" in output.replace("\n", " ")
    assert "[MASK]→" in output
    assert max(map(len, output.splitlines())) <= 40
    assert "\x1b" not in output
    run_line("show", my_bert, "a good film was bad", "it ends", "--json")
    [line] = capsys.readouterr().out.splitlines()
    assert [token["token"] for token in json.loads(line)["tokens"]][:2] == ["[CLS]", "a"]
    run_line("show", my_bert, "a film", "--layer", 1, "--head", 2)
    output = capsys.readouterr().out
    assert "Attention of layer 1, head 2" in output
    assert output.count("%") == 4 * 3  # three keys of each of four tokens
    run_line("show", my_bert, "a film", "--layer", 1)
    assert "the mean of 2 heads" in " ".join(capsys.readouterr().out.split())
    run_line("show", my_bert, "a film", "--layer", 1, "--json")
    assert len(json.loads(capsys.readouterr().out)["layer"]["norms"]) == 3
    page = tmp_path / "page.html"
    run_line("show", my_bert, "a film", "objective=masked_lm", "--layer", 1, "--out", page)
    assert capsys.readouterr().out == ""
    assert "<svg" in page.read_text("utf8")


@pytest.mark.parametrize(
    ("words", "where"),
    [
        (["a", "film", "ends"], "words"),
        (["CORPUS", "a film"], "CORPUS"),
        (["FILE"], "FILE"),
        (["a film", "--layer", "1", "--head", "9"], "head"),
        (["a film", "recipe=modern"], "recipe"),
    ],
)
def test_mistakes_of_a_command_name_their_place(corpus, my_bert, tmp_path, capsys, words, where):
    file = tmp_path / "text.txt"
    file.write_text("a film\n", "utf8")
    names = {"CORPUS": str(corpus.folder), "FILE": str(file)}
    with pytest.raises(ConfigError) as raised:
        run_line("show", my_bert, *(names.get(word, word) for word in words))
    assert raised.value.where == names.get(where, where)
    assert capsys.readouterr().out == ""


def test_a_corpus_that_does_not_exist_is_named(my_bert):
    with pytest.raises(ConfigError, match="text: is missing"):
        run_line("show", my_bert)
    with pytest.raises(DataError, match="corpsu: no such corpus"):
        run_line("show", "corpsu")


HOSTILE = "<script>alert(1)</script>\x1b[2J"


def hostile() -> sections.TokenSequence:
    token = sections.InputToken(HOSTILE, 7, 0, 0, HOSTILE, "kept", {"masked": HOSTILE})
    return sections.TokenSequence(HOSTILE, [token])


def test_pages_escape_what_texts_say(tmp_path):
    page = tmp_path / "page.html"
    TrainingInputs("title", (hostile(),)).save(page)
    assert "<script>alert" not in page.read_text("utf8")


def test_text_is_the_same_in_a_notebook_and_with_colours(monkeypatch):
    inputs = TrainingInputs("title", ())
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setattr("rich.console._is_jupyter", lambda: True)
    assert str(inputs) == "title\n"
    assert repr(TrainingInputs("title", (hostile(),))) == "TrainingInputs('title', 1 sequence)"


@pytest.mark.parametrize("colours", [False, True])
def test_terminals_are_not_commanded_by_texts(colours):
    file, system = io.StringIO(), "truecolor" if colours else None
    console = Console(file=file, width=40, force_terminal=colours, color_system=system)
    console.print(terminal.token_text(hostile()), terminal.TokenRows(hostile()))
    assert "\x1b[2J" not in file.getvalue()
    assert ("\x1b[" in file.getvalue()) == colours


def test_a_head_without_what_it_is_chosen_for_is_refused(tmp_path):
    for words in (["--head", "1"], ["--layer", "1", "--head", "1", "--json"]):
        with pytest.raises(ConfigError, match="head: chooses what is printed"):
            run_line("show", str(tmp_path), "a text", *words)
