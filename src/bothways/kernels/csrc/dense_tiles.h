/* Dense layers by AMX: two tiles of rows times two of outputs at a time.
 *
 * AMX has no products in fp32, but those in bf16 are sixteen times as fast as a processor's own in fp32. A number of 24 bits is
 * the sum of three of eight; of the nine products of two such sums the six largest are made here, and what is left out is
 * smaller than the rounding of a product in fp32. Weights are split on the way, a panel at a time. */

#ifndef BOTHWAYS_DENSE_TILES
#define BOTHWAYS_DENSE_TILES

#include "dense.h"

#define TILED CALLED(",avx512bf16,amx-tile,amx-int8,amx-bf16")
#define INSIDE inline __attribute__((always_inline))
#define TILE_BYTES (LANES * LINE)
#define DEEPEST 384 /* features of so many rows that are in the cache together, in parts */
#define AHEAD 96 /* features of a panel that are fetched before they are split */

/* Sums of up to 32 rows by a panel. While those of the next ones are made, in tiles, vectors finish these. */
typedef struct {
    float (*sums)[SIDE];
    int64_t output, row, count, done;
    column left, right;
} block;

/* The next `most` rows of a block; `more`: what is there is added. */
TILED static INSIDE void finish(block *b, int64_t most, const float *scales, const sink *into, int more, int kind, int form,
                                int with_gelu) {
    int64_t end = least(b->count, b->done + most);
    for (int64_t i = b->done; i < end; i++) {
        __m512 one = finished(&b->left, _mm512_load_ps(b->sums[i]), kind, scales + b->row + i, with_gelu);
        __m512 two = finished(&b->right, _mm512_load_ps(b->sums[i] + LANES), kind, scales + b->row + i, with_gelu);
        char *to = place(&into->to, b->row + i, b->output * form);
        if (form == BF16) {
            __mmask32 held = (__mmask32)b->right.held << LANES | b->left.held;
            _mm512_mask_storeu_epi16(to, held, (__m512i)_mm512_cvtne2ps_pbh(two, one));
        } else if (form == PARTS)
            split(one, two, to, into->to.line);
        else {
            if (more) {
                one = _mm512_add_ps(one, _mm512_maskz_loadu_ps(b->left.held, to));
                two = _mm512_add_ps(two, _mm512_maskz_loadu_ps(b->right.held, to + into->to.line));
            }
            _mm512_mask_storeu_ps(to, b->left.held, one);
            _mm512_mask_storeu_ps(to + into->to.line, b->right.held, two);
        }
    }
    b->done = end;
}

/* A panel in fp32 that becomes one in parts: lines of pairs of features, as tiles have them. */
typedef struct {
    const float *from;
    char *to;
    int64_t width, done, pairs;
} splitting;

static splitting split_panel(const dense *layer, int64_t output, range features, char *to) {
    int64_t width = features.to - features.from, pairs = output < layer->outputs ? round_up(width, SIDE) / 2 : 0;
    return (splitting){(const float *)panel_of(layer, output) + features.from * SIDE, to, width, 0, pairs};
}

/* The next `most` pairs; 0 where there is no feature. */
TILED static INSIDE void go_on(splitting *s, int64_t most) {
    int64_t end = least(s->pairs, s->done + most);
    for (int64_t p = s->done; p < end; p++) {
        int64_t tile = p / LANES, one = tile * SIDE + p % LANES, two = one + LANES;
        char *to = s->to + tile * 6 * TILE_BYTES + p % LANES * 2 * LINE;
        __mmask16 first_held = one < s->width ? 0xffff : 0, second_held = two < s->width ? 0xffff : 0;
        EACH for (int n = 0; n < 2; n++) {
            const float *here = s->from + n * LANES;
            _mm_prefetch((const char *)(here + (one + AHEAD) * SIDE), _MM_HINT_T1);
            _mm_prefetch((const char *)(here + (two + AHEAD) * SIDE), _MM_HINT_T1);
            __m512 x = _mm512_maskz_loadu_ps(first_held, here + one * SIDE);
            __m512 y = _mm512_maskz_loadu_ps(second_held, here + two * SIDE);
            split(x, y, to + n * LINE, 2 * TILE_BYTES);
        }
    }
    s->done = end;
}

