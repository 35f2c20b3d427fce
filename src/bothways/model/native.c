/* What torch has no operators for, on processors of x86 with AVX-512: attention over packed sequences as they lie, and dense
 * layers in int8 that round their input and scale their output within the product.
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

/* e^x for x ≤ 0, within 2 units in the last place; 1.6e-38 for all below −87; NaN for NaN. The polynomial is that of Cephes. */
KERNEL __m512 exponential(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-87.0f), x); /* of two operands the second is given where one is NaN */
    __m512 power = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
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

/* Scores of `tokens` keys become e^(score − the largest of them), in place; gives the inverse of their sum. */
KERNEL float exponentials(float *scores, int64_t tokens) {
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < tokens; j += LANES) {
        __mmask16 held = first(tokens - j);
        most = _mm512_mask_max_ps(most, held, most, _mm512_loadu_ps(scores + j));
    }
    __m512 top = _mm512_set1_ps(_mm512_reduce_max_ps(most));
    for (int64_t j = 0; j < tokens; j += LANES) {
        __m512 raised = _mm512_maskz_mov_ps(first(tokens - j), exponential(_mm512_sub_ps(_mm512_loadu_ps(scores + j), top)));
        sum = _mm512_add_ps(sum, raised);
        _mm512_storeu_ps(scores + j, raised);
    }
    return 1.0f / _mm512_reduce_add_ps(sum);
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

/* One head of one sequence. `qkv`: its queries, keys and values at `at`, `size`·`heads` apart; `out`: what it finds, at `to`. */
KERNEL void attend(const void *qkv, int64_t at, int64_t tokens, int64_t heads, int64_t size, void *out, int64_t to,
                   float *scratch, int bf16) {
    int64_t width = heads * size, stride = 3 * width, count = round_up(tokens, KEYS);
    float *keys = scratch, *values = keys + size * count, *queries = values + size * count, *scores = queries + QUERIES * size;
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf((float)size));
    for (int64_t f = 0; f < size; f += LANES) {
        for (int64_t j = 0; j < count; j += LANES)
            transpose(qkv, at + width + j * stride + f, stride, tokens - j, keys + f * count + j, count, bf16);
        for (int64_t j = 0; j < tokens; j++)
            _mm512_storeu_ps(values + j * size + f, load(qkv, at + 2 * width + j * stride + f, bf16));
    }
    for (int64_t start = 0; start < tokens; start += QUERIES) {
        int64_t rows = least(QUERIES, tokens - start);
        for (int64_t i = 0; i < QUERIES; i++) /* the last of too few are repeated */
            for (int64_t f = 0; f < size; f += LANES) {
                __m512 query = load(qkv, at + (start + least(i, rows - 1)) * stride + f, bf16);
                _mm512_storeu_ps(queries + i * size + f, _mm512_mul_ps(query, scale));
            }
        score(queries, keys, size, count, scores);
        float times[QUERIES];
        for (int i = 0; i < QUERIES; i++) times[i] = exponentials(scores + i * count, tokens);
        int64_t f = 0, place = to + start * width;
        for (; f + KEYS <= size; f += KEYS)
            average(scores, count, times, rows, values + f, size, tokens, 2, out, place + f, width, bf16);
        if (f < size) average(scores, count, times, rows, values + f, size, tokens, 1, out, place + f, width, bf16);
    }
}

CALLED("") static void attend_fp32(const void *qkv, int64_t at, int64_t tokens, int64_t heads, int64_t size, void *out,
                                   int64_t to, float *scratch) {
    attend(qkv, at, tokens, heads, size, out, to, scratch, 0);
}

CALLED("") static void attend_bf16(const void *qkv, int64_t at, int64_t tokens, int64_t heads, int64_t size, void *out,
                                   int64_t to, float *scratch) {
    attend(qkv, at, tokens, heads, size, out, to, scratch, 1);
}

/* ---- int8 ---- */

#define ROWS 6 /* with four vectors of outputs each they leave room for the weights */
#define OUTPUTS (4 * LANES)
#define CHUNK 96 /* rows whose codes stay in the cache while all weights pass by */
#define ZERO 128
#define ROUNDING 12582912.0f /* 1.5 · 2^23: the fp32 numbers around it are whole */

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

