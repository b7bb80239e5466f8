// The operators that have one implementation per instruction set, as a table of functions.
//
// Each works on a range of rows, panels or heads; who works on which range is tape.cpp's business.
// Invariant: an output row's bits depend on its input row alone, never on the range.

#pragma once

#include "step.h"

namespace octavo {

// Activations as int8 with a scale per group of 32: x ~ scale * q. `groups` per row.
struct QuantizedRows {
    int8_t* values;   // (rows, groups * 32), from -127 to 127
    float* scales;    // (rows, groups)
    float* sums;      // (rows, groups): scale * the sum of the group's integers
    int32_t* starts;  // (rows, groups): -128 * that sum, what int8 weights' offset of 128 adds too much
    int32_t groups;
};

struct AttentionJob {
    const float* q;  // first row of the chunk, at the first query head of this KV head
    float* out;      // likewise
    int32_t q_stride, out_stride;
    int32_t first_row, num_rows;  // of the chunk, of this job
    int32_t first_position;       // of the chunk's first row
    const int32_t* block_table;
    int32_t context;  // tokens in the cache
    int32_t group;    // query heads per KV head
    int32_t head_dim, window;  // window 0: all positions
    float scale;
    int32_t layer, kv_head;
};

struct Kernels {
    const char* name;
    void (*rms_norm)(const float* x, const float* weight, float* out, int width, float eps);
    void (*add)(const float* x, const float* y, float* out, int width);
    void (*gated_activation)(const float* gate, const float* up, float* out, int width, int kind);
    void (*rope)(const float* x, const float* cosines, const float* sines, float* out, int heads,
                 int head_dim);
    void (*quantize_row)(const float* x, int width, QuantizedRows rows, int row);
    // out[row][16 panel + lane] for rows [0, num_rows) and panels [first, end); bias may be null.
    void (*group_product)(const Matrix& matrix, const QuantizedRows& rows, int num_rows, int first,
                          int end, const float* bias, float* out, int stride);
    void (*bf16_product)(const Matrix& matrix, const float* x, int x_stride, int num_rows, int first,
                         int end, const float* bias, float* out, int stride);
    void (*write_kv)(const float* k, const float* v, uint8_t* page, int slot, const Pages& pages);
    void (*attention)(const AttentionJob& job, const Pages& pages);
};

// Null where this build or this machine lacks the instruction set.
const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();

}  // namespace octavo
