/* What torch has no operators for, on processors of x86 with AVX-512: attention over packed sequences as they lie, forward and
 * backward; dense layers in int8 that round their input and scale their output within the product; and all that follows the
 * attention of a block as one function, whose steps stay in the cache.
 *
 * All arrays are dense and belong to the caller. The functions that Python calls are at the end; native.py says what they mean.
 */

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define LANES 16 /* numbers of 32 bits in a vector */
#define EACH _Pragma("GCC unroll 16") /* a loop whose variable numbers registers */
#define KERNEL static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512dq,avx512vl,fma")))
#define VNNI static inline __attribute__((always_inline, target("avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,fma")))
#define CALLED(features) __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,fma" features)))

static int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

KERNEL __mmask16 first(int64_t count) { return count >= LANES ? 0xffff : (__mmask16)((1u << count) - 1); }

/* ---- attention ---- */

#define QUERIES 8 /* so many rows of scores at a time: with two vectors of keys each they fill half of the registers */
#define KEYS (2 * LANES)

/* Lanes from place `at` of an array in fp32 or bf16. */
KERNEL __m512 load(const void *from, int64_t at, int bf16) {
    if (!bf16) return _mm512_loadu_ps((const float *)from + at);
    __m256i half = _mm256_loadu_si256((const __m256i *)((const uint16_t *)from + at));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* The reverse; to the nearest number, ties to even. */
KERNEL void store(void *to, int64_t at, __m512 x, int bf16) {
    if (!bf16) {
        _mm512_storeu_ps((float *)to + at, x);
        return;
    }
    __m512i bits = _mm512_castps_si512(x);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q); /* adding could carry it over into infinity */
    rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
    _mm256_storeu_si256((__m256i *)((uint16_t *)to + at), _mm512_cvtepi32_epi16(rounded));
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

/* Sixteen features of up to sixteen tokens, `stride` apart, become rows of `to`, `width` apart; 0 where there is no token. */
KERNEL void transpose(const void *from, int64_t at, int64_t stride, int64_t tokens, float *to, int64_t width, int bf16) {
    __m512 a[LANES], b[LANES];
    EACH for (int i = 0; i < LANES; i++) a[i] = i < tokens ? load(from, at + i * stride, bf16) : _mm512_setzero_ps();
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
        _mm512_storeu_ps(to + i * width, _mm512_shuffle_f32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_ps(to + (i + 8) * width, _mm512_shuffle_f32x4(b[i], b[i + 8], 0xdd));
    }
}

/* scores[i][j] = Σ_f queries[i][f] · keys[f][j] */
KERNEL void score(const float *queries, const float *keys, int64_t size, int64_t count, float *scores) {
    for (int64_t j = 0; j < count; j += KEYS) {
        __m512 sums[QUERIES][2];
        EACH for (int i = 0; i < QUERIES; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
        for (int64_t f = 0; f < size; f++) {
            __m512 left = _mm512_loadu_ps(keys + f * count + j), right = _mm512_loadu_ps(keys + f * count + j + LANES);
            EACH for (int i = 0; i < QUERIES; i++) {
                __m512 query = _mm512_set1_ps(queries[i * size + f]);
                sums[i][0] = _mm512_fmadd_ps(query, left, sums[i][0]);
                sums[i][1] = _mm512_fmadd_ps(query, right, sums[i][1]);
            }
        }
        EACH for (int i = 0; i < QUERIES; i++) {
            _mm512_storeu_ps(scores + i * count + j, sums[i][0]);
            _mm512_storeu_ps(scores + i * count + j + LANES, sums[i][1]);
        }
    }
}

/* Dropout of attention probabilities: what is kept is scaled; of 2³² draws `below` are dropped, none for 0. */
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

/* Factors of the lanes from key `j` on: 0 or the scale. What is hashed is the place in the row, with both halves of its key. */
KERNEL __m512 factors(const dropout *drop, uint64_t key, int64_t j) {
    __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i x = _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)j));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32((int32_t)0x9e3779b9u));
    x = _mm512_add_epi32(x, _mm512_set1_epi32((int32_t)key));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 16)), _mm512_set1_epi32((int32_t)0x85ebca6bu));
    x = _mm512_xor_si512(x, _mm512_set1_epi32((int32_t)(key >> 32)));
    x = _mm512_mullo_epi32(_mm512_xor_si512(x, _mm512_srli_epi32(x, 13)), _mm512_set1_epi32((int32_t)0xc2b2ae35u));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    __mmask16 kept = _mm512_cmpge_epu32_mask(x, _mm512_set1_epi32((int32_t)drop->below));
    return _mm512_maskz_mov_ps(kept, _mm512_set1_ps(drop->scale));
}

