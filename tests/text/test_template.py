import numpy as np
import pytest

from bothways.text.template import assemble
from bothways.text.tokenizer import Tokenizer
from bothways.text.trainers import ByteBPE, train_vocabulary
from toy_text import write_vocabulary


@pytest.mark.parametrize(
    ("a", "b"),
    [("hello world", "playing"), ("hello", None), ("", ""), ("", None), ("", "a"), ("a", "")],
)
def test_assembled_as_the_files_template_has_it(tmp_path, a, b):
    tokenizer = Tokenizer.load(write_vocabulary(tmp_path))
    first, *second = tokenizer.encode([a] if b is None else [a, b])
    sequence = assemble(first, second[0] if second else None, tokenizer.template)
    expected = tokenizer.backend.encode(a, b)
    assert sequence.ids.tolist() == expected.ids
    assert sequence.segments.tolist() == expected.type_ids
    assert (sequence.ids.dtype, sequence.segments.dtype) == (np.int32, np.int8)


@pytest.mark.parametrize(("a", "b"), [("ab ba", "b"), ("ab", None), ("", ""), ("", "a"), ("a", "")])
def test_robertas_two_separators_and_its_single_segment(a, b):
    from tokenizers import processors

    made = train_vocabulary(["ab ba ab b a"], ByteBPE(270))
    specials = made.specials
    made.backend.post_processor = processors.RobertaProcessing(
        (made.token(specials.sep), specials.sep), (made.token(specials.cls), specials.cls)
    )
    tokenizer = Tokenizer(made.backend, specials)
    first, *second = tokenizer.encode([a] if b is None else [a, b])
    sequence = assemble(first, second[0] if second else None, tokenizer.template)
    expected = tokenizer.backend.encode(a, b)
    assert (sequence.ids.tolist(), sequence.segments.tolist()) == (expected.ids, expected.type_ids)
    assert (tokenizer.template.single, tokenizer.template.pair) == (2, 4)
