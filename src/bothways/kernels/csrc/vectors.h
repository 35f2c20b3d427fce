/* What the other files are made of: vectors of sixteen numbers, in fp32, read and written in fp32 or bf16. */

#ifndef BOTHWAYS_VECTORS
#define BOTHWAYS_VECTORS

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16 /* numbers of 32 bits in a vector */
#define LINE 64 /* bytes of a vector, and of a line of the cache */
#define EACH _Pragma("GCC unroll 16") /* a loop whose variable numbers registers */
#define BASE "avx512f,avx512bw,avx512dq,avx512vl,fma"
#define KERNEL static inline __attribute__((always_inline, target(BASE)))
#define CALLED(features) __attribute__((target(BASE features)))

/* With a word to compilers that do not know that it reads memory. */
#define LOAD_TILE(tile, from, stride)         \
    do {                                      \
        __asm__ volatile("" ::: "memory");    \
        _tile_loadd(tile, from, stride);      \
    } while (0)

static int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

typedef struct {
    int64_t from, to;
} range;

KERNEL __mmask16 first(int64_t count) { return count >= LANES ? 0xffff : count <= 0 ? 0 : (__mmask16)((1u << count) - 1); }

/* Lanes from place `at` of an array in fp32 or bf16. */
KERNEL __m512 load(const void *from, int64_t at, int bf16) {
    if (!bf16) return _mm512_loadu_ps((const float *)from + at);
    __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)from + at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* The same of those that are held, and 0 for the others. */
KERNEL __m512 load_some(__mmask16 held, const void *from, int64_t at, int bf16) {
    if (!bf16) return _mm512_maskz_loadu_ps(held, (const float *)from + at);
    __m256i half = _mm256_maskz_loadu_epi16(held, (const uint16_t *)from + at);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* Numbers in bf16: the nearest, ties to even. */
KERNEL __m256i shortened(__m512 x) {
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); /* adding could carry it over into infinity */
    return _mm512_cvtepi32_epi16(_mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0)));
}

/* The reverse of `load`. */
KERNEL void store(void *to, int64_t at, __m512 x, int bf16) {
    if (bf16)
        _mm256_storeu_si256((__m256i *)((uint16_t *)to + at), shortened(x));
    else
        _mm512_storeu_ps((float *)to + at, x);
}

/* The same of those that are held. */
KERNEL void store_some(void *to, int64_t at, __mmask16 held, __m512 x, int bf16) {
    if (bf16)
        _mm256_mask_storeu_epi16((uint16_t *)to + at, held, shortened(x));
    else
        _mm512_mask_storeu_ps((float *)to + at, held, x);
}

/* e^x for x ≤ 0, to six places; 1.6e-38 for all below −87; NaN for NaN. The polynomial is that of Cephes. */
KERNEL __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x); /* of two operands the second is given where one is NaN */
    __m512 power = _mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)); /* of 2 */
    power = _mm512_roundscale_ps(power, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(0.693359375f), x); /* ln 2 in two parts */
    rest = _mm512_fnmadd_ps(power, _mm512_set1_ps(-2.12194440e-4f), rest);
    __m512 sum = _mm512_set1_ps(1.9875691500e-4f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.3981999507e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(8.3334519073e-3f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(4.1665795894e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.6666665459e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.0000001201e-1f));
    sum = _mm512_fmadd_ps(sum, _mm512_mul_ps(rest, rest), _mm512_add_ps(rest, _mm512_set1_ps(1.0f)));
    return _mm512_scalef_ps(sum, power);
}

/* Rows become columns. */
KERNEL void turn(__m512 a[LANES]) {
    __m512 b[LANES];
    EACH for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm512_unpacklo_ps(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_ps(a[i], a[i + 1]);
    }
#define PAIRS(how, x, y) _mm512_castpd_ps(_mm512_##how##_pd(_mm512_castps_pd(x), _mm512_castps_pd(y)))
    EACH for (int i = 0; i < LANES; i += 4) {
        a[i] = PAIRS(unpacklo, b[i], b[i + 2]);
        a[i + 1] = PAIRS(unpackhi, b[i], b[i + 2]);
        a[i + 2] = PAIRS(unpacklo, b[i + 1], b[i + 3]);
        a[i + 3] = PAIRS(unpackhi, b[i + 1], b[i + 3]);
    }
#undef PAIRS
    EACH for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_f32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_f32x4(a[i + 8], a[i + 12], 0xdd);
    }
    EACH for (int i = 0; i < 8; i++) {
        a[i] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88);
        a[i + 8] = _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd);
    }
}

