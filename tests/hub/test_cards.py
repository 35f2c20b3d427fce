"""What cards say: data with fingerprints, limits from what the run knows."""

import pytest

from bothways.core.errors import Finding
from bothways.finetuning.data import DataSource
from bothways.hub.model_card import (
    UNSEEN,
    Card,
    data_of_corpus,
    limits_of_finetuned,
    limits_of_pretrained,
    render_card,
)
from bothways.model.config import EncoderConfig
from bothways.model.families.family import Architecture
from bothways.model.positions import Learned

FINDINGS = (
    Finding("balance", "warning", "97 % of the training examples are 'x'"),
    Finding("time", "note", "about a minute"),
    Finding("truncation", "warning", "half of the texts are cut."),
)


@pytest.mark.parametrize(
    ("heads", "task"),
    [
        ((), "feature-extraction"), (("masked", "pooler", "pair"), "fill-mask"), (("pooler", "labels"), "text-classification"),
        (("tags",), "token-classification"), (("span",), "question-answering"), (("pooler", "choice"), "multiple-choice"),
        (("causal",), "text-generation"),
    ],
)  # fmt: skip
def test_the_hub_is_told_what_a_model_is_for(heads, task):
    for own, library in ((False, "transformers"), (True, "bothways")):
        lines = render_card(Card(), Architecture("Any", frozenset(heads), own=own)).splitlines()
        assert lines[:6] == [
            "---",
            f"library_name: {library}",
            f"pipeline_tag: {task}",
            "tags:",
            "- bothways",
            "---",
        ]


def test_warnings_of_the_preflight_are_limits_and_notes_are_not():
    limits = limits_of_finetuned(128, 7, FINDINGS, evaluated=True)
    assert limits[0] == UNSEEN
    assert "97 % of the training examples are 'x'." in limits
    assert "Half of the texts are cut." in limits
    assert not any("minute" in limit for limit in limits)
    assert "with seed 7" in limits[-1]
    assert "Nothing was measured: there was no dev data." in limits_of_finetuned(
        128, 7, (), evaluated=False
    )


def test_a_pretrained_model_tells_which_positions_are_untrained(corpus):
    encoder = EncoderConfig(30, 16, 1, 2, 32, position=Learned(64))
    tokens = 2 * corpus.manifest.counts.tokens
    limits = limits_of_pretrained(encoder, (16, 48), tokens, corpus.manifest.counts.tokens)
    assert any(
        "at most 48 tokens; its last 16 positions are untrained." in limit for limit in limits
    )
    assert any("2 times its corpus" in limit for limit in limits)
    assert any(
        limit.endswith("at most 64 tokens.")
        for limit in limits_of_pretrained(encoder, (64,), tokens, corpus.manifest.counts.tokens)
    )


def test_the_card_has_sections_for_data_and_limits(corpus):
    data = {"train": DataSource("a.tsv", 1234, "abc"), **data_of_corpus(corpus, "def")}
    text = render_card(
        Card("T", data=data, limits=("One\nthing.", "Another.")),
        Architecture("BertModel", frozenset()),
    )
    assert "## Limits\n\n- One thing.\n- Another.\n" in text
    assert "| train | a.tsv, 1,234 examples, sha256 abc |" in text
    counts = corpus.manifest.counts
    assert counts.sentences < counts.tokens
    assert (
        f"| corpus | 150 documents, {counts.sentences:,} sentences, {counts.tokens:,} tokens |"
        in text
    )
    assert "| from | unknown |" in text
    assert "| sha256 | def |" in text
    assert "## Versions" in text
