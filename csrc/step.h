// What crosses from Python into the library: a model as a tape of operations, and one step.
//
// Every pointer is borrowed: Python owns arrays and packed weights, and keeps them alive. Each kind
// of operation has the name it has in octavo/program/ops.py.

#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace octavo {

// A matrix of activations, (rows, width): element (r, c) is base[r * stride + c].
struct Value {
    float* base = nullptr;
    int32_t stride = 0, width = 0;

    float* row(int64_t r) const { return base + r * stride; }
};

enum class Format : int32_t { bf16, int8, int4, int8_group, int4_group };

// A packed matrix of `outputs` x `inputs`, see pack.h. Panels hold 16 outputs each.
struct Matrix {
    const uint8_t* panels;
    int32_t outputs, inputs;
    Format format;
};

enum class Kind : int32_t {
    embed, rms_norm, add_rms_norm, linear, rope, write_kv, attention, gated_activation, add, select_rows,
    sample
};

struct Operation {
    Kind kind = Kind::embed;
    Value x, y, out, total;
    const float* weight = nullptr;     // of norms; of rope the cosines, (positions, head_dim / 2)
    const float* sines = nullptr;      // of rope
    std::vector<Matrix> matrices;      // of linear, side by side; the table of embed
    std::vector<const float*> biases;  // parallel to matrices; may be null
    int32_t heads = 1, kv_heads = 1, head_dim = 0, layer = 0, window = 0, gate = 0;
    float eps = 0, scale = 1;
    bool is_gated = false;  // a linear of two matrices: out = gate(the first's columns) * the second's
};

class Draws;

// One step: the arrays of octavo.executors.executor.Batch.
struct Step {
    int32_t num_rows, num_chunks, table_width, num_logit_rows;
    const int32_t *token_ids, *positions, *chunk_starts, *block_tables, *context_lengths, *logit_rows;
    Draws* draws = nullptr;       // of all logit rows
    int32_t first_logit_row = 0;  // of the batch's; a step may see a slice of them
};

// The KV pool: for each block, layer and KV head a page: keys, values, and with int8 the float scales of
// the keys, then those of the values, one per position.
struct Pages {
    uint8_t* base;
    int32_t num_layers, block_size, kv_heads, head_dim;
    int32_t element_bytes;  // 1: int8, 2: bfloat16, 4: float32

    int64_t page_elements() const { return int64_t(block_size) * head_dim; }
    int64_t page_bytes() const {
        return 2 * (page_elements() * element_bytes + (element_bytes == 1 ? block_size * int64_t(sizeof(float)) : 0));
    }
    uint8_t* page(int layer, int block, int head) const {
        return base + ((int64_t(block) * num_layers + layer) * kv_heads + head) * page_bytes();
    }
};

// What steps have done so far: flops of products and attention, and bytes of weights and pages. Keys and
// values count as read once per chunk and layer, whoever reads them together; weights once per run of theirs.
struct Counters {
    int64_t flops = 0, weights = 0, kv_read = 0, kv_written = 0;
};

}  // namespace octavo
