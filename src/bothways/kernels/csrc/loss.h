/* Cross-entropy of rows of logits, and its gradient. */

#ifndef BOTHWAYS_LOSS
#define BOTHWAYS_LOSS

#include "vectors.h"

/* Rows of logits in fp32 or bf16, and the label of each; rows whose label is `ignored` count for nothing. */
typedef struct {
    const void *logits;
    const int64_t *labels;
    int64_t rows, classes, ignored;
    int32_t bf16;
} classified;

KERNEL float one(const classified *c, int64_t at) { return _mm512_cvtss_f32(load_some(1, c->logits, at, c->bf16)); }

/* A row's largest logit, and the logarithm of the sum of exponentials of logits less that: added up they would lose places. */
typedef struct {
    float top, log;
} summed;

/* A row's sum; its loss; and whether its first largest logit is that of the label. */
CALLED("") static void lose(const classified *c, int64_t row, summed *found, float *loss, uint8_t *hit) {
    int64_t at = row * c->classes, label = c->labels[row];
    __m512 most = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < c->classes; j += LANES) {
        __mmask16 held = first(c->classes - j);
        most = _mm512_mask_max_ps(most, held, most, load_some(held, c->logits, at + j, c->bf16));
    }
    float top = _mm512_reduce_max_ps(most);
    for (int64_t j = 0; j < c->classes; j += LANES) {
        __mmask16 held = first(c->classes - j);
        __m512 below = _mm512_sub_ps(load_some(held, c->logits, at + j, c->bf16), _mm512_set1_ps(top));
        sum = _mm512_mask_add_ps(sum, held, sum, exponential(below));
    }
    *found = (summed){top, logf(_mm512_reduce_add_ps(sum))};
    *loss = 0, *hit = 0;
    if (label == c->ignored) return;
    *loss = found->log - (one(c, at + label) - top);
    *hit = one(c, at + label) == top;
    for (int64_t j = 0; *hit && j < label; j += LANES) {
        __mmask16 held = first(label - j);
        if (_mm512_mask_cmp_ps_mask(held, load_some(held, c->logits, at + j, c->bf16), _mm512_set1_ps(top), _CMP_EQ_OQ)) *hit = 0;
    }
}

/* (softmax − one-hot) · times. */
CALLED("") static void lose_backward(const classified *c, int64_t row, summed found, float times, void *out) {
    int64_t at = row * c->classes, label = c->labels[row];
    __m512 factor = _mm512_set1_ps(times), top = _mm512_set1_ps(found.top), log = _mm512_set1_ps(found.log);
    for (int64_t j = 0; j < c->classes; j += LANES) {
        __mmask16 held = first(c->classes - j);
        __m512 share = _mm512_setzero_ps();
        if (label != c->ignored) {
            share = exponential(_mm512_sub_ps(_mm512_sub_ps(load_some(held, c->logits, at + j, c->bf16), top), log));
            if (label >= j && label < j + LANES)
                share = _mm512_mask_sub_ps(share, (__mmask16)(1u << (label - j)), share, _mm512_set1_ps(1.0f));
        }
        store_some(out, at + j, held, _mm512_mul_ps(share, factor), c->bf16);
    }
}

#endif