typedef struct {
    float most, sum;
} normaliser;

/* Scores of `tokens` keys become e^(score − the largest of them), in place, and after their sum is taken some are dropped. */
KERNEL normaliser exponentials(float *scores, int64_t tokens, const dropout *drop, int64_t row) {
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < tokens; j += LANES) {
        __mmask16 held = first(tokens - j);
        most = _mm512_mask_max_ps(most, held, most, _mm512_loadu_ps(scores + j));
    }
    normaliser found = {_mm512_reduce_max_ps(most), 0};
    __m512 top = _mm512_set1_ps(found.most);
    uint64_t key = drop->below ? draw_key(drop->seed, row) : 0;
    for (int64_t j = 0; j < tokens; j += LANES) {
        __m512 raised = _mm512_maskz_mov_ps(first(tokens - j), exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + j), top)));
        sum = _mm512_add_ps(sum, raised);
        if (drop->below) raised = _mm512_mul_ps(raised, factors(drop, key, j));
        _mm512_storeu_ps(scores + j, raised);
    }
    found.sum = _mm512_reduce_add_ps(sum);
    return found;
}

/* Σ_j weights[i][j] · values[j], times times[i], for `vectors` vectors of features from `values` on; rows `stride` apart. */
KERNEL void average(const float *weights, int64_t count, const float *times, int64_t rows, const float *values, int64_t size,
                    int64_t tokens, const int vectors, void *out, int64_t at, int64_t stride, int bf16) {
    __m512 sums[QUERIES][2];
    EACH for (int i = 0; i < QUERIES; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (int64_t j = 0; j < tokens; j++) {
        __m512 value[2];
        EACH for (int n = 0; n < vectors; n++) value[n] = _mm512_loadu_ps(values + j * size + n * LANES);
        EACH for (int i = 0; i < QUERIES; i++) {
            __m512 weight = _mm512_set1_ps(weights[i * count + j]);
            EACH for (int n = 0; n < vectors; n++) sums[i][n] = _mm512_fmadd_ps(weight, value[n], sums[i][n]);
        }
    }
    EACH for (int i = 0; i < QUERIES; i++) {
        if (i >= rows) break;
        EACH for (int n = 0; n < vectors; n++)
            store(out, at + i * stride + n * LANES, _mm512_mul_ps(sums[i][n], _mm512_set1_ps(times[i])), bf16);
    }
}

/* Asks for query, key and value of one token, `width` apart, to be in the cache when they are read. */
KERNEL void fetch(const void *qkv, int64_t at, int64_t width, int64_t size, int bf16) {
    for (int64_t part = 0; part < 3; part++)
        for (int64_t f = 0; f < size; f += LANES)
            _mm_prefetch((const char *)qkv + (at + part * width + f) * (bf16 ? 2 : 4), _MM_HINT_T0);
}

/* What a head attends over: query, key and value of token j are `stride`·j beyond `at`, `width` apart. */
typedef struct {
    const void *qkv;
    int64_t at, tokens, heads, size, row; /* row: of the first token and this head, among all tokens and heads */
} head;

/* Eight queries from token `start` on, times 1/√d; the last of too few are repeated. */
KERNEL void take_queries(const head *h, int64_t start, int64_t rows, float *queries, int bf16) {
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf((float)h->size));
    int64_t stride = 3 * h->heads * h->size;
    for (int64_t i = 0; i < QUERIES; i++)
        for (int64_t f = 0; f < h->size; f += LANES) {
            __m512 query = load(h->qkv, h->at + (start + least(i, rows - 1)) * stride + f, bf16);
            _mm512_storeu_ps(queries + i * h->size + f, _mm512_mul_ps(query, scale));
        }
}

