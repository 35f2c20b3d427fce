/* Attention of one head by AMX, in bf16.
 *
 * Scores are computed transposed, with keys as rows and sixteen queries as columns:
 *
 *                 q0  q1 … q15
 *     key 0     [  ·   ·     · ]      one vector
 *     key 1     [  ·   ·     · ]
 *
 * so that a softmax over keys is a sequence of vector operations, key by key, that never adds up
 * across a vector. Two sets of sixteen queries are computed at a time, two tiles of keys by two of
 * queries (see amx.h). All tokens and features are padded with 0 to multiples of 32. */

#include "attention.h"
#include "attention_tiles.h"
#include "dropout.h"

#include <string.h>

/* ---- softmax ---- */

/* The dropout keys of sixteen queries, from a row of scores on, rows `heads` apart. */
typedef struct {
    __m512i low, high;
} query_keys;

INLINE query_keys load_query_keys(const dropout *drop, int64_t row, int64_t heads) {
    int32_t low[LANES], high[LANES];
    for (int i = 0; i < LANES; i++) {
        uint64_t key = dropout_row_key(drop, row + i * heads);
        low[i] = (int32_t)key, high[i] = (int32_t)(key >> 32);
    }
    return (query_keys){_mm512_loadu_si512(low), _mm512_loadu_si512(high)};
}

/* The factors of key j for sixteen queries. */
INLINE __m512 key_factors(const dropout *drop, const query_keys *keys, int64_t j) {
    return dropout_factors(drop, _mm512_set1_epi32((int32_t)j), keys->low, keys->high);
}

/* 2^x for x ≤ 0, to 2.6e-6, a hundredth of what rounding to bf16 loses; the polynomial is fitted to
 * the fraction of x. */
INLINE __m512 exp2_16(__m512 x) {
    __m512 fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 sum = _mm512_set1_ps(1.353418e-2f);
    sum = _mm512_fmadd_ps(sum, fraction, _mm512_set1_ps(5.201149e-2f));
    sum = _mm512_fmadd_ps(sum, fraction, _mm512_set1_ps(2.4144269e-1f));
    sum = _mm512_fmadd_ps(sum, fraction, _mm512_set1_ps(6.9300386e-1f));
    sum = _mm512_fmadd_ps(sum, fraction, _mm512_set1_ps(1.00000259f));
    return _mm512_scalef_ps(sum, x);
}

/* scores[j] (`padded` keys by sixteen queries) → e^(scale · (score − the largest)) after dropout,
 * as pairs of keys in bf16, in place: key pair p takes the place of key p. Return 1/Σ of each
 * query, and store log-sum-exp to `lse` unless it is NULL. */
INLINE __m512 softmax_columns(float *scores, int64_t tokens, int64_t padded, float scale,
                              const dropout *drop, query_keys keys, float lse[LANES]) {
    __m512 tops[4],
        sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}; /* so that none waits for the last */
    UNROLL
    for (int i = 0; i < 4; i++) tops[i] = _mm512_set1_ps(-INFINITY);
    for (int64_t j = 0; j < padded; j += 4) {
        UNROLL
        for (int i = 0; i < 4; i++)
            if (j + i < tokens)
                tops[i] = _mm512_max_ps(tops[i], _mm512_loadu_ps(scores + (j + i) * LANES));
    }
    __m512 largest =
        _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
    __m512 factor = _mm512_set1_ps(scale * LOG2_E);
    __m512i order = interleaved_halves();
    for (int64_t j = 0; j < padded; j += 2) {
        __m512 pair[2];
        UNROLL
        for (int i = 0; i < 2; i++) {
            __m512 shifted = _mm512_mul_ps(
                _mm512_sub_ps(_mm512_loadu_ps(scores + (j + i) * LANES), largest), factor);
            pair[i] = j + i < tokens ? exp2_16(shifted) : _mm512_setzero_ps();
            sums[i] = _mm512_add_ps(sums[i], pair[i]);
            if (drop->threshold) pair[i] = _mm512_mul_ps(pair[i], key_factors(drop, &keys, j + i));
        }
        __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(pair[1], pair[0]);
        _mm512_storeu_si512(scores + j / 2 * LANES, _mm512_permutexvar_epi16(order, halves));
    }
    __m512 sum = _mm512_add_ps(sums[0], sums[1]);
    if (lse) {
        float log_sums[LANES];
        _mm512_storeu_ps(log_sums, sum);
        for (int i = 0; i < LANES; i++) log_sums[i] = logf(log_sums[i]);
        _mm512_storeu_ps(
            lse, _mm512_fmadd_ps(largest, _mm512_set1_ps(scale), _mm512_loadu_ps(log_sums)));
    }
    return _mm512_div_ps(_mm512_set1_ps(1.0f), sum);
}

