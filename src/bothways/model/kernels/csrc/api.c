/* The functions that Python calls: they validate their arguments, allocate workspaces and share out
 * the work to threads. bothways.h describes them. */

#include "attention.h"
#include "encoder.h"
#include "linear.h"
#include "rows.h"
#include "team.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- ABI and processor ---- */

int32_t bothways_abi(int64_t *struct_sizes, int32_t count) {
    const int64_t sizes[] = {
        sizeof(dropout),       sizeof(attention_batch), sizeof(linear),
        sizeof(layer_norm),    sizeof(moments),         sizeof(block_tail),
        sizeof(encoder_layer), sizeof(classification),  sizeof(log_normalizer),
        sizeof(adamw_table),
    };
    for (int32_t i = 0; i < count && i < (int32_t)(sizeof sizes / sizeof *sizes); i++)
        struct_sizes[i] = sizes[i];
    return BOTHWAYS_ABI;
}

int32_t bothways_available(void) {
    static _Atomic int32_t known = -1;
    int32_t features = known;
    if (features >= 0) return features;
    features = 0;
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("fma")) {
        features |= HAS_AVX512;
        if (__builtin_cpu_supports("avx512vnni")) features |= HAS_VNNI;
#ifdef WITH_BF16
        if (__builtin_cpu_supports("avx512bf16")) features |= HAS_BF16;
#endif
#ifdef WITH_AMX
        if ((features & HAS_VNNI) && (features & HAS_BF16) && amx_is_available())
            features |= HAS_AMX;
#endif
    }
    known = features;
    return features;
}

static _Atomic int32_t allowed_features = -1; /* all bits */

int32_t bothways_limit(int32_t features) {
    return atomic_exchange(&allowed_features, features) & bothways_available();
}

/* Read once in every call: a limit set by another thread does not change the kernel between sizing
 * a workspace and using it. */
static int32_t current_features(void) { return bothways_available() & allowed_features; }

static void begin_thread(int32_t features) {
#ifdef WITH_AMX
    if (features & HAS_AMX) amx_begin();
#endif
    (void)features;
}

static void end_thread(int32_t features) {
#ifdef WITH_AMX
    if (features & HAS_AMX) amx_end();
#endif
    (void)features;
}

/* ---- validation ---- */

/* Return from the calling function unless a check gives BOTHWAYS_OK. */
#define CHECK(check)                                \
    do {                                            \
        status checked = (check);                   \
        if (checked != BOTHWAYS_OK) return checked; \
    } while (0)

static status require(int condition) { return condition ? BOTHWAYS_OK : BOTHWAYS_INVALID_ARGUMENT; }

static status require_features(int32_t features, int32_t needed) {
    return (features & needed) == needed ? BOTHWAYS_OK : BOTHWAYS_UNSUPPORTED_PROCESSOR;
}

static status check_call(int32_t features, int64_t rows, int32_t threads) {
    CHECK(require_features(features, HAS_AVX512));
    return require(rows >= 0 && rows <= MAX_ROWS && threads > 0 && threads <= MAX_THREADS);
}

static int is_width(int64_t n) { return n > 0 && n <= MAX_FEATURES; }

static int is_float(int32_t dtype) { return dtype == FP32 || dtype == BF16; }

static status check_dropout(const dropout *drop) { return require(drop && isfinite(drop->scale)); }

/* cu_seqlens ascend from 0 to the number of tokens; `longest`: the longest sequence. */
static status check_batch(const attention_batch *b, int32_t features, int32_t threads,
                          int64_t *longest) {
    CHECK(require(b != NULL));
    CHECK(check_call(features, b->tokens, threads));
    CHECK(check_dropout(&b->drop));
    CHECK(require(is_float(b->dtype) && is_width(b->heads) && is_width(b->head_size) &&
                  b->head_size % 16 == 0 && is_width(b->heads * b->head_size)));
    CHECK(require(b->cu_seqlens && b->sequences >= 0 && b->sequences <= MAX_ROWS &&
                  b->cu_seqlens[0] == 0));
    *longest = 0;
    for (int64_t i = 0; i < b->sequences; i++) {
        int64_t start = b->cu_seqlens[i], end = b->cu_seqlens[i + 1];
        CHECK(require(start <= end &&
                      end <= b->tokens)); /* before the difference, which else could overflow */
        *longest = maximum(*longest, end - start);
    }
    return require(b->cu_seqlens[b->sequences] == b->tokens);
}

