/* The interface between Python (`abi.py` and its neighbours) and the compiled kernels.
 *
 * All arrays are dense, row-major and owned by the caller. Every function that computes validates
 * its arguments first and returns a status: if it is not BOTHWAYS_OK, nothing has been written.
 * `threads` is the number of OpenMP threads to use.
 */

#ifndef BOTHWAYS_H
#define BOTHWAYS_H

#include <stdint.h>

/* Increase it with every change of a signature, a struct or the meaning of an argument:
 * `abi.py` refuses a library with another number. */
#define BOTHWAYS_ABI 2

/* Limits that keep every size in bytes below 2^63. */
#define MAX_ROWS ((int64_t)1 << 32)
#define MAX_FEATURES ((int64_t)1 << 24)
#define MAX_THREADS 1024

typedef enum {
    BOTHWAYS_OK = 0,
    BOTHWAYS_NO_MEMORY = 1,
    BOTHWAYS_INVALID_ARGUMENT = 2,
    BOTHWAYS_UNSUPPORTED_PROCESSOR = 3,
    BOTHWAYS_LABEL_OUT_OF_RANGE = 4,
} status;

/* Features of a processor that kernels need, as bits. */
enum { HAS_AVX512 = 1, HAS_VNNI = 2, HAS_BF16 = 4, HAS_AMX = 8 };

/* Formats of numbers; each value is the number of bytes that one number takes. SPLIT_BF16 exists
 * only inside the kernels: an fp32 number as the sum of three bf16 numbers. */
enum { INT8 = 1, BF16 = 2, FP32 = 4, SPLIT_BF16 = 6 };

/* Dropout: each number draws 32 random bits, is dropped if they are below `threshold`, and is
 * multiplied by `scale` otherwise. A threshold of 0 disables it. */
typedef struct {
    uint64_t seed;
    uint32_t threshold;
    float scale;
} dropout;

/* Packed sequences: sequence i is the tokens from cu_seqlens[i] to cu_seqlens[i + 1]. */
typedef struct {
    const void *qkv;           /* (tokens, 3, heads, head_size), fp32 or bf16 */
    const int64_t *cu_seqlens; /* (sequences + 1), ascending from 0 to `tokens` */
    int64_t tokens, sequences, heads, head_size;
    dropout drop; /* of the attention probabilities */
    int32_t dtype;
} attention_batch;

/* A linear layer for inference, x·Wᵀ + b. The weights are stored in panels of 32 outputs. A panel is
 * a sequence of rows of 128 bytes: 4 bytes of each output, then the next 4 bytes of each, that is
 * one feature in fp32, two in bf16, four in int8:
 *
 *     fp32:  w[0][0]    w[1][0]    …  w[31][0]    |  w[0][1]    w[1][1]    …
 *     bf16:  w[0][0:2]  w[1][0:2]  …  w[31][0:2]  |  w[0][2:4]  w[1][2:4]  …
 *
 * Features (to whole cache lines, in bf16 and int8) and outputs (to whole panels) are padded
 * with 0. */
typedef struct {
    const void *panels;
    const float *scales;           /* INT8: of each output's weights */
    const int32_t *zero_point_sum; /* INT8: 128 · Σ of each output's codes */
    const float *bias;             /* (out_features), or NULL */
    int64_t in_features, out_features;
    int64_t panel_bytes; /* size of `panels`, to validate the two above */
    int32_t dtype;       /* of the weights */
} linear;

typedef struct {
    const float *weight, *bias; /* bias: (width), or NULL */
    int64_t width;
    float epsilon;
} layer_norm;

/* Mean and 1/√(variance + ε) of one row. */
typedef struct {
    float mean, inverse_deviation;
} moments;

/* The layers after the attention of a post-norm block with GELU. */
typedef struct {
    linear out, up, down; /* all of one dtype */
    layer_norm attention_norm, mlp_norm;
} block_tail;

typedef struct {
    linear qkv;
    block_tail tail;
} encoder_layer;

/* Rows of logits and the label of each; a row whose label is `ignore_index` counts for nothing. */
typedef struct {
    const void *logits;    /* (rows, classes), fp32 or bf16 */
    const int64_t *labels; /* (rows) */
    int64_t rows, classes, ignore_index;
    int32_t dtype;
} classification;

/* A row's largest logit, and log Σ exp(logit − largest): kept apart, since their sum would lose
 * digits. */
typedef struct {
    float largest, log_sum;
} log_normalizer;

