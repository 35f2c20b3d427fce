/* Attention over packed sequences in bf16, for predictions, by AMX.
 *
 * Scores lie with keys as rows and sixteen queries as columns, so that a softmax is a step of vectors, key by key. */

#ifndef BOTHWAYS_TILES
#define BOTHWAYS_TILES

#include "attention.h"
#include "dense.h"

#define PAIRS (2 * LANES) /* numbers of bf16 in a vector */

/* Rows of a tile, and bytes of each; all eight are whole. */
TILED static void begin_tiles(void) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) shape.rows[i] = LANES, shape.bytes[i] = LINE;
    __asm__ volatile("" ::"r"(&shape) : "memory"); /* there are compilers that believe its first bytes to be all that is read */
    _tile_loadconfig(&shape);
}

TILED static void end_tiles(void) { _tile_release(); }

/* What a thread does before and after it works with tiles, if it does. */
static void begin(int tiled) {
    if (tiled && (features & USES_TILES)) begin_tiles();
}

static void end(int tiled) {
    if (tiled && (features & USES_TILES)) end_tiles();
}

/* Pairs of features of sixteen tokens from place `at` on, `stride` apart; 0 where there is no token or no feature. */
KERNEL void load_pairs(const uint16_t *from, int64_t at, int64_t stride, int64_t tokens, int64_t count, __m512 pairs[LANES]) {
    __mmask16 held = first(count / 2);
    EACH for (int i = 0; i < LANES; i++)
        pairs[i] = _mm512_maskz_loadu_ps(i < tokens ? held : 0, (const float *)(from + at + (i < tokens ? i * stride : 0)));
}

/* Two tiles of rows by two of columns, or by one where there are no more; the second lies `below` or `after` the first. */
#define CLEAR_TILES                                 \
    _tile_zero(0);                                  \
    _tile_zero(1);                                  \
    _tile_zero(2);                                  \
    _tile_zero(3);
#define TILES_BY_TILES(rows, below, stride, columns, after)        \
    {                                                              \
        LOAD_TILE(4, rows, stride);                                \
        LOAD_TILE(6, columns, LINE);                               \
        LOAD_TILE(5, (rows) + (below), stride);                    \
        _tile_dpbf16ps(0, 4, 6);                                   \
        _tile_dpbf16ps(1, 5, 6);                                   \
        if (sets == 2) {                                           \
            LOAD_TILE(7, (columns) + (after), LINE);               \
            _tile_dpbf16ps(2, 4, 7);                               \
            _tile_dpbf16ps(3, 5, 7);                               \
        }                                                          \
    }
#define STORE_TILES(to, below, after)                              \
    _tile_stored(0, to, LINE);                                     \
    _tile_stored(1, (to) + (below), LINE);                         \
    if (sets == 2) {                                               \
        _tile_stored(2, (to) + (after), LINE);                     \
        _tile_stored(3, (to) + (after) + (below), LINE);           \
    }

/* What a head keeps of a sequence: keys by rows; values by features; in both what is filled up is 0. */
typedef struct {
    uint16_t *keys, *values;
    float *queries, *scores, *found;
    int64_t count, size; /* of keys and features, filled up */
} desk;

static int64_t desk_bytes(int64_t tokens, int64_t features) {
    int64_t count = round_up(tokens, PAIRS), size = round_up(features, PAIRS);
    return 4 * count * size + 4 * LANES * (size + 2 * count + 4 * LANES);
}

static desk desk_at(char *place, int64_t tokens, int64_t features) {
    desk d = {.count = round_up(tokens, PAIRS), .size = round_up(features, PAIRS)};
    d.keys = (uint16_t *)place;
    d.values = d.keys + d.count * d.size;
    d.queries = (float *)(d.values + d.count * d.size);
    d.scores = d.queries + LANES * d.size; /* of two times sixteen queries, as are all of these */
    d.found = d.scores + 2 * LANES * d.count;
    return d;
}

