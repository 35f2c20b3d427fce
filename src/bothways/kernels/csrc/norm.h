/* LayerNorm of a sum, one of whose parts may be dropped out; and its gradients. */

#ifndef BOTHWAYS_NORM
#define BOTHWAYS_NORM

#include "vectors.h"

typedef struct {
    const float *weight, *bias; /* no bias: NULL */
    float epsilon;
} norm;

/* Mean and one over the deviation. */
typedef struct {
    float mean, times;
} moments;

/* Of x + y over a row: the sum lies in `sums`, in the cache, until its mean and its variance are known. y begins at `at`, in fp32
 * or bf16, and is dropped out as row number `row`. `sums` may be `out`. */
KERNEL moments normalise(const norm *layer, const float *x, const void *y, int64_t at, int bf16, const dropout *drop, int64_t row,
                         int64_t width, float *sums, float *out) {
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    uint64_t key = drop->below ? draw_key(drop->seed, row) : 0;
    for (int64_t f = 0; f < width; f += LANES) {
        __mmask16 held = first(width - f);
        __m512 added = load_some(held, y, at + f, bf16);
        if (drop->below) added = _mm512_mul_ps(added, factors(drop, key, f));
        __m512 both = _mm512_add_ps(_mm512_maskz_loadu_ps(held, x + f), added);
        _mm512_mask_storeu_ps(sums + f, held, both);
        sum = _mm512_add_ps(sum, both);
    }
    moments found = {_mm512_reduce_add_ps(sum) / (float)width, 0};
    __m512 mean = _mm512_set1_ps(found.mean);
    for (int64_t f = 0; f < width; f += LANES) {
        __mmask16 held = first(width - f);
        __m512 from = _mm512_maskz_sub_ps(held, _mm512_maskz_loadu_ps(held, sums + f), mean);
        squares = _mm512_fmadd_ps(from, from, squares);
    }
    found.times = 1.0f / sqrtf(_mm512_reduce_add_ps(squares) / (float)width + layer->epsilon);
    __m512 times = _mm512_set1_ps(found.times);
    for (int64_t f = 0; f < width; f += LANES) {
        __mmask16 held = first(width - f);
        __m512 unit = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(held, sums + f), mean), times);
        __m512 added = layer->bias ? _mm512_maskz_loadu_ps(held, layer->bias + f) : _mm512_setzero_ps();
        _mm512_mask_storeu_ps(out + f, held, _mm512_fmadd_ps(unit, _mm512_maskz_loadu_ps(held, layer->weight + f), added));
    }
    return found;
}

/* Rows of a sum for its gradient: as they were kept, and what comes of them. */
typedef struct {
    const float *sums;
    const moments *found;
    int64_t width;
    dropout drop;
    int32_t bf16; /* y, and its gradient, in bf16 rather than fp32 */
} normed;

CALLED("") static void normalise_and_keep(const norm *layer, const normed *n, const float *x, const void *y, int64_t row,
                                          float *sums, moments *found, float *out) {
    int64_t at = row * n->width;
    *found = normalise(layer, x + at, y, at, n->bf16, &n->drop, row, n->width, sums + at, out + at);
}

/* The gradients of x and y in a row; those of weight and bias are added up. With u = (sum − mean) · times and g the gradient times
 * the weight, that of the sum is times · (g − mean of g − u · mean of g·u) (Ba et al. 2016). */
CALLED("") static void normalise_backward(const norm *layer, const normed *n, const float *gradient, int64_t row, float *of_x,
                                          void *of_y, float *of_weight, float *of_bias) {
    int64_t width = n->width, at = row * width;
    const float *sums = n->sums + at, *above = gradient + at;
    __m512 mean = _mm512_set1_ps(n->found[row].mean), times = _mm512_set1_ps(n->found[row].times);
    __m512 total = _mm512_setzero_ps(), inner = _mm512_setzero_ps();
    for (int64_t f = 0; f < width; f += LANES) {
        __mmask16 held = first(width - f);
        __m512 g = _mm512_maskz_loadu_ps(held, above + f);
        __m512 unit = _mm512_maskz_mul_ps(held, _mm512_sub_ps(_mm512_maskz_loadu_ps(held, sums + f), mean), times);
        _mm512_mask_storeu_ps(of_weight + f, held, _mm512_fmadd_ps(g, unit, _mm512_maskz_loadu_ps(held, of_weight + f)));
        _mm512_mask_storeu_ps(of_bias + f, held, _mm512_add_ps(g, _mm512_maskz_loadu_ps(held, of_bias + f)));
        g = _mm512_mul_ps(g, _mm512_maskz_loadu_ps(held, layer->weight + f));
        total = _mm512_add_ps(total, g);
        inner = _mm512_fmadd_ps(g, unit, inner);
    }
    __m512 whole = _mm512_set1_ps(_mm512_reduce_add_ps(total) / (float)width);
    __m512 along = _mm512_set1_ps(_mm512_reduce_add_ps(inner) / (float)width);
    uint64_t key = n->drop.below ? draw_key(n->drop.seed, row) : 0;
    for (int64_t f = 0; f < width; f += LANES) {
        __mmask16 held = first(width - f);
        __m512 g = _mm512_mul_ps(_mm512_maskz_loadu_ps(held, above + f), _mm512_maskz_loadu_ps(held, layer->weight + f));
        __m512 unit = _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(held, sums + f), mean), times);
        __m512 found = _mm512_mul_ps(times, _mm512_sub_ps(_mm512_sub_ps(g, whole), _mm512_mul_ps(unit, along)));
        _mm512_mask_storeu_ps(of_x + at + f, held, found);
        if (n->drop.below) found = _mm512_mul_ps(found, factors(&n->drop, key, f));
        store_some(of_y, at + f, held, found, n->bf16);
    }
}

#endif