static status check_linear(const linear *l, int32_t features) {
    CHECK(require(l && l->panels && is_width(l->in_features) && is_width(l->out_features)));
    CHECK(require(l->dtype == FP32 || l->dtype == BF16 ||
                  (l->dtype == INT8 && l->scales && l->zero_point_sum)));
    CHECK(require_features(features, l->dtype == FP32   ? HAS_AVX512
                                     : l->dtype == BF16 ? HAS_BF16
                                                        : HAS_VNNI));
    return require(l->panel_bytes == round_up(l->out_features, PANEL) * row_bytes(l, l->dtype));
}

static status check_norm(const layer_norm *n) {
    return require(n && n->weight && is_width(n->width) && isfinite(n->epsilon) && n->epsilon >= 0);
}

static status check_tail(const block_tail *tail, int32_t features) {
    CHECK(require(tail != NULL));
    const linear *layers[] = {&tail->out, &tail->up, &tail->down};
    for (int i = 0; i < 3; i++) {
        CHECK(check_linear(layers[i], features));
        CHECK(require(layers[i]->dtype == tail->out.dtype));
    }
    CHECK(check_norm(&tail->attention_norm));
    CHECK(check_norm(&tail->mlp_norm));
    int64_t width = tail->out.out_features;
    CHECK(
        require(tail->up.in_features == width && tail->down.in_features == tail->up.out_features));
    return require(tail->down.out_features == width && tail->attention_norm.width == width &&
                   tail->mlp_norm.width == width);
}

static status check_layers(const encoder_layer *const *layers, int64_t depth,
                           const attention_batch *b, int32_t features) {
    CHECK(require(layers && depth >= 0 && (!depth || layers[0])));
    for (int64_t i = 0; i < depth; i++) {
        CHECK(require(layers[i] != NULL));
        const linear *qkv = &layers[i]->qkv, *out = &layers[i]->tail.out;
        CHECK(check_linear(qkv, features));
        CHECK(check_tail(&layers[i]->tail, features));
        CHECK(require(qkv->dtype == layers[0]->qkv.dtype && qkv->dtype == out->dtype));
        CHECK(require(qkv->in_features == layers[0]->qkv.in_features &&
                      qkv->in_features == out->out_features));
        CHECK(require(out->in_features == b->heads * b->head_size &&
                      qkv->out_features == 3 * out->in_features));
    }
    return BOTHWAYS_OK;
}

/* ---- attention ---- */

status bothways_attention(const attention_batch *b, void *out, float *lse, int32_t threads) {
    int32_t features = current_features();
    int64_t longest;
    CHECK(check_batch(b, features, threads, &longest));
    CHECK(require(!b->tokens || (b->qkv && out)));
    int64_t bytes = head_bytes(b, longest, features);
    char *workspaces = alloc_workspaces(bytes, threads);
    if (!workspaces) return BOTHWAYS_NO_MEMORY;
    barrier done = {0};
#pragma omp parallel num_threads(threads)
    {
        char *mine = workspaces + omp_get_thread_num() * bytes;
        begin_thread(features);
#pragma omp for schedule(dynamic, 4) nowait
        for (int64_t unit = 0; unit < b->sequences * b->heads; unit++) {
            head_view h = head_of(b, unit, 0);
            attend_head(b, &h, features, out, lse, mine);
        }
        end_thread(features);
        barrier_wait(&done, omp_get_num_threads());
    }
    free(workspaces);
    return BOTHWAYS_OK;
}

