/* Vectors of sixteen fp32 numbers (AVX-512), loaded from and stored to fp32 or bf16. */

#ifndef SIMD_H
#define SIMD_H

#include "memory.h"

#include <immintrin.h>
#include <math.h>
#include <stdint.h>

#define LANES 16               /* fp32 numbers of a vector */
#define BF16_LANES (2 * LANES) /* bf16 numbers of a vector */
#define INLINE static inline __attribute__((always_inline))
/* Unroll a short loop completely: arrays of vectors stay in registers only if every index is a
 * constant. */
#define UNROLL _Pragma("GCC unroll 16")

/* The mask of the first `count` lanes; `count` may be negative or above 16. */
INLINE __mmask16 first_lanes(int64_t count) {
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1);
}

/* ---- loads and stores ---- */

/* bf16 is the upper half of an fp32 number. */
INLINE __m512 widen_bf16(__m256i half) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Sixteen numbers from element `at` on. */
INLINE __m512 load16(const void *from, int64_t at, int bf16) {
    if (!bf16) return _mm512_loadu_ps((const float *)from + at);
    return widen_bf16(_mm256_loadu_si256((const __m256i *)((const uint16_t *)from + at)));
}

/* The lanes of `mask`, and 0 in the others, whose memory is not touched. */
INLINE __m512 load16_masked(__mmask16 mask, const void *from, int64_t at, int bf16) {
    if (!bf16) return _mm512_maskz_loadu_ps(mask, (const float *)from + at);
    return widen_bf16(_mm256_maskz_loadu_epi16(mask, (const uint16_t *)from + at));
}

/* Round to the nearest bf16, ties to even, without the instructions of AVX512-BF16. */
INLINE __m256i round_to_bf16(__m512 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i bias = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, bias), 16);
    __mmask16 nan =
        _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); /* the addition could carry NaN into infinity */
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}

INLINE void store16(void *to, int64_t at, __m512 x, int bf16) {
    if (bf16)
        _mm256_storeu_si256((__m256i *)((uint16_t *)to + at), round_to_bf16(x));
    else
        _mm512_storeu_ps((float *)to + at, x);
}

INLINE void store16_masked(void *to, int64_t at, __mmask16 mask, __m512 x, int bf16) {
    if (bf16)
        _mm256_mask_storeu_epi16((uint16_t *)to + at, mask, round_to_bf16(x));
    else
        _mm512_mask_storeu_ps((float *)to + at, mask, x);
}

/* ---- transposition ---- */

INLINE __m512 unpack_low_pairs(__m512 x, __m512 y) {
    return _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
}

INLINE __m512 unpack_high_pairs(__m512 x, __m512 y) {
    return _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)));
}

/* Transpose a 16 × 16 matrix in registers: first within blocks of 4 × 4, then the blocks. */
INLINE void transpose16(__m512 a[LANES]) {
    __m512 b[LANES];
    UNROLL
    for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
    UNROLL
    for (int i = 0; i < LANES; i += 4) {
        a[i] = unpack_low_pairs(b[i], b[i + 2]);
        a[i + 1] = unpack_high_pairs(b[i], b[i + 2]);
        a[i + 2] = unpack_low_pairs(b[i + 1], b[i + 3]);
        a[i + 3] = unpack_high_pairs(b[i + 1], b[i + 3]);
    }
    UNROLL
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
    }
    UNROLL
    for (int i = 0; i < 8; i++) {
        a[i] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88);
        a[i + 8] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd);
    }
}

/* ---- functions ---- */

/* e^x for x ≤ 0, to six digits; 1.6e-38 for everything below −87; NaN for NaN.
 * e^x = 2^n · e^r with n = round(x / ln 2); the polynomial for e^r is that of Cephes. */
INLINE __m512 exp16(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f),
                      x); /* max gives its second operand where one is NaN */
    __m512 n = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f));
    n = _mm512_roundscale_ps(n, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 r =
        _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);    /* ln 2 as a sum of two, so that */
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r); /* n times the first is exact */
    __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.3981999507e-3f));
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(8.3334519073e-3f));
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(4.1665795894e-2f));
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(1.6666665459e-1f));
    sum = _mm512_fmadd_ps(sum, r, _mm512_set1_ps(5.0000001201e-1f));
    sum = _mm512_fmadd_ps(sum, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(sum, n);
}

/* erf(z)/z = P(z²)/Q(z²), fitted to 1.5e-8 for |z| ≤ 3.9, beyond which erf is 1 in fp32. */
#define ERF_IS_ONE_BEYOND 3.9f
static const float ERF_P[] = {2.05038507e-6f, 2.87454169e-4f, 3.83679333e-3f,
                              5.29666603e-2f, 1.91939252e-1f, 1.12837903f};
static const float ERF_Q[] = {3.82305569e-5f, 1.18171204e-3f, 1.51090400e-2f,
                              1.14757452e-1f, 5.03433512e-1f, 1.0f};

/* x·Φ(x) with the exact Φ(x) = (1 + erf(x/√2)) / 2. */
INLINE __m512 gelu16(__m512 x) {
    __m512 z = _mm512_mul_ps(x, _mm512_set1_ps(0.70710678f));
    __mmask16 saturated =
        _mm512_cmp_ps_mask(_mm512_abs_ps(z), _mm512_set1_ps(ERF_IS_ONE_BEYOND), _CMP_GT_OQ);
    __m512 sign = _mm512_and_ps(z, _mm512_set1_ps(-0.0f)), square = _mm512_mul_ps(z, z);
    __m512 p = _mm512_set1_ps(ERF_P[0]), q = _mm512_set1_ps(ERF_Q[0]);
    UNROLL
    for (int i = 1; i < 6; i++) {
        p = _mm512_fmadd_ps(p, square, _mm512_set1_ps(ERF_P[i]));
        q = _mm512_fmadd_ps(q, square, _mm512_set1_ps(ERF_Q[i]));
    }
    /* 1/q to 14 bits, then to all by one step of Newton's method: faster than a division. */
    __m512 reciprocal = _mm512_rcp14_ps(q);
    reciprocal = _mm512_mul_ps(reciprocal, _mm512_fnmadd_ps(q, reciprocal, _mm512_set1_ps(2.0f)));
    __m512 erf = _mm512_mul_ps(z, _mm512_mul_ps(p, reciprocal));
    erf = _mm512_mask_or_ps(erf, saturated, sign, _mm512_set1_ps(1.0f));
    __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
    return _mm512_fmadd_ps(half, erf, half);
}

#endif
