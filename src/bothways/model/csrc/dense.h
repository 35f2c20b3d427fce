/* Dense layers whose weights lie in panels: in fp32, in bf16, and in int8; what such a layer reads is rounded on the way in, and
 * what it gives is scaled, moved and goes through GELU before it leaves the registers.
 *
 * Four bytes of a row, which are one number in fp32, two in bf16 and four in int8, meet the same features of all outputs at a
 * time; where the processor has AMX, 32 rows meet 32 outputs in tiles. */

#ifndef BOTHWAYS_DENSE
#define BOTHWAYS_DENSE

#include "vectors.h"

#define ROWS 6 /* with four vectors of outputs each they leave room for the weights */
#define SIDE (2 * LANES) /* outputs of a panel; and of what four tiles make together */
#define ZERO 128
#define ROUNDING 12582912.0f /* 1.5 · 2^23: the fp32 numbers around it are whole */

enum { FP32 = 4, BF16 = 2, INT8 = 1 }; /* bytes of a number */

/* A layer: panels of 32 outputs, made of lines of 4 bytes for 16 outputs each; in bf16 and int8 up to a whole line of a row. */
typedef struct {
    const void *panels;
    const float *scales;  /* in int8, one for each output */
    const int32_t *zeros; /* in int8, what the code of 0 adds to each output */
    const float *bias;    /* no bias: NULL */
    int64_t width, outputs;
    int32_t kind;
} dense;

/* What is in use of what the processor has; a bit each. */
enum { USES_AVX512 = 1, USES_VNNI = 2, USES_BF16 = 4, USES_TILES = 8 };
static int32_t features;

static int in_tiles(const dense *layer) { return layer->kind != FP32 && (features & USES_TILES); }

/* Bytes of a row that a layer reads. */
static int64_t row_bytes(const dense *layer) {
    int64_t bytes = layer->width * layer->kind;
    return layer->kind == FP32 ? bytes : round_up(bytes, LINE);
}

static const char *panel_of(const dense *layer, int64_t output) { return (const char *)layer->panels + output * row_bytes(layer); }

/* Where rows lie: sixteen of them `block` bytes from the next sixteen, one `row` from the next, a line of it `line`. */
typedef struct {
    char *at;
    int64_t block, row, line;
} rows;

static rows row_by_row(void *at, int64_t bytes) { return (rows){at, LANES * bytes, bytes, LINE}; }

/* Each sixteen rows in tiles of a line of each; `bytes`: of a row, in whole lines. */
static rows tile_by_tile(void *at, int64_t bytes) { return (rows){at, LANES * bytes, LINE, LANES * LINE}; }

static rows read_by(const dense *layer, void *at) {
    return in_tiles(layer) ? tile_by_tile(at, row_bytes(layer)) : row_by_row(at, row_bytes(layer));
}

static char *place(const rows *r, int64_t row, int64_t byte) {
    return r->at + row / LANES * r->block + row % LANES * r->row + byte / LINE * r->line + byte % LINE;
}

/* ---- what a layer reads ---- */

/* Rows as a layer reads them. */
typedef struct {
    rows codes;
    float *scales; /* in int8, one for each row */
} packed;

/* A row's codes and its scale: as quantised.py has them, bit for bit. */
CALLED("") static void quantise(const dense *layer, const void *x, int bf16, int64_t row, const packed *into) {
    int64_t width = layer->width, at = row * width;
    __m512i most = _mm512_setzero_si512(); /* of the bits without the sign: NaN is above infinity, that above numbers */
    for (int64_t f = 0; f < width; f += LANES) {
        __m512i bits = _mm512_castps_si512(load_some(first(width - f), x, at + f, bf16));
        most = _mm512_max_epi32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
    }
    int32_t top = _mm512_reduce_max_epi32(most);
    float largest;
    memcpy(&largest, &top, 4);
    __m512 times = _mm512_set1_ps(1.0f / largest * 127.0f), shift = _mm512_set1_ps(ROUNDING + ZERO);
    for (int64_t f = 0; f < row_bytes(layer); f += LANES) {
        __m512 moved = _mm512_add_ps(_mm512_mul_ps(load_some(first(width - f), x, at + f, bf16), times), shift);
        _mm_storeu_si128((__m128i *)place(&into->codes, row, f), _mm512_cvtepi32_epi8(_mm512_castps_si512(moved)));
    }
    into->scales[row] = largest / 127.0f;
}