/* `out`: what the head finds, at `to`; `logs`: of the sums of exponentials, by token and head; NULL where nobody asks. */
KERNEL void attend(const head *h, const dropout *drop, void *out, int64_t to, float *logs, float *scratch, int bf16) {
    int64_t tokens = h->tokens, size = h->size, width = h->heads * size, stride = 3 * width, count = round_up(tokens, KEYS);
    float *keys = scratch, *values = keys + size * count, *queries = values + size * count, *scores = queries + QUERIES * size;
    for (int64_t f = 0; f < size; f += LANES) {
        for (int64_t j = 0; j < count; j += LANES)
            transpose(h->qkv, h->at + width + j * stride + f, stride, tokens - j, keys + f * count + j, count, bf16);
        for (int64_t j = 0; j < tokens; j++)
            _mm512_storeu_ps(values + j * size + f, load(h->qkv, h->at + 2 * width + j * stride + f, bf16));
    }
    for (int64_t start = 0; start < tokens; start += QUERIES) {
        int64_t rows = least(QUERIES, tokens - start);
        if (to % width + size < width) /* a token's heads lie together, its neighbours far away: fetch those of the next head */
            for (int64_t j = start; j < start + rows; j++) fetch(h->qkv, h->at + size + j * stride, width, size, bf16);
        take_queries(h, start, rows, queries, bf16);
        score(queries, keys, size, count, scores);
        float times[QUERIES];
        for (int i = 0; i < QUERIES; i++) {
            int64_t row = h->row + (start + i) * h->heads;
            normaliser found = exponentials(scores + i * count, tokens, drop, row);
            times[i] = 1.0f / found.sum;
            if (logs && i < rows) logs[row] = found.most + logf(found.sum);
        }
        int64_t f = 0, place = to + start * width;
        for (; f + KEYS <= size; f += KEYS)
            average(scores, count, times, rows, values + f, size, tokens, 2, out, place + f, width, bf16);
        if (f < size) average(scores, count, times, rows, values + f, size, tokens, 1, out, place + f, width, bf16);
    }
}

/* sums[j] += Σ_i weights[i][j] · rows[i], for `vectors` vectors of features. */
KERNEL void spread(const float *weights, int64_t count, const float *rows, int64_t size, int64_t tokens, const int vectors,
                   float *sums) {
    for (int64_t j = 0; j < tokens; j++) {
        __m512 sum[2];
        EACH for (int n = 0; n < vectors; n++) sum[n] = _mm512_loadu_ps(sums + j * size + n * LANES);
        EACH for (int i = 0; i < QUERIES; i++) {
            __m512 weight = _mm512_set1_ps(weights[i * count + j]);
            EACH for (int n = 0; n < vectors; n++)
                sum[n] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(rows + i * size + n * LANES), sum[n]);
        }
        EACH for (int n = 0; n < vectors; n++) _mm512_storeu_ps(sums + j * size + n * LANES, sum[n]);
    }
}

/* Scores become probabilities as they were, and `of_shares`, the gradient of those that were not dropped, that of scores; the
 * probabilities that values were multiplied by take the place of the former. Beyond the last token both mean nothing. `inner`:
 * Σ_f of the gradient times what was found. */
KERNEL void backward(float *scores, float *of_shares, int64_t tokens, const dropout *drop, int64_t row, float log,
                     float inner) {
    uint64_t key = drop->below ? draw_key(drop->seed, row) : 0;
    for (int64_t j = 0; j < tokens; j += LANES) {
        __m512 share = exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + j), _mm512_set1_ps(log)));
        __m512 factor = drop->below ? factors(drop, key, j) : _mm512_set1_ps(1.0f);
        __m512 above = _mm512_fmsub_ps(_mm512_loadu_ps(of_shares + j), factor, _mm512_set1_ps(inner));
        _mm512_storeu_ps(of_shares + j, _mm512_mul_ps(share, above));
        _mm512_storeu_ps(scores + j, _mm512_mul_ps(share, factor));
    }
}

