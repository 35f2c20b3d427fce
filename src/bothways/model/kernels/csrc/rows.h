/* Kernels that compute one row at a time: LayerNorm of a sum, cross-entropy, AdamW, products with
 * codes. */

#ifndef ROWS_H
#define ROWS_H

#include "bothways.h"

/* LayerNorm(x + y) of rows, without dropout, all in fp32; `out` may be `y`. */
void add_norm_rows(const layer_norm *norm, const float *x, const float *y, int64_t from, int64_t to,
                   float *out);

/* One row each, as the functions of bothways.h have them. */
void add_norm_row(const layer_norm *norm, const dropout *drop, const float *x, const void *y,
                  int bf16, int64_t row, float *sums, moments *row_moments, float *out);
void add_norm_backward_row(const layer_norm *norm, const dropout *drop, const float *sums,
                           const moments *row_moments, const float *grad_out, int64_t row,
                           float *grad_x, void *grad_y, int bf16, float *grad_weight,
                           float *grad_bias);
void cross_entropy_row(const classification *c, int64_t row, log_normalizer *normalizer,
                       float *loss, uint8_t *hit);
void cross_entropy_backward_row(const classification *c, int64_t row, log_normalizer normalizer,
                                float grad_loss, void *grad_logits);
void adamw_row(const adamw_table *t, int64_t row, const float *gradient); /* NULL: 0 */
float code_product(const int8_t *codes, const float *query, int64_t width);

#endif
