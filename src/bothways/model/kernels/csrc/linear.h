/* Linear layers with weights in panels (see bothways.h): how their inputs and outputs are laid
 * out, and what the kernels of this and other units have in common. */

#ifndef LINEAR_H
#define LINEAR_H

#include "bothways.h"
#include "memory.h"
#include "team.h"

#include <stddef.h>

#define PANEL 32 /* outputs of a panel; also the rows that four AMX tiles make together */

/* Addresses of rows. Sixteen rows form a block; a row is a sequence of cache lines. */
typedef struct {
    char *base;
    int64_t block_stride; /* from sixteen rows to the next sixteen */
    int64_t row_stride;   /* from a row to the next one of its block */
    int64_t line_stride;  /* from a line of a row to the next one */
} row_layout;

/* Row after row. */
static inline row_layout row_major(void *base, int64_t row_bytes) {
    return (row_layout){base, 16 * row_bytes, row_bytes, LINE};
}

/* The first line of sixteen rows, then their second line, …: 1 KiB each, which is an AMX tile, so
 * that a tile is loaded from consecutive lines. `row_bytes` is a multiple of LINE. */
static inline row_layout tile_major(void *base, int64_t row_bytes) {
    return (row_layout){base, 16 * row_bytes, LINE, 16 * LINE};
}

static inline char *address_of(const row_layout *l, int64_t row, int64_t byte) {
    int64_t block = row / 16 * l->block_stride + row % 16 * l->row_stride;
    return l->base + block + byte / LINE * l->line_stride + byte % LINE;
}

/* Bytes of an input row, or of one output's weights, in a format. */
static inline int64_t row_bytes(const linear *l, int format) {
    if (format == FP32) return l->in_features * FP32;
    if (format == SPLIT_BF16) return round_up(l->in_features, PANEL) * SPLIT_BF16;
    return round_up(l->in_features * format, LINE);
}

/* The panel that begins with an output. */
static inline const char *panel_at(const linear *l, int64_t output) {
    return (const char *)l->panels + output * row_bytes(l, l->dtype);
}

/* Input rows as the kernels read them. */
typedef struct {
    row_layout codes;
    float *scales;      /* INT8: of each row */
    char *split_panels; /* SPLIT_BF16: room for two panels */
    int32_t format, amx;
} packed_rows;

/* The place and format of outputs; `gelu`: apply GELU first. */
typedef struct {
    row_layout rows;
    int32_t format, gelu;
} destination;

/* The format in which this team reads the input of a layer. */
int packed_format(const team *t, const linear *l);

packed_rows carve_packed(arena *a, const team *t, const linear *l, int64_t count);

/* Convert the rows [from, to) of `x`, dense in fp32 or bf16, to the format of `into`. */
void pack_rows(const linear *l, const void *x, int32_t dtype, int64_t from, int64_t to,
               const packed_rows *into);

/* x·Wᵀ + b of `count` packed rows; each member of the team computes its share of the outputs. */
void team_linear(team *t, const linear *l, const packed_rows *x, int64_t count,
                 const destination *into);

/* ---- one unit each ---- */

typedef void pack_function(const linear *, const void *x, int bf16, int64_t from, int64_t to,
                           const packed_rows *);
pack_function pack_fp32, pack_bf16, pack_int8;

/* Memory to fetch into the second cache during a product: `bytes` at each step. */
typedef struct {
    const char *next;
    int64_t bytes;
} prefetcher;

/* A microkernel computes so many rows times one panel, or two, while the sums stay in registers. */
typedef void microkernel(const linear *, int64_t output, const packed_rows *, int64_t row,
                         const destination *, prefetcher *);

#define MAX_TILE_ROWS 12 /* with one panel: 24 registers of sums; half as many rows with two */

/* By the number of panels − 1 and the number of rows − 1. */
extern microkernel *const fp32_microkernels[2][MAX_TILE_ROWS];
extern microkernel *const bf16_microkernels[2][MAX_TILE_ROWS];
extern microkernel *const int8_microkernels[2][MAX_TILE_ROWS];

/* Return 1 if this processor has AMX for bf16 and int8, and the system lets this process use it. */
int amx_is_available(void);

/* Configure, and release, the tiles of the calling thread. */
void amx_begin(void);
void amx_end(void);

/* By AMX: all rows, for the outputs [from, to), whole panels. */
void linear_amx(const linear *, const packed_rows *, int64_t count, int64_t from, int64_t to,
                const destination *);

#endif
