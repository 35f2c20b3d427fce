/* Linear layers by AMX: 32 rows times a panel of 32 outputs at a time, four tiles of sums.
 *
 * The epilogue of a block (scale, bias, GELU, store) takes the vector units as long as its products
 * take the tile unit. So each block's sums are stored to memory, and finished a few rows at a time
 * between the tile instructions of the next block.
 *
 * AMX has no products in fp32, but those in bf16 are sixteen times as fast as fp32 by vectors. An
 * fp32 number of 24 bits is the sum of three bf16 numbers of 8, a + b + c; of the nine products of
 * two such sums the six largest are computed:
 *
 *     x·w ≈ xa·wa + (xa·wb + xb·wa) + (xa·wc + xb·wb + xc·wa)
 *
 * The three left out are below the rounding of a product in fp32. Weights are split on the way, the
 * next panel while the tiles multiply by this one. */

#include "amx.h"
#include "linear_simd.h"

#include <cpuid.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

int amx_is_available(void) {
#ifdef EMULATED_AMX
    return 1;
#else
    unsigned a, b, c, d, needed = 1u << 22 | 1u << 24 | 1u << 25; /* AMX-BF16, AMX-TILE, AMX-INT8 */
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & needed) != needed) return 0;
    return !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */);
#endif
}