#define ROWS_OF(part)                                     \
    LOAD_TILE(4, above + (part) * TILE_BYTES, LINE);      \
    LOAD_TILE(5, below + (part) * TILE_BYTES, LINE);
#define OUTPUTS_OF(part)                                            \
    LOAD_TILE(6, panel + (part) * 2 * TILE_BYTES, 2 * LINE);        \
    LOAD_TILE(7, panel + (part) * 2 * TILE_BYTES + LINE, 2 * LINE);
#define ADD(how)     \
    how(0, 4, 6);    \
    how(1, 4, 7);    \
    how(2, 5, 6);    \
    how(3, 5, 7);

/* The six products of parts, each after tiles that change: so the processor always has tiles to multiply while vectors work. */
#define EACH_PRODUCT(work) \
    ROWS_OF(2)             \
    OUTPUTS_OF(0)          \
    ADD(_tile_dpbf16ps)    \
    work;                  \
    ROWS_OF(1)             \
    ADD(_tile_dpbf16ps)    \
    work;                  \
    OUTPUTS_OF(1)          \
    ADD(_tile_dpbf16ps)    \
    work;                  \
    ROWS_OF(0)             \
    ADD(_tile_dpbf16ps)    \
    work;                  \
    OUTPUTS_OF(0)          \
    ADD(_tile_dpbf16ps)    \
    work;                  \
    OUTPUTS_OF(2)          \
    ADD(_tile_dpbf16ps)    \
    work;

/* The same as `product` by AMX; of these features alone, in fp32. */
TILED static INSIDE void by_tiles(const dense *layer, range features, const packed *x, int64_t count, int64_t from, int64_t to,
                                  const sink *into, int kind, int form, int with_gelu) {
    float sums[2][SIDE][SIDE] __attribute__((aligned(LINE)));
    int64_t line = kind == FP32 ? 3 * LINE : LINE, more = features.from > 0, begun = features.from / SIDE * line;
    int64_t length = kind == FP32 ? round_up(features.to - features.from, SIDE) * PARTS : row_bytes(layer, kind);
    int64_t blocks = (count + SIDE - 1) / SIDE, works = length / line * (kind == FP32 ? 6 : 1);
    int64_t each = (SIDE + works - 1) / works, turn = 0;
    int64_t fetched = (SIDE + blocks - 1) / blocks * LINE, pairs = (LANES + 6 * blocks - 1) / (6 * blocks);
    const float *scales = x->scales;
    const sink where = *into;
    block last = {0}, now;
    splitting next = split_panel(layer, from, features, x->split);
    for (int64_t output = from; output < to; output += SIDE) {
        const char *outputs = panel_of(layer, output), *ahead = outputs + length * SIDE; /* the next one comes from far away */
        if (kind == FP32) {
            go_on(&next, next.pairs);
            outputs = next.to;
            next = split_panel(layer, output + SIDE, features, outputs == x->split ? x->split + length * SIDE : x->split);
        }
        for (int64_t row = 0; row < count; row += SIDE) {
            const char *first_rows = x->codes.at + row / LANES * x->codes.block + begun * LANES;
            column left = column_of(layer, output), right = column_of(layer, output + LANES);
            now = (block){sums[turn++ % 2], output, row, least(SIDE, count - row), 0, left, right};
            if (more) now.left.bias = now.right.bias = _mm512_setzero_ps();
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t f = 0; f < length; f += line) {
                const char *above = first_rows + f * LANES, *below = above + x->codes.block, *panel = outputs + f * SIDE;
                if (kind == FP32) {
                    EACH_PRODUCT(go_on(&next, pairs); finish(&last, each, scales, &where, (int)more, kind, form, with_gelu))
                } else {
                    for (int64_t q = 0; q < fetched; q += LINE) _mm_prefetch(ahead + q, _MM_HINT_T1);
                    ahead += fetched;
                    ROWS_OF(0)
                    OUTPUTS_OF(0)
                    if (kind == INT8) {
                        ADD(_tile_dpbusd)
                    } else {
                        ADD(_tile_dpbf16ps)
                    }
                    finish(&last, each, scales, &where, (int)more, kind, form, with_gelu);
                }
            }
            _tile_stored(0, &now.sums[0][0], SIDE * 4);
            _tile_stored(1, &now.sums[0][LANES], SIDE * 4);
            _tile_stored(2, &now.sums[LANES][0], SIDE * 4);
            _tile_stored(3, &now.sums[LANES][LANES], SIDE * 4);
            last = now;
        }
    }
    finish(&last, SIDE, scales, &where, (int)more, kind, form, with_gelu);
}

