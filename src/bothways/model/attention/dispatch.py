"""Attention over packed tokens, by the fastest kernel for the call: `attend`.

`choose` decides. It is a pure function of an `AttentionCall`, which holds everything that the
decision depends on but the thresholds (`runtime.tuning`) and what this machine has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable
from typing_extensions import assert_never

from bothways.core.runtime.devices import has_flex, has_varlen
from bothways.core.runtime.tuning import TUNING
from bothways.model.attention import reference
from bothways.model.attention.flash import PackedView, attend_packed
from bothways.model.attention.mask import EVERYTHING, AttentionPart, AttentionView, sees_all
from bothways.model.attention.patterns import Blocks, Causal, Full, Pattern, Window
from bothways.model.kernels import library
from bothways.model.kernels.attention import packed_attention
from bothways.model.kernels.dropout import Mask, drop
from bothways.model.kernels.library import Feature


@dataclass(frozen=True)
class AttentionCall:
    """What the choice of a kernel depends on.

    Attributes:
        device, dtype: of queries, keys and values.
        head_size: features of a head.
        max_seqlen: the longest sequence, in tokens.
        pattern: which tokens attend to which.
        dropout: the rate on attention probabilities.
        learning: whether there will be gradients.
        global_tokens: whether the batch names global tokens that the pattern attends to.
        rectangle: whether the call is for one rectangle of a batch, not for all of it.
        causal: whether some sequences are read from left to right, whatever the pattern.
    """

    device: torch.device
    dtype: torch.dtype
    head_size: int
    max_seqlen: int
    pattern: Pattern = EVERYTHING
    dropout: float = 0.0
    learning: bool = False
    global_tokens: bool = False
    rectangle: bool = False
    causal: bool = False


Kernel = Literal["packed", "flexible", "compiled", "gathered", "blocked"] | reference.PaddedKernel
"""What computes a call, of a whole batch or, from "blocked" on, of one rectangle of it.

