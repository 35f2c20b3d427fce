/* Attention over packed sequences in bf16, forward and backward, by AMX.
 *
 * Scores lie with keys as rows and sixteen queries as columns, so that a softmax is a step of vectors, key by key. */

#ifndef BOTHWAYS_TILES
#define BOTHWAYS_TILES

#include "attention.h"
#include "dense_tiles.h"

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

/* What a thread does before and after it works with tiles, where there are any. */
static void begin(void) {
    if (features & USES_TILES) begin_tiles();
}

static void end(void) {
    if (features & USES_TILES) end_tiles();
}

/* Pairs of features of sixteen tokens from place `at` on, `stride` apart; 0 where there is no token or no feature. */
KERNEL void load_pairs(const uint16_t *from, int64_t at, int64_t stride, int64_t tokens, int64_t count, __m512 pairs[LANES]) {
    __mmask16 held = first(count / 2);
    EACH for (int i = 0; i < LANES; i++)
        pairs[i] = _mm512_maskz_loadu_ps(i < tokens ? held : 0, (const float *)(from + at + (i < tokens ? i * stride : 0)));
}

/* Two tiles of rows by two of columns, or by one where there are no more; the second lies `below` or `after` the first. */
#define CLEAR_TILES    \
    _tile_zero(0);     \
    _tile_zero(1);     \
    _tile_zero(2);     \
    _tile_zero(3);
#define TILES_BY_TILES(rows, below, stride, columns, after, wide)  \
    {                                                              \
        LOAD_TILE(4, rows, stride);                                \
        LOAD_TILE(6, columns, wide);                               \
        LOAD_TILE(5, (rows) + (below), stride);                    \
        _tile_dpbf16ps(0, 4, 6);                                   \
        _tile_dpbf16ps(1, 5, 6);                                   \
        if (sets == 2) {                                           \
            LOAD_TILE(7, (columns) + (after), wide);               \
            _tile_dpbf16ps(2, 4, 7);                               \
            _tile_dpbf16ps(3, 5, 7);                               \
        }                                                          \
    }
#define STORE_TILES(to, below, after, stride)                      \
    _tile_stored(0, to, stride);                                   \
    _tile_stored(1, (to) + (below), stride);                       \
    if (sets == 2) {                                               \
        _tile_stored(2, (to) + (after), stride);                   \
        _tile_stored(3, (to) + (after) + (below), stride);         \
    }
#define TILE_NUMBERS (LANES * LANES)

/* Tokens as rows of features, in bf16, up to whole numbers of pairs of both; what is filled up is 0. */
KERNEL void take_rows(const uint16_t *from, int64_t at, int64_t stride, int64_t tokens, int64_t features, uint16_t *to) {
    int64_t count = round_up(tokens, PAIRS), size = round_up(features, PAIRS);
    for (int64_t f = 0; f < size; f += PAIRS) {
        __mmask32 held = features - f >= PAIRS ? 0xffffffff : 0xffff;
        for (int64_t j = 0; j < count; j++) {
            __mmask32 mine = j < tokens ? held : 0;
            _mm512_storeu_si512(to + j * size + f, _mm512_maskz_loadu_epi16(mine, from + at + (mine ? j * stride : 0) + f));
        }
    }
}

