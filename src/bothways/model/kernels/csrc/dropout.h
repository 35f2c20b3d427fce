/* Dropout without a mask in memory: what is dropped is a hash of the seed, the row and the column,
 * so that the backward pass draws the same numbers again, on any thread and in any order. */

#ifndef DROPOUT_H
#define DROPOUT_H

#include "bothways.h"
#include "simd.h"

/* The key of a row: one step of SplitMix64 (Steele et al. 2014). */
static inline uint64_t dropout_row_key(const dropout *drop, int64_t row) {
    uint64_t x = drop->seed + (uint64_t)(row + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
    return x ^ (x >> 31);
}

/* Factors, 0 or drop->scale, of sixteen columns and the halves of their rows' keys. The mixing
 * steps and constants are those of MurmurHash3's finalizer. */
INLINE __m512 dropout_factors(const dropout *drop, __m512i column, __m512i key_low,
                              __m512i key_high) {
    const __m512i golden = _mm512_set1_epi32((int32_t)0x9e3779b9u);
    __m512i x = _mm512_add_epi32(_mm512_mullo_epi32(column, golden), key_low);
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32((int32_t)0x85ebca6bu));
    x = _mm512_xor_si512(x, key_high);
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 13));
    x = _mm512_mullo_epi32(x, _mm512_set1_epi32((int32_t)0xc2b2ae35u));
    x = _mm512_xor_si512(x, _mm512_srli_epi32(x, 16));
    __mmask16 kept = _mm512_cmpge_epu32_mask(x, _mm512_set1_epi32((int32_t)drop->threshold));
    return _mm512_maskz_mov_ps(kept, _mm512_set1_ps(drop->scale));
}

/* The factors of the columns j to j + 15 of one row. */
INLINE __m512 dropout_row_factors(const dropout *drop, uint64_t row_key, int64_t j) {
    __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    __m512i column = _mm512_add_epi32(lanes, _mm512_set1_epi32((int32_t)j));
    return dropout_factors(drop, column, _mm512_set1_epi32((int32_t)row_key),
                           _mm512_set1_epi32((int32_t)(row_key >> 32)));
}

#endif
