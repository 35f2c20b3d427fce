/* Attention of one head by AVX-512, in fp32; inputs and output in fp32 or bf16.
 *
 * The scores of 8 queries by all keys are computed, turned into probabilities and multiplied by the
 * values before the next 8: they fit in the first cache, and nothing of size tokens² exists. A
 * block of 8 queries × 32 keys takes 16 registers for the sums, 2 for the keys and 1 for a query,
 * of 32. Keys are transposed once per head, so that 16 of them form a vector:
 *
 *     keys[f][j]      (head_size, padded)   feature f of all tokens, padded with 0 to 32 tokens
 *     values[j][f]    (tokens, head_size)
 *     queries[i][f]   (8, head_size)        times 1/√d
 *     scores[i][j]    (8, padded)
 */

#include "attention.h"
#include "dropout.h"
#include "simd.h"

#include <string.h>

#define QUERIES 8
#define KEYS (2 * LANES)

typedef struct {
    float *keys, *values, *queries, *scores;
    int64_t padded; /* tokens, to a multiple of KEYS */
} forward_workspace;

static forward_workspace carve_forward(arena *a, int64_t tokens, int64_t head_size) {
    int64_t padded = round_up(tokens, KEYS), number = (int64_t)sizeof(float);
    return (forward_workspace){
        .keys = take(a, number * head_size * padded),
        .values = take(a, number * head_size * padded),
        .queries = take(a, number * QUERIES * head_size),
        .scores = take(a, number * QUERIES * padded),
        .padded = padded,
    };
}

int64_t attention_bytes(int64_t tokens, int64_t head_size) {
    arena a = {0};
    carve_forward(&a, tokens, head_size);
    return a.used;
}

/* scores[i][j] = Σ_f queries[i][f] · keys[f][j] */
INLINE void compute_scores(const float *queries, const float *keys, int64_t head_size,
                           int64_t padded, float *scores) {
    for (int64_t j = 0; j < padded; j += KEYS) {
        __m512 sums[QUERIES][2];
        UNROLL
        for (int i = 0; i < QUERIES; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
        for (int64_t f = 0; f < head_size; f++) {
            __m512 left = _mm512_loadu_ps(keys + f * padded + j);
            __m512 right = _mm512_loadu_ps(keys + f * padded + j + LANES);
            UNROLL
            for (int i = 0; i < QUERIES; i++) {
                __m512 query = _mm512_set1_ps(queries[i * head_size + f]);
                sums[i][0] = _mm512_fmadd_ps(query, left, sums[i][0]);
                sums[i][1] = _mm512_fmadd_ps(query, right, sums[i][1]);
            }
        }
        UNROLL
        for (int i = 0; i < QUERIES; i++) {
            _mm512_storeu_ps(scores + i * padded + j, sums[i][0]);
            _mm512_storeu_ps(scores + i * padded + j + LANES, sums[i][1]);
        }
    }
}

typedef struct {
    float largest, sum;
} softmax_row;

/* scores[j] = e^(score − the largest), in place; dropout applies after the sum is taken. */
INLINE softmax_row exponentials(float *scores, int64_t tokens, const dropout *drop, int64_t row) {
    __m512 largest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < tokens; j += LANES)
        largest = _mm512_mask_max_ps(largest, first_lanes(tokens - j), largest,
                                     _mm512_loadu_ps(scores + j));
    softmax_row result = {_mm512_reduce_max_ps(largest), 0};
    largest = _mm512_set1_ps(result.largest);
    uint64_t key = drop->threshold ? dropout_row_key(drop, row) : 0;
    for (int64_t j = 0; j < tokens; j += LANES) {
        __m512 shifted = _mm512_sub_ps(_mm512_loadu_ps(scores + j), largest);
        __m512 power = _mm512_maskz_mov_ps(first_lanes(tokens - j), exp16(shifted));
        sum = _mm512_add_ps(sum, power);
        if (drop->threshold) power = _mm512_mul_ps(power, dropout_row_factors(drop, key, j));
        _mm512_storeu_ps(scores + j, power);
    }
    result.sum = _mm512_reduce_add_ps(sum);
    return result;
}

/* out[i] = scale[i] · Σ_j weights[i][j] · values[j], for `vectors` (1 or 2) vectors of features;
 * rows of `out` are `stride` apart and begin at element `at`. */