#define BY_TILES(name, kind, form, with_gelu)                                                                            \
    TILED static void name(const dense *layer, range features, const packed *x, int64_t count, int64_t from, int64_t to, \
                           const sink *into) {                                                                           \
        by_tiles(layer, features, x, count, from, to, into, kind, form, with_gelu);                                      \
    }
BY_TILES(int8_to_fp32, INT8, FP32, 0)
BY_TILES(int8_to_fp32_gelu, INT8, FP32, 1)
BY_TILES(int8_to_bf16, INT8, BF16, 0)
BY_TILES(bf16_to_fp32, BF16, FP32, 0)
BY_TILES(bf16_to_bf16, BF16, BF16, 0)
BY_TILES(bf16_to_bf16_gelu, BF16, BF16, 1)
BY_TILES(fp32_to_fp32, FP32, FP32, 0)
BY_TILES(fp32_to_bf16, FP32, BF16, 0)
BY_TILES(fp32_to_parts_gelu, FP32, PARTS, 1)
typedef void tiles(const dense *, range, const packed *, int64_t, int64_t, int64_t, const sink *);

/* By what is multiplied and what is given; with GELU goes only what the next layer reads. */
static tiles *in_tiles_to(int kind, const sink *into) {
    if (kind == INT8) return into->form == BF16 ? int8_to_bf16 : into->gelu ? int8_to_fp32_gelu : int8_to_fp32;
    if (kind == BF16) return into->form == FP32 ? bf16_to_fp32 : into->gelu ? bf16_to_bf16_gelu : bf16_to_bf16;
    return into->form == PARTS ? fp32_to_parts_gelu : into->form == BF16 ? fp32_to_bf16 : fp32_to_fp32;
}

#define FEW 24 /* rows that are faster by one panel than by two, since that is read fewer times from the second cache */

/* x·Wᵀ + b of so many rows, for the outputs between two multiples of two panels. */
static void product(const dense *layer, const packed *x, int64_t count, int64_t from, int64_t to, const sink *into) {
    to = least(to, layer->outputs);
    if (!count) return;
    if (in_tiles(x->form)) {
        int64_t most = layer->kind == FP32 && into->form == FP32 ? DEEPEST : layer->width;
        for (int64_t f = 0; f < layer->width; f += most)
            in_tiles_to(layer->kind, into)(layer, (range){f, least(f + most, layer->width)}, x, count, from, to, into);
        return;
    }
    static tile *const *const kinds[][2] = {[INT8] = {by_int8, by_int8_wide}, [BF16] = {by_bf16, by_bf16_wide},
                                            [FP32] = {by_fp32, by_fp32_wide}};
    int wide = count > FEW;
    tile *const *tiles = kinds[layer->kind][wide];
    int64_t step = wide ? 2 * SIDE : SIDE, most = wide ? MOST / 2 : MOST;
    int64_t turns = (count + most - 1) / most, rows = (count + turns - 1) / turns, lines = step / LANES;
    for (int64_t output = from; output < to; output += step) {
        ahead next = {panel_of(layer, output + step), (lines + turns - 1) / turns * LINE};
        for (int64_t i = 0; i < count; i += rows) tiles[least(rows, count - i) - 1](layer, output, x, i, into, &next);
    }
}

#endif
