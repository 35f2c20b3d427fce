import numpy as np
import pytest

from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer
from toy_text import load, roberta_backend, write_vocabulary

PAIRS = [("hello world", "playing"), ("hello", None), ("", ""), ("", None), ("", "a"), ("a", "")]


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_assembled_as_the_files_template_has_it(tmp_path, family):
    """RoBERTa's has two separators between texts, and a single segment."""
    if family == "bert":
        tokenizer, specials = Tokenizer.load(write_vocabulary(tmp_path)), (2, 3)
    else:
        tokenizer, specials = load(roberta_backend(), tmp_path), (2, 4)
    assert (tokenizer.template.single, tokenizer.template.pair) == specials
    for a, b in PAIRS:
        first, *second = tokenizer.encode([a] if b is None else [a, b])
        sequence = assemble(first, second[0] if second else None, tokenizer.template)
        expected = tokenizer.backend.encode(a, b)
        assert sequence.ids.tolist() == expected.ids
        assert sequence.segments.tolist() == expected.type_ids
        assert (sequence.ids.dtype, sequence.segments.dtype) == (np.int32, np.int8)