INLINE void weighted_sums(const float *weights, int64_t padded, const float *scale, int64_t rows,
                          const float *values, int64_t head_size, int64_t tokens, const int vectors,
                          void *out, int64_t at, int64_t stride, int bf16) {
    __m512 sums[QUERIES][2];
    UNROLL
    for (int i = 0; i < QUERIES; i++) sums[i][0] = sums[i][1] = _mm512_setzero_ps();
    for (int64_t j = 0; j < tokens; j++) {
        __m512 value[2];
        UNROLL
        for (int n = 0; n < vectors; n++)
            value[n] = _mm512_loadu_ps(values + j * head_size + n * LANES);
        UNROLL
        for (int i = 0; i < QUERIES; i++) {
            __m512 weight = _mm512_set1_ps(weights[i * padded + j]);
            UNROLL
            for (int n = 0; n < vectors; n++)
                sums[i][n] = _mm512_fmadd_ps(weight, value[n], sums[i][n]);
        }
    }
    UNROLL
    for (int i = 0; i < QUERIES; i++) {
        if (i >= rows) break;
        UNROLL
        for (int n = 0; n < vectors; n++) {
            __m512 scaled = _mm512_mul_ps(sums[i][n], _mm512_set1_ps(scale[i]));
            store16(out, at + i * stride + n * LANES, scaled, bf16);
        }
    }
}

/* Ask for the query, key and value of one token to be in the first cache soon. */
INLINE void prefetch_token(const head_view *h, int64_t at, int bf16) {
    for (int64_t part = 0; part < 3; part++)
        for (int64_t f = 0; f < h->head_size; f += LANES)
            _mm_prefetch((const char *)h->qkv + (at + part * h->width + f) * (bf16 ? BF16 : FP32),
                         _MM_HINT_T0);
}

/* Eight queries from token `start` on, times 1/√d; where fewer are left, the last is repeated. */
INLINE void load_queries(const head_view *h, int64_t start, int64_t rows, float *queries,
                         int bf16) {
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf((float)h->head_size));
    for (int64_t i = 0; i < QUERIES; i++)
        for (int64_t f = 0; f < h->head_size; f += LANES) {
            int64_t at = h->offset + (start + minimum(i, rows - 1)) * h->stride + f;
            _mm512_storeu_ps(queries + i * h->head_size + f,
                             _mm512_mul_ps(load16(h->qkv, at, bf16), scale));
        }
}

/* Sixteen features of up to sixteen tokens, `stride` apart, → rows of `to`, `width` apart: one row
 * for each feature; 0 where there is no token. */
INLINE void load_transposed(const void *from, int64_t at, int64_t stride, int64_t tokens, float *to,
                            int64_t width, int bf16) {
    __m512 a[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++)
        a[i] = i < tokens ? load16(from, at + i * stride, bf16) : _mm512_setzero_ps();
    transpose16(a);
    UNROLL
    for (int i = 0; i < LANES; i++) _mm512_storeu_ps(to + i * width, a[i]);
}

INLINE void attend(const head_view *h, const dropout *drop, void *out, float *lse, char *workspace,
                   int bf16) {
    int64_t tokens = h->tokens, size = h->head_size, stride = h->stride;
    forward_workspace w = carve_forward(&(arena){.base = workspace}, tokens, size);
    for (int64_t f = 0; f < size; f += LANES) {
        int64_t keys = h->offset + h->width + f, values = keys + h->width;
        for (int64_t j = 0; j < w.padded; j += LANES)
            load_transposed(h->qkv, keys + j * stride, stride, tokens - j,
                            w.keys + f * w.padded + j, w.padded, bf16);
        for (int64_t j = 0; j < tokens; j++)
            _mm512_storeu_ps(w.values + j * size + f, load16(h->qkv, values + j * stride, bf16));
    }
    int is_last_head = h->out_offset % h->width + size >= h->width;
    for (int64_t start = 0; start < tokens; start += QUERIES) {
        int64_t rows = minimum(QUERIES, tokens - start);
        /* The heads of a token are neighbours in memory, its neighbour tokens far away: fetch the
         * same tokens for the next head, which most often this thread computes next. */
        for (int64_t j = start; !is_last_head && j < start + rows; j++)
            prefetch_token(h, h->offset + size + j * stride, bf16);
        load_queries(h, start, rows, w.queries, bf16);
        compute_scores(w.queries, w.keys, size, w.padded, w.scores);
        float inverse_sums[QUERIES];
        for (int i = 0; i < QUERIES; i++) {
            int64_t row = h->first_row + (start + i) * h->heads;
            softmax_row result = exponentials(w.scores + i * w.padded, tokens, drop, row);
            inverse_sums[i] = 1.0f / result.sum;
            if (lse && i < rows) lse[row] = result.largest + logf(result.sum);
        }
        int64_t f = 0, at = h->out_offset + start * h->width;
        for (; f + KEYS <= size; f += KEYS)
            weighted_sums(w.scores, w.padded, inverse_sums, rows, w.values + f, size, tokens, 2,
                          out, at + f, h->width, bf16);
        if (f < size)
            weighted_sums(w.scores, w.padded, inverse_sums, rows, w.values + f, size, tokens, 1,
                          out, at + f, h->width, bf16);
    }
}