status bothways_attention_backward(const attention_batch *b, const void *out, const void *grad_out,
                                   const float *lse, void *grad_qkv, int32_t threads) {
    int32_t features = current_features();
    int64_t longest, bytes = 0;
    CHECK(check_batch(b, features, threads, &longest));
    CHECK(require(!b->tokens || (b->qkv && out && grad_out && lse && grad_qkv)));
    if (b->dtype == BF16) CHECK(require_features(features, HAS_AMX));
    if (b->dtype == FP32) bytes = attention_backward_bytes(longest, b->head_size);
#ifdef WITH_AMX
    if (b->dtype == BF16) bytes = attention_amx_backward_bytes(longest, b->head_size);
#endif
    char *workspaces = alloc_workspaces(bytes, threads);
    if (!workspaces) return BOTHWAYS_NO_MEMORY;
    barrier done = {0};
#pragma omp parallel num_threads(threads)
    {
        char *mine = workspaces + omp_get_thread_num() * bytes;
        begin_thread(features);
#pragma omp for schedule(dynamic, 4) nowait
        for (int64_t unit = 0; unit < b->sequences * b->heads; unit++) {
            head_view h = head_of(b, unit, 0);
            if (b->dtype == FP32)
                attend_backward_fp32(&h, &b->drop, out, grad_out, lse, grad_qkv, mine);
#ifdef WITH_AMX
            if (b->dtype == BF16)
                attend_backward_amx(&h, &b->drop, out, grad_out, lse, grad_qkv, mine);
#endif
        }
        end_thread(features);
        barrier_wait(&done, omp_get_num_threads());
    }
    free(workspaces);
    return BOTHWAYS_OK;
}

/* ---- rows ---- */

status bothways_add_norm(const layer_norm *norm, const dropout *drop, const float *x, const void *y,
                         int32_t y_dtype, int64_t rows, float *sums, moments *row_moments,
                         float *out, int32_t threads) {
    CHECK(check_call(current_features(), rows, threads));
    CHECK(check_norm(norm));
    CHECK(check_dropout(drop));
    CHECK(require(is_float(y_dtype) && (!rows || (x && y && sums && row_moments && out))));
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < rows; i++)
        add_norm_row(norm, drop, x, y, y_dtype == BF16, i, sums, row_moments, out);
    return BOTHWAYS_OK;
}

status bothways_add_norm_backward(const layer_norm *norm, const dropout *drop, const float *sums,
                                  const moments *row_moments, const float *grad_out, int64_t rows,
                                  float *grad_x, void *grad_y, int32_t y_dtype, float *grad_weight,
                                  float *grad_bias, int32_t threads) {
    CHECK(check_call(current_features(), rows, threads));
    CHECK(check_norm(norm));
    CHECK(check_dropout(drop));
    CHECK(require(is_float(y_dtype) && grad_weight &&
                  (!rows || (sums && row_moments && grad_out && grad_x && grad_y))));
    /* Each thread adds up gradients of weight and bias of its own; then they are added in order. */
    int64_t width = norm->width, bytes = round_up(2 * width * FP32, LINE);
    char *workspaces = alloc_workspaces(bytes, threads);
    if (!workspaces) return BOTHWAYS_NO_MEMORY;
    memset(workspaces, 0, (size_t)(bytes * threads));
#pragma omp parallel num_threads(threads)
    {
        float *mine = (float *)(void *)(workspaces + omp_get_thread_num() * bytes);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < rows; i++)
            add_norm_backward_row(norm, drop, sums, row_moments, grad_out, i, grad_x, grad_y,
                                  y_dtype == BF16, mine, mine + width);
    }
    float *total = (float *)(void *)workspaces;
    for (int32_t t = 1; t < threads; t++) {
        const float *other = (const float *)(const void *)(workspaces + t * bytes);
        for (int64_t f = 0; f < 2 * width; f++) total[f] += other[f];
    }
    memcpy(grad_weight, total, (size_t)(FP32 * width));
    if (grad_bias) memcpy(grad_bias, total + width, (size_t)(FP32 * width));
    free(workspaces);
    return BOTHWAYS_OK;
}

