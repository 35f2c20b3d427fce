/* Post-norm blocks with GELU for inference, computed by a team (see team.h). */

#ifndef ENCODER_H
#define ENCODER_H

#include "attention.h"
#include "linear.h"

/* One head of a sequence, in arrays that begin with token `origin`;
 * unit = sequence · heads + head. */
head_view head_of(const attention_batch *b, int64_t unit, int64_t origin);

/* Bytes that a thread needs for any head of up to `tokens` tokens, and one head, by the kernel that
 * the features allow. */
int64_t head_bytes(const attention_batch *b, int64_t tokens, int32_t features);
void attend_head(const attention_batch *b, const head_view *h, int32_t features, void *out,
                 float *lse, char *workspace);

/* Bytes that a team needs for `count` rows, or for sequences of `count` tokens in total and of up
 * to `longest` tokens each. */
int64_t tail_bytes(const team *t, const block_tail *tail, int64_t count);
int64_t layers_bytes(const team *t, const encoder_layer *const *layers, int64_t depth,
                     const attention_batch *b, int64_t count, int64_t longest);

/* Compute bothways_block_tail for `count` rows. */
void run_tail(team *t, const block_tail *tail, const float *residual, const void *heads,
              int32_t heads_dtype, int64_t count, float *result, char *workspace);

/* Compute bothways_encoder_layers for the sequences [from, to), of up to `longest` tokens each. */
void run_layers(team *t, const encoder_layer *const *layers, int64_t depth,
                const attention_batch *b, int64_t from, int64_t to, int64_t longest, float *x,
                char *workspace);

#endif
