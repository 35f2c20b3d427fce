/* The microkernels of linear layers without AMX, for one format of numbers. The unit that includes
 * this file defines FORMAT, `multiply_add` and KERNELS, the name of its table.
 *
 * A microkernel computes `rows` rows times one panel (2 vectors of outputs) or two (4 vectors), and
 * keeps all sums in registers: 12 × 2 or 6 × 4, 24 of the 32. At every step it loads the same 4
 * bytes of each output, which are adjacent in a panel, and multiplies them by the same 4 bytes
 * of each row, broadcast to all lanes:
 *
 *                              panel:  [w0 w1 … w15] [w16 … w31]     one line each
 *     row 0, 4 bytes  → [x x … x]  ×         +=            +=        sums[0][0], sums[0][1]
 *     row 1, 4 bytes  → [x x … x]  ×         +=            +=        sums[1][0], sums[1][1]
 *
 * Two panels need half as many broadcasts for each product; one panel is read for twice as many
 * rows at a time. */

#include "linear_simd.h"

#include <string.h>

INLINE void multiply_panel(const linear *l, int64_t output, const packed_rows *x, int64_t row,
                           const destination *into, prefetcher *prefetch, const int rows,
                           const int vectors) {
    int64_t length = row_bytes(l, FORMAT);
    const char *left = panel_at(l, output), *codes = x->codes.base + row * length,
               *fetch = prefetch->next;
    /* Behind the last panel there is no second one: compute the first twice, and write it once. */
    const char *right = output + PANEL < l->out_features ? panel_at(l, output + PANEL) : left;
    __m512 sums[MAX_TILE_ROWS][4];
    UNROLL
    for (int i = 0; i < rows; i++) {
        UNROLL
        for (int n = 0; n < vectors; n++) sums[i][n] = _mm512_setzero_ps();
    }
    for (int64_t f = 0; f < length; f += 4) {
        __m512i weights[4];
        UNROLL
        for (int n = 0; n < vectors; n++)
            weights[n] = _mm512_loadu_si512((n < 2 ? left : right) + f * PANEL + n % 2 * LINE);
        for (int64_t q = 0; q < prefetch->bytes; q += LINE, fetch += LINE)
            _mm_prefetch(fetch, _MM_HINT_T1);
        UNROLL
        for (int i = 0; i < rows; i++) {
            int32_t four_bytes;
            memcpy(&four_bytes, codes + i * length + f, 4);
            __m512i broadcast = _mm512_set1_epi32(four_bytes);
            UNROLL
            for (int n = 0; n < vectors; n++)
                sums[i][n] = multiply_add(sums[i][n], broadcast, weights[n]);
        }
    }
    prefetch->next = fetch;
    UNROLL
    for (int n = 0; n < vectors; n++) {
        if (l->out_features <= output + n * LANES) break;
        output_columns c = load_columns(l, output + n * LANES);
        UNROLL
        for (int i = 0; i < rows; i++) {
            __m512 result = epilogue16(&c, sums[i][n], FORMAT, x->scales + row + i, into->gelu);
            char *to = address_of(&into->rows, row + i, (output + n * LANES) * into->format);
            store16_masked(to, 0, c.mask, result, into->format == BF16);
        }
    }
}

/* One function for each number of rows and panels: both have to be constants. */
#define MICROKERNEL(rows, panels)                                                                 \
    static void multiply_##rows##x##panels(const linear *l, int64_t output, const packed_rows *x, \
                                           int64_t row, const destination *into,                  \
                                           prefetcher *prefetch) {                                \
        multiply_panel(l, output, x, row, into, prefetch, rows, 2 * panels);                      \
    }
/* clang-format off */
MICROKERNEL(1, 1) MICROKERNEL(2, 1) MICROKERNEL(3, 1) MICROKERNEL(4, 1)
MICROKERNEL(5, 1) MICROKERNEL(6, 1) MICROKERNEL(7, 1) MICROKERNEL(8, 1)
MICROKERNEL(9, 1) MICROKERNEL(10, 1) MICROKERNEL(11, 1) MICROKERNEL(12, 1)
MICROKERNEL(1, 2) MICROKERNEL(2, 2) MICROKERNEL(3, 2)
MICROKERNEL(4, 2) MICROKERNEL(5, 2) MICROKERNEL(6, 2)

microkernel *const KERNELS[2][MAX_TILE_ROWS] = {
    {multiply_1x1, multiply_2x1, multiply_3x1, multiply_4x1, multiply_5x1, multiply_6x1,
     multiply_7x1, multiply_8x1, multiply_9x1, multiply_10x1, multiply_11x1, multiply_12x1},
    {multiply_1x2, multiply_2x2, multiply_3x2, multiply_4x2, multiply_5x2, multiply_6x2},
};