/* Sixteen features of up to sixteen tokens, `stride` apart, become rows of `to`, `width` apart; 0 where there is no token. */
KERNEL void transpose(const void *from, int64_t at, int64_t stride, int64_t tokens, float *to, int64_t width, int bf16) {
    __m512 a[LANES];
    EACH for (int i = 0; i < LANES; i++) a[i] = i < tokens ? load(from, at + i * stride, bf16) : _mm512_setzero_ps();
    turn(a);
    EACH for (int i = 0; i < LANES; i++) _mm512_storeu_ps(to + i * width, a[i]);
}

/* erf(z)/z as a quotient of polynomials in z², fitted to 1.5e-8 for |z| ≤ 3.9, beyond which erf is 1 in fp32. */
#define FARTHEST 3.9f
static const float ABOVE[] = {2.05038507e-6f, 2.87454169e-4f, 3.83679333e-3f, 5.29666603e-2f, 1.91939252e-1f, 1.12837903f};
static const float BELOW[] = {3.82305569e-5f, 1.18171204e-3f, 1.51090400e-2f, 1.14757452e-1f, 5.03433512e-1f, 1.0f};

/* x·Φ(x) */
KERNEL __m512 gelu(__m512 x) {
    __m512 z = _mm512_mul_ps(x, _mm512_set1_ps(0.70710678f)), far = _mm512_set1_ps(FARTHEST);
    __mmask16 whole = _mm512_cmp_ps_mask(_mm512_abs_ps(z), far, _CMP_GT_OQ);
    __m512 sign = _mm512_and_ps(z, _mm512_set1_ps(-0.0f)), square = _mm512_mul_ps(z, z);
    __m512 above = _mm512_set1_ps(ABOVE[0]), below = _mm512_set1_ps(BELOW[0]);
    EACH for (int i = 1; i < 6; i++) {
        above = _mm512_fmadd_ps(above, square, _mm512_set1_ps(ABOVE[i]));
        below = _mm512_fmadd_ps(below, square, _mm512_set1_ps(BELOW[i]));
    }
    __m512 reciprocal = _mm512_rcp14_ps(below); /* to 14 bits, and by a step of Newton's to all */
    reciprocal = _mm512_mul_ps(reciprocal, _mm512_fnmadd_ps(below, reciprocal, _mm512_set1_ps(2.0f)));
    __m512 erf = _mm512_mul_ps(z, _mm512_mul_ps(above, reciprocal));
    erf = _mm512_mask_or_ps(erf, whole, sign, _mm512_set1_ps(1.0f));
    __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
    return _mm512_fmadd_ps(half, erf, half);
}

/* A dropout: what is kept is scaled; of 2³² draws `below` are dropped, none for 0. */
typedef struct {
    uint64_t seed;
    uint32_t below;
    float scale;
} dropout;

/* The key of a row's draws: a step of SplitMix64 (Steele et al. 2014). */
static uint64_t draw_key(uint64_t seed, int64_t row) {
    uint64_t x = seed + (uint64_t)(row + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Factors, 0 or the scale: what is hashed is the place in the row, with both halves of the row's key. */
KERNEL __m512 mixed(const dropout *drop, __m512i place, __m512i low, __m512i high) {
    __m512i x = _mm512_add_epi32(_mm512_mullo_epi32(place, _mm512_set1_epi32((int32_t)0x9e3779b9u)), low);
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32((int32_t)0x85ebca6bu));
    x = _mm512_xor_si512(x, high);
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 13)), _mm512_set1_epi32((int32_t)0xc2b2ae35u));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    __mmask16 kept = _mm512_cmpge_epu32_mask(x, _mm512_set1_epi32((int32_t)drop->below));
    return _mm512_maskz_mov_ps(kept, _mm512_set1_ps(drop->scale));
}

/* Those of the lanes from place `j` of a row on. */
KERNEL __m512 factors(const dropout *drop, uint64_t key, int64_t j) {
    __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i place = _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)j));
    return mixed(drop, place, _mm512_set1_epi32((int32_t)key), _mm512_set1_epi32((int32_t)(key >> 32)));
}

#endif