static status check_classification(const classification *c, int32_t threads) {
    CHECK(require(c != NULL));
    CHECK(check_call(current_features(), c->rows, threads));
    CHECK(require(is_float(c->dtype) && is_width(c->classes) &&
                  (!c->rows || (c->logits && c->labels))));
    for (int64_t i = 0; i < c->rows; i++)
        if (c->labels[i] != c->ignore_index && (c->labels[i] < 0 || c->labels[i] >= c->classes))
            return BOTHWAYS_LABEL_OUT_OF_RANGE;
    return BOTHWAYS_OK;
}

status bothways_cross_entropy(const classification *c, log_normalizer *normalizers, float *losses,
                              uint8_t *hits, int32_t threads) {
    CHECK(check_classification(c, threads));
    CHECK(require(!c->rows || (normalizers && losses && hits)));
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < c->rows; i++)
        cross_entropy_row(c, i, normalizers + i, losses + i, hits + i);
    return BOTHWAYS_OK;
}

status bothways_cross_entropy_backward(const classification *c, const log_normalizer *normalizers,
                                       const float *grad_loss, void *grad_logits, int32_t threads) {
    CHECK(check_classification(c, threads));
    CHECK(require(!c->rows || (normalizers && grad_loss && grad_logits)));
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t i = 0; i < c->rows; i++)
        cross_entropy_backward_row(c, i, normalizers[i], *grad_loss, grad_logits);
    return BOTHWAYS_OK;
}

/* Rows that a thread takes at once. */
#define TABLE_CHUNK 256

status bothways_adamw_rows(const adamw_table *t, const int64_t *rows, const float *gradients,
                           int64_t count, int32_t threads) {
    CHECK(require(t != NULL));
    CHECK(check_call(current_features(), t->rows, threads));
    CHECK(require(is_width(t->width) && count >= 0 && count <= t->rows &&
                  (!t->rows || (t->weight && t->average && t->squares && t->seen)) &&
                  (!count || (rows && gradients))));
    for (int64_t i = 0; i < count; i++)
        CHECK(require(rows[i] >= (i ? rows[i - 1] + 1 : 0) && rows[i] < t->rows));
    for (int64_t i = 0; i < count; i++) t->seen[rows[i]] = 1;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t from = 0; from < t->rows; from += TABLE_CHUNK) {
        int64_t next = 0, end = count, to = minimum(from + TABLE_CHUNK, t->rows);
        while (next < end) { /* the first of `rows` from `from` on */
            int64_t middle = (next + end) / 2;
            if (rows[middle] < from)
                next = middle + 1;
            else
                end = middle;
        }
        for (int64_t row = from; row < to; row++) {
            int has_gradient = next < count && rows[next] == row;
            if (has_gradient || t->seen[row] || t->decay != 0)
                adamw_row(t, row, has_gradient ? gradients + next * t->width : NULL);
            next += has_gradient;
        }
    }
    return BOTHWAYS_OK;
}

status bothways_code_products(const int8_t *codes, const float *scales, const float *query,
                              int64_t rows, int64_t width, float *products, int32_t threads) {
    CHECK(check_call(current_features(), rows, threads));
    CHECK(require(is_width(width) && (!rows || (codes && scales && query && products))));
#pragma omp parallel for schedule(static) num_threads(threads)
    for (int64_t row = 0; row < rows; row++)
        products[row] = scales[row] * code_product(codes + row * width, query, width);
    return BOTHWAYS_OK;
}

/* ---- linear layers and whole blocks ---- */

/* How rows are shared out: in chunks, each of which one thread takes through all weights; or, where
 * there are too few rows for that, all by a team. The results are the same. */
typedef struct {
    int64_t rows;    /* of a chunk */
    int64_t members; /* of a team; 1: each thread takes its own chunks */
    int64_t threads;
} schedule;

