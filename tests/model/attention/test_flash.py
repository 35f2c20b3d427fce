"""Attention by torch's own kernels: the table, and packed sequences with a stand-in for the operator of a GPU."""

import itertools

import pytest
import torch
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor

from attention_formulas import OnGpu, assert_same_with_gradients, formula
from bothways.core.batch import Layout
from bothways.model.attention import dispatch as kernels
from bothways.model.attention.flash import PackedView, attend_fused, attend_packed
from bothways.model.attention.mask import AttentionView
from bothways.model.attention.patterns import Causal, Full, Window
from bothways.model.config import Dropouts, EncoderConfig
from bothways.model.model import Encoder
from bothways.model.positions import Rotary
from small_models import batch_for

CUDA, CPU, META = (torch.device(name) for name in ("cuda", "cpu", "meta"))


def documented(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, keys: Tensor, *others: object,
    window_size_left: int, window_size_right: int,
) -> tuple[Tensor, None]:  # fmt: skip
    """What the operator computes, one sequence after the other."""
    assert starts.dtype == keys.dtype == torch.int32
    left, right = window_size_left, window_size_right
    most, causal = int(starts.diff().max()), (left, right) == (-1, 0)
    assert others == (most, most, 0.0, causal, False)  # no dropout, no mask for a debugger
    parts = []
    for start, stop in itertools.pairwise(starts):
        distance = torch.arange(int(stop - start))[:, None] - torch.arange(int(stop - start))
        hidden = ((distance > left) & (left >= 0)) | ((-distance > right) & (right >= 0))
        scores = torch.einsum("qhd,khd->hqk", q[start:stop], k[start:stop]) / q.shape[-1] ** 0.5
        shares = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        parts.append(torch.einsum("hqk,khd->qhd", shares, v[start:stop]))
    return torch.cat(parts), None


@pytest.fixture
def stand_in(monkeypatch) -> None:
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", documented)
    monkeypatch.setattr(kernels, "choose", lambda _: "packed")


PATTERNS = st.one_of(st.just(Full()), st.just(Causal()), st.builds(Window, st.integers(0, 12)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=8),
    pattern=PATTERNS,
    seed=st.integers(0, 99),
)
def test_packed_sequences_attend_as_the_formula(stand_in, lengths, pattern, seed):
    torch.manual_seed(seed)
    qkv = torch.randn(sum(lengths), 3, 2, 4, dtype=torch.float64)
    mine, reference = qkv.clone().requires_grad_(), qkv.clone().requires_grad_()
    found = kernels.attend(mine, AttentionView(Layout.of(lengths), pattern))
    wanted = formula(reference, lengths, pattern)
    assert_same_with_gradients(found, wanted, [mine], [reference], near=1e-7)


@pytest.mark.parametrize("patterns", [(Full(),), (Window(3), Full()), (Causal(),)])
def test_an_encoder_is_the_same_by_either_kernel(patterns, request):
    torch.manual_seed(0)
    config = EncoderConfig(
        50, 16, 3, 2, 24, dropout=Dropouts(0.0, 0.0), patterns=patterns, position=Rotary(128)
    )
    encoder, batch = Encoder(config), batch_for(config)
    wanted = encoder(batch).last
    request.getfixturevalue("stand_in")
    torch.testing.assert_close(encoder(batch).last, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("rate", [0.0, 0.1])
@pytest.mark.parametrize("pattern", [Full(), Causal(), Window(3)])
def test_the_kernel_takes_what_it_is_given(pattern, rate):
    """torch's own one on a device without values: shapes and types, forward and backward."""
    qkv = torch.empty(17, 3, 2, 8, device=META, dtype=torch.bfloat16, requires_grad=True)
    view = AttentionView(Layout.of([5, 9, 3]).to(META), pattern)
    found = attend_packed(qkv, PackedView.of(view), rate)
    assert (found.shape, found.dtype, found.device) == ((17, 2, 8), torch.bfloat16, META)
    found.sum().backward()
    assert qkv.grad is not None


def test_cudnn_is_left_out(monkeypatch):
    enabled: list[bool] = []

    def recorded(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        assert options == {"attn_mask": None, "dropout_p": 0.1, "scale": 2.0}
        enabled.append(torch.backends.cuda.cudnn_sdp_enabled())
        return q

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    before, x = torch.backends.cuda.cudnn_sdp_enabled(), torch.randn(1, 1, 2, 4)
    attend_fused(x.as_subclass(OnGpu), x, x, None, 0.1, 2.0)
    attend_fused(x, x, x, None, 0.1, 2.0)
    assert enabled == [False, before]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before
