"""Attention over packed tokens: the reference kernel.

Each rectangle of the layout is a batch of near-equal lengths, so hardly anything is computed on padding, and no mask is needed
where lengths are equal and all tokens see each other. This kernel runs on any device, in any precision, with dropout; faster
ones are held to it.

Source: Vaswani et al. 2017, section 3.2.1: softmax(QKᵀ/√d)V.
"""

from __future__ import annotations

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from typing_extensions import assert_never

from bothways.attention.block_sparse import BlockReach, GlobalTokens
from bothways.attention.flash import attend_fused, attend_packed, is_packed
from bothways.attention.mask import AttentionPart, AttentionView
from bothways.attention.padded_autograd import attend_gathered
from bothways.attention.patterns import Blocks, Causal, Full, Pattern, Window
from bothways.core.layout import Rectangle
from bothways.kernels import library as native
from bothways.kernels.dropout import dropped_product
from bothways.kernels.library import Feature
from bothways.runtime.devices import has_flex

Kernel = Literal["written_out", "fused", "in_place"]

LONGEST_WRITTEN_OUT = {torch.bfloat16: 512, torch.float32: 256}
"""Up to this length a CPU is faster with two matrix products and a softmax than with torch's fused kernel, which works on small
tiles: on two Zen 5 cores 4 to 9 times faster at 32 to 128 tokens in bf16 with gradients, 1.2 to 3 times at 512."""

LONGEST_IN_PLACE = {torch.float32: 48}
"""Up to this length, where nothing is learned, a CPU is fastest with the same products and the scores scaled in place: on one
core of Cascade Lake 1.1 to 1.4 times as fast as the fused kernel at 20, 26 and 40 tokens, which is faster beyond."""

LONGEST_COMPILED = 512
"""Up to this length the library's own kernel is faster on a CPU than torch's fused one, which works on tiles: on one core of
Cascade Lake 1.1 to 4 times without gradients, 1.0 to 1.9 with; at 1,024 tokens equal and 0.7."""

LONGEST_IN_TILES = 4096
"""The same in bf16 by AMX: on two cores of a Xeon with it 4.3 times at 256 tokens without gradients, 1.9 at 1,024, 1.4 at 4,096
and 1.0 at 8,192; with gradients 2.9 at 128, 6.2 at 512, 3.0 at 1,024, 2.1 at 2,048."""

LONGEST_MASKED = {"cpu": 256, "cuda": 1024}
"""Up to so many tokens beyond the window a mask on full attention is faster than blocks: on one Cascade Lake core in fp32, with
gradients, equal at 256 tokens for a radius of 16, 390 to 510 for 64 and 700 for 256. On a GPU it is a guess."""


def choose(
    device: torch.device, dtype: torch.dtype, longest: int, rate: float, learning: bool = True
) -> Kernel:
    """The kernel for one rectangle; `learning`: whether there will be gradients.

    | device | dropout | learning | longest | kernel |
    |---|---|---|---|---|
    | CUDA | any | any | any | fused |
    | CPU | > 0 | any | any | written out: there is no fused one |
    | CPU | 0 | no, in fp32 | up to `LONGEST_IN_PLACE[dtype]` | in place |
    | CPU | 0 | no, in fp32 | longer | fused |
    | CPU | 0 | else | up to `LONGEST_WRITTEN_OUT[dtype]` | written out |
    | CPU | 0 | else | longer | fused |
    """
    if device.type != "cpu":
        return "fused"
    if rate == 0 and not learning and dtype in LONGEST_IN_PLACE:
        return "in_place" if longest <= LONGEST_IN_PLACE[dtype] else "fused"
    return "written_out" if rate > 0 or longest <= LONGEST_WRITTEN_OUT.get(dtype, 256) else "fused"


def is_compiled(
    device: torch.device, dtype: torch.dtype, size: int, longest: int, rate: float, learning: bool
) -> bool:
    """Whether a layer in which all see all, with heads of `size` features, goes through the library's own kernel.

    | `native.attends` | dtype | dropout | learning | longest | own kernel |
    |---|---|---|---|---|---|
    | yes | fp32 | 0 | any | up to `LONGEST_COMPILED` | yes |
    | yes | fp32 | > 0 | any | any | yes: torch has no fused one |
    | yes, with AMX | bf16 | 0 | any | up to `LONGEST_IN_TILES` | yes |
    | yes, with AMX | bf16 | > 0 | any | any | yes |
    | yes, without | bf16 | 0 | no | up to `LONGEST_COMPILED` | yes |
    | any other | | | | | no |
    """
    in_tiles = dtype == torch.bfloat16 and Feature.TILES in native.kernel_features()
    plain = rate == 0 and longest <= (LONGEST_IN_TILES if in_tiles else LONGEST_COMPILED)
    learns = dtype == torch.float32 or in_tiles
    allowed = plain or rate > 0 if learns else plain and not learning
    return allowed and native.attends(device, dtype, size)


