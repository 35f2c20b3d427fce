#include "encoder.h"

#include "rows.h"

#include <string.h>

/* ---- attention ---- */

head_view head_of(const attention_batch *b, int64_t unit, int64_t origin) {
    int64_t sequence = unit / b->heads, head = unit % b->heads, width = b->heads * b->head_size;
    int64_t start = b->cu_seqlens[sequence], first = start - origin;
    return (head_view){
        .qkv = b->qkv,
        .offset = first * 3 * width + head * b->head_size,
        .tokens = b->cu_seqlens[sequence + 1] - start,
        .heads = b->heads,
        .head_size = b->head_size,
        .width = width,
        .stride = 3 * width,
        .out_offset = first * width + head * b->head_size,
        .first_row = start * b->heads + head,
    };
}

int64_t head_bytes(const attention_batch *b, int64_t tokens, int32_t features) {
#ifdef WITH_AMX
    if (b->dtype == BF16 && (features & HAS_AMX)) return attention_amx_bytes(tokens, b->head_size);
#endif
    (void)features;
    return attention_bytes(tokens, b->head_size);
}

void attend_head(const attention_batch *b, const head_view *h, int32_t features, void *out,
                 float *lse, char *workspace) {
    (void)features;
    if (b->dtype == FP32) attend_fp32(h, &b->drop, out, lse, workspace);
#ifdef WITH_AMX
    else if (features & HAS_AMX)
        attend_amx(h, &b->drop, out, lse, workspace);
#endif
    else
        attend_bf16(h, &b->drop, out, lse, workspace);
}

/* ---- what follows the attention ---- */

typedef struct {
    packed_rows out, up, down; /* what each layer reads */
    float *normed;             /* after the first LayerNorm */
    float *intermediate;       /* INT8: after GELU, as a row is quantized only once it is whole */
} tail_workspace;

static tail_workspace carve_tail(arena *a, const team *t, const block_tail *tail, int64_t count) {
    tail_workspace w;
    arena out = *a, up = *a; /* share memory: `out` has been read before `up` is packed */
    w.out = carve_packed(&out, t, &tail->out, count);
    w.up = carve_packed(&up, t, &tail->up, count);
    a->used = maximum(out.used, up.used);
    w.down = carve_packed(a, t, &tail->down, count);
    w.normed = take(a, FP32 * count * tail->out.out_features);
    w.intermediate = take(a, tail->down.dtype == INT8 ? FP32 * count * tail->up.out_features : 0);
    return w;
}

int64_t tail_bytes(const team *t, const block_tail *tail, int64_t count) {
    arena a = {0};
    carve_tail(&a, t, tail, count);
    return a.used;
}

void run_tail(team *t, const block_tail *tail, const float *residual, const void *heads,
              int32_t heads_dtype, int64_t count, float *result, char *workspace) {
    int64_t width = tail->out.out_features, inner = tail->up.out_features;
    tail_workspace w = carve_tail(&(arena){.base = workspace}, t, tail, count);
    range mine = partition(t, count, 1);
    pack_rows(&tail->out, heads, heads_dtype, mine.from, mine.to, &w.out);
    team_barrier(t);
    team_linear(t, &tail->out, &w.out, count,
                &(destination){row_major(w.normed, FP32 * width), FP32, 0});
    add_norm_rows(&tail->attention_norm, residual, w.normed, mine.from, mine.to, w.normed);
    pack_rows(&tail->up, w.normed, FP32, mine.from, mine.to, &w.up);
    if (tail->down.dtype == INT8) {
        team_barrier(t);
        team_linear(t, &tail->up, &w.up, count,
                    &(destination){row_major(w.intermediate, FP32 * inner), FP32, 1});
        pack_rows(&tail->down, w.intermediate, FP32, mine.from, mine.to, &w.down);
        team_barrier(t);
    } else { /* the epilogue of `up` writes what `down` reads, up to the padding of its rows */
        int64_t padding = w.down.format == BF16 ? row_bytes(&tail->down, BF16) - BF16 * inner : 0;
        for (int64_t row = mine.from; padding && row < mine.to; row++)
            memset(address_of(&w.down.codes, row, BF16 * inner), 0, (size_t)padding);
        team_barrier(t);
        team_linear(t, &tail->up, &w.up, count, &(destination){w.down.codes, w.down.format, 1});
    }
    team_linear(t, &tail->down, &w.down, count,
                &(destination){row_major(result, FP32 * width), FP32, 0});
    add_norm_rows(&tail->mlp_norm, w.normed, result, mine.from, mine.to, result);
}

/* ---- whole layers ---- */

typedef struct {
    char *heads; /* what the attention gives, which the tail reads */
    packed_rows read;
    char *qkv, *attention; /* the latter: for each member */
    char *tail;
} layer_workspace;

static layer_workspace carve_layer(arena *a, const team *t, const encoder_layer *l,
                                   const attention_batch *b, int64_t count, int64_t longest) {
    layer_workspace w = {.heads = take(a, count * l->tail.out.in_features * b->dtype)};
    arena before = *a, after = *a; /* share memory: of the first part only `heads` is read later */
    w.read = carve_packed(&before, t, &l->qkv, count);
    w.qkv = take(&before, count * l->qkv.out_features * b->dtype);
    w.attention = take(&before, t->size * head_bytes(b, longest, t->features));
    w.tail = take(&after, tail_bytes(t, &l->tail, count));
    a->used = maximum(before.used, after.used);
    return w;
}

int64_t layers_bytes(const team *t, const encoder_layer *const *layers, int64_t depth,
                     const attention_batch *b, int64_t count, int64_t longest) {
    int64_t most = 0;
    for (int64_t i = 0; i < depth; i++) {
        arena a = {0};
        carve_layer(&a, t, layers[i], b, count, longest);
        most = maximum(most, a.used);
    }
    return most;
}

void run_layers(team *t, const encoder_layer *const *layers, int64_t depth,
                const attention_batch *b, int64_t from, int64_t to, int64_t longest, float *x,
                char *workspace) {
    int64_t origin = b->cu_seqlens[from], count = b->cu_seqlens[to] - origin;
    int64_t each = head_bytes(b, longest, t->features);
    range mine = partition(t, count, 1);
    for (int64_t i = 0; i < depth; i++) {
        const encoder_layer *l = layers[i];
        float *rows = x + origin * l->qkv.in_features;
        layer_workspace w = carve_layer(&(arena){.base = workspace}, t, l, b, count, longest);
        /* Four steps; a barrier between two of them where members read the rows of others. */
        pack_rows(&l->qkv, rows, FP32, mine.from, mine.to, &w.read);
        team_barrier(t);
        row_layout qkv = row_major(w.qkv, l->qkv.out_features * b->dtype);
        team_linear(t, &l->qkv, &w.read, count, &(destination){qkv, b->dtype, 0});
        attention_batch local = *b;
        local.qkv = w.qkv;
        for (int64_t unit = from * b->heads + t->rank; unit < to * b->heads; unit += t->size) {
            head_view h = head_of(&local, unit, origin);
            attend_head(&local, &h, t->features, w.heads, NULL, w.attention + t->rank * each);
        }
        team_barrier(t);
        run_tail(t, &l->tail, rows, w.heads, b->dtype, count, rows, w.tail);
    }
}
