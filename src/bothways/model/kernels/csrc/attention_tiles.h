/* Tiles for attention in bf16: products of two tiles by two, and the conversions from packed qkv. */

#ifndef ATTENTION_TILES_H
#define ATTENTION_TILES_H

#include "amx.h"

/* ---- two tiles of rows by two of columns ----
 *
 * Or by one set of columns, where `sets` is 1. The tiles of sums are
 *
 *     0 2   rows 4   with columns 6 7
 *     1 3   rows 5                      */

INLINE void multiply_tiles(const void *rows, int64_t next_rows, int64_t row_stride,
                           const void *columns, int64_t next_columns, int64_t column_stride,
                           const int64_t sets) {
    LOAD_TILE(4, rows, row_stride);
    LOAD_TILE(6, columns, column_stride);
    LOAD_TILE(5, (const char *)rows + next_rows, row_stride);
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 5, 6);
    if (sets == 2) {
        LOAD_TILE(7, (const char *)columns + next_columns, column_stride);
        _tile_dpbf16ps(2, 4, 7);
        _tile_dpbf16ps(3, 5, 7);
    }
}

/* Distances in numbers of fp32. */
INLINE void store_sums(float *to, int64_t next_rows, int64_t next_columns, int64_t stride,
                       const int64_t sets) {
    _tile_stored(0, to, stride);
    _tile_stored(1, to + next_rows, stride);
    if (sets == 2) {
        _tile_stored(2, to + next_columns, stride);
        _tile_stored(3, to + next_columns + next_rows, stride);
    }
}

INLINE void load_sums(const float *from, int64_t next_rows, int64_t next_columns, int64_t stride) {
    LOAD_TILE(0, from, stride);
    LOAD_TILE(1, from + next_rows, stride);
    LOAD_TILE(2, from + next_columns, stride);
    LOAD_TILE(3, from + next_columns + next_rows, stride);
}

/* ---- from qkv to tiles ----
 *
 * `from` + `at` is the first feature of a token; tokens are `stride` apart. */

/* tokens as rows: to[j][f], (padded tokens, padded features). */
INLINE void copy_rows(const uint16_t *from, int64_t at, int64_t stride, int64_t tokens,
                      int64_t features, uint16_t *to) {
    int64_t count = round_up(tokens, BF16_LANES), size = round_up(features, BF16_LANES);
    for (int64_t f = 0; f < size; f += BF16_LANES) {
        __mmask32 exists = features - f >= BF16_LANES ? 0xffffffff : 0xffff;
        for (int64_t j = 0; j < count; j++) {
            __mmask32 mask = j < tokens ? exists : 0;
            const uint16_t *place = from + at + (mask ? j * stride : 0) + f;
            _mm512_storeu_si512(to + j * size + f, _mm512_maskz_loadu_epi16(mask, place));
        }
    }
}

/* Sixteen tokens, each as sixteen pairs of features. */
INLINE void load_feature_pairs(const uint16_t *from, int64_t at, int64_t stride, int64_t tokens,
                               int64_t features, __m512 pairs[LANES]) {
    __mmask16 exists = first_lanes(features / 2);
    UNROLL
    for (int i = 0; i < LANES; i++) {
        const uint16_t *place = from + at + (i < tokens ? i * stride : 0);
        pairs[i] = _mm512_maskz_loadu_ps(i < tokens ? exists : 0, (const float *)place);
    }
}

/* Features as rows: to[f][j], (padded features, padded tokens). */
INLINE void copy_transposed(const uint16_t *from, int64_t at, int64_t stride, int64_t tokens,
                            int64_t features, uint16_t *to) {
    short even[BF16_LANES],
        odd[BF16_LANES]; /* of a pair's first and second features, in two vectors */
    for (int i = 0; i < BF16_LANES; i++) even[i] = (short)(2 * i), odd[i] = (short)(2 * i + 1);
    __m512i firsts = _mm512_loadu_si512(even), seconds = _mm512_loadu_si512(odd);
    int64_t count = round_up(tokens, BF16_LANES);
    for (int64_t j = 0; j < count; j += BF16_LANES)
        for (int64_t f = 0; f < features; f += BF16_LANES) {
            __m512 left[LANES], right[LANES];
            int64_t here = at + j * stride + f;
            load_feature_pairs(from, here, stride, tokens - j, features - f, left);
            load_feature_pairs(from, here + LANES * stride, stride, tokens - j - LANES,
                               features - f, right);
            transpose16(left), transpose16(right);
            UNROLL
            for (int p = 0; p < LANES; p++) {
                __m512i a = _mm512_castps_si512(left[p]), b = _mm512_castps_si512(right[p]);
                uint16_t *row = to + (f + 2 * p) * count + j;
                _mm512_storeu_si512(row, _mm512_permutex2var_epi16(a, firsts, b));
                _mm512_storeu_si512(row + count, _mm512_permutex2var_epi16(a, seconds, b));
            }
        }
}

/* Sixteen tokens as columns of pairs of features: to[p] = (2p, 2p + 1) of each token. */
INLINE void copy_feature_pairs(const uint16_t *from, int64_t at, int64_t stride, int64_t tokens,
                               int64_t features, float *to) {
    for (int64_t f = 0; f < features; f += BF16_LANES) {
        __m512 pairs[LANES];
        load_feature_pairs(from, at + f, stride, tokens, features - f, pairs);
        transpose16(pairs);
        UNROLL
        for (int p = 0; p < LANES; p++) _mm512_storeu_ps(to + (f / 2 + p) * LANES, pairs[p]);
    }
}

/* Thirty-two tokens as rows of pairs of tokens: to[p][f] = feature f of tokens 2p and 2p + 1. */
INLINE void copy_token_pairs(const uint16_t *from, int64_t at, int64_t stride, int64_t tokens,
                             int64_t features, float *to) {
    int64_t size = round_up(features, BF16_LANES);
    for (int64_t p = 0; p < LANES; p++)
        for (int64_t f = 0; f < size; f += LANES) {
            __m256i pair[2];
            UNROLL
            for (int i = 0; i < 2; i++) {
                const __m256i *place = (const __m256i *)(from + at + (2 * p + i) * stride + f);
                pair[i] = 2 * p + i < tokens && f < features ? _mm256_loadu_si256(place)
                                                             : _mm256_setzero_si256();
            }
            __m512i upper = _mm512_slli_epi32(_mm512_cvtepu16_epi32(pair[1]), 16);
            _mm512_storeu_si512(to + p * size + f,
                                _mm512_or_si512(_mm512_cvtepu16_epi32(pair[0]), upper));
        }
}

/* A tile of features × sixteen tokens → up to sixteen features of each token, in bf16. */
INLINE void store_transposed(const float *from, __m512 scale, int64_t tokens, uint16_t *to,
                             int64_t stride) {
    __m512 a[LANES];
    UNROLL
    for (int i = 0; i < LANES; i++) a[i] = _mm512_mul_ps(_mm512_loadu_ps(from + i * LANES), scale);
    transpose16(a);
    UNROLL
    for (int i = 0; i < LANES; i++)
        if (i < tokens)
            _mm256_storeu_si256((__m256i *)(to + i * stride), (__m256i)_mm512_cvtneps_pbh(a[i]));
}

/* The permutation that turns (key a: 16 queries, key b: 16 queries) into sixteen pairs (a, b). */
INLINE __m512i interleaved_halves(void) {
    short order[BF16_LANES];
    for (int i = 0; i < LANES; i++) order[2 * i] = (short)i, order[2 * i + 1] = (short)(LANES + i);
    return _mm512_loadu_si512(order);
}

#endif