void attend_fp32(const head_view *h, const dropout *drop, void *out, float *lse, char *workspace) {
    attend(h, drop, out, lse, workspace, 0);
}

void attend_bf16(const head_view *h, const dropout *drop, void *out, float *lse, char *workspace) {
    attend(h, drop, out, lse, workspace, 1);
}

/* ---- backward ----
 *
 * As FlashAttention does (Dao et al. 2022, algorithm 4): the probabilities are computed again from
 * scores and their log-sum-exp, 8 queries at a time. With P the probabilities after dropout,
 * dP = grad_out · Vᵀ, and D_i = Σ_f grad_out[i][f] · out[i][f], the gradient of the scores is
 * dS = P · (dP − D); then dQ = dS · K / √d, dK = dSᵀ · Q / √d, dV = Pᵀ · grad_out. */

typedef struct {
    float *keys_t, *values_t, *keys; /* two transposed, as the forward pass reads keys */
    float *grad_keys, *grad_values;
    float *queries, *grad_out, *scores, *grad_scores;
    int64_t padded;
} backward_workspace;

static backward_workspace carve_backward(arena *a, int64_t tokens, int64_t head_size) {
    int64_t padded = round_up(tokens, KEYS), number = (int64_t)sizeof(float),
            whole = number * head_size * padded;
    return (backward_workspace){
        .keys_t = take(a, whole),
        .values_t = take(a, whole),
        .keys = take(a, whole),
        .grad_keys = take(a, whole),
        .grad_values = take(a, whole),
        .queries = take(a, number * QUERIES * head_size),
        .grad_out = take(a, number * QUERIES * head_size),
        .scores = take(a, number * QUERIES * padded),
        .grad_scores = take(a, number * QUERIES * padded),
        .padded = padded,
    };
}

int64_t attention_backward_bytes(int64_t tokens, int64_t head_size) {
    arena a = {0};
    carve_backward(&a, tokens, head_size);
    return a.used;
}

/* sums[j] += Σ_i weights[i][j] · rows[i], for `vectors` (1 or 2) vectors of features. */
INLINE void add_outer_products(const float *weights, int64_t padded, const float *rows,
                               int64_t head_size, int64_t tokens, const int vectors, float *sums) {
    for (int64_t j = 0; j < tokens; j++) {
        __m512 sum[2];
        UNROLL
        for (int n = 0; n < vectors; n++)
            sum[n] = _mm512_loadu_ps(sums + j * head_size + n * LANES);
        UNROLL
        for (int i = 0; i < QUERIES; i++) {
            __m512 weight = _mm512_set1_ps(weights[i * padded + j]);
            UNROLL
            for (int n = 0; n < vectors; n++)
                sum[n] = _mm512_fmadd_ps(weight, _mm512_loadu_ps(rows + i * head_size + n * LANES),
                                         sum[n]);
        }
        UNROLL
        for (int n = 0; n < vectors; n++)
            _mm512_storeu_ps(sums + j * head_size + n * LANES, sum[n]);
    }
}

/* In place, for one query: scores → P; grad_probabilities (dP) → dS. `inner` is D.
 * Numbers beyond the last token mean nothing. */
INLINE void softmax_backward(float *scores, float *grad_probabilities, int64_t tokens,
                             const dropout *drop, int64_t row, float lse, float inner) {
    uint64_t key = drop->threshold ? dropout_row_key(drop, row) : 0;
    for (int64_t j = 0; j < tokens; j += LANES) {
        __m512 probability = exp16(_mm512_sub_ps(_mm512_loadu_ps(scores + j), _mm512_set1_ps(lse)));
        __m512 factor = drop->threshold ? dropout_row_factors(drop, key, j) : _mm512_set1_ps(1.0f);
        __m512 grad =
            _mm512_fmsub_ps(_mm512_loadu_ps(grad_probabilities + j), factor, _mm512_set1_ps(inner));
        _mm512_storeu_ps(grad_probabilities + j, _mm512_mul_ps(probability, grad));
        _mm512_storeu_ps(scores + j, _mm512_mul_ps(probability, factor));
    }
}