KERNEL void take_keys(const head *h, const desk *d) {
    const uint16_t *qkv = h->qkv;
    int64_t width = h->heads * h->size, stride = 3 * width;
    for (int64_t f = 0; f < d->size; f += PAIRS) {
        __mmask32 held = h->size - f >= PAIRS ? 0xffffffff : 0xffff;
        for (int64_t j = 0; j < d->count; j++) {
            __mmask32 mine = j < h->tokens ? held : 0;
            __m512i key = _mm512_maskz_loadu_epi16(mine, qkv + h->at + width + (mine ? j * stride : 0) + f);
            _mm512_storeu_si512(d->keys + j * d->size + f, key);
        }
    }
    short even[PAIRS], odd[PAIRS]; /* places of a pair's first and second features in two vectors */
    for (int i = 0; i < PAIRS; i++) even[i] = (short)(2 * i), odd[i] = (short)(2 * i + 1);
    __m512i firsts = _mm512_loadu_si512(even), seconds = _mm512_loadu_si512(odd);
    for (int64_t j = 0; j < d->count; j += PAIRS)
        for (int64_t f = 0; f < h->size; f += PAIRS) {
            __m512 left[LANES], right[LANES];
            int64_t at = h->at + 2 * width + j * stride + f;
            load_pairs(qkv, at, stride, h->tokens - j, h->size - f, left);
            load_pairs(qkv, at + LANES * stride, stride, h->tokens - j - LANES, h->size - f, right);
            turn(left), turn(right);
            EACH for (int p = 0; p < LANES; p++) {
                __m512i a = _mm512_castps_si512(left[p]), b = _mm512_castps_si512(right[p]);
                uint16_t *row = d->values + (f + 2 * p) * d->count + j;
                _mm512_storeu_si512(row, _mm512_permutex2var_epi16(a, firsts, b));
                _mm512_storeu_si512(row + d->count, _mm512_permutex2var_epi16(a, seconds, b));
            }
        }
}

/* 2^x for x ≤ 0, to 2.6e-6, which is a hundredth of what is lost in bf16; the polynomial is fitted from one whole number to the
 * next. */
KERNEL __m512 power_of_two(__m512 x) {
    __m512 rest = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    __m512 sum = _mm512_set1_ps(1.353418e-2f);
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(5.201149e-2f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(2.4144269e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(6.9300386e-1f));
    sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.00000259f));
    return _mm512_scalef_ps(sum, x);
}

/* Scores of keys by sixteen queries become e^(score − the largest) in pairs of keys, in bf16, in place; what is given is one
 * over their sums. */
TILED static inline __m512 shares(float *scores, int64_t tokens, int64_t count, float scale) {
    __m512 tops[4], sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}; /* several, so that none waits for the one before */
    EACH for (int i = 0; i < 4; i++) tops[i] = _mm512_set1_ps(-INFINITY);
    for (int64_t j = 0; j < count; j += 4)
        EACH for (int i = 0; i < 4; i++)
            if (j + i < tokens) tops[i] = _mm512_max_ps(tops[i], _mm512_loadu_ps(scores + (j + i) * LANES));
    __m512 most = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
    __m512 times = _mm512_set1_ps(scale * 1.44269504f), moved = _mm512_mul_ps(most, times);
    short order[PAIRS]; /* from the halves of two keys to pairs */
    for (int i = 0; i < LANES; i++) order[2 * i] = (short)i, order[2 * i + 1] = (short)(LANES + i);
    __m512i paired = _mm512_loadu_si512(order);
    for (int64_t j = 0; j < count; j += 2) {
        __m512 both[2];
        EACH for (int i = 0; i < 2; i++) {
            __m512 below = _mm512_fmsub_ps(_mm512_loadu_ps(scores + (j + i) * LANES), times, moved);
            both[i] = j + i < tokens ? power_of_two(below) : _mm512_setzero_ps();
            sums[i] = _mm512_add_ps(sums[i], both[i]);
        }
        __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(both[1], both[0]);
        _mm512_storeu_si512(scores + j / 2 * LANES, _mm512_permutexvar_epi16(paired, halves));
    }
    return _mm512_div_ps(_mm512_set1_ps(1.0f), _mm512_add_ps(sums[0], sums[1]));
}