/* The same as rows of tokens, for each feature. */
KERNEL void take_columns(const uint16_t *from, int64_t at, int64_t stride, int64_t tokens, int64_t features, uint16_t *to) {
    short even[PAIRS], odd[PAIRS]; /* places of a pair's first and second features in two vectors */
    for (int i = 0; i < PAIRS; i++) even[i] = (short)(2 * i), odd[i] = (short)(2 * i + 1);
    __m512i firsts = _mm512_loadu_si512(even), seconds = _mm512_loadu_si512(odd);
    int64_t count = round_up(tokens, PAIRS);
    for (int64_t j = 0; j < count; j += PAIRS)
        for (int64_t f = 0; f < features; f += PAIRS) {
            __m512 left[LANES], right[LANES];
            load_pairs(from, at + j * stride + f, stride, tokens - j, features - f, left);
            load_pairs(from, at + (j + LANES) * stride + f, stride, tokens - j - LANES, features - f, right);
            turn(left), turn(right);
            EACH for (int p = 0; p < LANES; p++) {
                __m512i a = _mm512_castps_si512(left[p]), b = _mm512_castps_si512(right[p]);
                uint16_t *row = to + (f + 2 * p) * count + j;
                _mm512_storeu_si512(row, _mm512_permutex2var_epi16(a, firsts, b));
                _mm512_storeu_si512(row + count, _mm512_permutex2var_epi16(a, seconds, b));
            }
        }
}

/* Sixteen tokens as columns of pairs of features. */
KERNEL void take_pairs(const uint16_t *from, int64_t at, int64_t stride, int64_t tokens, int64_t features, float *to) {
    for (int64_t f = 0; f < features; f += PAIRS) {
        __m512 pairs[LANES];
        load_pairs(from, at + f, stride, tokens, features - f, pairs);
        turn(pairs);
        EACH for (int p = 0; p < LANES; p++) _mm512_storeu_ps(to + (f / 2 + p) * LANES, pairs[p]);
    }
}

/* Thirty-two tokens as rows of pairs of them, for each feature. */
KERNEL void take_twos(const uint16_t *from, int64_t at, int64_t stride, int64_t tokens, int64_t features, float *to) {
    int64_t size = round_up(features, PAIRS);
    for (int64_t p = 0; p < LANES; p++)
        for (int64_t f = 0; f < size; f += LANES) {
            __m256i two[2];
            EACH for (int i = 0; i < 2; i++) {
                int held = 2 * p + i < tokens && f < features;
                two[i] = held ? _mm256_loadu_si256((const __m256i *)(from + at + (2 * p + i) * stride + f)) : _mm256_setzero_si256();
            }
            __m512i above = _mm512_slli_epi32(_mm512_cvtepu16_epi32(two[1]), 16);
            _mm512_storeu_si512(to + p * size + f, _mm512_or_si512(_mm512_cvtepu16_epi32(two[0]), above));
        }
}

/* The reverse of `turn`ing features of sixteen tokens to rows: up to sixteen features of each, in bf16. */
TILED static inline void give_columns(const float *from, __m512 times, int64_t tokens, uint16_t *to, int64_t stride) {
    __m512 found[LANES];
    EACH for (int i = 0; i < LANES; i++) found[i] = _mm512_mul_ps(_mm512_loadu_ps(from + i * LANES), times);
    turn(found);
    EACH for (int i = 0; i < LANES; i++)
        if (i < tokens) _mm256_storeu_si256((__m256i *)(to + i * stride), (__m256i)_mm512_cvtneps_pbh(found[i]));
}

/* What a head keeps: keys by rows, values by features; and of two times sixteen queries themselves, scores, and what they find. */
typedef struct {
    uint16_t *keys, *values;
    float *queries, *scores, *found;
    int64_t count, size; /* of keys and features, filled up */
} desk;

static int64_t desk_bytes(int64_t tokens, int64_t features) {
    int64_t count = round_up(tokens, PAIRS), size = round_up(features, PAIRS);
    return 4 * count * size + 4 * LANES * (size + 2 * count) + 16 * TILE_NUMBERS;
}

static desk desk_at(char *place, int64_t tokens, int64_t features) {
    desk d = {.count = round_up(tokens, PAIRS), .size = round_up(features, PAIRS)};
    d.keys = (uint16_t *)place;
    d.values = d.keys + d.count * d.size;
    d.queries = (float *)(d.values + d.count * d.size);
    d.scores = d.queries + LANES * d.size;
    d.found = d.scores + 2 * LANES * d.count;
    return d;
}

/* For the dropouts of sixteen queries, `heads` apart, from a row on: the halves of their keys. */
typedef struct {
    __m512i low, high;
} draws;