def is_flexible(device: torch.device, size: int, rate: float, view: AttentionView) -> bool:
    """Whether a window with global tokens goes through FlexAttention (`flex`), in any precision.

    | device | features of a head | dropout | global tokens of a window | FlexAttention |
    |---|---|---|---|---|
    | CUDA, as `has_flex` says | 16, 32 … | 0 | named | yes |
    | any other | | | | no |
    """
    return rate == 0 and size % 16 == 0 and view.named is not None and has_flex(device)


def in_blocks(device: torch.device, pattern: Pattern, longest: int) -> bool:
    """Whether a rectangle is read block by block, in time linear in its length, in place of whole and masked.

    | pattern | longest | read |
    |---|---|---|
    | window | up to two radii and `LONGEST_MASKED[device]` | whole |
    | window | longer | in blocks |
    | blocks | longer than its own limit | in blocks |
    | any other | any | whole |
    """
    match pattern:
        case Window(radius):
            return longest > 2 * radius + LONGEST_MASKED.get(device.type, 1024)
        case Blocks():
            return longest > pattern.dense
        case Full() | Causal():
            return False
        case _:
            assert_never(pattern)


def attend(
    qkv: Float[Tensor, "tokens 3 heads d"],
    view: AttentionView,
    rate: float = 0.0,
    global_qkv: Float[Tensor, "tokens 3 heads d"] | None = None,
) -> Float[Tensor, "tokens heads d"]:
    """Every token attends to those of its own sequence that it sees.

    Args:
        qkv: queries, keys and values.
        view: who sees whom.
        rate: of the dropout on attention probabilities.
        global_qkv: those through which the global tokens of a window see; none if they see through the same as others.
    """
    if view.rotary is not None:
        qkv, global_qkv = view.rotary(qkv), None if global_qkv is None else view.rotary(global_qkv)
    if global_qkv is None and is_packed(qkv.device, qkv.dtype, qkv.shape[-1], rate, view):
        return attend_packed(qkv, view)
    if is_flexible(qkv.device, qkv.shape[-1], rate, view):
        return view.flexible(qkv, global_qkv)
    shape = (qkv.device, qkv.dtype, qkv.shape[-1], view.layout.max_seqlen)
    if global_qkv is None and view.full and is_compiled(*shape, rate, qkv.requires_grad):
        learned = rate > 0 or qkv.requires_grad
        return (
            native.attend_learning(qkv, view.layout, rate)
            if learned
            else native.attend(qkv, view.layout)
        )
    if (
        qkv.requires_grad
        and global_qkv is None
        and all(_is_gathered(part, qkv, rate) for part in view.parts)
    ):
        return attend_gathered(qkv, view.parts, rate)
    parts = [_attend_part(qkv, global_qkv, part, rate) for part in view.parts]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _is_gathered(part: AttentionPart, qkv: Tensor, rate: float) -> bool:
    """Whether a rectangle is written out, as a whole, and with no global tokens."""
    longest, device = part.rectangle.longest, qkv.device
    dense = part.global_tokens is None and not in_blocks(device, part.pattern, longest)
    return dense and choose(device, qkv.dtype, longest, rate) == "written_out"


def _attend_part(
    qkv: Tensor, global_qkv: Tensor | None, part: AttentionPart, rate: float
) -> Float[Tensor, "part heads d"]:
    rectangle = part.rectangle
    q, k, v = rectangle.pad(qkv).permute(2, 0, 3, 1, 4)  # each (rows, heads, longest, d)
    sparse = in_blocks(qkv.device, part.pattern, rectangle.longest)
    if isinstance(part.pattern, Blocks) and sparse:
        rate = 0.0  # BigBird's code drops no probability here
    if sparse and part.reach is not None:
        found = attend_in_blocks(q, k, v, part.reach, part.global_tokens, rate)
    else:
        found = attend_padded(
            q,
            k,
            v,
            part.mask,
            rate,
            choose(q.device, q.dtype, rectangle.longest, rate, q.requires_grad),
        )
    if part.global_tokens is not None:
        if global_qkv is not None and isinstance(part.pattern, Window):
            q, k, v = rectangle.pad(global_qkv).permute(2, 0, 3, 1, 4)
        found = attend_from(part.global_tokens, q, k, v, rectangle, rate, found)
    return rectangle.unpad(found.transpose(1, 2))


def attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    reach: BlockReach,
    global_tokens: GlobalTokens | None,
    rate: float,
) -> Tensor:
    """`(rows, heads, longest, d)` each → as q; every block of queries meets the keys of the blocks that it reads."""
    longest, count = q.shape[2], reach.blocks.shape[1]
    q, k, v = (_blocked(x, count, reach.size) for x in (q, k, v))
    queries, keys, values = (
        _joined(q),
        _read(k, reach, global_tokens),
        _read(v, reach, global_tokens),
    )
    mask = reach.mask.permute(2, 0, 1, 3, 4)
    if mask.shape[1:3] != (1, 1):
        mask = mask.expand(-1, *q.shape[:2], -1, -1)
    kernel = choose(q.device, q.dtype, keys.shape[2], rate, q.requires_grad)
    found = attend_padded(queries, keys, values, mask.flatten(1, 2), rate, kernel)
    return (
        found.reshape(count, *q.shape[:2], reach.size, -1)
        .permute(1, 2, 0, 3, 4)
        .flatten(2, 3)[:, :, :longest]
    )


def _blocked(
    x: Float[Tensor, "rows heads longest d"], count: int, size: int
) -> Float[Tensor, "rows heads blocks size d"]:
    padded = F.pad(x, (0, 0, 0, count * size - x.shape[2]))
    return padded.reshape(*x.shape[:2], count, size, x.shape[3])


def _joined(x: Float[Tensor, "rows heads blocks size d"]) -> Float[Tensor, "blocks places size d"]:
    """Blocks first; rows and heads as one."""
    return x.permute(2, 0, 1, 3, 4).flatten(1, 2)


def _read(
    x: Tensor, reach: BlockReach, global_tokens: GlobalTokens | None
) -> Float[Tensor, "blocks places keys d"]:
    """Of keys or values in blocks `(rows, heads, blocks, size, d)`, those that each block of queries reads."""
    heads, count, read = reach.blocks.shape
    if heads == 1:
        near = x.index_select(2, reach.blocks.flatten())
    else:
        numbers = reach.blocks + count * torch.arange(heads, device=x.device)[:, None, None]
        near = x.flatten(1, 2).index_select(1, numbers.flatten())
    near = near.reshape(*x.shape[:2], count, read * reach.size, x.shape[-1])
    if global_tokens is None:
        return _joined(near)
    front = _at(x.flatten(2, 3), global_tokens)[:, :, None].expand(-1, -1, count, -1, -1)
    return _joined(torch.cat([front, near], 3))


def _at(
    x: Float[Tensor, "rows heads longest d"], global_tokens: GlobalTokens
) -> Float[Tensor, "rows heads globals d"]:
    """What global tokens have; anything, where a row has fewer than others."""
    return x.gather(2, global_tokens.slots[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def attend_from(
    global_tokens: GlobalTokens,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rectangle: Rectangle,
    rate: float,
    found: Tensor,
) -> Tensor:
    """What was found `(rows, heads, longest, d)`, with that of global tokens in its place: these see all."""
    keys = None if rectangle.keep is None else rectangle.keep[:, None, None, :]
    kernel = choose(q.device, q.dtype, rectangle.longest, rate, q.requires_grad)
    global_qkv = attend_padded(_at(q, global_tokens), k, v, keys, rate, kernel).to(found.dtype)
    # Where a row has fewer global tokens than others, the rest goes to a place of its own at the end.
    places = torch.where(global_tokens.held, global_tokens.slots, rectangle.longest)[
        :, None, :, None
    ].expand_as(global_qkv)
    return F.pad(found, (0, 0, 0, 1)).scatter(2, places, global_qkv)[:, :, : rectangle.longest]


def attend_padded(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, rate: float, kernel: Kernel
) -> Tensor:
    """`(rows, heads, longest, d)` each, and a mask as in `View` → as q."""
    match kernel:
        case "fused":
            return attend_fused(q, k, v, mask, rate)
        case "written_out":
            q, k, v = (q * q.shape[-1] ** -0.5).contiguous(), k.contiguous(), v.contiguous()
            scores = q @ k.transpose(-2, -1)
            if mask is not None:
                scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
            return dropped_product(scores.softmax(-1), v, rate)
        case "in_place":
            scores = (q.contiguous() @ k.transpose(-2, -1).contiguous()).mul_(q.shape[-1] ** -0.5)
            if mask is not None:
                scores.masked_fill_(~mask, torch.finfo(scores.dtype).min)
            return dropped_product(scores.softmax(-1), v.contiguous(), rate)
        case _:
            assert_never(kernel)
