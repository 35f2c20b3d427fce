/* Threads that work on the same rows: each does its share of every step, and waits for the others
 * before the next one. */

#ifndef TEAM_H
#define TEAM_H

#include "bothways.h"
#include "memory.h"

#include <stdatomic.h>

/* A barrier whose waiting threads spin for some microseconds and then sleep. Those of OpenMP spin
 * for milliseconds, which on a busy machine is time in which the thread that they wait for could
 * have run. */
typedef struct {
    _Atomic uint32_t round, sleepers;
    _Atomic int32_t arrived;
} barrier;

typedef struct {
    int64_t rank, size;
    int32_t features;   /* HAS_… bits that are in use; the same for the whole call */
    int32_t split_fp32; /* whether fp32 products are made by AMX, from numbers split into bf16 */
    barrier *sync;      /* NULL in a team that only measures workspaces */
} team;

typedef struct {
    int64_t from, to;
} range;

/* A member's share of `count` things, in whole steps. */
static inline range partition(const team *t, int64_t count, int64_t step) {
    int64_t share = round_up((count + t->size - 1) / t->size, step);
    return (range){minimum(count, t->rank * share), minimum(count, (t->rank + 1) * share)};
}

/* Wait until `size` threads have called it. */
void barrier_wait(barrier *b, int64_t size);

static inline void team_barrier(const team *t) { barrier_wait(t->sync, t->size); }

#endif
