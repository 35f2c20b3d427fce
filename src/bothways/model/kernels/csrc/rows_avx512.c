/* LayerNorm of a sum, cross-entropy, AdamW, and products with codes, by AVX-512. */

#include "dropout.h"
#include "rows.h"
#include "simd.h"

/* ---- LayerNorm ---- */

/* LayerNorm(x + dropout(y)) of one row; y begins at element `at`. The sum is stored to `sums`,
 * which stays in the first cache until its mean and variance are known; `sums` may be `out`. */
INLINE moments normalize(const layer_norm *norm, const float *x, const void *y, int64_t at,
                         int bf16, const dropout *drop, int64_t row, float *sums, float *out) {
    int64_t width = norm->width;
    __m512 sum = _mm512_setzero_ps(), squares = _mm512_setzero_ps();
    uint64_t key = drop->threshold ? dropout_row_key(drop, row) : 0;
    for (int64_t f = 0; f < width; f += LANES) {
        __mmask16 mask = first_lanes(width - f);
        __m512 added = load16_masked(mask, y, at + f, bf16);
        if (drop->threshold) added = _mm512_mul_ps(added, dropout_row_factors(drop, key, f));
        __m512 both = _mm512_add_ps(_mm512_maskz_loadu_ps(mask, x + f), added);
        _mm512_mask_storeu_ps(sums + f, mask, both);
        sum = _mm512_add_ps(sum, both);
    }
    /* Two passes: Σ(z − mean)² loses no digits where the mean is large, unlike Σz² − n·mean². */
    moments result = {_mm512_reduce_add_ps(sum) / (float)width, 0};
    __m512 mean = _mm512_set1_ps(result.mean);
    for (int64_t f = 0; f < width; f += LANES) {
        __mmask16 mask = first_lanes(width - f);
        __m512 centered = _mm512_maskz_sub_ps(mask, _mm512_maskz_loadu_ps(mask, sums + f), mean);
        squares = _mm512_fmadd_ps(centered, centered, squares);
    }
    float variance = _mm512_reduce_add_ps(squares) / (float)width;
    result.inverse_deviation = 1.0f / sqrtf(variance + norm->epsilon);
    __m512 scale = _mm512_set1_ps(result.inverse_deviation);
    for (int64_t f = 0; f < width; f += LANES) {
        __mmask16 mask = first_lanes(width - f);
        __m512 unit =
            _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, sums + f), mean), scale);
        __m512 bias =
            norm->bias ? _mm512_maskz_loadu_ps(mask, norm->bias + f) : _mm512_setzero_ps();
        _mm512_mask_storeu_ps(
            out + f, mask,
            _mm512_fmadd_ps(unit, _mm512_maskz_loadu_ps(mask, norm->weight + f), bias));
    }
    return result;
}

void add_norm_rows(const layer_norm *norm, const float *x, const float *y, int64_t from, int64_t to,
                   float *out) {
    const dropout none = {0};
    for (int64_t row = from; row < to; row++) {
        int64_t at = row * norm->width;
        normalize(norm, x + at, y, at, 0, &none, 0, out + at, out + at);
    }
}

void add_norm_row(const layer_norm *norm, const dropout *drop, const float *x, const void *y,
                  int bf16, int64_t row, float *sums, moments *row_moments, float *out) {
    int64_t at = row * norm->width;
    row_moments[row] = normalize(norm, x + at, y, at, bf16, drop, row, sums + at, out + at);
}

/* With u = (sum − mean) / deviation and g = grad_out · weight, the gradient of the sum is
 * (g − mean(g) − u · mean(g · u)) / deviation (Ba et al. 2016); those of weight and bias are
 * Σ grad_out · u and Σ grad_out over rows, added to what is there. */
