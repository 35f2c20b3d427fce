/* What torch has no operators for, on processors of x86 with AVX-512: attention over packed sequences as they lie, forward and
 * backward; dense layers that round their input and scale their output within the product; and all that follows the attention
 * of a block as one function.
 *
 * All arrays are dense and belong to the caller. This file has the functions that Python calls; native.py says what they mean.
 */

#include "attention.h"
#include "block.h"
#include "dense_tiles.h"
#include "loss.h"
#include "norm.h"
#include "tiles.h"

#include <cpuid.h>
#include <omp.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef SOURCE
#define SOURCE 0u
#endif

/* The checksum of these files, as whoever compiled them said. */
uint32_t bothways_source(void) { return SOURCE; }

/* Whether the processor has AMX for bf16 and int8, and the system lets this process use it. */
static int has_tiles(void) {
    unsigned a, b, c, d, wanted = 1u << 22 | 1u << 24 | 1u << 25;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & wanted) != wanted) return 0;
    return !syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* of tiles' data */);
}

/* The bits of what the processor has; of them, only those of `most` are used from now on. */
int32_t bothways_features(int32_t most) {
    __builtin_cpu_init();
    int32_t found = 0;
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma")) {
        found |= USES_AVX512;
        if (__builtin_cpu_supports("avx512vnni")) found |= USES_VNNI;
        if (__builtin_cpu_supports("avx512bf16")) found |= USES_BF16;
        if ((found & USES_VNNI) && (found & USES_BF16) && has_tiles()) found |= USES_TILES;
    }
    return features = found & most;
}

/* For every thread so many bytes in whole lines, begun on a line; NULL where there is no memory. */
static char *rooms(int64_t bytes, int64_t threads) { return aligned_alloc(LINE, (size_t)(round_up(bytes, LINE) * threads)); }

/* Gives 0; 1 where there is no memory. */
int32_t bothways_attend(const batch *b, void *out, float *logs, int32_t threads) {
    int64_t bytes = round_up(attend_bytes(b), LINE);
    char *scratch = rooms(bytes, threads);
    if (!scratch) return 1;
#pragma omp parallel num_threads(threads)
    {
        char *mine = scratch + omp_get_thread_num() * bytes;
        begin();
#pragma omp for schedule(dynamic, 4)
        for (int64_t unit = 0; unit < b->sequences * b->heads; unit++) attend_unit(b, unit, 0, out, logs, mine);
        end();
    }
    free(scratch);
    return 0;
}

/* The same for the gradient of qkv: in fp32, and in bf16 by AMX. */
int32_t bothways_attend_backward(const batch *b, const void *found, const void *gradient, const float *logs, void *out,
                                 int32_t threads) {
    int64_t count = round_up(b->longest, KEYS), floats = 5 * b->size * count + 2 * QUERIES * (b->size + count);
    int64_t bytes = round_up(b->bf16 ? bureau_at(NULL, b->longest, b->size).bytes : 4 * floats, LINE);
    char *scratch = rooms(bytes, threads);
    if (!scratch) return 1;
#pragma omp parallel num_threads(threads)
    {
        char *mine = scratch + omp_get_thread_num() * bytes;
        begin();
#pragma omp for schedule(dynamic, 4)
        for (int64_t unit = 0; unit < b->sequences * b->heads; unit++) {
            int64_t to;
            head h = head_of(b, unit, 0, &to);
            if (b->bf16) {
                bureau here = bureau_at(mine, h.tokens, h.size);
                attend_backward_in_tiles(&h, &b->drop, found, gradient, to, logs, out, &here);
            } else
                attend_backward_fp32(&h, &b->drop, found, gradient, to, logs, out, (float *)mine);
        }
        end();
    }
    free(scratch);
    return 0;
}

/* The same for LayerNorms of x + y, whose sums and moments are kept. */
int32_t bothways_add_norm(const norm *layer, const normed *n, const float *x, const void *y, int64_t rows, float *sums,
                          moments *found, float *out, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; i++) normalise_and_keep(layer, n, x, y, i, sums, found + i, out);
    return 0;
}

/* The same for their gradients. */
int32_t bothways_add_norm_backward(const norm *layer, const normed *n, const float *gradient, int64_t rows, float *of_x,
                                   void *of_y, float *of_weight, float *of_bias, int32_t threads) {
    int64_t each = round_up(2 * n->width, LANES); /* of weight and bias, for each thread */
    float *parts = (float *)rooms(4 * each, threads);
    if (!parts) return 1;
    memset(parts, 0, (size_t)(4 * each * threads));
#pragma omp parallel num_threads(threads)
    {
        float *mine = parts + omp_get_thread_num() * each;
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++) normalise_backward(layer, n, gradient, i, of_x, of_y, mine, mine + n->width);
    }
    for (int64_t t = 1; t < threads; t++)
        for (int64_t f = 0; f < 2 * n->width; f++) parts[f] += parts[t * each + f];
    memcpy(of_weight, parts, (size_t)(4 * n->width));
    if (of_bias) memcpy(of_bias, parts + n->width, (size_t)(4 * n->width));
    free(parts);
    return 0;
}

/* The same for cross-entropies. */
int32_t bothways_lose(const classified *c, summed *found, float *losses, uint8_t *hits, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < c->rows; i++) lose(c, i, found + i, losses + i, hits + i);
    return 0;
}

/* The same for their gradients, times a number. */
int32_t bothways_lose_backward(const classified *c, const summed *found, const float *times, void *out, int32_t threads) {
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < c->rows; i++) lose_backward(c, i, found[i], *times, out);
    return 0;
}

