/* Linear layers by AVX-512 alone: packing of fp32 and int8 rows, and products in fp32. */

#include "linear_simd.h"

enum { FORMAT = FP32 };
#define KERNELS fp32_microkernels

INLINE __m512 multiply_add(__m512 sum, __m512i x, __m512i weights) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(weights), sum);
}

#include "linear_microkernel.h"

/* Rows in fp32, as they are or split into bf16. */
void pack_fp32(const linear *l, const void *x, int bf16, int64_t from, int64_t to,
               const packed_rows *into) {
    int64_t width = l->in_features;
    for (int64_t row = from; row < to; row++)
        for (int64_t f = 0; f < width; f += BF16_LANES) {
            __mmask16 left = first_lanes(width - f), right = first_lanes(width - f - LANES);
            __m512 a = load16_masked(left, x, row * width + f, bf16);
            __m512 b = load16_masked(right, x, row * width + f + LANES, bf16);
            char *place = address_of(&into->codes, row, f * into->format);
            if (into->format == SPLIT_BF16) {
                split_to_bf16(a, b, place, into->codes.line_stride);
            } else {
                _mm512_mask_storeu_ps(place, left, a);
                _mm512_mask_storeu_ps(place + LINE, right, b);
            }
        }
}

#define ZERO_POINT 128
/* 1.5 · 2^23: the fp32 numbers around it are integers, so adding it rounds to the nearest, ties to
 * even, into the lowest bits of the sum. */
#define ROUND_TO_INTEGER 12582912.0f

/* Quantize each row symmetrically, with the same codes as `int8.py`, bit for bit: the largest
 * absolute value becomes 128 ± 127. */
void pack_int8(const linear *l, const void *x, int bf16, int64_t from, int64_t to,
               const packed_rows *into) {
    int64_t width = l->in_features;
    for (int64_t row = from; row < to; row++) {
        /* The maximum of absolute values as integers of the same bits: NaN is above infinity, and
         * that above all numbers, so that neither gets lost. */
        __m512i largest_bits = _mm512_setzero_si512();
        for (int64_t f = 0; f < width; f += LANES) {
            __m512i bits = _mm512_castps_si512(
                load16_masked(first_lanes(width - f), x, row * width + f, bf16));
            largest_bits = _mm512_max_epi32(largest_bits,
                                            _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
        }
        int32_t top = _mm512_reduce_max_epi32(largest_bits);
        float largest;
        memcpy(&largest, &top, 4);
        __m512 factor = _mm512_set1_ps(1.0f / largest * 127.0f),
               shift = _mm512_set1_ps(ROUND_TO_INTEGER + ZERO_POINT);
        for (int64_t f = 0; f < row_bytes(l, INT8); f += LANES) {
            __m512 number = load16_masked(first_lanes(width - f), x, row * width + f, bf16);
            __m512 shifted = _mm512_add_ps(_mm512_mul_ps(number, factor), shift);
            _mm_storeu_si128((__m128i *)address_of(&into->codes, row, f),
                             _mm512_cvtepi32_epi8(_mm512_castps_si512(shifted)));
        }
        into->scales[row] = largest / 127.0f;
    }
}