void add_norm_backward_row(const layer_norm *norm, const dropout *drop, const float *sums,
                           const moments *row_moments, const float *grad_out, int64_t row,
                           float *grad_x, void *grad_y, int bf16, float *grad_weight,
                           float *grad_bias) {
    int64_t width = norm->width, at = row * width;
    sums += at, grad_out += at;
    __m512 mean = _mm512_set1_ps(row_moments[row].mean),
           scale = _mm512_set1_ps(row_moments[row].inverse_deviation);
    __m512 sum_g = _mm512_setzero_ps(), sum_gu = _mm512_setzero_ps();
    for (int64_t f = 0; f < width; f += LANES) {
        __mmask16 mask = first_lanes(width - f);
        __m512 g = _mm512_maskz_loadu_ps(mask, grad_out + f);
        __m512 unit = _mm512_maskz_mul_ps(
            mask, _mm512_sub_ps(_mm512_maskz_loadu_ps(mask, sums + f), mean), scale);
        __m512 weight_sum = _mm512_maskz_loadu_ps(mask, grad_weight + f),
               bias_sum = _mm512_maskz_loadu_ps(mask, grad_bias + f);
        _mm512_mask_storeu_ps(grad_weight + f, mask, _mm512_fmadd_ps(g, unit, weight_sum));
        _mm512_mask_storeu_ps(grad_bias + f, mask, _mm512_add_ps(g, bias_sum));
        g = _mm512_mul_ps(g, _mm512_maskz_loadu_ps(mask, norm->weight + f));
        sum_g = _mm512_add_ps(sum_g, g);
        sum_gu = _mm512_fmadd_ps(g, unit, sum_gu);
    }
    __m512 mean_g = _mm512_set1_ps(_mm512_reduce_add_ps(sum_g) / (float)width);
    __m512 mean_gu = _mm512_set1_ps(_mm512_reduce_add_ps(sum_gu) / (float)width);
    uint64_t key = drop->threshold ? dropout_row_key(drop, row) : 0;
    for (int64_t f = 0; f < width; f += LANES) {
        __mmask16 mask = first_lanes(width - f);
        __m512 weight = _mm512_maskz_loadu_ps(mask, norm->weight + f);
        __m512 g = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, grad_out + f), weight);
        __m512 unit =
            _mm512_mul_ps(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, sums + f), mean), scale);
        __m512 grad = _mm512_sub_ps(_mm512_sub_ps(g, mean_g), _mm512_mul_ps(unit, mean_gu));
        grad = _mm512_mul_ps(scale, grad);
        _mm512_mask_storeu_ps(grad_x + at + f, mask, grad);
        if (drop->threshold) grad = _mm512_mul_ps(grad, dropout_row_factors(drop, key, f));
        store16_masked(grad_y, at + f, mask, grad, bf16);
    }
}

/* ---- cross-entropy ---- */

INLINE float logit_at(const classification *c, int64_t at) {
    return _mm512_cvtss_f32(load16_masked(1, c->logits, at, c->dtype == BF16));
}

void cross_entropy_row(const classification *c, int64_t row, log_normalizer *normalizer,
                       float *loss, uint8_t *hit) {
    int64_t at = row * c->classes, label = c->labels[row];
    int bf16 = c->dtype == BF16;
    __m512 largest = _mm512_set1_ps(-INFINITY), sum = _mm512_setzero_ps();
    for (int64_t j = 0; j < c->classes; j += LANES) {
        __mmask16 mask = first_lanes(c->classes - j);
        largest = _mm512_mask_max_ps(largest, mask, largest,
                                     load16_masked(mask, c->logits, at + j, bf16));
    }
    float top = _mm512_reduce_max_ps(largest);
    for (int64_t j = 0; j < c->classes; j += LANES) {
        __mmask16 mask = first_lanes(c->classes - j);
        __m512 shifted =
            _mm512_sub_ps(load16_masked(mask, c->logits, at + j, bf16), _mm512_set1_ps(top));
        sum = _mm512_mask_add_ps(sum, mask, sum, exp16(shifted));
    }
    *normalizer = (log_normalizer){top, logf(_mm512_reduce_add_ps(sum))};
    *loss = 0, *hit = 0;
    if (label == c->ignore_index) return;
    *loss = normalizer->log_sum - (logit_at(c, at + label) - top);
    *hit = logit_at(c, at + label) == top;
    for (int64_t j = 0; *hit && j < label; j += LANES) { /* a hit is the first of equal ones */
        __mmask16 mask = first_lanes(label - j);
        __m512 before = load16_masked(mask, c->logits, at + j, bf16);
        if (_mm512_mask_cmp_ps_mask(mask, before, _mm512_set1_ps(top), _CMP_EQ_OQ)) *hit = 0;
    }
}

