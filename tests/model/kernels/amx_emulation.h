/* AMX instructions as functions, after the pseudocode of Intel's manual (volume 2, chapter 3), so that
 * the code for AMX runs, under sanitizers too, on processors without it. Included before the sources
 * by `build_kernels.py --emulate-amx`.
 *
 * Tile memory is read and written by ordinary loads and stores, whose bounds AddressSanitizer checks. */

#ifndef AMX_EMULATION_H
#define AMX_EMULATION_H

#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* One for all source files that include this one, hence weak. */
struct emulated_tiles {
    uint8_t rows[8][16][64];
    int configured;
};
__thread struct emulated_tiles emulated_tiles __attribute__((weak));

static inline void emulated_need_config(void) {
    if (!emulated_tiles.configured) abort(); /* the processor raises #UD */
}

static inline void emulated_loadconfig(const void *config) {
    uint8_t shape[64];
    memcpy(shape, config, 64);
    if (shape[0] != 1) abort();
    for (int i = 0; i < 8; i++)
        if (shape[16 + 2 * i] != 64 || shape[48 + i] != 16) abort(); /* all tiles are whole here */
    memset(&emulated_tiles, 0, sizeof emulated_tiles);
    emulated_tiles.configured = 1;
}

static inline void emulated_load(int tile, const void *from, int64_t stride) {
    emulated_need_config();
    for (int i = 0; i < 16; i++)
        memcpy(emulated_tiles.rows[tile][i], (const char *)from + i * stride, 64);
}

static inline void emulated_store(int tile, void *to, int64_t stride) {
    emulated_need_config();
    for (int i = 0; i < 16; i++) memcpy((char *)to + i * stride, emulated_tiles.rows[tile][i], 64);
}

static inline void emulated_zero(int tile) {
    emulated_need_config();
    memset(emulated_tiles.rows[tile], 0, sizeof emulated_tiles.rows[tile]);
}

/* bf16 → fp32; denormals are zeros. */
static inline float emulated_widen(uint16_t half) {
    uint32_t bits = (uint32_t)half << 16;
    if (!(bits & 0x7f800000u)) bits &= 0x80000000u;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline float emulated_flush(float x) {
    return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x;
}

/* Registers only: nothing to check, and many times faster without the checks. */
#define EMULATED_REGISTERS __attribute__((no_sanitize("address", "undefined"), optimize("O3")))

/* Even and odd products are added up apart, then both to the sum. */
EMULATED_REGISTERS static inline void emulated_dpbf16ps(int sum, int left, int right) {
    emulated_need_config();
    for (int m = 0; m < 16; m++) {
        float parts[2][16] = {{0}}, total[16];
        for (int k = 0; k < 32; k++) {
            uint16_t a, pairs[32];
            memcpy(&a, emulated_tiles.rows[left][m] + 2 * k, 2);
            memcpy(pairs, emulated_tiles.rows[right][k / 2], 64);
            float x = emulated_widen(a);
            for (int n = 0; n < 16; n++) {
                float y = emulated_widen(pairs[2 * n + k % 2]);
                parts[k % 2][n] = emulated_flush(fmaf(x, y, parts[k % 2][n]));
            }
        }
        memcpy(total, emulated_tiles.rows[sum][m], 64);
        for (int n = 0; n < 16; n++) {
            float both = emulated_flush(parts[0][n] + parts[1][n]);
            total[n] = emulated_flush(emulated_flush(total[n]) + both);
        }
        memcpy(emulated_tiles.rows[sum][m], total, 64);
    }
}

/* Unsigned bytes times signed ones; int32 wraps. */
EMULATED_REGISTERS static inline void emulated_dpbusd(int sum, int left, int right) {
    emulated_need_config();
    for (int m = 0; m < 16; m++)
        for (int n = 0; n < 16; n++) {
            uint32_t total;
            memcpy(&total, emulated_tiles.rows[sum][m] + 4 * n, 4);
            for (int k = 0; k < 64; k++) {
                int8_t weight = (int8_t)emulated_tiles.rows[right][k / 4][4 * n + k % 4];
                total += (uint32_t)(emulated_tiles.rows[left][m][k] * weight);
            }
            memcpy(emulated_tiles.rows[sum][m] + 4 * n, &total, 4);
        }
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_zero
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_loadconfig(config) emulated_loadconfig(config)
#define _tile_release() ((void)(emulated_tiles.configured = 0))
#define _tile_loadd(tile, from, stride) emulated_load(tile, from, stride)
#define _tile_stored(tile, to, stride) emulated_store(tile, to, stride)
#define _tile_zero(tile) emulated_zero(tile)
#define _tile_dpbf16ps(sum, left, right) emulated_dpbf16ps(sum, left, right)
#define _tile_dpbusd(sum, left, right) emulated_dpbusd(sum, left, right)

#endif