/* Σ_f a[f] · b[f] */
INLINE float inner_product(const float *a, const float *b, int64_t size) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t f = 0; f < size; f += LANES)
        sum = _mm512_fmadd_ps(_mm512_loadu_ps(a + f), _mm512_loadu_ps(b + f), sum);
    return _mm512_reduce_add_ps(sum);
}

/* The gradients that eight queries give: dQ of their own, and their shares of dK and dV. */
INLINE void accumulate_gradients(const backward_workspace *w, int64_t size, int64_t tokens,
                                 int64_t rows, const float *scale, const int vectors, int64_t f,
                                 float *grad_qkv, int64_t at, int64_t stride) {
    weighted_sums(w->grad_scores, w->padded, scale, rows, w->keys + f, size, tokens, vectors,
                  grad_qkv, at + f, stride, 0);
    add_outer_products(w->grad_scores, w->padded, w->queries + f, size, tokens, vectors,
                       w->grad_keys + f);
    add_outer_products(w->scores, w->padded, w->grad_out + f, size, tokens, vectors,
                       w->grad_values + f);
}

void attend_backward_fp32(const head_view *h, const dropout *drop, const void *out_,
                          const void *grad_out_, const float *lse, void *grad_qkv_,
                          char *workspace) {
    const float *qkv = h->qkv, *out = out_, *grad_out = grad_out_;
    float *grad_qkv = grad_qkv_;
    int64_t tokens = h->tokens, size = h->head_size, width = h->width, stride = h->stride;
    backward_workspace w = carve_backward(&(arena){.base = workspace}, tokens, size);
    for (int64_t f = 0; f < size; f += LANES) {
        int64_t keys = h->offset + width + f, values = keys + width;
        for (int64_t j = 0; j < w.padded; j += LANES) {
            int64_t at = f * w.padded + j;
            load_transposed(qkv, keys + j * stride, stride, tokens - j, w.keys_t + at, w.padded, 0);
            load_transposed(qkv, values + j * stride, stride, tokens - j, w.values_t + at, w.padded,
                            0);
        }
        for (int64_t j = 0; j < tokens; j++)
            _mm512_storeu_ps(w.keys + j * size + f, _mm512_loadu_ps(qkv + keys + j * stride));
    }
    size_t row_bytes = (size_t)size * sizeof(float), score_bytes = (size_t)w.padded * sizeof(float);
    memset(w.grad_keys, 0, (size_t)w.padded * row_bytes);
    memset(w.grad_values, 0, (size_t)w.padded * row_bytes);
    float scale[QUERIES];
    for (int i = 0; i < QUERIES; i++) scale[i] = 1.0f / sqrtf((float)size);
    for (int64_t start = 0; start < tokens; start += QUERIES) {
        int64_t rows = minimum(QUERIES, tokens - start);
        load_queries(h, start, rows, w.queries, 0);
        for (int64_t i = 0; i < QUERIES; i++) {
            int64_t at = h->out_offset + (start + minimum(i, rows - 1)) * width;
            memcpy(w.grad_out + i * size, grad_out + at, row_bytes);
        }
        compute_scores(w.queries, w.keys_t, size, w.padded, w.scores);
        compute_scores(w.grad_out, w.values_t, size, w.padded, w.grad_scores);
        for (int64_t i = 0; i < rows; i++) {
            float inner = inner_product(w.grad_out + i * size,
                                        out + h->out_offset + (start + i) * width, size);
            int64_t row = h->first_row + (start + i) * h->heads, at = i * w.padded;
            softmax_backward(w.scores + at, w.grad_scores + at, tokens, drop, row, lse[row], inner);
        }
        for (int64_t i = rows; i < QUERIES; i++) { /* repeated queries add nothing */
            memset(w.scores + i * w.padded, 0, score_bytes);
            memset(w.grad_scores + i * w.padded, 0, score_bytes);
        }
        int64_t f = 0, at = h->offset + start * stride;
        for (; f + KEYS <= size; f += KEYS)
            accumulate_gradients(&w, size, tokens, rows, scale, 2, f, grad_qkv, at, stride);
        if (f < size)
            accumulate_gradients(&w, size, tokens, rows, scale, 1, f, grad_qkv, at, stride);
    }
    for (int64_t j = 0; j < tokens; j++) {
        float *grad_key = grad_qkv + h->offset + width + j * stride;
        memcpy(grad_key, w.grad_keys + j * size, row_bytes);
        memcpy(grad_key + width, w.grad_values + j * size, row_bytes);
    }
}
