/* Attention of one head of one sequence: what the units for it have in common. */

#ifndef ATTENTION_H
#define ATTENTION_H

#include "bothways.h"
#include "memory.h"

/* One head of one sequence inside the packed qkv of a batch. Query, key and value of token j begin
 * at element `offset` + j · `stride`, `width` apart from each other. */
typedef struct {
    const void *qkv;
    int64_t offset, tokens, heads, head_size;
    int64_t width, stride; /* heads · head_size, and 3 · width */
    int64_t out_offset;    /* of the head in the output, whose tokens are `width` apart */
    int64_t first_row; /* of its first token's row of scores, (tokens, heads) in row-major order */
} head_view;

/* A softmax over `scores` in base 2 takes its argument times this. */
#define LOG2_E 1.44269504f

/* Bytes that one thread needs for any head of up to `tokens` tokens. */
int64_t attention_bytes(int64_t tokens, int64_t head_size);
int64_t attention_backward_bytes(int64_t tokens, int64_t head_size);

/* `lse`: log-sum-exp of each row of scores, (tokens, heads); NULL if it is not needed. */
void attend_fp32(const head_view *h, const dropout *drop, void *out, float *lse, char *workspace);
void attend_bf16(const head_view *h, const dropout *drop, void *out, float *lse, char *workspace);
void attend_backward_fp32(const head_view *h, const dropout *drop, const void *out,
                          const void *grad_out, const float *lse, void *grad_qkv, char *workspace);

/* The same in bf16 by AMX. */
int64_t attention_amx_bytes(int64_t tokens, int64_t head_size);
int64_t attention_amx_backward_bytes(int64_t tokens, int64_t head_size);
void attend_amx(const head_view *h, const dropout *drop, void *out, float *lse, char *workspace);
void attend_backward_amx(const head_view *h, const dropout *drop, const void *out,
                         const void *grad_out, const float *lse, void *grad_qkv, char *workspace);

#endif
