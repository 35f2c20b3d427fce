#include "team.h"

#include <immintrin.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Pauses before a waiting thread sleeps: 30 to 150 µs, by processor. The steps of one short text
 * take some 20 µs; to sleep and to be woken takes about as long. */
#define SPINS 2000

static int64_t nanoseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

int64_t barrier_wait(barrier *b, int64_t size) {
    if (size <= 1) return 0;
    uint32_t round = atomic_load(&b->round);
    if (atomic_fetch_add(&b->arrived, 1) + 1 == size) { /* the last one opens the next round */
        atomic_store(&b->arrived, 0);
        atomic_store(&b->round, round + 1);
        if (atomic_exchange(&b->sleepers, 0)) syscall(SYS_futex, &b->round, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
        return 0;
    }
    for (int i = 0; i < SPINS; i++) {
        if (atomic_load_explicit(&b->round, memory_order_acquire) != round) return 0;
        _mm_pause();
    }
    int64_t start = nanoseconds();
    while (atomic_load(&b->round) == round) {
        atomic_store(&b->sleepers, 1);
        /* The kernel compares the round once more: if it is over meanwhile, nobody sleeps. */
        syscall(SYS_futex, &b->round, FUTEX_WAIT_PRIVATE, round, NULL, NULL, 0);
    }
    return nanoseconds() - start;
}

/* ---- busy machines ----
 *
 * A thread of the team that does not run, because another program does, delays every step by a time
 * slice of some milliseconds, and a short text has fifty steps. After one such wait small inputs are
 * computed by one thread, for a while. */

#define STALL INT64_C(1000000)      /* ns: longer than any step of a small input */
#define BACK_OFF INT64_C(100000000) /* ns */

static _Atomic int64_t busy_until;

void team_barrier(const team *t) {
    int64_t waited = barrier_wait(t->sync, t->size);
    if (t->small && waited > STALL) atomic_store_explicit(&busy_until, nanoseconds() + BACK_OFF, memory_order_relaxed);
}

int machine_is_busy(void) {
    int64_t until = atomic_load_explicit(&busy_until, memory_order_relaxed);
    return until && nanoseconds() < until;
}
