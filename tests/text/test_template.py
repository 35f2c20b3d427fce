from __future__ import annotations

import numpy as np
import pytest
from toy_text import write_vocabulary

from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer


@pytest.mark.parametrize(("a", "b"), [("hello world", "playing"), ("hello", None), ("", ""), ("", None), ("", "a"), ("a", "")])
def test_assembled_as_the_files_template_has_it(tmp_path, a, b):
    tokenizer = Tokenizer.load(write_vocabulary(tmp_path))
    first, *second = tokenizer.encode([a] if b is None else [a, b])
    sequence = assemble(first, second[0] if second else None, tokenizer.specials)
    expected = tokenizer.backend.encode(a, b)
    assert sequence.ids.tolist() == expected.ids
    assert sequence.segments.tolist() == expected.type_ids
    assert (sequence.ids.dtype, sequence.segments.dtype) == (np.int32, np.int8)
