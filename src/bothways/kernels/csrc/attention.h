/* Attention over packed sequences as they lie, forward and backward, by AVX-512. */

#ifndef BOTHWAYS_ATTENTION
#define BOTHWAYS_ATTENTION

#include "vectors.h"

#define QUERIES 8 /* so many rows of scores at a time: with two vectors of keys each they fill half of the registers */
#define KEYS (2 * LANES)

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

#endif