/* ---- forward ---- */

typedef struct {
    uint16_t *keys;           /* (tokens, features) */
    uint16_t *values;         /* (features, tokens) */
    float *queries;           /* of each set: (feature pairs, 16) */
    float *scores;            /* of each set: (tokens, 16), then (token pairs, 16) */
    float *sums;              /* four tiles */
    int64_t tokens, features; /* padded */
} forward_workspace;

static forward_workspace carve_forward(arena *a, int64_t tokens, int64_t features) {
    forward_workspace w = {.tokens = round_up(tokens, BF16_LANES),
                           .features = round_up(features, BF16_LANES)};
    w.keys = take(a, BF16 * w.tokens * w.features);
    w.values = take(a, BF16 * w.tokens * w.features);
    w.queries = take(a, FP32 * LANES * w.features);
    w.scores = take(a, FP32 * 2 * LANES * w.tokens);
    w.sums = take(a, FP32 * 4 * TILE_NUMBERS);
    return w;
}

int64_t attention_amx_bytes(int64_t tokens, int64_t head_size) {
    arena a = {0};
    carve_forward(&a, tokens, head_size);
    return a.used;
}

void attend_amx(const head_view *h, const dropout *drop, void *out_, float *lse, char *workspace) {
    const uint16_t *qkv = h->qkv;
    uint16_t *out = out_;
    forward_workspace w = carve_forward(&(arena){.base = workspace}, h->tokens, h->head_size);
    int64_t width = h->width, stride = h->stride, query_set = LANES * w.features / 2,
            score_set = LANES * w.tokens;
    float scale = 1.0f / sqrtf((float)h->head_size);
    copy_rows(qkv, h->offset + width, stride, h->tokens, h->head_size, w.keys);
    copy_transposed(qkv, h->offset + 2 * width, stride, h->tokens, h->head_size, w.values);
    for (int64_t start = 0; start < h->tokens; start += 2 * LANES) {
        int64_t rows = h->tokens - start, sets = rows > LANES ? 2 : 1; /* of sixteen queries */
        for (int64_t s = 0; s < sets; s++)
            copy_feature_pairs(qkv, h->offset + (start + s * LANES) * stride, stride,
                               rows - s * LANES, h->head_size, w.queries + s * query_set);
        for (int64_t j = 0; j < w.tokens; j += 2 * LANES) { /* scores = K · Qᵀ */
            zero_sums();
            for (int64_t f = 0; f < w.features; f += BF16_LANES)
                multiply_tiles(w.keys + j * w.features + f, BF16 * LANES * w.features,
                               BF16 * w.features, w.queries + f / 2 * LANES, FP32 * query_set, LINE,
                               sets);
            store_sums(w.scores + j * LANES, TILE_NUMBERS, score_set, LINE, sets);
        }
        __m512 inverse_sums[2];
        for (int64_t s = 0; s < sets; s++) {
            int64_t row = h->first_row + (start + s * LANES) * h->heads;
            float set_lse[LANES];
            query_keys keys =
                drop->threshold ? load_query_keys(drop, row, h->heads) : (query_keys){0};
            inverse_sums[s] = softmax_columns(w.scores + s * score_set, h->tokens, w.tokens, scale,
                                              drop, keys, lse ? set_lse : NULL);
            for (int64_t i = 0; lse && i < minimum(LANES, rows - s * LANES); i++)
                lse[row + i * h->heads] = set_lse[i];
        }
        for (int64_t f = 0; f < h->head_size; f += 2 * LANES) { /* outᵀ = Vᵀ · probabilities */
            zero_sums();
            for (int64_t j = 0; j < w.tokens; j += BF16_LANES)
                multiply_tiles(w.values + f * w.tokens + j, BF16 * LANES * w.tokens,
                               BF16 * w.tokens, w.scores + j / 2 * LANES, FP32 * score_set, LINE,
                               sets);
            store_sums(w.sums, TILE_NUMBERS, 2 * TILE_NUMBERS, LINE, sets);
            for (int64_t s = 0; s < sets; s++)
                for (int64_t n = 0; n < 2 && f + n * LANES < h->head_size; n++) {
                    int64_t at = h->out_offset + (start + s * LANES) * width + f + n * LANES;
                    store_transposed(w.sums + (2 * s + n) * TILE_NUMBERS, inverse_sums[s],
                                     rows - s * LANES, out + at, width);
                }
        }
    }
}