/* `rows` rows of codes times one panel of weights, into `columns` outputs. */
VNNI void multiply(const uint8_t *codes, const float *row_scales, int64_t padded, const int8_t *panel, const float *scales,
                   const int32_t *zeros, const float *bias, int64_t columns, float *out, int64_t outputs, const int rows) {
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
        if (columns <= n * LANES) break;
        __mmask16 held = first(columns - n * LANES);
        __m512 scale = _mm512_maskz_loadu_ps(held, scales + n * LANES);
        __m512i zero = _mm512_maskz_loadu_epi32(held, zeros + n * LANES);
        __m512 added = bias ? _mm512_maskz_loadu_ps(held, bias + n * LANES) : _mm512_setzero_ps();
        EACH for (int i = 0; i < rows; i++) {
            __m512 product = _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_sub_epi32(sums[i][n], zero)), scale);
            product = _mm512_fmadd_ps(product, _mm512_set1_ps(row_scales[i]), added);
            _mm512_mask_storeu_ps(out + i * outputs + n * LANES, held, product);
        }
    }
}

typedef void tile(const uint8_t *, const float *, int64_t, const int8_t *, const float *, const int32_t *, const float *,
                  int64_t, float *, int64_t);
#define TILE(rows)                                                                                                          \
    CALLED(",avx512vnni") static void tile##rows(const uint8_t *a, const float *b, int64_t c, const int8_t *d,              \
                                                 const float *e, const int32_t *f, const float *g, int64_t h, float *i,     \
                                                 int64_t j) {                                                               \
        multiply(a, b, c, d, e, f, g, h, i, j, rows);                                                                       \
    }
TILE(1) TILE(2) TILE(3) TILE(4) TILE(5) TILE(6)
static tile *const TILES[] = {tile1, tile2, tile3, tile4, tile5, tile6};

/* ---- what Python calls ---- */

/* 0: this processor has too little; 1: it can attend; 2: it can multiply int8, too. */
int32_t bothways_level(void) {
    __builtin_cpu_init();
    int base = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
               __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
    return base ? 1 + !!__builtin_cpu_supports("avx512vnni") : 0;
}

/* Gives 0; 1 where there is no memory. */
int32_t bothways_attend(const void *qkv, const int64_t *offsets, int64_t sequences, int64_t longest, int64_t heads, int64_t size,
                        void *out, int32_t bf16, int32_t threads) {
    int64_t count = round_up(longest, KEYS), wanted = 2 * size * count + QUERIES * (size + count);
    int32_t failed = 0;
#pragma omp parallel num_threads(threads)
    {
        float *scratch = aligned_alloc(64, (size_t)round_up(wanted, LANES) * sizeof(float));
#pragma omp for schedule(dynamic, 4)
        for (int64_t unit = 0; unit < sequences * heads; unit++) {
            int64_t start = offsets[unit / heads], tokens = offsets[unit / heads + 1] - start, head = unit % heads;
            int64_t width = heads * size, at = start * 3 * width + head * size, to = start * width + head * size;
            if (scratch) (bf16 ? attend_bf16 : attend_fp32)(qkv, at, tokens, heads, size, out, to, scratch);
        }
        if (!scratch)
#pragma omp atomic write
            failed = 1;
        free(scratch);
    }
    return failed;
}

void bothways_multiply(const float *x, int64_t rows, int64_t width, const int8_t *panels, const float *scales,
                       const int32_t *zeros, const float *bias, int64_t outputs, uint8_t *codes, float *row_scales, float *out,
                       int32_t threads) {
    if (rows <= 0) return;
    int64_t padded = round_up(width, 4), chunks = (rows + CHUNK - 1) / CHUNK, count = (outputs + OUTPUTS - 1) / OUTPUTS;
    int64_t chunk = round_up((rows + chunks - 1) / chunks, ROWS);
#pragma omp parallel num_threads(threads)
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) row_scales[i] = quantise(x + i * width, width, padded, codes + i * padded);
#pragma omp for schedule(static) collapse(2)
        for (int64_t c = 0; c < chunks; c++)
            for (int64_t p = 0; p < count; p++) {
                int64_t here = p * OUTPUTS, columns = least(OUTPUTS, outputs - here), stop = least(rows, (c + 1) * chunk);
                for (int64_t i = c * chunk; i < stop; i += ROWS)
                    TILES[least(ROWS, stop - i) - 1](codes + i * padded, row_scales + i, padded, panels + here * padded,
                                                     scales + here, zeros + here, bias ? bias + here : NULL, columns,
                                                     out + i * outputs + here, outputs);
            }
    }
}
