/* Linear layers: which kernel computes which rows and outputs. */

#include "linear.h"

int packed_format(const team *t, const linear *l) {
    return l->dtype == FP32 && t->split_fp32 ? SPLIT_BF16 : l->dtype;
}

packed_rows carve_packed(arena *a, const team *t, const linear *l, int64_t count) {
    int format = packed_format(t, l), amx = format != FP32 && (t->features & HAS_AMX);
    int64_t bytes = row_bytes(l, format), filled = round_up(count, PANEL);
    char *codes = take(a, filled * bytes);
    float *scales = take(a, filled * (int64_t)sizeof(float));
    int64_t split_bytes =
        format == SPLIT_BF16 ? 2 * PANEL * bytes : 0; /* two panels for each member */
    char *split_panels = take(a, t->size * split_bytes);
    return (packed_rows){
        .codes = amx ? tile_major(codes, bytes) : row_major(codes, bytes),
        .scales = scales,
        .split_panels = split_panels ? split_panels + t->rank * split_bytes : NULL,
        .format = format,
        .amx = amx,
    };
}

void pack_rows(const linear *l, const void *x, int32_t dtype, int64_t from, int64_t to,
               const packed_rows *into) {
    int bf16 = dtype == BF16;
    if (l->dtype == INT8)
        pack_int8(l, x, bf16, from, to, into);
    else if (l->dtype == FP32)
        pack_fp32(l, x, bf16, from, to, into);
#ifdef WITH_BF16
    else
        pack_bf16(l, x, bf16, from, to, into);
#endif
}

static microkernel *const *microkernels(const linear *l, int panels) {
#ifdef WITH_BF16
    if (l->dtype == BF16) return bf16_microkernels[panels - 1];
#endif
    return l->dtype == INT8 ? int8_microkernels[panels - 1] : fp32_microkernels[panels - 1];
}

/* Rows up to which one panel at a time is faster: it is read from the second cache fewer times. */
#define MAX_ROWS_ONE_PANEL 24

/* All packed rows, for the outputs [from, to). Every group of rows runs through the same panel,
 * which stays in the first cache, while the next panel is fetched from memory. */
static void multiply(const linear *l, const packed_rows *x, int64_t count, int64_t from, int64_t to,
                     const destination *into) {
    to = minimum(to, l->out_features);
    if (!count) return;
#ifdef WITH_AMX
    if (x->amx) {
        linear_amx(l, x, count, from, to, into);
        return;
    }
#endif
    int panels = count > MAX_ROWS_ONE_PANEL ? 2 : 1;
    microkernel *const *kernels = microkernels(l, panels);
    int64_t max_rows = MAX_TILE_ROWS / panels, groups = (count + max_rows - 1) / max_rows;
    int64_t rows = (count + groups - 1) / groups; /* of each group, as equal as possible */
    int64_t lines = panels * PANEL / 16;          /* that a step reads, of the panels */
    for (int64_t output = from; output < to; output += panels * PANEL) {
        prefetcher prefetch = {panel_at(l, output + panels * PANEL),
                               (lines + groups - 1) / groups * LINE};
        for (int64_t row = 0; row < count; row += rows)
            kernels[minimum(rows, count - row) - 1](l, output, x, row, into, &prefetch);
    }
}

void team_linear(team *t, const linear *l, const packed_rows *x, int64_t count,
                 const destination *into) {
    range outputs = partition(t, l->out_features, 2 * PANEL);
    multiply(l, x, count, outputs.from, outputs.to, into);
    team_barrier(t);
}