KERNEL draws draws_of(const dropout *drop, int64_t row, int64_t heads) {
    int32_t low[LANES], high[LANES];
    for (int i = 0; i < LANES; i++) {
        uint64_t key = draw_key(drop->seed, row + i * heads);
        low[i] = (int32_t)key, high[i] = (int32_t)(key >> 32);
    }
    return (draws){_mm512_loadu_si512(low), _mm512_loadu_si512(high)};
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

#define LOG2E 1.44269504f

/* The places that make pairs of the halves of two keys. */
KERNEL __m512i paired(void) {
    short order[PAIRS];
    for (int i = 0; i < LANES; i++) order[2 * i] = (short)i, order[2 * i + 1] = (short)(LANES + i);
    return _mm512_loadu_si512(order);
}

/* Scores of keys by sixteen queries become e^(score − the largest) in pairs of keys, in bf16, in place, and some are dropped; what
 * is given is one over their sums, and in `logs` the logarithm of these. */
TILED static inline __m512 shares(float *scores, int64_t tokens, int64_t count, float scale, const dropout *drop, draws keys,
                                  float logs[LANES]) {
    __m512 tops[4], sums[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()}; /* several, so that none waits for the one before */
    EACH for (int i = 0; i < 4; i++) tops[i] = _mm512_set1_ps(-INFINITY);
    for (int64_t j = 0; j < count; j += 4)
        EACH for (int i = 0; i < 4; i++)
            if (j + i < tokens) tops[i] = _mm512_max_ps(tops[i], _mm512_loadu_ps(scores + (j + i) * LANES));
    __m512 most = _mm512_max_ps(_mm512_max_ps(tops[0], tops[1]), _mm512_max_ps(tops[2], tops[3]));
    __m512 times = _mm512_set1_ps(scale * LOG2E);
    __m512i order = paired();
    for (int64_t j = 0; j < count; j += 2) {
        __m512 both[2];
        EACH for (int i = 0; i < 2; i++) {
            __m512 below = _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(scores + (j + i) * LANES), most), times);
            both[i] = j + i < tokens ? power_of_two(below) : _mm512_setzero_ps();
            sums[i] = _mm512_add_ps(sums[i], both[i]);
            if (drop->below) both[i] = _mm512_mul_ps(both[i], mixed(drop, _mm512_set1_epi32((int32_t)(j + i)), keys.low, keys.high));
        }
        __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(both[1], both[0]);
        _mm512_storeu_si512(scores + j / 2 * LANES, _mm512_permutexvar_epi16(order, halves));
    }
    __m512 sum = _mm512_add_ps(sums[0], sums[1]);
    if (logs) {
        float found[LANES];
        _mm512_storeu_ps(found, sum);
        for (int i = 0; i < LANES; i++) found[i] = logf(found[i]);
        _mm512_storeu_ps(logs, _mm512_fmadd_ps(most, _mm512_set1_ps(scale), _mm512_loadu_ps(found)));
    }
    return _mm512_div_ps(_mm512_set1_ps(1.0f), sum);
}