/* The gradient of one head's queries, keys and values, into `out` as they lie in qkv; all in fp32. `to`: as in `attend`. */
KERNEL void attend_backward(const head *h, const dropout *drop, const float *found, const float *gradient, int64_t to,
                            const float *logs, float *out, float *scratch) {
    int64_t tokens = h->tokens, size = h->size, width = h->heads * size, stride = 3 * width, count = round_up(tokens, KEYS);
    const float *qkv = h->qkv;
    float *keys = scratch, *values = keys + size * count, *plain = values + size * count, *of_keys = plain + size * count;
    float *of_values = of_keys + size * count, *queries = of_values + size * count, *above = queries + QUERIES * size;
    float *scores = above + QUERIES * size, *of_scores = scores + QUERIES * count;
    for (int64_t f = 0; f < size; f += LANES) {
        for (int64_t j = 0; j < count; j += LANES) {
            transpose(qkv, h->at + width + j * stride + f, stride, tokens - j, keys + f * count + j, count, 0);
            transpose(qkv, h->at + 2 * width + j * stride + f, stride, tokens - j, values + f * count + j, count, 0);
        }
        for (int64_t j = 0; j < tokens; j++)
            _mm512_storeu_ps(plain + j * size + f, _mm512_loadu_ps(qkv + h->at + width + j * stride + f));
    }
    memset(of_keys, 0, (size_t)(2 * size * count) * sizeof(float));
    float scale[QUERIES];
    for (int i = 0; i < QUERIES; i++) scale[i] = 1.0f / sqrtf((float)size);
    for (int64_t start = 0; start < tokens; start += QUERIES) {
        int64_t rows = least(QUERIES, tokens - start);
        take_queries(h, start, rows, queries, 0);
        for (int64_t i = 0; i < QUERIES; i++)
            memcpy(above + i * size, gradient + to + (start + least(i, rows - 1)) * width, (size_t)size * sizeof(float));
        score(queries, keys, size, count, scores);
        score(above, values, size, count, of_scores);
        for (int64_t i = 0; i < rows; i++) {
            __m512 inner = _mm512_setzero_ps();
            for (int64_t f = 0; f < size; f += LANES)
                inner = _mm512_fmadd_ps(_mm512_loadu_ps(above + i * size + f),
                                        _mm512_loadu_ps(found + to + (start + i) * width + f), inner);
            int64_t row = h->row + (start + i) * h->heads;
            backward(scores + i * count, of_scores + i * count, tokens, drop, row, logs[row], _mm512_reduce_add_ps(inner));
        }
        for (int64_t i = rows; i < QUERIES; i++) { /* the repeated ones give nothing */
            memset(scores + i * count, 0, (size_t)count * sizeof(float));
            memset(of_scores + i * count, 0, (size_t)count * sizeof(float));
        }
        int64_t place = h->at + start * stride;
        for (int64_t f = 0; f < size; f += KEYS) {
            if (f + KEYS <= size) {
                average(of_scores, count, scale, rows, plain + f, size, tokens, 2, out, place + f, stride, 0);
                spread(of_scores, count, queries + f, size, tokens, 2, of_keys + f);
                spread(scores, count, above + f, size, tokens, 2, of_values + f);
            } else {
                average(of_scores, count, scale, rows, plain + f, size, tokens, 1, out, place + f, stride, 0);
                spread(of_scores, count, queries + f, size, tokens, 1, of_keys + f);
                spread(scores, count, above + f, size, tokens, 1, of_values + f);
            }
        }
    }
    for (int64_t j = 0; j < tokens; j++) {
        memcpy(out + h->at + width + j * stride, of_keys + j * size, (size_t)size * sizeof(float));
        memcpy(out + h->at + 2 * width + j * stride, of_values + j * size, (size_t)size * sizeof(float));
    }
}