/* A row in bf16. */
CALLED(",avx512bf16") static void shorten(const dense *layer, const void *x, int bf16, int64_t row, const packed *into) {
    for (int64_t f = 0; 2 * f < row_bytes(layer); f += SIDE) {
        __m512 left = load_some(first(layer->width - f), x, row * layer->width + f, bf16);
        __m512 right = load_some(first(layer->width - f - LANES), x, row * layer->width + f + LANES, bf16);
        _mm512_storeu_si512(place(&into->codes, row, 2 * f), (__m512i)_mm512_cvtne2ps_pbh(right, left));
    }
}

/* Rows that lie dense in fp32 or bf16, as the layer reads them. */
CALLED("") static void pack(const dense *layer, const void *x, int bf16, int64_t from, int64_t to, const packed *into) {
    for (int64_t i = from; i < to; i++)
        if (layer->kind == INT8)
            quantise(layer, x, bf16, i, into);
        else if (layer->kind == BF16)
            shorten(layer, x, bf16, i, into);
        else
            for (int64_t f = 0; f < layer->width; f += LANES) {
                __mmask16 held = first(layer->width - f);
                _mm512_mask_storeu_ps(into->codes.at + i * row_bytes(layer) + 4 * f, held, load_some(held, x, i * layer->width + f, bf16));
            }
}

/* ---- what it gives ---- */

/* Where it goes, in fp32 or bf16, through GELU or not. */
typedef struct {
    rows to;
    int32_t bf16, gelu;
} sink;

/* What sixteen outputs have in common for all rows. */
typedef struct {
    __mmask16 held;
    __m512 scale, bias;
    __m512i zero;
} column;

KERNEL column column_of(const dense *layer, int64_t output) {
    column c = {first(layer->outputs - output), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_si512()};
    if (layer->kind == INT8) c.scale = _mm512_maskz_loadu_ps(c.held, layer->scales + output);
    if (layer->kind == INT8) c.zero = _mm512_maskz_loadu_epi32(c.held, layer->zeros + output);
    if (layer->bias) c.bias = _mm512_maskz_loadu_ps(c.held, layer->bias + output);
    return c;
}

/* `sum`: of products, in int32 for int8. */
KERNEL __m512 finished(const column *c, __m512 sum, int kind, const float *row_scale, int with_gelu) {
    __m512 product = _mm512_add_ps(sum, c->bias);
    if (kind == INT8) {
        __m512i whole = _mm512_sub_epi32(_mm512_castps_si512(sum), c->zero);
        product = _mm512_fmadd_ps(_mm512_mul_ps(_mm512_cvtepi32_ps(whole), c->scale), _mm512_set1_ps(*row_scale), c->bias);
    }
    return with_gelu ? gelu(product) : product;
}

/* Sixteen outputs of a row. */
KERNEL void put(const sink *into, int64_t row, int64_t output, __mmask16 held, __m512 found) {
    store_some(place(&into->to, row, output * (into->bf16 ? 2 : 4)), 0, held, found, into->bf16);
}

/* ---- products ---- */

typedef void tile(const dense *, int64_t output, const packed *, int64_t row, const sink *);

