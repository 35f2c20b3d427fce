/* Linear layers in bf16 by AVX512-BF16. */

#include "linear_simd.h"

enum { FORMAT = BF16 };
#define KERNELS bf16_microkernels

/* Two products for each output, added up in fp32. */
INLINE __m512 multiply_add(__m512 sum, __m512i x, __m512i weights) {
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weights);
}

#include "linear_microkernel.h"

void pack_bf16(const linear *l, const void *x, int bf16, int64_t from, int64_t to,
               const packed_rows *into) {
    int64_t width = l->in_features;
    for (int64_t row = from; row < to; row++)
        for (int64_t f = 0; BF16 * f < row_bytes(l, BF16); f += BF16_LANES) {
            __m512 left = load16_masked(first_lanes(width - f), x, row * width + f, bf16);
            __m512 right =
                load16_masked(first_lanes(width - f - LANES), x, row * width + f + LANES, bf16);
            _mm512_storeu_si512(address_of(&into->codes, row, BF16 * f),
                                (__m512i)_mm512_cvtne2ps_pbh(right, left));
        }
}