CALLED("") static void attend_fp32(const head *h, const dropout *drop, void *out, int64_t to, float *logs, float *scratch) {
    attend(h, drop, out, to, logs, scratch, 0);
}

CALLED("") static void attend_bf16(const head *h, const dropout *drop, void *out, int64_t to, float *logs, float *scratch) {
    attend(h, drop, out, to, logs, scratch, 1);
}

CALLED("") static void attend_backward_fp32(const head *h, const dropout *drop, const float *found, const float *gradient,
                                            int64_t to, const float *logs, float *out, float *scratch) {
    attend_backward(h, drop, found, gradient, to, logs, out, scratch);
}

/* ---- GELU and LayerNorm ---- */

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
    __m512 erf = _mm512_mul_ps(z, _mm512_div_ps(above, below));
    erf = _mm512_mask_or_ps(erf, whole, sign, _mm512_set1_ps(1.0f));
    __m512 half = _mm512_mul_ps(x, _mm512_set1_ps(0.5f));
    return _mm512_fmadd_ps(half, erf, half);
}

typedef struct {
    const float *weight, *bias; /* no bias: NULL */
    float epsilon;
} norm;

/* LayerNorm of x + y over a row: the sum stays in `out`, in the cache, until its mean and its variance are known. */
CALLED("") static void normalise(const norm *layer, const float *x, const float *y, int64_t width, float *out) {
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    for (int64_t f = 0; f < width; f += LANES) {
        __mmask16 held = first(width - f);
        __m512 both = _mm512_add_ps(_mm512_maskz_loadu_ps(held, x + f), _mm512_maskz_loadu_ps(held, y + f));
        _mm512_mask_storeu_ps(out + f, held, both);
        sum = _mm512_add_ps(sum, both);
    }
    __m512 mean = _mm512_set1_ps(_mm512_reduce_add_ps(sum) / (float)width);
    for (int64_t f = 0; f < width; f += LANES) {
        __mmask16 held = first(width - f);
        __m512 from = _mm512_maskz_sub_ps(held, _mm512_maskz_loadu_ps(held, out + f), mean);
        squares = _mm512_fmadd_ps(from, from, squares);
    }
    __m512 times = _mm512_set1_ps(1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)width + layer->epsilon));
    for (int64_t f = 0; f < width; f += LANES) {
        __mmask16 held = first(width - f);
        __m512 unit = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(held, out + f), mean), times);
        __m512 added = layer->bias ? _mm512_maskz_loadu_ps(held, layer->bias + f) : _mm512_setzero_ps();
        _mm512_mask_storeu_ps(out + f, held, _mm512_fmadd_ps(unit, _mm512_maskz_loadu_ps(held, layer->weight + f), added));
    }
}

/* ---- dense layers ---- */

#define ROWS 6 /* with four vectors of outputs each they leave room for the weights */
#define OUTPUTS (4 * LANES)
#define CHUNK 96 /* rows that go through all weights together: what they become on the way stays in the cache */
#define ZERO 128
#define ROUNDING 12582912.0f /* 1.5 · 2^23: the fp32 numbers around it are whole */

/* A layer: panels of 64 outputs; in int8 four features of every output lie side by side, in fp32 (no scales) one. */
typedef struct {
    const void *panels;
    const float *scales;  /* in int8, one for each output */
    const int32_t *zeros; /* in int8, what the code of 0 adds to each output */
    const float *bias;    /* no bias: NULL */
    int64_t width, outputs;
} dense;