- packed: FlashAttention over packed sequences on a GPU; no rectangles, no padding.
- flexible: FlexAttention over packed sequences; a window with global tokens on a GPU.
- compiled: the library's compiled CPU kernel over packed sequences.
- gathered: matrix products over rectangles, with a backward pass of its own for all of a batch.
- blocked: block-sparse attention in a rectangle, in time linear in the length.
- fused, products, in_place: full attention with a mask in a rectangle (`PaddedKernel`).
"""


def choose(call: AttentionCall) -> Kernel:
    """Return the kernel for a call: the first row of this table that fits.

    | # | device | dtype | pattern | dropout | learning | length | kernel |
    |---|---|---|---|---|---|---|---|
    | 1 | CUDA (`has_varlen`) | bf16, fp16 | full, causal, window | any | any | any | packed |
    | 2 | CUDA (`has_flex`) | any | window with global tokens | 0 | any | any | flexible |
    | 3 | CPU (`library.supports_heads`) | fp32 | all see all | 0 | any | ≤ `compiled` | compiled |
    | 4 | the same | fp32 | all see all | > 0 | any | any | compiled |
    | 5 | the same with AMX | bf16 | all see all | 0 | any | ≤ `compiled_amx` | compiled |
    | 6 | the same with AMX | bf16 | all see all | > 0 | any | any | compiled |
    | 7 | the same without AMX | bf16 | all see all | 0 | no | ≤ `compiled` | compiled |
    | 8 | CPU | any | not as rows 9, 10 | any | yes | `padded_kernel`: products | gathered |
    | 9 | any | any | window | any | any | > 2 · radius + `masked_window` | blocked |
    | 10 | any | any | blocks | any | any | > `pattern.dense` | blocked |
    | 11 | any | any | any | any | any | any | `padded_kernel` |

    Rows 1 to 8 are for whole batches: a rectangle begins at row 9. A call with `causal` needs a
    mask: rows 1 to 7, 9 and 10 do not fit it. Row 1 and rows 3 to 8 need a batch without global
    tokens, which have queries, keys and values of their own. Row 2 needs heads of 16, 32, …
    features.
    """
    # A rectangle has left the packed form: kernels for whole batches are out of the question.
    if not call.rectangle and not call.causal:
        # FlashAttention reads vectors of 8 half-precision numbers (16 bytes) at once.
        half = call.dtype in {torch.bfloat16, torch.float16} and call.head_size % 8 == 0
        plain = not (isinstance(call.pattern, Blocks) or call.global_tokens)
        small = call.head_size <= 256
        if plain and half and small and has_varlen(call.device):
            return "packed"
        aligned = call.head_size % 16 == 0
        if call.global_tokens and call.dropout == 0 and aligned and has_flex(call.device):
            return "flexible"
        if _is_compiled(call):
            return "compiled"
    if not call.causal and _is_sparse(call):
        return "blocked"
    kernel = padded_kernel(call)
    dense = not (call.rectangle or call.global_tokens)
    return "gathered" if dense and call.learning and kernel == "products" else kernel


def _is_compiled(call: AttentionCall) -> bool:
    if call.global_tokens or not sees_all(call.pattern, call.max_seqlen):
        return False
    amx = call.dtype == torch.bfloat16 and Feature.AMX in library.kernel_features()
    short = call.max_seqlen <= (TUNING.compiled_amx if amx else TUNING.compiled)
    if call.dtype == torch.float32 or amx:
        allowed = call.dropout > 0 or short  # torch has no fused kernel with dropout on a CPU
    else:
        allowed = call.dropout == 0 and short and not call.learning
    return allowed and library.supports_heads(call.device, call.dtype, call.head_size)


def _is_sparse(call: AttentionCall) -> bool:
    match call.pattern:
        case Window(radius):
            cpu = call.device.type == "cpu"
            margin = TUNING.masked_window_cpu if cpu else TUNING.masked_window_cuda
            return call.max_seqlen > 2 * radius + margin
        case Blocks():
            return call.max_seqlen > call.pattern.dense
        case Full() | Causal():
            return False
        case _:
            assert_never(call.pattern)


def padded_kernel(call: AttentionCall) -> reference.PaddedKernel:
    """Choose the kernel for a rectangle of `call.max_seqlen` keys.

    | device | dropout | learning | dtype | keys | kernel |
    |---|---|---|---|---|---|
    | CUDA | any | any | any | any | fused |
    | CPU | > 0 | any | any | any | products: the fused kernel has no dropout |
    | CPU | 0 | no | fp32 | ≤ `in_place_fp32` | in place |
    | CPU | 0 | no | fp32 | more | fused |
    | CPU | 0 | yes | fp32 | ≤ `products_fp32` | products |
    | CPU | 0 | any | bf16 | ≤ `products_bf16` | products |
    | CPU | 0 | any | any | more | fused |
    """
    if call.device.type != "cpu":
        return "fused"
    if call.dropout > 0:
        return "products"
    if not call.learning and call.dtype == torch.float32:
        return "in_place" if call.max_seqlen <= TUNING.in_place_fp32 else "fused"
    bf16 = call.dtype == torch.bfloat16
    short = call.max_seqlen <= (TUNING.products_bf16 if bf16 else TUNING.products_fp32)
    return "products" if short else "fused"


def packed_view(view: AttentionView, x: Tensor, head_size: int) -> PackedView | None:
    """Return a view for the kernel for packed sequences; None if another one is chosen for `x`."""
    autocast = x.is_cuda and torch.is_autocast_enabled("cuda")
    dtype = torch.get_autocast_dtype("cuda") if autocast else x.dtype
    call = AttentionCall(
        x.device, dtype, head_size, view.layout.max_seqlen, view.pattern,
        global_tokens=view.has_global_tokens, causal=view.causal is not None,
    )  # fmt: skip
    return PackedView.of(view) if choose(call) == "packed" else None


def attend(
    qkv: Float[Tensor, "tokens 3 heads d"],
    view: AttentionView | PackedView,
    rate: float = 0.0,
    global_qkv: Float[Tensor, "tokens 3 heads d"] | None = None,
) -> Float[Tensor, "tokens heads d"]:
    """Let every token attend to the tokens of its own sequence that it sees.

    Args:
        qkv: queries, keys and values.
        view: which tokens see which.
        rate: of the dropout on attention probabilities.
        global_qkv: queries, keys and values for the global tokens of a window; None for `qkv`.
    """
    if isinstance(view, PackedView):  # inside a compiled block
        return attend_packed(qkv if view.rotary is None else view.rotary(qkv), view, rate)
    if view.rotary is not None:
        qkv, global_qkv = view.rotary(qkv), None if global_qkv is None else view.rotary(global_qkv)
    call = AttentionCall(
        qkv.device, qkv.dtype, qkv.shape[-1], view.layout.max_seqlen, view.pattern, rate,
        qkv.requires_grad, view.has_global_tokens, causal=view.causal is not None,
    )  # fmt: skip
    match choose(call):
        # The whole batch at once …
        case "packed":
            return attend_packed(qkv, PackedView.of(view), rate)
        case "flexible":
            return view.flexible(qkv, global_qkv)
        case "compiled":
            return packed_attention(qkv, view.layout, rate)
        case "gathered":
            return attend_gathered(qkv, view.parts, rate)
        # … or rectangle by rectangle, each with its own choice.
        case _:
            outputs = [_attend_part(qkv, global_qkv, segment, call) for segment in view.parts]
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def _attend_part(
    qkv: Tensor, global_qkv: Tensor | None, segment: AttentionPart, batch: AttentionCall
) -> Float[Tensor, "part heads d"]:
    """Attend in one rectangle."""
    rectangle, rate = segment.rectangle, batch.dropout
    q, k, v = rectangle.pad(qkv).permute(2, 0, 3, 1, 4)  # each (rows, heads, longest, d)
    call = replace(batch, max_seqlen=rectangle.longest, rectangle=True)
    match choose(call):
        case "blocked":
            if isinstance(segment.pattern, Blocks):
                rate = 0.0  # BigBird's code drops no probability here
            sparse = segment.block_mask
            # Each block is a rectangle of its own: its length is the number of keys that it reads.
            sparse_call = replace(call, dropout=rate, max_seqlen=sparse.mask.shape[-1])
            outputs = reference.attend_in_blocks(
                q, k, v, sparse, segment.global_tokens, rate, padded_kernel(sparse_call)
            )
        case "fused" | "products" | "in_place" as kernel:
            outputs = reference.attend_padded(q, k, v, segment.mask, rate, kernel)
        case other:
            raise AssertionError(f"{other} is for a whole batch")
    if segment.global_tokens is not None:
        # Global tokens attend to all tokens, in windows through projections of their own.
        if global_qkv is not None and isinstance(segment.pattern, Window):
            q, k, v = rectangle.pad(global_qkv).permute(2, 0, 3, 1, 4)
        kernel = padded_kernel(replace(call, dropout=rate))
        outputs = reference.attend_from(
            segment.global_tokens, q, k, v, rectangle, rate, kernel, outputs
        )
    return rectangle.unpad(outputs.transpose(1, 2))


def attend_gathered(
    qkv: Float[Tensor, "tokens 3 heads d"], segments: Sequence[AttentionPart], rate: float
) -> Float[Tensor, "tokens heads d"]:
    """Compute `dispatch.attend` for the calls that are "gathered"; differentiable once."""
    result: Tensor = _Attention.apply(qkv, segments, rate)  # type: ignore[no-untyped-call]
    return result


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, qkv: Tensor, segments: Sequence[AttentionPart], rate: float) -> Tensor:
        """Compute attention over padded rectangles."""
        tokens, _, heads, size = qkv.shape
        saved, masks = list[Tensor | None](), list[Mask]()
        vectors, result = qkv.reshape(-1, size), qkv.new_empty(tokens * heads, size)
        for segment in segments:
            index = segment.head_index(heads)
            # (3, rows · heads, longest, d)
            q, k, v = vectors.index_select(0, index.sources).view(
                3, -1, segment.rectangle.longest, size
            )
            # beta=0 ignores the first argument: this is alpha · q @ kᵀ in one operation.
            scores = torch.baddbmm(q.new_empty(1, 1, 1), q, k.mT, beta=0, alpha=size**-0.5)
            if segment.mask is not None:
                # Adding the least number hides a key: e to its power is 0.
                least = torch.finfo(scores.dtype).min
                hidden = torch.zeros(segment.mask.shape, dtype=scores.dtype)
                _by_rows(scores, segment).add_(hidden.masked_fill_(~segment.mask, least))
            exact = torch.promote_types(scores.dtype, torch.float32)
            probabilities = scores.softmax(-1, dtype=exact)
            # A large mask is not kept: its seed is enough to draw it again.
            dropped, mask = drop(probabilities, rate)
            outputs = dropped.to(v.dtype) @ v
            torch.index_select(outputs.view(-1, size), 0, index.outputs, out=result[index.here])
            saved += [q, k, v, probabilities, mask.factors]
            masks.append(mask._replace(factors=None))
        ctx.parts, ctx.masks = segments, masks
        ctx.save_for_backward(*saved)
        return result.view(tokens, heads, size)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient for queries, keys and values."""
        tokens, heads, size = gradient.shape
        saved, scale = iter(ctx.saved_tensors), size**-0.5
        vectors, result = gradient.reshape(-1, size), gradient.new_empty(tokens * 3 * heads, size)
        for segment, seeded in zip(ctx.parts, ctx.masks, strict=True):
            index, rectangle = segment.head_index(heads), segment.rectangle
            q, k, v, probabilities, factors = (next(saved) for _ in range(5))
            mask = seeded._replace(factors=factors).like(probabilities)
            # The gradient of O = dropout(P) V with P = softmax(S), S = scale · Q Kᵀ:
            # dV = dropout(P)ᵀ dO, dP = dropout(dO Vᵀ), dS = P ∘ (dP − Σ P ∘ dP),
            # dQ = scale · dS K, dK = scale · dSᵀ Q.
            above = vectors[index.here].index_select(0, index.queries).view(q.shape)  # dO
            if rectangle.keep is not None:  # padding has read a copied query: it gives no gradient
                _by_rows(above, segment).mul_(rectangle.keep[:, None, :, None])
            of_qkv = torch.empty(3, *q.shape, dtype=q.dtype)  # written in place, gathered once
            torch.bmm(mask.times(probabilities).to(v.dtype).mT, above, out=of_qkv[2])
            of_probabilities = torch.bmm(above, v.mT).to(probabilities.dtype)
            if mask.factors is not None:
                of_probabilities.mul_(mask.factors)
            of_scores = torch._softmax_backward_data(
                of_probabilities, probabilities, -1, probabilities.dtype
            ).to(q.dtype)
            torch.baddbmm(of_qkv[0], of_scores, k, beta=0, alpha=scale, out=of_qkv[0])
            torch.baddbmm(of_qkv[1], of_scores.mT, q, beta=0, alpha=scale, out=of_qkv[1])
            rows = slice(index.here.start * 3, index.here.stop * 3)
            torch.index_select(of_qkv.view(-1, size), 0, index.gradients, out=result[rows])
        return result.view(tokens, 3, heads, size), None, None


def _by_rows(
    x: Float[Tensor, "places longest n"], segment: AttentionPart
) -> Float[Tensor, "rows heads longest n"]:
    """Return a view with rows and heads apart."""
    return x.view(segment.rectangle.rows, -1, *x.shape[1:])
