// The operators that have one implementation per instruction set, as a table of functions.
//
// Each works on a range of rows, panels or heads; who works on which range is tape.cpp's business.
// Invariant: an output row's bits depend on its input row alone, never on the range.

#pragma once

#include "step.h"

namespace octavo {

// The rows that go into a product: as floats, and as whatever the weights' format makes of them.
//
// Prepared rows lie in tiles of 16: the 32 inputs of group g of row r at (r / 16, g, r % 16). As int8:
// x ~ scale * value, with a scale per row and group.
struct Activations {
    const float* x;
    int32_t stride, width, groups;
    int8_t* values;     // from -127 to 127
    float* scales;      // (rows / 16, groups, 16), as are the next two
    float* sums;        // scale * the sum of the group's values
    int32_t* starts;    // -128 * that sum: what the offset of 128 in int8 weights adds too much
    uint16_t* rounded;  // as bfloat16
    // For formats with one scale per output: x ~ row scale * value. AMX has, from five rows on, the values in
    // planes of bytes instead, see amx_channels.h.
    int32_t count;        // rows
    int16_t* shorts;      // (rows, groups * 32)
    int16_t* group_sums;  // (rows, groups, 2): the sum of a group's values, and that over 256, rounded
    float* row_scales;    // (rows,)
    int32_t* row_sums;    // (rows,): the sum of all values
    int8_t* planes;

    int64_t tile(int64_t row, int group) const { return ((row / 16) * groups + group) * 16 + row % 16; }
};

// Where the columns of a product go: out[row][column] = sum + bias[column] + addend[row][column]; both may be null.
struct Output {
    const float* bias;
    float* out;
    int32_t stride;
    const float* addend;
    int32_t addend_stride;
};

// Positions are attended to in segments at absolute multiples of 256, one after the other.
constexpr int SEGMENT = 256;

// The segments [first, end) that a row at `position` sees; window 0: all up to it.
static inline int first_segment(int position, int window) {
    return window && position >= window ? (position - window + 1) / SEGMENT : 0;
}
static inline int end_segment(int position) { return position / SEGMENT + 1; }

// What single segments gave, to be merged later: a part for each row, segment that it sees, and head.
// A part is what the values mixed to, as many floats as a head has dims; 16 lanes, whose sum is that of
// the weights; and the largest score.
struct Parts {
    float* base;
    const int64_t* starts;  // of each row: where its parts begin, less its first segment; in `heads`
    int32_t heads, head_dim;

    static int floats(int head_dim) { return head_dim + 32; }
    float* at(int row, int segment, int head) const {
        return base + ((starts[row] + segment) * heads + head) * floats(head_dim);
    }
};

// Keys to fetch into a cache: of one head, at the positions [begin, end) of a block table; none if it is null.
struct Upcoming {
    const int32_t* block_table;
    int32_t begin, end, kv_head;
};

// Rows that attend together to some segments of one block table, for one KV head.
struct AttentionJob {
    const float* q;  // of row 0 of the batch, at the first query head of this KV head
    float* out;      // likewise
    int32_t q_stride, out_stride;
    const int32_t* rows;       // of the batch
    const int32_t* positions;  // of all rows of the batch
    const int32_t* block_table;
    int32_t num_rows, first_segment, end_segment;
    int32_t group;             // query heads per KV head
    int32_t head_dim, window;  // window 0: all positions
    float scale;
    int32_t layer, kv_head;
    Upcoming next;       // what this thread reads after it
    const Parts* parts;  // where results go; null: they are merged here, into `out`
};

struct Kernels {
    const char* name;
    void (*rms_norm)(const float* x, const float* weight, float* out, int width, float eps);
    void (*add)(const float* x, const float* y, float* out, int width);
    void (*gated_activation)(const float* gate, const float* up, float* out, int width, int kind);
    void (*rope)(const float* x, const float* cosines, const float* sines, float* out, int heads,
                 int head_dim);
    // Prepare a row for products with weights of this format.
    void (*prepare_row)(Format format, const Activations& rows, int row);
    // Columns 16 panel + lane of rows [0, num_rows), for panels [first, end).
    void (*product)(const Matrix& matrix, const Activations& rows, int num_rows, int first, int end,
                    const Output& to);
    void (*write_kv)(const float* k, const float* v, uint8_t* page, int slot, const Pages& pages);
    void (*attention)(const AttentionJob& job, const Pages& pages);
    // Merge the parts of a row at `position`, left to right, into out[head * head_dim + dim].
    void (*merge_parts)(const Parts& parts, int row, int position, int window, float* out);
    // For sampling. Into `out` the largest of each 256 values (the last of fewer), NaN if one is.
    void (*maxima)(const float* x, int count, float* out);
    void (*maxima_wide)(const double* x, int count, double* out);
    // The sum of e^((x - top) * inverse); the terms into `out`, of whole 32, unless it is null.
    double (*weigh)(const float* x, int count, double top, double inverse, double* out);
    double (*weigh_wide)(const double* x, int count, double top, double inverse, double* out);
};

// Null where this build or this machine lacks the instruction set.
const Kernels* generic_kernels();
const Kernels* avx2_kernels();
const Kernels* avx512_kernels();
const Kernels* avx512_bf16_kernels();
const Kernels* amx_kernels();

}  // namespace octavo