/* ---- backward ----
 *
 * The formulas are those of attention_avx512.c, with scores and their gradients transposed as
 * above. Each block of 32 queries computes dQ at once, and adds its share to dK and dV. dS is
 * needed twice: as rows of keys for dK, and as pairs of keys for dQ. */

typedef struct {
    uint16_t *keys, *values;                         /* (tokens, features) */
    uint16_t *keys_t;                                /* (features, tokens) */
    uint16_t *probabilities;                         /* (tokens, 32 queries), after dropout */
    uint16_t *grad_scores;                           /* (tokens, 32 queries) */
    float *grad_score_pairs;                         /* of each set: (token pairs, 16) */
    float *queries, *grad_out;                       /* of each set: (feature pairs, 16) */
    float *query_token_pairs, *grad_out_token_pairs; /* (16, features) */
    float *scores, *grad_probabilities;              /* four tiles: 32 keys by both sets */
    float *grad_queries;                             /* four tiles */
    float *grad_keys, *grad_values;                  /* (tokens, features) */
    int64_t tokens, features;                        /* padded */
} backward_workspace;

static backward_workspace carve_backward(arena *a, int64_t tokens, int64_t features) {
    backward_workspace w = {.tokens = round_up(tokens, BF16_LANES),
                            .features = round_up(features, BF16_LANES)};
    int64_t whole = w.tokens * w.features;
    w.keys = take(a, BF16 * whole);
    w.values = take(a, BF16 * whole);
    w.keys_t = take(a, BF16 * whole);
    w.probabilities = take(a, BF16 * BF16_LANES * w.tokens);
    w.grad_scores = take(a, BF16 * BF16_LANES * w.tokens);
    w.grad_score_pairs = take(a, FP32 * LANES * w.tokens);
    w.queries = take(a, FP32 * LANES * w.features);
    w.grad_out = take(a, FP32 * LANES * w.features);
    w.query_token_pairs = take(a, FP32 * LANES * w.features);
    w.grad_out_token_pairs = take(a, FP32 * LANES * w.features);
    w.scores = take(a, FP32 * 4 * TILE_NUMBERS);
    w.grad_probabilities = take(a, FP32 * 4 * TILE_NUMBERS);
    w.grad_queries = take(a, FP32 * 4 * TILE_NUMBERS);
    w.grad_keys = take(a, FP32 * whole);
    w.grad_values = take(a, FP32 * whole);
    return w;
}

int64_t attention_amx_backward_bytes(int64_t tokens, int64_t head_size) {
    arena a = {0};
    carve_backward(&a, tokens, head_size);
    return a.used;
}

/* Σ_f a[i][f] · b[i][f] of up to sixteen rows, `width` apart. */
INLINE __m512 inner_products(const uint16_t *a, const uint16_t *b, int64_t width, int64_t rows,
                             int64_t size) {
    float inner[LANES] = {0};
    for (int64_t i = 0; i < minimum(LANES, rows); i++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t f = 0; f < size; f += LANES)
            sum = _mm512_fmadd_ps(load16(a, i * width + f, 1), load16(b, i * width + f, 1), sum);
        inner[i] = _mm512_reduce_add_ps(sum);
    }
    return _mm512_loadu_ps(inner);
}