/* As `attend`; `out` in bf16. */
TILED static void attend_in_tiles(const head *h, uint16_t *out, int64_t to, const desk *d) {
    int64_t width = h->heads * h->size, stride = 3 * width, after = LANES * d->size / 2, below = LANES * d->count;
    take_keys(h, d);
    for (int64_t start = 0; start < h->tokens; start += 2 * LANES) {
        int64_t rows = h->tokens - start, sets = rows > LANES ? 2 : 1; /* of sixteen queries */
        for (int64_t s = 0; s < sets; s++)
            for (int64_t f = 0; f < d->size; f += PAIRS) {
                __m512 pairs[LANES];
                load_pairs(h->qkv, h->at + (start + s * LANES) * stride + f, stride, rows - s * LANES, h->size - f, pairs);
                turn(pairs);
                EACH for (int p = 0; p < LANES; p++) _mm512_storeu_ps(d->queries + s * after + (f / 2 + p) * LANES, pairs[p]);
            }
        for (int64_t j = 0; j < d->count; j += 2 * LANES) {
            CLEAR_TILES
            for (int64_t f = 0; f < d->size; f += PAIRS)
                TILES_BY_TILES(d->keys + j * d->size + f, LANES * d->size, 2 * d->size, d->queries + f / 2 * LANES, after)
            float *scores = d->scores + j * LANES;
            STORE_TILES(scores, LANES * LANES, below)
        }
        __m512 times[2];
        for (int64_t s = 0; s < sets; s++) times[s] = shares(d->scores + s * below, h->tokens, d->count, 1.0f / sqrtf((float)h->size));
        for (int64_t f = 0; f < h->size; f += 2 * LANES) {
            CLEAR_TILES
            for (int64_t j = 0; j < d->count; j += PAIRS)
                TILES_BY_TILES(d->values + f * d->count + j, LANES * d->count, 2 * d->count, d->scores + j / 2 * LANES, below)
            STORE_TILES(d->found, LANES * LANES, 2 * LANES * LANES)
            for (int64_t s = 0; s < sets; s++)
                for (int64_t n = 0; n < 2 && f + n * LANES < h->size; n++) {
                    __m512 found[LANES];
                    const float *made = d->found + (2 * s + n) * LANES * LANES;
                    EACH for (int i = 0; i < LANES; i++) found[i] = _mm512_mul_ps(_mm512_loadu_ps(made + i * LANES), times[s]);
                    turn(found);
                    uint16_t *place = out + to + (start + s * LANES) * width + f + n * LANES;
                    EACH for (int i = 0; i < LANES; i++)
                        if (s * LANES + i < rows)
                            _mm256_storeu_si256((__m256i *)(place + i * width), (__m256i)_mm512_cvtneps_pbh(found[i]));
                }
        }
    }
}

/* A batch: sequence i is the tokens from offsets[i] to offsets[i + 1]. */
typedef struct {
    const void *qkv;
    const int64_t *offsets;
    int64_t sequences, longest, heads, size;
    dropout drop;
    int32_t bf16;
} batch;

/* One head of a sequence, and where its output goes; in arrays that begin with token `origin`. */
static head head_of(const batch *b, int64_t unit, int64_t origin, int64_t *to) {
    int64_t start = b->offsets[unit / b->heads], number = unit % b->heads, width = b->heads * b->size;
    *to = (start - origin) * width + number * b->size;
    return (head){b->qkv, (start - origin) * 3 * width + number * b->size, b->offsets[unit / b->heads + 1] - start,
                  b->heads, b->size, start * b->heads + number};
}

static int attends_in_tiles(const batch *b) { return b->bf16 && (features & USES_TILES); }

/* Bytes that a thread needs for it. */
static int64_t attend_bytes(const batch *b) {
    int64_t count = round_up(b->longest, KEYS);
    return attends_in_tiles(b) ? desk_bytes(b->longest, b->size) : 4 * (2 * b->size * count + QUERIES * (b->size + count));
}

static void attend_unit(const batch *b, int64_t unit, int64_t origin, void *out, float *logs, char *scratch) {
    int64_t to;
    head h = head_of(b, unit, origin, &to);
    if (attends_in_tiles(b)) {
        desk d = desk_at(scratch, h.tokens, h.size);
        attend_in_tiles(&h, out, to, &d);
    } else
        (b->bf16 ? attend_bf16 : attend_fp32)(&h, &b->drop, out, to, logs, (float *)scratch);
}

#endif
