/* Blocks whose LayerNorms come last, for predictions: what they make on the way stays in the cache. */

#ifndef BOTHWAYS_BLOCK
#define BOTHWAYS_BLOCK

#include "dense_tiles.h"
#include "norm.h"
#include "tiles.h"

CALLED("") static void normalise_alone(const norm *layer, const float *x, const float *y, int64_t width, float *out) {
    normalise(layer, x, y, 0, 0, &(dropout){0}, 0, width, out, out);
}

typedef struct {
    dense out, up, down;
    norm first, second;
} rest;

/* The share of a team's member in so many, in whole steps. */
static range share(const team *t, int64_t count, int64_t step) {
    int64_t each = round_up((count + t->size - 1) / t->size, step);
    return (range){least(count, t->number * each), least(count, (t->number + 1) * each)};
}

/* Until all members have come so far. */
static void meet(const team *t) {
    if (t->size > 1) {
#pragma omp barrier
    }
}

/* `product` by a team, rows packed before. */
static void multiply(const team *t, const dense *layer, const packed *x, int64_t count, const sink *into) {
    range outputs = share(t, layer->outputs, 2 * SIDE);
    product(layer, x, count, outputs.from, outputs.to, into);
    meet(t);
}

/* Where what follows the attention lies for so many rows; all but what `out` reads, which comes first. */
typedef struct {
    packed up, down;
    float *middle, *wide; /* after the first LayerNorm; and in int8 after GELU, where rows are rounded when they are whole */
    int64_t bytes;
} room;

static room room_at(const team *t, const rest *block, char *at, int64_t count) {
    int64_t out = packed_bytes(t, &block->out, count), up = packed_bytes(t, &block->up, count);
    char *down = at + (out > up ? out : up), *middle = down + packed_bytes(t, &block->down, count);
    char *wide = middle + round_up(4 * count * block->out.outputs, LINE);
    int64_t last = block->down.kind == INT8 ? 4 * count * block->up.outputs : 0;
    return (room){packed_at(t, &block->up, at, count), packed_at(t, &block->down, down, count),
                  (float *)middle, (float *)wide, wide + last - at};
}

static int64_t rest_bytes(const team *t, const rest *block, int64_t count) { return room_at(t, block, NULL, count).bytes; }

/* `start` of the residual path, and what the heads found, of so many rows; the latter in bf16 or fp32. */
static void follow(const team *t, const rest *block, const float *start, const void *heads, int bf16, int64_t count,
                   float *result, char *scratch) {
    int64_t width = block->out.outputs, inner = block->up.outputs;
    packed out = packed_at(t, &block->out, scratch, count);
    room r = room_at(t, block, scratch, count);
    range mine = share(t, count, 1);
    pack(&block->out, heads, bf16, mine.from, mine.to, &out);
    meet(t);
    multiply(t, &block->out, &out, count, &(sink){row_by_row(r.middle, 4 * width), FP32, 0});
    for (int64_t i = mine.from; i < mine.to; i++)
        normalise_alone(&block->first, start + i * width, r.middle + i * width, width, r.middle + i * width);
    pack(&block->up, r.middle, 0, mine.from, mine.to, &r.up);
    if (block->down.kind == INT8) {
        meet(t);
        multiply(t, &block->up, &r.up, count, &(sink){row_by_row(r.wide, 4 * inner), FP32, 1});
        pack(&block->down, r.wide, 0, mine.from, mine.to, &r.down);
        meet(t);
    } else { /* GELU gives what `down` reads */
        int64_t filled = r.down.form == BF16 ? row_bytes(&block->down, BF16) - 2 * inner : 0;
        for (int64_t i = mine.from; filled && i < mine.to; i++) memset(place(&r.down.codes, i, 2 * inner), 0, (size_t)filled);
        meet(t);
        multiply(t, &block->up, &r.up, count, &(sink){r.down.codes, r.down.form, 1});
    }
    multiply(t, &block->down, &r.down, count, &(sink){row_by_row(result, 4 * width), FP32, 0});
    for (int64_t i = mine.from; i < mine.to; i++)
        normalise_alone(&block->second, r.middle + i * width, result + i * width, width, result + i * width);
}

/* A whole block. */
typedef struct {
    dense qkv;
    rest rest;
} layer;

/* Bytes of queries, keys and values of so many tokens, and of what their heads find. */
static int64_t qkv_bytes(const layer *l, const batch *b, int64_t count) {
    return round_up(count * l->qkv.outputs * (b->bf16 ? 2 : 4), LINE);
}

static int64_t heads_bytes(const layer *l, const batch *b, int64_t count) {
    return round_up(count * l->rest.out.width * (b->bf16 ? 2 : 4), LINE);
}

/* Bytes that a team of so many needs for any of the layers. First lies what the heads find; then, one after the other, what is
 * needed before and after that. */
static int64_t layer_bytes(const team *t, const layer *const *layers, int64_t depth, const batch *b, int64_t count) {
    int64_t most = 0;
    for (int64_t i = 0; i < depth; i++) {
        const layer *l = layers[i];
        int64_t before = packed_bytes(t, &l->qkv, count) + qkv_bytes(l, b, count) + t->size * round_up(attend_bytes(b), LINE);
        int64_t after = rest_bytes(t, &l->rest, count), bytes = heads_bytes(l, b, count) + (before > after ? before : after);
        most = bytes > most ? bytes : most;
    }
    return most;
}

/* The sequences from one to another through all layers, in place. */
static void go_through(const team *t, const layer *const *layers, int64_t depth, const batch *b, int64_t from, int64_t to,
                       float *x, char *scratch) {
    int64_t origin = b->offsets[from], count = b->offsets[to] - origin, width = layers[0]->qkv.width;
    range mine = share(t, count, 1);
    x += origin * width;
    for (int64_t i = 0; i < depth; i++) {
        const layer *l = layers[i];
        char *heads = scratch, *next = heads + heads_bytes(l, b, count), *qkv = next + packed_bytes(t, &l->qkv, count);
        char *desks = qkv + qkv_bytes(l, b, count);
        packed read = packed_at(t, &l->qkv, next, count);
        pack(&l->qkv, x, 0, mine.from, mine.to, &read);
        meet(t);
        multiply(t, &l->qkv, &read, count, &(sink){row_by_row(qkv, l->qkv.outputs * (b->bf16 ? 2 : 4)), b->bf16 ? BF16 : FP32, 0});
        batch local = *b;
        local.qkv = qkv;
        for (int64_t unit = from * b->heads + t->number; unit < to * b->heads; unit += t->size)
            attend_unit(&local, unit, origin, heads, NULL, desks + t->number * round_up(attend_bytes(b), LINE));
        meet(t);
        follow(t, &l->rest, x, heads, b->bf16, count, x, next);
    }
}

#endif