/* A row's codes, up to `padded`, and its scale: as quantised.py has them, bit for bit. */
CALLED("") static float quantise(const float *x, int64_t width, int64_t padded, uint8_t *codes) {
    __m512i most = _mm512_setzero_si512(); /* of the bits without the sign: NaN is above infinity, that above numbers */
    for (int64_t f = 0; f < width; f += LANES) {
        __m512i bits = _mm512_castps_si512(_mm512_maskz_loadu_ps(first(width - f), x + f));
        most = _mm512_max_epi32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    int32_t top = _mm512_reduce_max_epi32(most);
    float largest;
    memcpy(&largest, &top, 4);
    __m512 times = _mm512_set1_ps(127.0f / largest), shift = _mm512_set1_ps(ROUNDING + ZERO);
    for (int64_t f = 0; f < padded; f += LANES) {
        __m512 moved = _mm512_add_ps(_mm512_mul_ps(_mm512_maskz_loadu_ps(first(width - f), x + f), times), shift);
        _mm512_mask_cvtepi32_storeu_epi8(codes + f, first(padded - f), _mm512_castps_si512(moved));
    }
    return largest / 127.0f;
}

/* `rows` rows of codes times the panel that begins with output `at`. */
VNNI void multiply_int8(const dense *layer, int64_t at, const uint8_t *codes, const float *row_scales, int with_gelu,
                        float *out, const int rows) {
    int64_t padded = round_up(layer->width, 4);
    const int8_t *panel = (const int8_t *)layer->panels + at * padded;
    __m512i sums[ROWS][4];
    EACH for (int i = 0; i < rows; i++) EACH for (int n = 0; n < 4; n++) sums[i][n] = _mm512_setzero_si512();
    for (int64_t f = 0; f < padded; f += 4) {
        __m512i weights[4];
        EACH for (int n = 0; n < 4; n++) weights[n] = _mm512_loadu_si512(panel + f * OUTPUTS + n * 4 * LANES);
        EACH for (int i = 0; i < rows; i++) {
            int32_t four;
            memcpy(&four, codes + i * padded + f, 4);
            EACH for (int n = 0; n < 4; n++) sums[i][n] = _mm512_dpbusd_epi32(sums[i][n], _mm512_set1_epi32(four), weights[n]);
        }
    }
    EACH for (int n = 0; n < 4; n++) {
        if (layer->outputs <= at + n * LANES) break;
        __mmask16 held = first(layer->outputs - at - n * LANES);
        __m512 scale = _mm512_maskz_loadu_ps(held, layer->scales + at + n * LANES);
        __m512i zero = _mm512_maskz_loadu_epi32(held, layer->zeros + at + n * LANES);
        __m512 bias = layer->bias ? _mm512_maskz_loadu_ps(held, layer->bias + at + n * LANES) : _mm512_setzero_ps();
        EACH for (int i = 0; i < rows; i++) {
            __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums[i][n], zero)), scale);
            product = _mm512_fmadd_ps(product, _mm512_set1_ps(row_scales[i]), bias);
            if (with_gelu) product = gelu(product);
            _mm512_mask_storeu_ps(out + i * layer->outputs + at + n * LANES, held, product);
        }
    }
}

/* The same in fp32. */
KERNEL void multiply_fp32(const dense *layer, int64_t at, const float *x, int with_gelu, float *out, const int rows) {
    const float *panel = (const float *)layer->panels + at * layer->width;
    __m512 sums[ROWS][4];
    EACH for (int i = 0; i < rows; i++) EACH for (int n = 0; n < 4; n++) sums[i][n] = _mm512_setzero_ps();
    for (int64_t f = 0; f < layer->width; f++) {
        __m512 weights[4];
        EACH for (int n = 0; n < 4; n++) weights[n] = _mm512_loadu_ps(panel + f * OUTPUTS + n * LANES);
        EACH for (int i = 0; i < rows; i++) {
            __m512 number = _mm512_set1_ps(x[i * layer->width + f]);
            EACH for (int n = 0; n < 4; n++) sums[i][n] = _mm512_fmadd_ps(number, weights[n], sums[i][n]);
        }
    }
    EACH for (int n = 0; n < 4; n++) {
        if (layer->outputs <= at + n * LANES) break;
        __mmask16 held = first(layer->outputs - at - n * LANES);
        __m512 bias = layer->bias ? _mm512_maskz_loadu_ps(held, layer->bias + at + n * LANES) : _mm512_setzero_ps();
        EACH for (int i = 0; i < rows; i++) {
            __m512 product = _mm512_add_ps(sums[i][n], bias);
            if (with_gelu) product = gelu(product);
            _mm512_mask_storeu_ps(out + i * layer->outputs + at + n * LANES, held, product);
        }
    }
}