void cross_entropy_backward_row(const classification *c, int64_t row, log_normalizer normalizer,
                                float grad_loss, void *grad_logits) {
    int64_t at = row * c->classes, label = c->labels[row];
    int bf16 = c->dtype == BF16;
    __m512 factor = _mm512_set1_ps(grad_loss), top = _mm512_set1_ps(normalizer.largest);
    __m512 log_sum = _mm512_set1_ps(normalizer.log_sum);
    for (int64_t j = 0; j < c->classes; j += LANES) {
        __mmask16 mask = first_lanes(c->classes - j);
        __m512 grad = _mm512_setzero_ps();
        if (label != c->ignore_index) {
            grad = exp16(_mm512_sub_ps(
                _mm512_sub_ps(load16_masked(mask, c->logits, at + j, bf16), top), log_sum));
            if (label >= j && label < j + LANES)
                grad = _mm512_mask_sub_ps(grad, (__mmask16)(1u << (label - j)), grad,
                                          _mm512_set1_ps(1.0f));
        }
        store16_masked(grad_logits, at + j, mask, _mm512_mul_ps(grad, factor), bf16);
    }
}

/* ---- AdamW ---- */

/* In the order and with the roundings of torch's fused kernel. */
void adamw_row(const adamw_table *t, int64_t row, const float *gradient) {
    float *weight = t->weight + row * t->width, *average = t->average + row * t->width,
          *squares = t->squares + row * t->width;
    __m512 decay = _mm512_set1_ps(t->decay), first = _mm512_set1_ps(t->first);
    int from_average = t->first < 0.5f; /* the interpolation starts from the nearer end */
    if (!from_average) first = _mm512_sub_ps(first, _mm512_set1_ps(1.0f));
    for (int64_t f = 0; f < t->width; f += LANES) {
        __mmask16 mask = first_lanes(t->width - f);
        __m512 w = _mm512_maskz_loadu_ps(mask, weight + f);
        w = _mm512_fmadd_ps(decay, w, w);
        if (t->seen[row]) {
            __m512 g = _mm512_setzero_ps(), m = _mm512_maskz_loadu_ps(mask, average + f),
                   v = _mm512_maskz_loadu_ps(mask, squares + f);
            if (gradient) g = _mm512_maskz_loadu_ps(mask, gradient + f);
            g = _mm512_div_ps(g, _mm512_set1_ps(t->scale));
            m = _mm512_fmadd_ps(first, _mm512_sub_ps(g, m), from_average ? m : g);
            __m512 part = _mm512_mul_ps(_mm512_set1_ps(t->second), g);
            v = _mm512_fmadd_ps(part, g, _mm512_mul_ps(v, _mm512_set1_ps(t->keep)));
            __m512 denominator =
                _mm512_add_ps(_mm512_div_ps(_mm512_sqrt_ps(v), _mm512_set1_ps(t->correction)),
                              _mm512_set1_ps(t->epsilon));
            __m512 change = _mm512_div_ps(_mm512_mul_ps(_mm512_set1_ps(t->rate), m), denominator);
            w = _mm512_add_ps(w, change);
            _mm512_mask_storeu_ps(average + f, mask, m);
            _mm512_mask_storeu_ps(squares + f, mask, v);
        }
        _mm512_mask_storeu_ps(weight + f, mask, w);
    }
}

/* ---- products with codes ---- */

INLINE __m512 load_codes(__mmask16 mask, const int8_t *codes) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_maskz_loadu_epi8(mask, codes)));
}

/* Two sums, since one would wait for itself; the memory is the limit. */
float code_product(const int8_t *codes, const float *query, int64_t width) {
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int64_t f = 0; f < width; f += 2 * LANES) {
        __mmask16 mask = first_lanes(width - f);
        even = _mm512_fmadd_ps(load_codes(mask, codes + f),
                               _mm512_maskz_loadu_ps(mask, query + f), even);
        if (width - f <= LANES) break;
        mask = first_lanes(width - f - LANES);
        odd = _mm512_fmadd_ps(load_codes(mask, codes + f + LANES),
                              _mm512_maskz_loadu_ps(mask, query + f + LANES), odd);
    }
    return _mm512_reduce_add_ps(_mm512_add_ps(even, odd));
}