/* `count` rows from `row` on times two panels, of which the second may not be there. */
#define TILE(name, count, kind, features, step)                                                                             \
    CALLED(features) static void name##count(const dense *layer, int64_t output, const packed *x, int64_t row,              \
                                             const sink *into) {                                                            \
        int64_t length = row_bytes(layer);                                                                                  \
        const char *left = panel_of(layer, output), *codes = x->codes.at + row * length;                                    \
        const char *right = output + SIDE < layer->outputs ? panel_of(layer, output + SIDE) : left;                         \
        __m512 sums[count][4];                                                                                              \
        EACH for (int i = 0; i < count; i++) EACH for (int n = 0; n < 4; n++) sums[i][n] = _mm512_setzero_ps();             \
        for (int64_t f = 0; f < length; f += 4) {                                                                           \
            __m512i weights[4];                                                                                             \
            EACH for (int n = 0; n < 4; n++)                                                                                \
                weights[n] = _mm512_loadu_si512((n < 2 ? left : right) + f * SIDE + n % 2 * LINE);                          \
            EACH for (int i = 0; i < count; i++) {                                                                          \
                int32_t four;                                                                                               \
                memcpy(&four, codes + i * length + f, 4);                                                                   \
                __m512i numbers = _mm512_set1_epi32(four);                                                                  \
                EACH for (int n = 0; n < 4; n++) sums[i][n] = step(sums[i][n], numbers, weights[n]);                        \
            }                                                                                                               \
        }                                                                                                                   \
        EACH for (int n = 0; n < 4; n++) {                                                                                  \
            if (layer->outputs <= output + n * LANES) break;                                                                \
            column c = column_of(layer, output + n * LANES);                                                                \
            EACH for (int i = 0; i < count; i++)                                                                            \
                put(into, row + i, output + n * LANES, c.held,                                                              \
                    finished(&c, sums[i][n], kind, x->scales + row + i, into->gelu));                                       \
        }                                                                                                                   \
    }