/* Rows from which fp32 products by AMX pay for splitting the weights. Decided by the rows of the
 * whole call, so that the result does not depend on the number of threads. */
#define MIN_SPLIT_ROWS 32

static int32_t splits_fp32(int64_t rows, int32_t features) {
    return rows >= MIN_SPLIT_ROWS && (features & HAS_AMX);
}

/* The intermediate results of a row take some 8 KiB; those of a chunk stay in the second cache. */
static schedule plan(int64_t count, int64_t width, int64_t threads) {
    if (count < PANEL * threads) {
        /* A member of a team computes pairs of panels (team_linear): more threads would wait. */
        threads = minimum(threads, (width + 2 * PANEL - 1) / (2 * PANEL));
        if (count < PANEL * threads) return (schedule){count, threads, threads};
    }
    int64_t cache = sysconf(_SC_LEVEL2_CACHE_SIZE),
            most = cache > (1 << 20) ? minimum(cache, 1 << 22) / 8192 : 96;
    int64_t chunks = round_up((count + most - 1) / most, threads);
    return (schedule){round_up((count + chunks - 1) / chunks, PANEL), 1, threads};
}

/* The team of a thread: all of them, or itself alone. */
static team team_of(const schedule *s, int64_t rows, int32_t features, barrier *sync) {
    int64_t rank = s->members > 1 ? omp_get_thread_num() : 0,
            size = s->members > 1 ? omp_get_num_threads() : 1;
    return (team){rank, size, features, splits_fp32(rows, features), sync};
}

/* A team of the size for which a workspace has room. */
static team largest_team(const schedule *s, int64_t rows, int32_t features) {
    return (team){0, s->members, features, splits_fp32(rows, features), NULL};
}

status bothways_linear(const linear *layer, const void *x, int32_t x_dtype, int64_t rows, void *out,
                       int32_t out_dtype, int32_t threads) {
    int32_t features = current_features();
    CHECK(check_call(features, rows, threads));
    CHECK(check_linear(layer, features));
    CHECK(require(is_float(x_dtype) && is_float(out_dtype) && (!rows || (x && out))));
    schedule s = plan(rows, layer->out_features, threads);
    team largest = largest_team(&s, rows, features);
    arena size = {0};
    carve_packed(&size, &largest, layer, s.rows);
    char *workspaces = alloc_workspaces(size.used, s.members == 1 ? s.threads : 1);
    if (!workspaces) return BOTHWAYS_NO_MEMORY;
    barrier step = {0}, done = {0};
#pragma omp parallel num_threads((int)s.threads)
    {
        int64_t alone = s.members == 1, thread = alone * omp_get_thread_num(),
                row_size = layer->out_features * out_dtype;
        team t = team_of(&s, rows, features, &step);
        begin_thread(features);
        for (int64_t i = thread * s.rows; i < rows;
             i += alone ? omp_get_num_threads() * s.rows : rows) {
            int64_t count = minimum(s.rows, rows - i);
            packed_rows packed =
                carve_packed(&(arena){.base = workspaces + thread * size.used}, &t, layer, count);
            range mine = partition(&t, count, 1);
            pack_rows(layer, (const char *)x + i * layer->in_features * x_dtype, x_dtype, mine.from,
                      mine.to, &packed);
            team_barrier(&t);
            team_linear(
                &t, layer, &packed, count,
                &(destination){row_major((char *)out + i * row_size, row_size), out_dtype, 0});
        }
        end_thread(features);
        barrier_wait(&done, omp_get_num_threads());
    }
    free(workspaces);
    return BOTHWAYS_OK;
}