typedef void int8_tile(const dense *, int64_t, const uint8_t *, const float *, int, float *);
typedef void fp32_tile(const dense *, int64_t, const float *, int, float *);
#define TILES(rows)                                                                                                         \
    CALLED(",avx512vnni") static void int8_tile##rows(const dense *layer, int64_t at, const uint8_t *codes,                 \
                                                      const float *scales, int with_gelu, float *out) {                     \
        multiply_int8(layer, at, codes, scales, with_gelu, out, rows);                                                      \
    }                                                                                                                       \
    CALLED("") static void fp32_tile##rows(const dense *layer, int64_t at, const float *x, int with_gelu, float *out) {     \
        multiply_fp32(layer, at, x, with_gelu, out, rows);                                                                  \
    }
TILES(1) TILES(2) TILES(3) TILES(4) TILES(5) TILES(6)
static int8_tile *const INT8_TILES[] = {int8_tile1, int8_tile2, int8_tile3, int8_tile4, int8_tile5, int8_tile6};
static fp32_tile *const FP32_TILES[] = {fp32_tile1, fp32_tile2, fp32_tile3, fp32_tile4, fp32_tile5, fp32_tile6};

/* What a chunk needs on its way, in bytes; a multiple of a cache line. */
static int64_t codes_room(int64_t width) { return CHUNK * (round_up(round_up(width, 4), 64) + (int64_t)sizeof(float)); }

/* x·Wᵀ + b of a chunk, and GELU of it. `room`: as `codes_room` says, for int8. */
static void product(const dense *layer, const float *x, int64_t rows, int with_gelu, float *out, void *room) {
    int64_t padded = round_up(layer->width, 4);
    float *scales = room;
    uint8_t *codes = (uint8_t *)(scales + CHUNK);
    if (layer->scales)
        for (int64_t i = 0; i < rows; i++) scales[i] = quantise(x + i * layer->width, layer->width, padded, codes + i * padded);
    for (int64_t at = 0; at < layer->outputs; at += OUTPUTS)
        for (int64_t i = 0; i < rows; i += ROWS) {
            int64_t tile = least(ROWS, rows - i) - 1;
            if (layer->scales)
                INT8_TILES[tile](layer, at, codes + i * padded, scales + i, with_gelu, out + i * layer->outputs);
            else
                FP32_TILES[tile](layer, at, x + i * layer->width, with_gelu, out + i * layer->outputs);
        }
}

/* Rows of a chunk: as many chunks for every thread, and no more rows than `CHUNK`. */
static int64_t chunk_rows(int64_t rows, int64_t threads) {
    if (rows <= 0) return ROWS;
    int64_t chunks = round_up((rows + CHUNK - 1) / CHUNK, threads);
    return round_up((rows + chunks - 1) / chunks, ROWS);
}

/* What follows the attention in a post-norm block. */
typedef struct {
    dense out, up, down;
    norm first, second;
} rest;

static int64_t rest_room(const rest *block) {
    int64_t floats = CHUNK * (block->out.outputs + block->up.outputs) * (int64_t)sizeof(float);
    int64_t widest = block->up.outputs > block->up.width ? block->up.outputs : block->up.width;
    return floats + codes_room(widest > block->out.width ? widest : block->out.width);
}

static void follow(const rest *block, const float *start, const float *heads, int64_t rows, float *result, float *room) {
    int64_t width = block->out.outputs;
    float *middle = room, *inner = middle + CHUNK * width, *codes = inner + CHUNK * block->up.outputs;
    product(&block->out, heads, rows, 0, middle, codes);
    for (int64_t i = 0; i < rows * width; i += width) normalise(&block->first, start + i, middle + i, width, middle + i);
    product(&block->up, middle, rows, 1, inner, codes);
    product(&block->down, inner, rows, 0, result, codes);
    for (int64_t i = 0; i < rows * width; i += width) normalise(&block->second, middle + i, result + i, width, result + i);
}

/* ---- what Python calls ---- */