/* sums (tokens, features) += rows (tokens, 32 queries) · columns (query pairs, features) */
INLINE void add_outer_products(const backward_workspace *w, const uint16_t *rows,
                               const float *columns, float *sums) {
    for (int64_t j = 0; j < w->tokens; j += 2 * LANES)
        for (int64_t f = 0; f < w->features; f += 2 * LANES) {
            float *to = sums + j * w->features + f;
            int64_t next_rows = LANES * w->features, stride = FP32 * w->features;
            load_sums(to, next_rows, LANES, stride);
            multiply_tiles(rows + j * BF16_LANES, BF16 * LANES * BF16_LANES, LINE, columns + f,
                           FP32 * LANES, stride, 2);
            store_sums(to, next_rows, LANES, stride, 2);
        }
}

/* Numbers of a block of 32 queries: of its two sets of sixteen. */
typedef struct {
    __m512 inner[2], lse[2];
    query_keys keys[2];
    float scale;
} query_block;

/* From the scores and dP of 32 keys, from `first` on, to P and dS; two keys at a time, since dS is
 * also needed in pairs of keys. */
INLINE void softmax_backward(const backward_workspace *w, const query_block *q, const dropout *drop,
                             int64_t first, int64_t tokens) {
    const __m512 one = _mm512_set1_ps(1.0f), scale = _mm512_set1_ps(q->scale),
                 log2_e = _mm512_set1_ps(LOG2_E);
    const __m512i order = interleaved_halves();
    for (int64_t j = 0; j < 2 * LANES; j += 2) {
        __m512 probability[2][2], grad_score[2][2]; /* of two keys and both sets */
        UNROLL
        for (int i = 0; i < 2; i++) {
            UNROLL
            for (int s = 0; s < 2; s++) {
                int64_t at = (j + i) * LANES + s * 2 * TILE_NUMBERS, key = first + j + i;
                __m512 exponent =
                    _mm512_fmsub_ps(_mm512_loadu_ps(w->scores + at), scale, q->lse[s]);
                __m512 power =
                    key < tokens ? exp2_16(_mm512_mul_ps(exponent, log2_e)) : _mm512_setzero_ps();
                __m512 factor = drop->threshold ? key_factors(drop, &q->keys[s], key) : one;
                __m512 grad = _mm512_fmsub_ps(_mm512_loadu_ps(w->grad_probabilities + at), factor,
                                              q->inner[s]);
                probability[i][s] = _mm512_mul_ps(power, factor);
                grad_score[i][s] = _mm512_mul_ps(_mm512_mul_ps(power, grad), scale);
            }
        }
        UNROLL
        for (int i = 0; i < 2; i++) {
            int64_t at = (first + j + i) * BF16_LANES;
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(probability[i][1], probability[i][0]);
            __m512i grads = (__m512i)_mm512_cvtne2ps_pbh(grad_score[i][1], grad_score[i][0]);
            _mm512_storeu_si512(w->probabilities + at, both);
            _mm512_storeu_si512(w->grad_scores + at, grads);
        }
        UNROLL
        for (int s = 0; s < 2; s++) {
            __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(grad_score[1][s], grad_score[0][s]);
            float *pairs =
                w->grad_score_pairs + s * LANES * w->tokens / 2 + (first + j) / 2 * LANES;
            _mm512_storeu_si512(pairs, _mm512_permutexvar_epi16(order, halves));
        }
    }
}

/* to (32 keys by both sets) = rows (32 of them, features) · columns (feature pairs, 16) */
INLINE void multiply_block(const backward_workspace *w, const uint16_t *rows, const float *columns,
                           float *to) {
    int64_t query_set = LANES * w->features / 2;
    zero_sums();
    for (int64_t f = 0; f < w->features; f += BF16_LANES)
        multiply_tiles(rows + f, BF16 * LANES * w->features, BF16 * w->features,
                       columns + f / 2 * LANES, FP32 * query_set, LINE, 2);
    store_sums(to, TILE_NUMBERS, 2 * TILE_NUMBERS, LINE, 2);
}

