"""Windows with global tokens by FlexAttention, as far as a CPU goes: what is seen, which blocks are read, and when."""

import functools
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.attention.flex_attention import create_block_mask
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from attention_formulas import sparse_formula
from bothways.core.batch import Batch, Layout
from bothways.core.runtime import devices
from bothways.model.attention import dispatch as kernels, flex
from bothways.model.attention.dispatch import AttentionCall, Kernel, choose
from bothways.model.attention.flex import FlexWindow
from bothways.model.attention.mask import AttentionView
from bothways.model.attention.patterns import Window
from bothways.model.config import EncoderConfig
from bothways.model.model import Encoder

pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile:UserWarning"
)
CUDA, CPU = torch.device("cuda"), torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=8)
UNTRACED = "torch.nn.attention.flex_attention._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG"
"""Without it torch traces FlexAttention anew for each number of tokens; an encoder below is traced."""


@pytest.fixture
def chosen() -> Iterator[list[bool]]:
    """FlexAttention wherever a window has global tokens; for each layer, whether it had."""
    found: list[bool] = []

    def flexible(call: AttentionCall) -> Kernel:
        if not call.rectangle:
            found.append(call.global_tokens)
        return "flexible" if call.global_tokens else choose(call)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "choose", flexible)
        yield found


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=LENGTHS, radius=st.integers(0, 12), share=st.sampled_from([0.0, 0.1, 0.5]), seed=st.integers(0, 99),
)  # fmt: skip
def test_it_is_the_formula(chosen, lengths, radius, share, seed):
    torch.manual_seed(seed)
    pattern, tokens = Window(radius, global_attention=True), sum(lengths)
    qkv, wide = torch.randn(2, tokens, 3, 2, 4, dtype=torch.float64)
    named = torch.rand(tokens) < share
    view = AttentionView(Layout.of(lengths), pattern, global_attention_mask=named)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(UNTRACED, True, raising=False)
        found = kernels.attend(qkv, view, global_qkv=wide)
        alike = kernels.attend(qkv, view)
    assert chosen
    torch.testing.assert_close(found, sparse_formula(qkv, wide, lengths, pattern, named, None))
    torch.testing.assert_close(alike, sparse_formula(qkv, qkv, lengths, pattern, named, None))


@torch.no_grad()
def test_an_encoder_is_the_same_by_either_kernel(request):
    torch.manual_seed(0)
    patterns = (Window(5, global_attention=True), Window(3))
    encoder = Encoder(EncoderConfig(50, 16, 4, 2, 24, patterns=patterns)).eval()
    layout = Layout.of([30, 1, 12, 40])
    ids = torch.randint(4, 50, (layout.tokens,))
    named = torch.zeros(layout.tokens, dtype=torch.bool)
    named[layout.first_tokens] = named[35] = True
    batch = Batch(ids, torch.zeros_like(ids), layout, global_attention_mask=named)
    wanted = encoder(batch).last
    chosen: list[bool] = request.getfixturevalue("chosen")
    torch.testing.assert_close(encoder(batch).last, wanted, rtol=1e-4, atol=1e-5)
    assert chosen == [True, False, True, False]


@given(
    lengths=LENGTHS, radius=st.integers(0, 20),
    share=st.sampled_from([0.0, 0.02, 0.3]), seed=st.integers(0, 99),
)  # fmt: skip
def test_every_block_is_read_in_which_somebody_sees_somebody(lengths, radius, share, seed):
    torch.manual_seed(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flex, "BLOCK", 8)
        tokens = sum(lengths)
        window = FlexWindow(Layout.of(lengths), radius, torch.rand(tokens) < share)
        for mask, queries in ((window.near, tokens), (window.far, len(window.global_tokens))):
            if not queries:
                continue
            dense = create_block_mask(mask.mask_mod, None, None, queries, tokens, "cpu", 8)
            wanted, read = (blocks.to_dense().bool() for blocks in (dense, mask))
            assert read.shape == wanted.shape
            assert not (wanted & ~read).any()
            # A block between two sequences may be read for nothing.
            assert read.sum() <= 2 * wanted.sum() + len(lengths)


def test_many_global_tokens_take_no_block_of_pairs_each():
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            largest = max(largest, *(x.numel() for x in tree_leaves(result)), 0)
            return result

    layout = Layout.of([128] * 40)
    with Sizes():
        FlexWindow(layout, 5, layout.positions < 20)
    assert largest <= layout.tokens * 40  # blocks; not 800 global tokens · 40²


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the tracer looks at it of every input
def test_more_programs_are_compiled_than_torch_would(monkeypatch):
    """Past its limit all pairs of tokens are computed, and a run comes there: sizes of 1 and precisions need their own."""
    torch._dynamo.reset()
    # Not by monkeypatch, whose undoing hides the setting from torch.
    before, torch._dynamo.config.recompile_limit = torch._dynamo.config.recompile_limit, 2
    counter, compiled = CompileCounterWithBackend("eager"), torch.compile
    with monkeypatch.context() as patch:
        compile_counted = functools.partial(compiled, backend=counter)
        patch.setattr(torch, "compile", compile_counted)
        devices._programs.cache_clear()
        kernel = devices.compiled(flex.flex_attention)
        devices._programs.cache_clear()
    monkeypatch.setattr(flex, "flex_attention", kernel)
    try:
        for lengths in ([9], [200, 70]):
            layout = Layout.of(lengths)
            FlexWindow(layout, 5, layout.positions == 0)(torch.randn(layout.tokens, 3, 1, 16), None)
    finally:
        torch._dynamo.config.recompile_limit = before
    assert counter.frame_count == 4
    torch._dynamo.reset()