#ifndef SOURCE
#define SOURCE 0u
#endif

/* The checksum of this file, as whoever compiled it said. */
uint32_t bothways_source(void) { return SOURCE; }

/* 0: this processor has too little; 1: it can attend; 2: it can multiply int8, too. */
int32_t bothways_level(void) {
    __builtin_cpu_init();
    int base = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
    return base ? 1 + !!__builtin_cpu_supports("avx512vnni") : 0;
}

/* A batch: sequence i is the tokens from offsets[i] to offsets[i + 1]. */
typedef struct {
    const void *qkv;
    const int64_t *offsets;
    int64_t sequences, longest, heads, size;
    dropout drop;
    int32_t bf16;
} batch;

static head head_of(const batch *b, int64_t unit, int64_t *to) {
    int64_t start = b->offsets[unit / b->heads], number = unit % b->heads, width = b->heads * b->size;
    *to = start * width + number * b->size;
    return (head){b->qkv, start * 3 * width + number * b->size, b->offsets[unit / b->heads + 1] - start,
                  b->heads, b->size, start * b->heads + number};
}

/* Gives 0; 1 where there is no memory. */
int32_t bothways_attend(const batch *b, void *out, float *logs, int32_t threads) {
    int64_t count = round_up(b->longest, KEYS), wanted = 2 * b->size * count + QUERIES * (b->size + count);
    int32_t failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = aligned_alloc(64, (size_t)round_up(wanted, LANES) * sizeof(float));
#pragma omp for schedule(dynamic, 4)
        for (int64_t unit = 0; unit < b->sequences * b->heads; unit++) {
            int64_t to;
            head h = head_of(b, unit, &to);
            if (scratch) (b->bf16 ? attend_bf16 : attend_fp32)(&h, &b->drop, out, to, logs, scratch);
        }
        if (!scratch)
#pragma omp atomic write
            failed = 1;
        free(scratch);
    }
    return failed;
}

/* The same for the gradient of qkv; in fp32. */
int32_t bothways_attend_backward(const batch *b, const float *found, const float *gradient, const float *logs, float *out,
                                 int32_t threads) {
    int64_t count = round_up(b->longest, KEYS), wanted = 5 * b->size * count + 2 * QUERIES * (b->size + count);
    int32_t failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = aligned_alloc(64, (size_t)round_up(wanted, LANES) * sizeof(float));
#pragma omp for schedule(dynamic, 4)
        for (int64_t unit = 0; unit < b->sequences * b->heads; unit++) {
            int64_t to;
            head h = head_of(b, unit, &to);
            if (scratch) attend_backward_fp32(&h, &b->drop, found, gradient, to, logs, out, scratch);
        }
        if (!scratch)
#pragma omp atomic write
            failed = 1;
        free(scratch);
    }
    return failed;
}

/* The same for x·Wᵀ + b. */
int32_t bothways_multiply(const dense *layer, const float *x, int64_t rows, float *out, int32_t threads) {
    int64_t chunk = chunk_rows(rows, threads);
    int32_t failed = 0;
#pragma omp parallel num_threads(threads)
    {
        void *room = aligned_alloc(64, (size_t)codes_room(layer->width));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i += chunk)
            if (room) product(layer, x + i * layer->width, least(chunk, rows - i), 0, out + i * layer->outputs, room);
        if (!room)
#pragma omp atomic write
            failed = 1;
        free(room);
    }
    return failed;
}

/* The same for all that follows the attention: `start` of the residual path, and what the heads found. */
int32_t bothways_rest(const rest *block, const float *start, const float *heads, int64_t rows, float *result, int32_t threads) {
    int64_t chunk = chunk_rows(rows, threads), width = block->out.outputs;
    int32_t failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *room = aligned_alloc(64, (size_t)rest_room(block));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i += chunk)
            if (room)
                follow(block, start + i * width, heads + i * block->out.width, least(chunk, rows - i), result + i * width,
                       room);
        if (!room)
#pragma omp atomic write
            failed = 1;
        free(room);
    }
    return failed;
}
