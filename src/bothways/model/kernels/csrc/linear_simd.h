/* Shared by the units of linear layers: fp32 split into bf16, and the epilogue of a product. */

#ifndef LINEAR_SIMD_H
#define LINEAR_SIMD_H

#include "linear.h"
#include "simd.h"

/* x ≈ a + b + c, each a bf16 number of eight bits of x, from the most significant on. Two vectors
 * make one line for each part, with the numbers of both in turn:
 *
 *     x = x0 x1 …, y = y0 y1 …  →  to:             x0.a y0.a x1.a y1.a …
 *                                  to + distance:  x0.b y0.b x1.b y1.b …
 *
 * so a pair is (x, y) where a tile multiplies pairs. What remains for the last part has no more
 * than eight bits, and is truncated, unless it is too small to count. */
INLINE void split_to_bf16(__m512 x, __m512 y, char *to, int64_t distance) {
    const __m512i upper = _mm512_set1_epi32((int32_t)0xffff0000), half = _mm512_set1_epi32(0x8000);
    UNROLL
    for (int part = 0; part < 3; part++, to += distance) {
        __m512i a = _mm512_castps_si512(x), b = _mm512_castps_si512(y);
        if (part < 2) {
            a = _mm512_and_si512(_mm512_add_epi32(a, half), upper);
            b = _mm512_and_si512(_mm512_add_epi32(b, half), upper);
            x = _mm512_sub_ps(x, _mm512_castsi512_ps(a));
            y = _mm512_sub_ps(y, _mm512_castsi512_ps(b));
        }
        _mm512_store_si512(to,
                           _mm512_or_si512(_mm512_srli_epi32(a, 16), _mm512_and_si512(b, upper)));
    }
}

/* Constants of sixteen outputs, the same for all rows. */
typedef struct {
    __mmask16 mask; /* of those that exist */
    __m512 scale, bias;
    __m512i zero_point_sum;
} output_columns;

INLINE output_columns load_columns(const linear *l, int64_t output) {
    output_columns c = {first_lanes(l->out_features - output), _mm512_setzero_ps(),
                        _mm512_setzero_ps(), _mm512_setzero_si512()};
    if (l->dtype == INT8) {
        c.scale = _mm512_maskz_loadu_ps(c.mask, l->scales + output);
        c.zero_point_sum = _mm512_maskz_loadu_epi32(c.mask, l->zero_point_sum + output);
    }
    if (l->bias) c.bias = _mm512_maskz_loadu_ps(c.mask, l->bias + output);
    return c;
}

/* The outputs of one row from its sums of products, which in INT8 are int32: subtract what the zero
 * point of the row's codes added, scale, add the bias, apply GELU. */
INLINE __m512 epilogue16(const output_columns *c, __m512 sum, int dtype, const float *row_scale,
                         int gelu) {
    __m512 result = _mm512_add_ps(sum, c->bias);
    if (dtype == INT8) {
        __m512i whole = _mm512_sub_epi32(_mm512_castps_si512(sum), c->zero_point_sum);
        __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(whole), c->scale);
        result = _mm512_fmadd_ps(scaled, _mm512_set1_ps(*row_scale), c->bias);
    }
    return gelu ? gelu16(result) : result;
}

#endif
