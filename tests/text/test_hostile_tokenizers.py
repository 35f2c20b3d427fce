"""Tokenizer files that no trainer writes are refused with a message, in bounded time and memory."""

import json
import resource
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import pre_tokenizers

from bothways.core.errors import BothwaysError
from bothways.text.tokenizer import Tokenizer
from toy_text import write_vocabulary


def change(path: list[str], value: Any) -> Callable[[dict[str, Any]], None]:
    def apply(spec: dict[str, Any]) -> None:
        for key in path[:-1]:
            spec = spec[key]
        spec[path[-1]] = value

    return apply


DOUBLE = {"type": "Replace", "pattern": {"String": "e"}, "content": "ee"}
TEMPLATE = {"type": "TemplateProcessing", "single": [], "pair": [], "special_tokens": {}}
BEYOND = {
    "type": "TemplateProcessing",
    "single": [
        {"SpecialToken": {"id": "[X]", "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
    ],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {"[X]": {"id": "[X]", "ids": [10**6], "tokens": ["[X]"]}},
}


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (change(["model", "vocab"], {}), "token"),
        (
            change(["normalizer"], {"type": "Sequence", "normalizers": [DOUBLE] * 34}),
            "its normaliser makes up to 17,179,869,184 characters of one",
        ),
        (change(["post_processor"], TEMPLATE), "its post-processor"),
        (change(["post_processor"], BEYOND), "adds the id 1000000, which no token has"),
    ],
)
def test_a_hostile_tokenizer_is_refused(tmp_path, spoil, message):
    Tokenizer.load(write_vocabulary(tmp_path / "a")).save(tmp_path / "b")
    spec = json.loads((tmp_path / "b" / "tokenizer.json").read_text())
    spoil(spec)
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "b" / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast"}'
    )
    with pytest.raises(BothwaysError, match=message):
        Tokenizer.load(tmp_path / "b")


def test_ids_far_beyond_the_tokens_take_no_memory(tmp_path):
    """The tokenizer's own text has a place for every id up to the largest: 16 GB for 4·10⁹ of them."""
    Tokenizer.load(write_vocabulary(tmp_path / "a")).save(tmp_path / "b")
    spec = json.loads((tmp_path / "b" / "tokenizer.json").read_text())
    spec["model"]["vocab"]["far"] = 4 * 10**9
    (tmp_path / "b" / "tokenizer.json").write_text(json.dumps(spec))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(BothwaysError, match="has ids up to 4,000,000,000"):
        Tokenizer.load(tmp_path / "b")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 10**6  # kilobytes


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 10**5,
        b'{"model_max_length": ' + b"9" * 5000 + b"}",
        b'{"mask_token": "\\ud800"}',
        b'{"added_tokens_decoder": {"3": {"content": "\\udc00"}}}',
        b'{"extra_special_tokens": ["\\ud800x"]}',
    ],
)
def test_hostile_settings_are_refused(tmp_path, content):
    Tokenizer.load(write_vocabulary(tmp_path / "a")).save(tmp_path / "b")
    (tmp_path / "b" / "tokenizer_config.json").write_bytes(content)
    with pytest.raises(BothwaysError, match=r"tokenizer_config\.json"):
        Tokenizer.load(tmp_path / "b")


def test_bytes_stand_for_themselves_or_come_in_order():
    from bothways.text.tokenizer import byte_of

    assert set(byte_of()) == set(pre_tokenizers.ByteLevel.alphabet())
    assert bytes(byte_of()[c] for c in "æķ°Ġ") == "数 ".encode()