/* As `attend`; `out` in bf16. */
TILED static void attend_in_tiles(const head *h, const dropout *drop, uint16_t *out, int64_t to, float *logs, const desk *d) {
    int64_t width = h->heads * h->size, stride = 3 * width, after = LANES * d->size / 2, below = LANES * d->count;
    float scale = 1.0f / sqrtf((float)h->size);
    take_rows(h->qkv, h->at + width, stride, h->tokens, h->size, d->keys);
    take_columns(h->qkv, h->at + 2 * width, stride, h->tokens, h->size, d->values);
    for (int64_t start = 0; start < h->tokens; start += 2 * LANES) {
        int64_t rows = h->tokens - start, sets = rows > LANES ? 2 : 1; /* of sixteen queries */
        for (int64_t s = 0; s < sets; s++)
            take_pairs(h->qkv, h->at + (start + s * LANES) * stride, stride, rows - s * LANES, h->size, d->queries + s * after);
        for (int64_t j = 0; j < d->count; j += 2 * LANES) {
            CLEAR_TILES
            for (int64_t f = 0; f < d->size; f += PAIRS)
                TILES_BY_TILES(d->keys + j * d->size + f, LANES * d->size, 2 * d->size, d->queries + f / 2 * LANES, after, LINE)
            STORE_TILES(d->scores + j * LANES, TILE_NUMBERS, below, LINE)
        }
        __m512 times[2];
        for (int64_t s = 0; s < sets; s++) {
            int64_t row = h->row + (start + s * LANES) * h->heads;
            float found[LANES];
            draws keys = drop->below ? draws_of(drop, row, h->heads) : (draws){0};
            times[s] = shares(d->scores + s * below, h->tokens, d->count, scale, drop, keys, logs ? found : NULL);
            for (int64_t i = 0; logs && i < least(LANES, rows - s * LANES); i++) logs[row + i * h->heads] = found[i];
        }
        for (int64_t f = 0; f < h->size; f += 2 * LANES) {
            CLEAR_TILES
            for (int64_t j = 0; j < d->count; j += PAIRS)
                TILES_BY_TILES(d->values + f * d->count + j, LANES * d->count, 2 * d->count, d->scores + j / 2 * LANES, below, LINE)
            STORE_TILES(d->found, TILE_NUMBERS, 2 * TILE_NUMBERS, LINE)
            for (int64_t s = 0; s < sets; s++)
                for (int64_t n = 0; n < 2 && f + n * LANES < h->size; n++)
                    give_columns(d->found + (2 * s + n) * TILE_NUMBERS, times[s], rows - s * LANES,
                                 out + to + (start + s * LANES) * width + f + n * LANES, width);
        }
    }
}

/* What a head keeps for its gradients: keys and values by rows, keys by features; of two times sixteen queries these and what lies
 * above them, in pairs of features and in pairs of queries; scores of 32 keys, and gradients of their shares; for every key the
 * shares that values were multiplied by and the gradients of scores, by rows, these also in pairs of keys; the gradients. */
typedef struct {
    uint16_t *keys, *values, *columns, *shares, *of_scores;
    float *queries, *above, *query_twos, *above_twos, *scores, *of_shares, *of_pairs, *of_queries, *of_keys, *of_values;
    int64_t count, size, bytes;
} bureau;

static bureau bureau_at(char *place, int64_t tokens, int64_t features) {
    bureau b = {.count = round_up(tokens, PAIRS), .size = round_up(features, PAIRS)};
    int64_t whole = b.count * b.size, next = 0;
#define TAKE(name, numbers) b.name = (void *)(place + next), next += (int64_t)sizeof *b.name * (numbers)
    TAKE(keys, whole), TAKE(values, whole), TAKE(columns, whole), TAKE(shares, PAIRS * b.count), TAKE(of_scores, PAIRS * b.count);
    TAKE(queries, LANES * b.size), TAKE(above, LANES * b.size), TAKE(query_twos, LANES * b.size), TAKE(above_twos, LANES * b.size);
    TAKE(scores, 4 * TILE_NUMBERS), TAKE(of_shares, 4 * TILE_NUMBERS), TAKE(of_pairs, LANES * b.count);
    TAKE(of_queries, 4 * TILE_NUMBERS), TAKE(of_keys, whole), TAKE(of_values, whole);
#undef TAKE
    b.bytes = next;
    return b;
}

/* Σ of a gradient times what was found, for sixteen queries. */
TILED static inline __m512 inners(const uint16_t *gradient, const uint16_t *found, int64_t width, int64_t rows, int64_t size) {
    float inner[LANES] = {0};
    for (int64_t i = 0; i < least(LANES, rows); i++) {
        __m512 sum = _mm512_setzero_ps();
        for (int64_t f = 0; f < size; f += LANES)
            sum = _mm512_fmadd_ps(load(gradient, i * width + f, 1), load(found, i * width + f, 1), sum);
        inner[i] = _mm512_reduce_add_ps(sum);
    }
    return _mm512_loadu_ps(inner);
}