/* Rows, or tokens, that go through all weights together: by one thread each, or, where there are too few for that, by all; of
 * which the system may give fewer than are asked for. */
typedef struct {
    int64_t rows, together;
} chunk;

#define WORTH 32 /* rows for which weights in fp32 are split */

/* By the number of all rows: so what they become does not depend on who does which. */
static team team_of(int64_t number, int64_t size, int64_t rows) {
    return (team){number, size, rows >= WORTH && (features & USES_TILES)};
}

/* What a row becomes on its way has some 8 KiB, and stays in the second cache. */
static chunk chunk_of(int64_t count, int64_t threads) {
    if (count < SIDE * threads) return (chunk){count, threads};
    int64_t cache = sysconf(_SC_LEVEL2_CACHE_SIZE), most = cache > (1 << 20) ? least(cache, 1 << 22) / 8192 : 96;
    int64_t chunks = round_up((count + most - 1) / most, threads);
    return (chunk){round_up((count + chunks - 1) / chunks, SIDE), 1};
}

/* The same for x·Wᵀ + b. */
int32_t bothways_multiply(const dense *layer, const void *x, int32_t x_bf16, int64_t count, void *out, int32_t out_bf16,
                          int32_t threads) {
    chunk c = chunk_of(count, threads);
    team first = team_of(0, c.together, count);
    int64_t bytes = round_up(packed_bytes(&first, layer, c.rows), LINE), width = layer->outputs * (out_bf16 ? 2 : 4);
    char *scratch = rooms(bytes, threads);
    if (!scratch) return 1;
#pragma omp parallel num_threads(threads)
    {
        int64_t number = omp_get_thread_num(), crew = omp_get_num_threads(), alone = c.together == 1;
        team t = team_of(alone ? 0 : number, alone ? 1 : crew, count);
        begin();
        for (int64_t i = alone * number * c.rows; i < count; i += alone ? crew * c.rows : count) {
            int64_t here = least(c.rows, count - i);
            range mine = share(&t, here, 1);
            packed room = packed_at(&t, layer, scratch + alone * number * bytes, here);
            pack(layer, (const char *)x + i * layer->width * (x_bf16 ? 2 : 4), x_bf16, mine.from, mine.to, &room);
            meet(&t);
            multiply(&t, layer, &room, here, &(sink){row_by_row((char *)out + i * width, width), out_bf16 ? BF16 : FP32, 0});
        }
        end();
    }
    free(scratch);
    return 0;
}

/* The same for all that follows the attention: `start` of the residual path, and what the heads found. */
int32_t bothways_rest(const rest *block, const float *start, const void *heads, int32_t bf16, int64_t count, float *result,
                      int32_t threads) {
    chunk c = chunk_of(count, threads);
    team first = team_of(0, c.together, count);
    int64_t width = block->out.outputs, bytes = round_up(rest_bytes(&first, block, c.rows), LINE);
    char *scratch = rooms(bytes, threads);
    if (!scratch) return 1;
#pragma omp parallel num_threads(threads)
    {
        int64_t number = omp_get_thread_num(), crew = omp_get_num_threads(), alone = c.together == 1;
        team t = team_of(alone ? 0 : number, alone ? 1 : crew, count);
        begin();
        for (int64_t i = alone * number * c.rows; i < count; i += alone ? crew * c.rows : count)
            follow(&t, block, start + i * width, (const char *)heads + i * block->out.width * (bf16 ? 2 : 4), bf16,
                   least(c.rows, count - i), result + i * width, scratch + alone * number * bytes);
        end();
    }
    free(scratch);
    return 0;
}

/* The same for many layers, of `b` without its qkv: `x` becomes what the last of them gives. */
int32_t bothways_layers(const layer *const *layers, int64_t depth, const batch *b, float *x, int32_t threads) {
    int64_t tokens = b->offsets[b->sequences], chunks = 0;
    chunk c = chunk_of(tokens, threads);
    int64_t *firsts = malloc((size_t)(b->sequences + 1) * sizeof(int64_t)), most = 0; /* of each chunk, and the end */
    if (!firsts) return 1;
    for (int64_t i = 0; i < b->sequences; chunks++) {
        firsts[chunks] = i;
        for (int64_t end = b->offsets[i] + c.rows; i < b->sequences && (i == firsts[chunks] || b->offsets[i + 1] <= end);) i++;
        int64_t count = b->offsets[i] - b->offsets[firsts[chunks]];
        most = count > most ? count : most;
    }
    firsts[chunks] = b->sequences;
    int64_t alone = chunks >= threads, size = round_up(alone ? most : tokens, SIDE);
    team first = team_of(0, alone ? 1 : threads, tokens);
    int64_t bytes = round_up(layer_bytes(&first, layers, depth, b, size), LINE);
    char *scratch = rooms(bytes, alone ? threads : 1);
    if (scratch) {
#pragma omp parallel num_threads(threads)
        {
            int64_t number = omp_get_thread_num();
            begin();
            if (alone) {
#pragma omp for schedule(dynamic, 1)
                for (int64_t i = 0; i < chunks; i++)
                    go_through(&first, layers, depth, b, firsts[i], firsts[i + 1], x, scratch + number * bytes);
            } else {
                team t = team_of(number, omp_get_num_threads(), tokens);
                go_through(&t, layers, depth, b, 0, b->sequences, x, scratch);
            }
            end();
        }
    }
    free(scratch);
    free(firsts);
    return !scratch;
}
