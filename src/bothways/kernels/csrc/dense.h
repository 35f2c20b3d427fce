/* Dense layers whose weights lie in panels: in fp32, in bf16, and in int8; what such a layer reads is rounded on the way in, and
 * what it gives is scaled, moved and goes through GELU before it leaves the registers.
 *
 * Four bytes of a row, which are one number in fp32, two in bf16 and four in int8, meet the same features of all outputs at a
 * time; where the processor has AMX, 32 rows meet 32 outputs in tiles. */

#ifndef BOTHWAYS_DENSE
#define BOTHWAYS_DENSE

#include "vectors.h"

#define MOST 12 /* rows of a product whose sums lie in registers, with two vectors of outputs each; with four, half as many */
#define SIDE (2 * LANES) /* outputs of a panel; and of what four tiles make together */
#define ZERO 128
#define ROUNDING 12582912.0f /* 1.5 · 2^23: the fp32 numbers around it are whole */

/* Bytes of a number; PARTS: in fp32 as the sum of three in bf16. */
enum { FP32 = 4, BF16 = 2, INT8 = 1, PARTS = 6 };

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

static int in_tiles(int form) { return form != FP32 && (features & USES_TILES); }

/* Bytes of a row that a layer reads, and of an output's weights, in a form. */
static int64_t row_bytes(const dense *layer, int form) {
    if (form == FP32) return layer->width * FP32;
    return form == PARTS ? round_up(layer->width, SIDE) * PARTS : round_up(layer->width * form, LINE);
}

static const char *panel_of(const dense *layer, int64_t output) {
    return (const char *)layer->panels + output * row_bytes(layer, layer->kind);
}

/* Where rows lie: sixteen of them `block` bytes from the next sixteen, one `row` from the next, a line of it `line`. */
typedef struct {
    char *at;
    int64_t block, row, line;
} rows;

static rows row_by_row(void *at, int64_t bytes) { return (rows){at, LANES * bytes, bytes, LINE}; }

/* Each sixteen rows in tiles of a line of each; `bytes`: of a row, in whole lines. */
static rows tile_by_tile(void *at, int64_t bytes) { return (rows){at, LANES * bytes, LINE, LANES * LINE}; }

static char *place(const rows *r, int64_t row, int64_t byte) {
    return r->at + row / LANES * r->block + row % LANES * r->row + byte / LINE * r->line + byte % LINE;
}

/* ---- what a layer reads ---- */

/* Who works on the same rows: one thread, or several of which each does its share of rows or outputs at every step. */
typedef struct {
    int64_t number, size;
    int32_t splits; /* numbers in fp32 */
} team;

static int form_for(const team *t, const dense *layer) { return layer->kind == FP32 && t->splits ? PARTS : layer->kind; }

/* Rows as a layer reads them. */
typedef struct {
    rows codes;
    float *scales; /* in int8, one for each row */
    char *split;   /* in PARTS, place for two panels */
    int32_t form;
} packed;

static int64_t split_bytes(const dense *layer, int form) { return form == PARTS ? 2 * SIDE * row_bytes(layer, form) : 0; }

/* Bytes of so many rows, and of what each of a team needs to multiply them. */
static int64_t packed_bytes(const team *t, const dense *layer, int64_t count) {
    int form = form_for(t, layer);
    return round_up(count, SIDE) * (row_bytes(layer, form) + (int64_t)sizeof(float)) + t->size * split_bytes(layer, form);
}

static packed packed_at(const team *t, const dense *layer, char *at, int64_t count) {
    int form = form_for(t, layer);
    int64_t bytes = row_bytes(layer, form), filled = round_up(count, SIDE);
    float *scales = (float *)(at + filled * bytes);
    rows codes = in_tiles(form) ? tile_by_tile(at, bytes) : row_by_row(at, bytes);
    return (packed){codes, scales, (char *)(scales + filled) + t->number * split_bytes(layer, form), form};
}

/* Two vectors as sums of three in bf16, of eight bits each: one line for each part, with the numbers of both by turns. */
KERNEL void split(__m512 x, __m512 y, char *to, int64_t apart) {
    __m512i upper = _mm512_set1_epi32((int32_t)0xffff0000), half = _mm512_set1_epi32(0x8000);
    EACH for (int i = 0; i < 3; i++, to += apart) {
        __m512i a = _mm512_castps_si512(x), b = _mm512_castps_si512(y);
        if (i < 2) { /* of the last there are no more bits, unless it is too small for any that counts */
            a = _mm512_and_si512(_mm512_add_epi32(a, half), upper), b = _mm512_and_si512(_mm512_add_epi32(b, half), upper);
            x = _mm512_sub_ps(x, _mm512_castsi512_ps(a)), y = _mm512_sub_ps(y, _mm512_castsi512_ps(b));
        }
        _mm512_store_si512(to, _mm512_or_si512(_mm512_srli_epi32(a, 16), _mm512_and_si512(b, upper)));
    }
}

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
    for (int64_t f = 0; f < row_bytes(layer, INT8); f += LANES) {
        __m512 moved = _mm512_add_ps(_mm512_mul_ps(load_some(first(width - f), x, at + f, bf16), times), shift);
        _mm_storeu_si128((__m128i *)place(&into->codes, row, f), _mm512_cvtepi32_epi8(_mm512_castps_si512(moved)));
    }
    into->scales[row] = largest / 127.0f;
}

/* A row in bf16. */
CALLED(",avx512bf16") static void shorten(const dense *layer, const void *x, int bf16, int64_t row, const packed *into) {
    for (int64_t f = 0; 2 * f < row_bytes(layer, BF16); f += SIDE) {
        __m512 left = load_some(first(layer->width - f), x, row * layer->width + f, bf16);
        __m512 right = load_some(first(layer->width - f - LANES), x, row * layer->width + f + LANES, bf16);
        _mm512_storeu_si512(place(&into->codes, row, 2 * f), (__m512i)_mm512_cvtne2ps_pbh(right, left));
    }
}