status bothways_block_tail(const block_tail *tail, const float *residual, const void *heads,
                           int32_t heads_dtype, int64_t rows, float *result, int32_t threads) {
    int32_t features = current_features();
    CHECK(check_call(features, rows, threads));
    CHECK(check_tail(tail, features));
    CHECK(require(is_float(heads_dtype) && (!rows || (residual && heads && result))));
    schedule s = plan(rows, tail->up.out_features, threads);
    team largest = largest_team(&s, rows, features);
    int64_t bytes = tail_bytes(&largest, tail, s.rows), width = tail->out.out_features;
    char *workspaces = alloc_workspaces(bytes, s.members == 1 ? s.threads : 1);
    if (!workspaces) return BOTHWAYS_NO_MEMORY;
    barrier step = {0}, done = {0};
#pragma omp parallel num_threads((int)s.threads)
    {
        int64_t alone = s.members == 1, thread = alone * omp_get_thread_num();
        team t = team_of(&s, rows, features, &step);
        begin_thread(features);
        for (int64_t i = thread * s.rows; i < rows;
             i += alone ? omp_get_num_threads() * s.rows : rows)
            run_tail(&t, tail, residual + i * width,
                     (const char *)heads + i * tail->out.in_features * heads_dtype, heads_dtype,
                     minimum(s.rows, rows - i), result + i * width, workspaces + thread * bytes);
        end_thread(features);
        barrier_wait(&done, omp_get_num_threads());
    }
    free(workspaces);
    return BOTHWAYS_OK;
}

/* Cut sequences into chunks of up to s->rows tokens, or of one longer sequence. The first sequence
 * of each, and at the end the number of all → `firsts`. Return the number of chunks. */
static int64_t cut_sequences(const attention_batch *b, const schedule *s, int64_t *firsts,
                             int64_t *most_tokens) {
    int64_t chunks = 0, i = 0;
    for (*most_tokens = 0; i < b->sequences; chunks++) {
        int64_t first = i, end = b->cu_seqlens[i] + s->rows;
        do i++;
        while (i < b->sequences && b->cu_seqlens[i + 1] <= end);
        *most_tokens = maximum(*most_tokens, b->cu_seqlens[i] - b->cu_seqlens[first]);
        firsts[chunks] = first;
    }
    firsts[chunks] = b->sequences;
    return chunks;
}

status bothways_encoder_layers(const encoder_layer *const *layers, int64_t depth,
                               const attention_batch *b, float *x, int32_t threads) {
    int32_t features = current_features();
    int64_t longest, most_tokens;
    CHECK(check_batch(b, features, threads, &longest));
    CHECK(check_layers(layers, depth, b, features));
    CHECK(require(!b->tokens || x));
    if (!depth || !b->tokens) return BOTHWAYS_OK;
    schedule s = plan(b->tokens, layers[0]->tail.up.out_features, threads);
    int64_t *firsts = malloc((size_t)(b->sequences + 1) * sizeof(int64_t));
    if (!firsts) return BOTHWAYS_NO_MEMORY;
    int64_t chunks = cut_sequences(b, &s, firsts, &most_tokens);
    s.members =
        chunks >= s.threads ? 1 : s.threads; /* sequences are not cut: there may be too few */
    int64_t alone = s.members == 1, count = round_up(alone ? most_tokens : b->tokens, PANEL);
    team largest = largest_team(&s, b->tokens, features);
    int64_t bytes = layers_bytes(&largest, layers, depth, b, count, longest);
    char *workspaces = alloc_workspaces(bytes, alone ? s.threads : 1);
    if (!workspaces) {
        free(firsts);
        return BOTHWAYS_NO_MEMORY;
    }
    barrier step = {0}, done = {0};
#pragma omp parallel num_threads((int)s.threads)
    {
        team t = team_of(&s, b->tokens, features, &step);
        char *mine = workspaces + alone * omp_get_thread_num() * bytes;
        begin_thread(features);
        if (alone) {
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t i = 0; i < chunks; i++)
                run_layers(&t, layers, depth, b, firsts[i], firsts[i + 1], longest, x, mine);
        } else {
            run_layers(&t, layers, depth, b, 0, b->sequences, longest, x, mine);
        }
        end_thread(features);
        barrier_wait(&done, omp_get_num_threads());
    }
    free(workspaces);
    free(firsts);
    return BOTHWAYS_OK;
}