void amx_begin(void) {
    struct {
        uint8_t palette, start, unused[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    /* All eight tiles have 16 rows of 64 bytes: 16 × 32 bf16 or 16 × 64 int8 numbers, or 16 × 16
     * sums. Padding fills them, so one configuration serves every call. */
    for (int i = 0; i < 8; i++) shape.rows[i] = LANES, shape.bytes[i] = LINE;
    __asm__ volatile("" ::"r"(&shape)
                     : "memory"); /* some compilers think that only its first bytes are read */
    _tile_loadconfig(&shape);
}

void amx_end(void) { _tile_release(); }

/* ---- the epilogue ---- */

/* The sums of up to 32 rows by a panel, finished as far as `done`. */
typedef struct {
    float (*sums)[PANEL];
    int64_t output, row, rows, done;
    output_columns left, right;
} unfinished_block;

/* Finish the next `max_rows` rows; `add`: add to what is stored already. */
INLINE void finish_rows(unfinished_block *b, int64_t max_rows, const float *scales,
                        const destination *into, int add, int dtype, int format, int gelu) {
    int64_t end = minimum(b->rows, b->done + max_rows);
    for (int64_t i = b->done; i < end; i++) {
        const float *scale = scales + b->row + i;
        __m512 left = epilogue16(&b->left, _mm512_load_ps(b->sums[i]), dtype, scale, gelu);
        __m512 right =
            epilogue16(&b->right, _mm512_load_ps(b->sums[i] + LANES), dtype, scale, gelu);
        char *to = address_of(&into->rows, b->row + i, b->output * format);
        if (format == BF16) {
            __mmask32 mask = (__mmask32)b->right.mask << LANES | b->left.mask;
            _mm512_mask_storeu_epi16(to, mask, (__m512i)_mm512_cvtne2ps_pbh(right, left));
        } else if (format == SPLIT_BF16) {
            split_to_bf16(left, right, to, into->rows.line_stride);
        } else {
            char *next = to + into->rows.line_stride;
            if (add) {
                left = _mm512_add_ps(left, _mm512_maskz_loadu_ps(b->left.mask, to));
                right = _mm512_add_ps(right, _mm512_maskz_loadu_ps(b->right.mask, next));
            }
            _mm512_mask_storeu_ps(to, b->left.mask, left);
            _mm512_mask_storeu_ps(next, b->right.mask, right);
        }
    }
    b->done = end;
}

/* ---- splitting of weights ---- */

#define PREFETCH_FEATURES 96 /* how far ahead a panel is fetched before it is split */

/* A panel in fp32 on its way to one in SPLIT_BF16. Of each 32 features, that is 16 pairs, there are
 * three parts of 2 KiB each; a part has, for each pair, a line of outputs 0 to 15 and a line of
 * outputs 16 to 31. Pair p is (feature p, feature p + 16), as the rows' lines have them. */
typedef struct {
    const float *from;
    char *to;
    int64_t width, done, pairs;
} panel_splitter;

static panel_splitter start_splitting(const linear *l, int64_t output, range features, char *to) {
    int64_t width = features.to - features.from,
            pairs = output < l->out_features ? round_up(width, PANEL) / 2 : 0;
    return (panel_splitter){(const float *)panel_at(l, output) + features.from * PANEL, to, width,
                            0, pairs};
}

/* Split the next `max_pairs` pairs; 0 where there is no feature. */
INLINE void split_pairs(panel_splitter *s, int64_t max_pairs) {
    int64_t end = minimum(s->pairs, s->done + max_pairs);
    for (int64_t p = s->done; p < end; p++) {
        int64_t group = p / LANES, first = group * PANEL + p % LANES, second = first + LANES;
        char *to = s->to + group * 6 * TILE_BYTES + p % LANES * 2 * LINE;
        __mmask16 first_exists = first < s->width ? 0xffff : 0,
                  second_exists = second < s->width ? 0xffff : 0;
        UNROLL
        for (int n = 0; n < 2; n++) {
            const float *from = s->from + n * LANES;
            _mm_prefetch((const char *)(from + (first + PREFETCH_FEATURES) * PANEL), _MM_HINT_T1);
            _mm_prefetch((const char *)(from + (second + PREFETCH_FEATURES) * PANEL), _MM_HINT_T1);
            __m512 x = _mm512_maskz_loadu_ps(first_exists, from + first * PANEL);
            __m512 y = _mm512_maskz_loadu_ps(second_exists, from + second * PANEL);
            split_to_bf16(x, y, to + n * LINE, 2 * TILE_BYTES);
        }
    }
    s->done = end;
}

/* ---- products ---- */

/* Two tiles of rows: sixteen rows and the sixteen below; `part` of SPLIT_BF16, else 0. */
INLINE void load_rows(const char *above, const char *below, int part) {
    LOAD_TILE(4, above + part * TILE_BYTES, LINE);
    LOAD_TILE(5, below + part * TILE_BYTES, LINE);
}

/* Two tiles of outputs: the halves of a panel, whose lines alternate. */
INLINE void load_outputs(const char *panel, int part) {
    LOAD_TILE(6, panel + part * 2 * TILE_BYTES, 2 * LINE);
    LOAD_TILE(7, panel + part * 2 * TILE_BYTES + LINE, 2 * LINE);
}

/* The tiles of sums are   0 1   rows 4   with outputs 6 7.
 *                         2 3   rows 5                        */
INLINE void multiply_bf16(void) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
}

INLINE void multiply_int8(void) {
    _tile_dpbusd(0, 4, 6);
    _tile_dpbusd(1, 4, 7);
    _tile_dpbusd(2, 5, 6);
    _tile_dpbusd(3, 5, 7);
}

/* Load what the next of the six products of parts needs. In this order each needs one new part:
 * xc·wa, xb·wa, xb·wb, xa·wb, xa·wa, xa·wc. */
INLINE void load_parts(int product, const char *above, const char *below, const char *panel) {
    switch (product) {
    case 0: load_rows(above, below, 2), load_outputs(panel, 0); break;
    case 1: load_rows(above, below, 1); break;
    case 2: load_outputs(panel, 1); break;
    case 3: load_rows(above, below, 0); break;
    case 4: load_outputs(panel, 0); break;
    default: load_outputs(panel, 2);
    }
}

/* All rows, for the outputs [from, to) and these features alone, which in INT8 and BF16 are all. */
INLINE void multiply_features(const linear *l, range features, const packed_rows *x, int64_t count,
                              int64_t from, int64_t to, const destination *into_, int dtype,
                              int format, int gelu) {
    float sums[2][PANEL][PANEL] __attribute__((aligned(LINE))); /* of this block and the last */
    /* A step takes a line of each row, or in SPLIT_BF16 a line of each of the three parts. */
    int64_t step = dtype == FP32 ? 3 * LINE : LINE, add = features.from > 0,
            skipped = features.from / PANEL * step;
    int64_t length = dtype == FP32 ? round_up(features.to - features.from, PANEL) * SPLIT_BF16
                                   : row_bytes(l, dtype);
    /* How the other work is spread over the tile products of a block. */
    int64_t blocks = (count + PANEL - 1) / PANEL,
            products = length / step * (dtype == FP32 ? 6 : 1);
    int64_t rows_each = (PANEL + products - 1) / products,
            pairs_each = (LANES + 6 * blocks - 1) / (6 * blocks);
    int64_t fetched_each = (PANEL + blocks - 1) / blocks * LINE, turn = 0;
    const float *scales = x->scales;
    const destination into = *into_;
    unfinished_block last = {0};
    panel_splitter next = start_splitting(l, from, features, x->split_panels);
    for (int64_t output = from; output < to; output += PANEL) {
        const char *panel = panel_at(l, output),
                   *fetch = panel + length * PANEL; /* the next one, from far away */
        if (dtype == FP32) {
            split_pairs(&next, next.pairs); /* what is left of this panel */
            panel = next.to;
            char *other =
                panel == x->split_panels ? x->split_panels + length * PANEL : x->split_panels;
            next = start_splitting(l, output + PANEL, features, other);
        }
        for (int64_t row = 0; row < count; row += PANEL) {
            const char *rows =
                x->codes.base + row / LANES * x->codes.block_stride + skipped * LANES;
            unfinished_block block = {.sums = sums[turn++ % 2],
                                      .output = output,
                                      .row = row,
                                      .rows = minimum(PANEL, count - row),
                                      .left = load_columns(l, output),
                                      .right = load_columns(l, output + LANES)};
            if (add) block.left.bias = block.right.bias = _mm512_setzero_ps();
            zero_sums();
            for (int64_t f = 0; f < length; f += step) {
                const char *above = rows + f * LANES, *below = above + x->codes.block_stride,
                           *lines = panel + f * PANEL;
                if (dtype == FP32) {
                    UNROLL
                    for (int product = 0; product < 6; product++) {
                        load_parts(product, above, below, lines);
                        multiply_bf16();
                        split_pairs(&next, pairs_each);
                        finish_rows(&last, rows_each, scales, &into, (int)add, dtype, format, gelu);
                    }
                } else {
                    for (int64_t q = 0; q < fetched_each; q += LINE)
                        _mm_prefetch(fetch + q, _MM_HINT_T1);
                    fetch += fetched_each;
                    load_rows(above, below, 0);
                    load_outputs(lines, 0);
                    if (dtype == INT8)
                        multiply_int8();
                    else
                        multiply_bf16();
                    finish_rows(&last, rows_each, scales, &into, (int)add, dtype, format, gelu);
                }
            }
            _tile_stored(0, &block.sums[0][0], PANEL * 4);
            _tile_stored(1, &block.sums[0][LANES], PANEL * 4);
            _tile_stored(2, &block.sums[LANES][0], PANEL * 4);
            _tile_stored(3, &block.sums[LANES][LANES], PANEL * 4);
            last = block;
        }
    }
    finish_rows(&last, PANEL, scales, &into, (int)add, dtype, format, gelu);
}

/* One function for each dtype, output format and epilogue that occurs: all are constants. */
typedef void product(const linear *, range, const packed_rows *, int64_t, int64_t, int64_t,
                     const destination *);
#define PRODUCT(name, dtype, format, gelu)                                                 \
    static void name(const linear *l, range features, const packed_rows *x, int64_t count, \
                     int64_t from, int64_t to, const destination *into) {                  \
        multiply_features(l, features, x, count, from, to, into, dtype, format, gelu);     \
    }
PRODUCT(int8_to_fp32, INT8, FP32, 0)
PRODUCT(int8_to_fp32_gelu, INT8, FP32, 1)
PRODUCT(int8_to_bf16, INT8, BF16, 0)
PRODUCT(bf16_to_fp32, BF16, FP32, 0)
PRODUCT(bf16_to_bf16, BF16, BF16, 0)
PRODUCT(bf16_to_bf16_gelu, BF16, BF16, 1)
PRODUCT(fp32_to_fp32, FP32, FP32, 0)
PRODUCT(fp32_to_bf16, FP32, BF16, 0)
PRODUCT(fp32_to_split_gelu, FP32, SPLIT_BF16, 1)

/* GELU is only ever applied to what the next layer reads. */
static product *product_for(int dtype, const destination *into) {
    if (dtype == INT8)
        return into->format == BF16 ? int8_to_bf16 : into->gelu ? int8_to_fp32_gelu : int8_to_fp32;
    if (dtype == BF16)
        return into->format == FP32 ? bf16_to_fp32 : into->gelu ? bf16_to_bf16_gelu : bf16_to_bf16;
    return into->format == SPLIT_BF16 ? fp32_to_split_gelu
           : into->format == BF16     ? fp32_to_bf16
                                      : fp32_to_fp32;
}

#define SPLIT_DEPTH \
    384 /* features at a time in SPLIT_BF16: two panels of them stay in the second cache */

void linear_amx(const linear *l, const packed_rows *x, int64_t count, int64_t from, int64_t to,
                const destination *into) {
    product *multiply = product_for(l->dtype, into);
    int64_t depth = l->dtype == FP32 && into->format == FP32 ? SPLIT_DEPTH : l->in_features;
    for (int64_t f = 0; f < l->in_features; f += depth)
        multiply(l, (range){f, minimum(f + depth, l->in_features)}, x, count, from, to, into);
}