void attend_backward_amx(const head_view *h, const dropout *drop, const void *out_,
                         const void *grad_out_, const float *lse, void *grad_qkv_,
                         char *workspace) {
    const uint16_t *qkv = h->qkv, *out = out_, *grad_out = grad_out_;
    uint16_t *grad_qkv = grad_qkv_;
    backward_workspace w = carve_backward(&(arena){.base = workspace}, h->tokens, h->head_size);
    int64_t width = h->width, stride = h->stride, size = h->head_size,
            query_set = LANES * w.features / 2;
    query_block q = {.scale = 1.0f / sqrtf((float)size)};
    copy_rows(qkv, h->offset + width, stride, h->tokens, size, w.keys);
    copy_rows(qkv, h->offset + 2 * width, stride, h->tokens, size, w.values);
    copy_transposed(qkv, h->offset + width, stride, h->tokens, size, w.keys_t);
    memset(w.grad_keys, 0, (size_t)(FP32 * w.tokens * w.features));
    memset(w.grad_values, 0, (size_t)(FP32 * w.tokens * w.features));
    for (int64_t start = 0; start < h->tokens; start += 2 * LANES) {
        int64_t rows = h->tokens - start;
        copy_token_pairs(qkv, h->offset + start * stride, stride, rows, size, w.query_token_pairs);
        copy_token_pairs(grad_out, h->out_offset + start * width, width, rows, size,
                         w.grad_out_token_pairs);
        for (int64_t s = 0; s < 2; s++) {
            int64_t first = start + s * LANES, left = rows - s * LANES,
                    row = h->first_row + first * h->heads;
            int64_t at = h->out_offset + first * width;
            copy_feature_pairs(qkv, h->offset + first * stride, stride, left, size,
                               w.queries + s * query_set);
            copy_feature_pairs(grad_out, at, width, left, size, w.grad_out + s * query_set);
            q.inner[s] = inner_products(grad_out + at, out + at, width, left, size);
            float set_lse[LANES]; /* infinite where there is no query: every probability is 0 */
            for (int64_t i = 0; i < LANES; i++)
                set_lse[i] = i < left ? lse[row + i * h->heads] : INFINITY;
            q.lse[s] = _mm512_loadu_ps(set_lse);
            if (drop->threshold) q.keys[s] = load_query_keys(drop, row, h->heads);
        }
        for (int64_t j = 0; j < w.tokens; j += 2 * LANES) {
            multiply_block(&w, w.keys + j * w.features, w.queries, w.scores);
            multiply_block(&w, w.values + j * w.features, w.grad_out, w.grad_probabilities);
            softmax_backward(&w, &q, drop, j, h->tokens);
        }
        add_outer_products(&w, w.probabilities, w.grad_out_token_pairs, w.grad_values);
        add_outer_products(&w, w.grad_scores, w.query_token_pairs, w.grad_keys);
        for (int64_t f = 0; f < size; f += 2 * LANES) { /* dQᵀ = Kᵀ · dS */
            int64_t score_set = LANES * w.tokens / 2;
            zero_sums();
            for (int64_t j = 0; j < w.tokens; j += BF16_LANES)
                multiply_tiles(w.keys_t + f * w.tokens + j, BF16 * LANES * w.tokens,
                               BF16 * w.tokens, w.grad_score_pairs + j / 2 * LANES,
                               FP32 * score_set, LINE, 2);
            store_sums(w.grad_queries, TILE_NUMBERS, 2 * TILE_NUMBERS, LINE, 2);
            for (int64_t s = 0; s < 2; s++)
                for (int64_t n = 0; n < 2 && f + n * LANES < size; n++) {
                    int64_t at = h->offset + (start + s * LANES) * stride + f + n * LANES;
                    store_transposed(w.grad_queries + (2 * s + n) * TILE_NUMBERS,
                                     _mm512_set1_ps(1.0f), rows - s * LANES, grad_qkv + at, stride);
                }
        }
    }
    for (int64_t j = 0; j < h->tokens; j++)
        for (int64_t f = 0; f < size; f += LANES) {
            uint16_t *place = grad_qkv + h->offset + width + j * stride + f;
            __m512 key = _mm512_loadu_ps(w.grad_keys + j * w.features + f);
            __m512 value = _mm512_loadu_ps(w.grad_values + j * w.features + f);
            _mm256_storeu_si256((__m256i *)place, (__m256i)_mm512_cvtneps_pbh(key));
            _mm256_storeu_si256((__m256i *)(place + width), (__m256i)_mm512_cvtneps_pbh(value));
        }
}
