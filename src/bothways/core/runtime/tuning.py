"""Measured thresholds: where one way of computing overtakes another.

None of them changes a result beyond rounding; they decide speed and memory. Every field names the
processor that it was measured on. `benchmarks/thresholds.py` measures the most important ones on
this machine and prints the crossover points.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """The thresholds, in tokens unless a name says otherwise.

    Attributes:
        products_bf16, products_fp32: longest rectangle for which a CPU computes attention as two
            matrix products and a softmax instead of torch's fused kernel, which works on small
            tiles. Two Zen 5 cores, bf16 with gradients: 4 to 9 times faster at 32 to 128 tokens,
            1.2 to 3 times at 512.
        in_place_fp32: the same for fp32 without gradients, with the scores scaled in place. One
            Cascade Lake core: 1.1 to 1.4 times faster than the fused kernel at 20, 26 and 40
            tokens, slower beyond.
        compiled: longest sequence for which the library's attention kernel is faster than torch's
            fused one. One Cascade Lake core, fp32: 1.1 to 4 times without gradients, 1.0 to 1.9
            with; at 1,024 tokens equal, and 0.7 with gradients.
        compiled_amx: the same for bf16 by AMX. Two Sapphire Rapids cores, without gradients: 4.3
            times at 256 tokens, 1.9 at 1,024, 1.4 at 4,096, 1.0 at 8,192; with gradients 2.9 at
            128, 6.2 at 512, 3.0 at 1,024, 2.1 at 2,048.
        masked_window_cpu: tokens beyond a window's two radii up to which full attention with a
            mask is faster than block-sparse attention. One Cascade Lake core, fp32 with gradients:
            equal at 256 tokens for a radius of 16, at 390 to 510 for 64 and at 700 for 256.
        masked_window_cuda: the same on a GPU. An estimate, not measured.
        smallest_block: smallest block of block-sparse attention; a narrower window is computed in
            blocks of this size. One Cascade Lake core.
        panel_rows: rows up to which a dense layer with weights in panels beats a plain matrix
            product, where panels are not always faster. One Cascade Lake core: 1.8 times for 18
            rows of 384 features, 1.2 for 128, 1.0 for 1,024.
        int8_chunk_elements: numbers quantised together, so that they stay in the cache. One
            Cascade Lake core.
        dropout_mask_elements: largest dropout mask that is kept for the backward pass; a larger
            one is drawn again. One Cascade Lake core: drawing 2,048 × 768 takes 4.3 ms, in a step
            of 11,000 ms with 24 such masks.
        activation_elements: largest activation in a feed-forward layer that a CPU keeps for the
            backward pass; a larger one is computed again. One Cascade Lake core, fp32: 4 % slower
            at 1,024 × 1,024, where it saves 4 MiB a block; no slower at 2,048 × 3,072, where it
            saves 24 MiB.
        loss_chunk_elements_cpu: logits per chunk of the cross-entropy: their fp32 copy stays in
            the cache. One Cascade Lake core.
        loss_chunk_elements_cuda: the same on a GPU, 256 MiB in fp32. An estimate.
        predict_tokens_cpu: tokens per batch in prediction: what the cache holds. One Cascade Lake
            core: 1.2 times as fast as 8,192 with 384 features.
        predict_tokens_cuda: the same on a GPU. An estimate.
        prepare_tokens: tokens from which packing the weights pays, and tokens per batch for a
            model whose kernel splits batches itself. Packing takes as long as 1,000 to 2,000
            tokens save, for any model. One Cascade Lake core.
    """

    products_bf16: int = 512
    products_fp32: int = 256
    in_place_fp32: int = 48
    compiled: int = 512
    compiled_amx: int = 4096
    masked_window_cpu: int = 256
    masked_window_cuda: int = 1024
    smallest_block: int = 16
    panel_rows: int = 192
    int8_chunk_elements: int = 2**17
    dropout_mask_elements: int = 2**20
    activation_elements: int = 2**22
    loss_chunk_elements_cpu: int = 2**19
    loss_chunk_elements_cuda: int = 2**26
    predict_tokens_cpu: int = 1024
    predict_tokens_cuda: int = 8192
    prepare_tokens: int = 4096


TUNING = Tuning()
"""The thresholds in use."""
