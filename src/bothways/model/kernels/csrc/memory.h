/* Workspaces: one allocation, carved into arrays that each begin on a cache line. */

#ifndef MEMORY_H
#define MEMORY_H

#include <assert.h>
#include <stdint.h>
#include <stdlib.h>

#define LINE 64 /* bytes of a cache line, and of a vector */

static inline int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

static inline int64_t minimum(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t maximum(int64_t a, int64_t b) { return a > b ? a : b; }

/* Hands out memory from `base` on. With a base of NULL it only counts: the same function that
 * carves a workspace thus says how large it is. */
typedef struct {
    char *base;
    int64_t used;
} arena;

static inline void *take(arena *a, int64_t bytes) {
    char *result = a->base ? a->base + a->used : NULL;
    assert((uintptr_t)result % LINE == 0); /* the kernels store whole vectors, aligned */
    a->used += round_up(bytes, LINE);
    return result;
}

/* Memory for `count` workspaces of `bytes` each, one after the other; NULL if there is none.
 * `bytes` is a multiple of LINE, as arena.used always is. */
static inline char *alloc_workspaces(int64_t bytes, int64_t count) {
    assert(bytes % LINE == 0);
    if (bytes > INT64_MAX / 2 / count) return NULL;
    return aligned_alloc(LINE, (size_t)maximum(bytes * count, LINE));
}

#endif
