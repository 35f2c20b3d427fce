/* AMX: eight tile registers of 16 rows × 64 bytes. A product of tiles adds, to a 16 × 16 tile of
 * fp32 or int32 sums, the products of 16 rows with 16 columns; the columns' tile has its numbers in
 * pairs (bf16) or fours (int8):
 *
 *     sums[i][j] += Σ_p  rows[i][2p] · columns[p][2j]  +  rows[i][2p + 1] · columns[p][2j + 1]
 *
 * Here a step always multiplies two tiles of rows (4, 5) by two of columns (6, 7) into four tiles
 * of sums (0 to 3): each loaded tile is used twice. Tile numbers are part of the instruction, hence
 * literals. */

#ifndef AMX_H
#define AMX_H

#include "simd.h"

#define TILE_BYTES (LANES * LINE)
#define TILE_NUMBERS (LANES * LANES) /* fp32 sums of a tile */

/* With a note for compilers that do not know that the instruction reads memory. */
#define LOAD_TILE(tile, from, stride)      \
    do {                                   \
        __asm__ volatile("" ::: "memory"); \
        _tile_loadd(tile, from, stride);   \
    } while (0)

INLINE void zero_sums(void) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
}

#endif