#define TILES(name, ...)                                                                                                    \
    TILE(name, 1, __VA_ARGS__) TILE(name, 2, __VA_ARGS__) TILE(name, 3, __VA_ARGS__)                                        \
    TILE(name, 4, __VA_ARGS__) TILE(name, 5, __VA_ARGS__) TILE(name, 6, __VA_ARGS__)                                        \
    static tile *const name[] = {name##1, name##2, name##3, name##4, name##5, name##6};
#define ADD_FP32(sum, x, w) _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum)
#define ADD_BF16(sum, x, w) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(w))
#define ADD_INT8(sum, x, w) _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sum), x, w))
TILES(by_fp32, FP32, "", ADD_FP32)
TILES(by_bf16, BF16, ",avx512bf16", ADD_BF16)
TILES(by_int8, INT8, ",avx512vnni", ADD_INT8)

#define TILED CALLED(",avx512bf16,amx-tile,amx-int8,amx-bf16")
#define INSIDE inline __attribute__((always_inline))

/* Sums of up to 32 rows by a panel. While those of the next ones are made, in tiles, vectors finish these. */
typedef struct {
    float (*sums)[SIDE];
    int64_t output, row, count, done;
    column left, right;
} block;

/* The next `most` rows of a block. */
TILED static INSIDE void finish(block *b, int64_t most, const float *scales, const sink *into, int kind, int bf16, int with_gelu) {
    int64_t end = least(b->count, b->done + most);
    for (int64_t i = b->done; i < end; i++) {
        __m512 one = finished(&b->left, _mm512_load_ps(b->sums[i]), kind, scales + b->row + i, with_gelu);
        __m512 two = finished(&b->right, _mm512_load_ps(b->sums[i] + LANES), kind, scales + b->row + i, with_gelu);
        char *to = place(&into->to, b->row + i, b->output * (bf16 ? 2 : 4));
        if (bf16) {
            __mmask32 held = (__mmask32)b->right.held << LANES | b->left.held;
            _mm512_mask_storeu_epi16(to, held, (__m512i)_mm512_cvtne2ps_pbh(two, one));
        } else {
            _mm512_mask_storeu_ps(to, b->left.held, one);
            _mm512_mask_storeu_ps(to + into->to.line, b->right.held, two);
        }
    }
    b->done = end;
}

/* The same as `product` by AMX: two tiles of rows times two of outputs at a time. */
TILED static INSIDE void by_tiles(const dense *layer, const packed *x, int64_t count, int64_t from, int64_t to,
                                  const sink *into, int kind, int bf16, int with_gelu) {
    float sums[2][SIDE][SIDE] __attribute__((aligned(LINE)));
    int64_t length = row_bytes(layer), steps = length / LINE, blocks = (count + SIDE - 1) / SIDE;
    int64_t each = (SIDE + steps - 1) / steps, fetched = (SIDE + blocks - 1) / blocks * LINE;
    int64_t turn = 0;
    const float *scales = x->scales;
    const sink where = *into;
    block last = {0}, now;
    for (int64_t output = from; output < to; output += SIDE) {
        const char *panel = panel_of(layer, output), *ahead = panel + length * SIDE; /* the next one comes from far away */
        for (int64_t row = 0; row < count; row += SIDE) {
            const char *above = x->codes.at + row / LANES * x->codes.block, *below = above + x->codes.block;
            now = (block){sums[turn++ % 2], output, row, least(SIDE, count - row), 0, column_of(layer, output), column_of(layer, output + LANES)};
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            for (int64_t f = 0; f < length; f += LINE) {
                for (int64_t q = 0; q < fetched; q += LINE) _mm_prefetch(ahead + q, _MM_HINT_T1);
                ahead += fetched;
                LOAD_TILE(4, above + f * LANES, LINE);
                LOAD_TILE(6, panel + f * SIDE, 2 * LINE);
                LOAD_TILE(7, panel + f * SIDE + LINE, 2 * LINE);
                if (kind == BF16) {
                    _tile_dpbf16ps(0, 4, 6);
                    _tile_dpbf16ps(1, 4, 7);
                    LOAD_TILE(5, below + f * LANES, LINE);
                    _tile_dpbf16ps(2, 5, 6);
                    _tile_dpbf16ps(3, 5, 7);
                } else {
                    _tile_dpbusd(0, 4, 6);
                    _tile_dpbusd(1, 4, 7);
                    LOAD_TILE(5, below + f * LANES, LINE);
                    _tile_dpbusd(2, 5, 6);
                    _tile_dpbusd(3, 5, 7);
                }
                finish(&last, each, scales, &where, kind, bf16, with_gelu);
            }
            _tile_stored(0, &now.sums[0][0], SIDE * 4);
            _tile_stored(1, &now.sums[0][LANES], SIDE * 4);
            _tile_stored(2, &now.sums[LANES][0], SIDE * 4);
            _tile_stored(3, &now.sums[LANES][LANES], SIDE * 4);
            last = now;
        }
    }
    finish(&last, SIDE, scales, &where, kind, bf16, with_gelu);
}

#define BY_TILES(name, kind, bf16, with_gelu)                                                                              \
    TILED static void name(const dense *layer, const packed *x, int64_t count, int64_t from, int64_t to, const sink *into) { \
        by_tiles(layer, x, count, from, to, into, kind, bf16, with_gelu);                                                  \
    }
BY_TILES(tiles0, INT8, 0, 0)
BY_TILES(tiles1, INT8, 0, 1)
BY_TILES(tiles2, INT8, 1, 0)
BY_TILES(tiles3, INT8, 1, 1)
BY_TILES(tiles4, BF16, 0, 0)
BY_TILES(tiles5, BF16, 0, 1)
BY_TILES(tiles6, BF16, 1, 0)
BY_TILES(tiles7, BF16, 1, 1)
typedef void tiles(const dense *, const packed *, int64_t, int64_t, int64_t, const sink *);
static tiles *const IN_TILES[] = {tiles0, tiles1, tiles2, tiles3, tiles4, tiles5, tiles6, tiles7};

/* x·Wᵀ + b of so many rows, for the outputs between two multiples of two panels. */
static void product(const dense *layer, const packed *x, int64_t count, int64_t from, int64_t to, const sink *into) {
    to = least(to, layer->outputs);
    if (in_tiles(layer)) {
        IN_TILES[4 * (layer->kind == BF16) + 2 * into->bf16 + into->gelu](layer, x, count, from, to, into);
        return;
    }
    tile *const *tiles = layer->kind == FP32 ? by_fp32 : layer->kind == BF16 ? by_bf16 : by_int8;
    for (int64_t output = from; output < to; output += 2 * SIDE)
        for (int64_t i = 0; i < count; i += ROWS) tiles[least(ROWS, count - i) - 1](layer, output, x, i, into);
}

#endif