/* A row in fp32, as it is or in parts. */
CALLED("") static void keep(const dense *layer, const void *x, int bf16, int64_t row, const packed *into) {
    for (int64_t f = 0; f < layer->width; f += SIDE) {
        __mmask16 left = first(layer->width - f), right = first(layer->width - f - LANES);
        __m512 a = load_some(left, x, row * layer->width + f, bf16), b = load_some(right, x, row * layer->width + f + LANES, bf16);
        char *to = place(&into->codes, row, f * into->form);
        if (into->form == PARTS)
            split(a, b, to, into->codes.line);
        else {
            _mm512_mask_storeu_ps(to, left, a);
            _mm512_mask_storeu_ps(to + LINE, right, b);
        }
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
            keep(layer, x, bf16, i, into);
}

/* ---- what it gives ---- */

/* Where it goes, in which form, through GELU or not. */
typedef struct {
    rows to;
    int32_t form, gelu;
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
    store_some(place(&into->to, row, output * into->form), 0, held, found, into->form == BF16);
}

/* ---- products ---- */

/* What is fetched meanwhile: so many bytes at each step. */
typedef struct {
    const char *at;
    int64_t each;
} ahead;

typedef void tile(const dense *, int64_t output, const packed *, int64_t row, const sink *, ahead *);

/* `count` rows from `row` on times one panel or two, of which the second may not be there: two vectors of outputs or four. */
#define TILE(name, count, vectors, kind, features, step)                                                                    \
    CALLED(features) static void name##count(const dense *layer, int64_t output, const packed *x, int64_t row,              \
                                             const sink *into, ahead *next) {                                               \
        int64_t length = row_bytes(layer, kind);                                                                            \
        const char *left = panel_of(layer, output), *codes = x->codes.at + row * length, *fetch = next->at;                 \
        const char *right = output + SIDE < layer->outputs ? panel_of(layer, output + SIDE) : left;                         \
        __m512 sums[count][vectors];                                                                                        \
        EACH for (int i = 0; i < count; i++) EACH for (int n = 0; n < vectors; n++) sums[i][n] = _mm512_setzero_ps();       \
        for (int64_t f = 0; f < length; f += 4) {                                                                           \
            __m512i weights[vectors];                                                                                       \
            EACH for (int n = 0; n < vectors; n++)                                                                          \
                weights[n] = _mm512_loadu_si512((n < 2 ? left : right) + f * SIDE + n % 2 * LINE);                          \
            for (int64_t q = 0; q < next->each; q += LINE, fetch += LINE) _mm_prefetch(fetch, _MM_HINT_T1);                 \
            EACH for (int i = 0; i < count; i++) {                                                                          \
                int32_t four;                                                                                               \
                memcpy(&four, codes + i * length + f, 4);                                                                   \
                __m512i numbers = _mm512_set1_epi32(four);                                                                  \
                EACH for (int n = 0; n < vectors; n++) sums[i][n] = step(sums[i][n], numbers, weights[n]);                  \
            }                                                                                                               \
        }                                                                                                                   \
        next->at = fetch;                                                                                                   \
        EACH for (int n = 0; n < vectors; n++) {                                                                            \
            if (layer->outputs <= output + n * LANES) break;                                                                \
            column c = column_of(layer, output + n * LANES);                                                                \
            EACH for (int i = 0; i < count; i++)                                                                            \
                put(into, row + i, output + n * LANES, c.held,                                                              \
                    finished(&c, sums[i][n], kind, x->scales + row + i, into->gelu));                                       \
        }                                                                                                                   \
    }
#define TILES(name, ...)                                                                                                    \
    TILE(name##_wide, 1, 4, __VA_ARGS__) TILE(name##_wide, 2, 4, __VA_ARGS__) TILE(name##_wide, 3, 4, __VA_ARGS__)          \
    TILE(name##_wide, 4, 4, __VA_ARGS__) TILE(name##_wide, 5, 4, __VA_ARGS__) TILE(name##_wide, 6, 4, __VA_ARGS__)          \
    TILE(name, 1, 2, __VA_ARGS__) TILE(name, 2, 2, __VA_ARGS__) TILE(name, 3, 2, __VA_ARGS__)                               \
    TILE(name, 4, 2, __VA_ARGS__) TILE(name, 5, 2, __VA_ARGS__) TILE(name, 6, 2, __VA_ARGS__)                               \
    TILE(name, 7, 2, __VA_ARGS__) TILE(name, 8, 2, __VA_ARGS__) TILE(name, 9, 2, __VA_ARGS__)                               \
    TILE(name, 10, 2, __VA_ARGS__) TILE(name, 11, 2, __VA_ARGS__) TILE(name, 12, 2, __VA_ARGS__)                            \
    static tile *const name##_wide[] = {name##_wide1, name##_wide2, name##_wide3,                                           \
                                        name##_wide4, name##_wide5, name##_wide6};                                          \
    static tile *const name[] = {name##1, name##2, name##3, name##4,  name##5,  name##6,                                    \
                                 name##7, name##8, name##9, name##10, name##11, name##12};
#define ADD_FP32(sum, x, w) _mm512_fmadd_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(w), sum)
#define ADD_BF16(sum, x, w) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(w))
#define ADD_INT8(sum, x, w) _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sum), x, w))
TILES(by_fp32, FP32, "", ADD_FP32)
TILES(by_bf16, BF16, ",avx512bf16", ADD_BF16)
TILES(by_int8, INT8, ",avx512vnni", ADD_INT8)

#endif