/* A table whose rows are updated by AdamW, and the constants of one step. */
typedef struct {
    float *weight, *average, *squares; /* (rows, width) */
    uint8_t *seen;                     /* (rows); 0: no gradient yet, and both moments are 0 */
    int64_t rows, width;
    float scale;               /* gradients are divided by it */
    float decay, rate;         /* weight += decay · weight, then rate · average / denominator */
    float first, second, keep; /* 1 − β₁, 1 − β₂, β₂ */
    float correction, epsilon; /* denominator: √squares / correction + epsilon */
} adamw_table;

#define EXPORT __attribute__((visibility("default")))

/* The ABI version, and the sizes of the structs above in their order; `count`: how many fit. */
EXPORT int32_t bothways_abi(int64_t *struct_sizes, int32_t count);

/* The HAS_… bits of this processor for which kernels were compiled. */
EXPORT int32_t bothways_available(void);

/* Use only these of the available features from now on, as on another processor; return
 * those that were in use before. */
EXPORT int32_t bothways_limit(int32_t features);

/* softmax(QKᵀ/√d)V → `out` (tokens, heads, head_size) in the dtype of qkv; and, unless NULL, the
 * log-sum-exp of each row of scores → `lse` (tokens, heads). */
EXPORT status bothways_attention(const attention_batch *b, void *out, float *lse, int32_t threads);

/* Its gradient → `grad_qkv` (tokens, 3, heads, head_size). bf16 needs AMX. */
EXPORT status bothways_attention_backward(const attention_batch *b, const void *out,
                                          const void *grad_out, const float *lse, void *grad_qkv,
                                          int32_t threads);

/* x·Wᵀ + b of `x` (rows, in_features), fp32 or bf16 → `out` (rows, out_features), fp32 or bf16. */
EXPORT status bothways_linear(const linear *layer, const void *x, int32_t x_dtype, int64_t rows,
                              void *out, int32_t out_dtype, int32_t threads);

/* y = attention_norm(residual + out(heads)); mlp_norm(y + down(gelu(up(y)))) → `result`, fp32. */
EXPORT status bothways_block_tail(const block_tail *tail, const float *residual, const void *heads,
                                  int32_t heads_dtype, int64_t rows, float *result,
                                  int32_t threads);

/* `depth` layers, one after the other, of `x` (tokens, width) in place; b->qkv is not read, and
 * b->dtype is that of the attention inside. */
EXPORT status bothways_encoder_layers(const encoder_layer *const *layers, int64_t depth,
                                      const attention_batch *b, float *x, int32_t threads);

/* LayerNorm(x + dropout(y)) → `out`; x + dropout(y) → `sums` (which may be `out`), and the moments
 * of its rows, for the backward pass. y is fp32 or bf16; the rest fp32. */
EXPORT status bothways_add_norm(const layer_norm *norm, const dropout *drop, const float *x,
                                const void *y, int32_t y_dtype, int64_t rows, float *sums,
                                moments *row_moments, float *out, int32_t threads);

EXPORT status bothways_add_norm_backward(const layer_norm *norm, const dropout *drop,
                                         const float *sums, const moments *row_moments,
                                         const float *grad_out, int64_t rows, float *grad_x,
                                         void *grad_y, int32_t y_dtype, float *grad_weight,
                                         float *grad_bias, int32_t threads);

/* −log softmax(logits)[label] of each row → `losses`, 0 where it is ignored; whether the label's
 * logit is the first of the largest → `hits`; `normalizers` for the backward pass. */
EXPORT status bothways_cross_entropy(const classification *c, log_normalizer *normalizers,
                                     float *losses, uint8_t *hits, int32_t threads);

/* (softmax(logits) − one_hot(label)) · grad_loss → `grad_logits`, in the dtype of the logits. */
EXPORT status bothways_cross_entropy_backward(const classification *c,
                                              const log_normalizer *normalizers,
                                              const float *grad_loss, void *grad_logits,
                                              int32_t threads);

/* One step of AdamW in place. Row rows[i] of the table, of `count` in ascending order, has the
 * gradient `gradients`[i] (width), all others 0: those that are not seen only decay. */
EXPORT status bothways_adamw_rows(const adamw_table *t, const int64_t *rows, const float *gradients,
                                  int64_t count, int32_t threads);

/* The product of `query` (width) with each row of `codes` (rows, width), times its scale. */
EXPORT status bothways_code_products(const int8_t *codes, const float *scales, const float *query,
                                     int64_t rows, int64_t width, float *products,
                                     int32_t threads);

#endif