/* sums += rows · columns for all keys and features, of 32 queries. */
TILED static inline void add_tiles(const bureau *b, const uint16_t *rows, const float *columns, float *sums) {
    const int sets = 2;
    for (int64_t j = 0; j < b->count; j += 2 * LANES)
        for (int64_t f = 0; f < b->size; f += 2 * LANES) {
            float *to = sums + j * b->size + f;
            int64_t below = LANES * b->size, stride = 4 * b->size;
            LOAD_TILE(0, to, stride);
            LOAD_TILE(1, to + below, stride);
            LOAD_TILE(2, to + LANES, stride);
            LOAD_TILE(3, to + LANES + below, stride);
            TILES_BY_TILES(rows + j * PAIRS, LANES * PAIRS, LINE, columns + f, LANES, stride)
            STORE_TILES(to, below, LANES, stride)
        }
}

/* As `attend_backward`, in bf16. */
TILED static void attend_backward_in_tiles(const head *h, const dropout *drop, const uint16_t *found, const uint16_t *gradient,
                                           int64_t to, const float *logs, uint16_t *out, const bureau *b) {
    int64_t width = h->heads * h->size, stride = 3 * width, after = LANES * b->size / 2;
    float scale = 1.0f / sqrtf((float)h->size);
    __m512 times = _mm512_set1_ps(scale), one = _mm512_set1_ps(1.0f);
    __m512i order = paired();
    take_rows(h->qkv, h->at + width, stride, h->tokens, h->size, b->keys);
    take_rows(h->qkv, h->at + 2 * width, stride, h->tokens, h->size, b->values);
    take_columns(h->qkv, h->at + width, stride, h->tokens, h->size, b->columns);
    memset(b->of_keys, 0, (size_t)(8 * b->count * b->size)); /* and of values, which follow */
    for (int64_t start = 0; start < h->tokens; start += 2 * LANES) {
        int64_t rows = h->tokens - start, sets = 2;
        __m512 inner[2], log[2];
        draws keys[2];
        memset(keys, 0, sizeof keys);
        take_twos(h->qkv, h->at + start * stride, stride, rows, h->size, b->query_twos);
        take_twos(gradient, to + start * width, width, rows, h->size, b->above_twos);
        for (int64_t s = 0; s < 2; s++) {
            int64_t here = start + s * LANES, left = rows - s * LANES, row = h->row + here * h->heads;
            take_pairs(h->qkv, h->at + here * stride, stride, left, h->size, b->queries + s * after);
            take_pairs(gradient, to + here * width, width, left, h->size, b->above + s * after);
            inner[s] = inners(gradient + to + here * width, found + to + here * width, width, left, h->size);
            float those[LANES];
            for (int64_t i = 0; i < LANES; i++) those[i] = i < left ? logs[row + i * h->heads] : INFINITY; /* no share of any */
            log[s] = _mm512_loadu_ps(those);
            if (drop->below) keys[s] = draws_of(drop, row, h->heads);
        }
        for (int64_t block = 0; block < b->count; block += 2 * LANES) {
            CLEAR_TILES
            for (int64_t f = 0; f < b->size; f += PAIRS)
                TILES_BY_TILES(b->keys + block * b->size + f, LANES * b->size, 2 * b->size, b->queries + f / 2 * LANES, after, LINE)
            STORE_TILES(b->scores, TILE_NUMBERS, 2 * TILE_NUMBERS, LINE)
            CLEAR_TILES
            for (int64_t f = 0; f < b->size; f += PAIRS)
                TILES_BY_TILES(b->values + block * b->size + f, LANES * b->size, 2 * b->size, b->above + f / 2 * LANES, after, LINE)
            STORE_TILES(b->of_shares, TILE_NUMBERS, 2 * TILE_NUMBERS, LINE)
            for (int64_t j = 0; j < 2 * LANES; j += 2) {
                __m512 share[2][2], of_score[2][2]; /* of two keys and of both sets */
                EACH for (int i = 0; i < 2; i++) EACH for (int s = 0; s < 2; s++) {
                    int64_t at = (j + i) * LANES + s * 2 * TILE_NUMBERS, key = block + j + i;
                    __m512 below = _mm512_fmsub_ps(_mm512_loadu_ps(b->scores + at), _mm512_set1_ps(scale), log[s]), raised;
                    raised = key < h->tokens ? power_of_two(_mm512_mul_ps(below, _mm512_set1_ps(LOG2E))) : _mm512_setzero_ps();
                    __m512 factor = one;
                    if (drop->below) factor = mixed(drop, _mm512_set1_epi32((int32_t)key), keys[s].low, keys[s].high);
                    __m512 of_share = _mm512_fmsub_ps(_mm512_loadu_ps(b->of_shares + at), factor, inner[s]);
                    share[i][s] = _mm512_mul_ps(raised, factor);
                    of_score[i][s] = _mm512_mul_ps(_mm512_mul_ps(raised, of_share), times);
                }
                EACH for (int i = 0; i < 2; i++) {
                    int64_t at = (block + j + i) * PAIRS;
                    _mm512_storeu_si512(b->shares + at, (__m512i)_mm512_cvtne2ps_pbh(share[i][1], share[i][0]));
                    _mm512_storeu_si512(b->of_scores + at, (__m512i)_mm512_cvtne2ps_pbh(of_score[i][1], of_score[i][0]));
                }
                EACH for (int s = 0; s < 2; s++) {
                    __m512i halves = (__m512i)_mm512_cvtne2ps_pbh(of_score[1][s], of_score[0][s]);
                    float *pairs = b->of_pairs + s * LANES * b->count / 2 + (block + j) / 2 * LANES;
                    _mm512_storeu_si512(pairs, _mm512_permutexvar_epi16(order, halves));
                }
            }
        }
        add_tiles(b, b->shares, b->above_twos, b->of_values);
        add_tiles(b, b->of_scores, b->query_twos, b->of_keys);
        for (int64_t f = 0; f < h->size; f += 2 * LANES) {
            CLEAR_TILES
            for (int64_t j = 0; j < b->count; j += PAIRS)
                TILES_BY_TILES(b->columns + f * b->count + j, LANES * b->count, 2 * b->count, b->of_pairs + j / 2 * LANES,
                               LANES * b->count / 2, LINE)
            STORE_TILES(b->of_queries, TILE_NUMBERS, 2 * TILE_NUMBERS, LINE)
            for (int64_t s = 0; s < 2; s++)
                for (int64_t n = 0; n < 2 && f + n * LANES < h->size; n++)
                    give_columns(b->of_queries + (2 * s + n) * TILE_NUMBERS, one, rows - s * LANES,
                                 out + h->at + (start + s * LANES) * stride + f + n * LANES, stride);
        }
    }
    for (int64_t j = 0; j < h->tokens; j++)
        for (int64_t f = 0; f < h->size; f += LANES) {
            uint16_t *place = out + h->at + width + j * stride + f;
            __m512 of_key = _mm512_loadu_ps(b->of_keys + j * b->size + f), of_value = _mm512_loadu_ps(b->of_values + j * b->size + f);
            _mm256_storeu_si256((__m256i *)place, (__m256i)_mm512_cvtneps_pbh(of_key));
            _mm256_storeu_si256((__m256i *)(place + width), (__m256i)_mm512_cvtneps_pbh(of_value));
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
        attend_in_tiles(&h, &b->drop, out, to, logs, &d);
    } else
        (b->bf16 ? attend_bf16 : attend_fp32)(&h, &b->drop, out, to, logs, (float *)scratch);
}

#endif
