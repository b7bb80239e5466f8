// The operators, written once over the primitives of vector.h. Included by one file per instruction
// set, which then fills its table.
//
// Every reduction keeps 16 partial sums in lanes and adds them as a tree at the end; a loop over rows
// never reaches into another row's sum. Widths need not be multiples of 16: tails go through a
// zero-padded copy, so a tail lane does what a full one does.

#pragma once

#include <cmath>

#include "../kernels.h"
#include "../pack.h"
#include "vector.h"

namespace {

using octavo::AttentionJob;
using octavo::Format;
using octavo::Matrix;
using octavo::Pages;
using octavo::QuantizedRows;

// Apply `body(vector of x, vector of y) -> vector` lane by lane; x and y may be `out`.
template <class Body>
INLINE void map(const float* x, const float* y, float* out, int width, Body&& body) {
    int i = 0;
    for (; i + LANES <= width; i += LANES) store(out + i, body(load(x + i), load(y + i)));
    if (i < width) {
        const size_t rest = size_t(width - i) * sizeof(float);
        float a[LANES] = {}, b[LANES] = {};
        std::memcpy(a, x + i, rest), std::memcpy(b, y + i, rest);
        store(a, body(load(a), load(b)));
        std::memcpy(out + i, a, rest);
    }
}

INLINE Floats load_some(const float* from, int count) {
    if (count >= LANES) return load(from);
    float x[LANES] = {};
    std::memcpy(x, from, size_t(count) * sizeof(float));
    return load(x);
}

void rms_norm(const float* x, const float* weight, float* out, int width, float eps) {
    Floats squares{};
    for (int i = 0; i < width; i += LANES) {
        const Floats v = load_some(x + i, width - i);
        squares = fma(v, v, squares);
    }
    const Floats factor = splat(1.0f / std::sqrt(sum(squares) / float(width) + eps));
    map(x, weight, out, width, [=](Floats v, Floats w) { return v * factor * w; });
}

void add(const float* x, const float* y, float* out, int width) {
    map(x, y, out, width, [](Floats a, Floats b) { return a + b; });
}

// kind 0: silu(gate) * up. kind 1: gelu(gate) * up, with the approximation by tanh.
void gated_activation(const float* gate, const float* up, float* out, int width, int kind) {
    if (kind == 0) {
        map(gate, up, out, width, [](Floats g, Floats u) { return g / (exponential(-g) + 1.0f) * u; });
    } else {
        // x/2 (1 + tanh t) = x / (1 + e^-2t)
        map(gate, up, out, width, [](Floats g, Floats u) {
            const Floats t = fma(g * g * g, splat(0.044715f), g) * 0.797884561f;
            return g / (exponential(t * -2.0f) + 1.0f) * u;
        });
    }
}

void rope(const float* x, const float* cosines, const float* sines, float* out, int heads, int head_dim) {
    const int half = head_dim / 2;
    for (int h = 0; h < heads; ++h, x += head_dim, out += head_dim) {
        for (int i = 0; i < half; i += LANES) {
            const int count = half - i < LANES ? half - i : LANES;
            const Floats c = load_some(cosines + i, count), s = load_some(sines + i, count);
            const Floats a = load_some(x + i, count), b = load_some(x + half + i, count);
            float first[LANES], second[LANES];
            store(first, a * c - b * s), store(second, b * c + a * s);
            std::memcpy(out + i, first, size_t(count) * sizeof(float));
            std::memcpy(out + half + i, second, size_t(count) * sizeof(float));
        }
    }
}

// --- products with weights ------------------------------------------------------------------------

void quantize_row(const float* x, int width, QuantizedRows rows, int row) {
    int8_t* values = rows.values + int64_t(row) * rows.groups * octavo::GROUP;
    for (int g = 0; g < rows.groups; ++g) {
        const int begin = g * octavo::GROUP;
        const Floats a = load_some(x + begin, width - begin);
        const int rest = width - begin - LANES;
        const Floats b = rest > 0 ? load_some(x + begin + LANES, rest) : Floats{};
        const float top = largest(maximum(maximum(a, -a), maximum(b, -b)));
        const float scale = top / 127.0f, inverse = top > 0 ? 127.0f / top : 0.0f;
        const Floats magic = splat(12582912.0f);  // adding 1.5 * 2^23 rounds to the nearest integer
        float rounded[2 * LANES];
        store(rounded, (a * inverse + magic) - magic);
        store(rounded + LANES, (b * inverse + magic) - magic);
        int total = 0;
        for (int i = 0; i < octavo::GROUP; ++i) {
            values[begin + i] = int8_t(rounded[i]);
            total += int(rounded[i]);
        }
        rows.scales[int64_t(row) * rows.groups + g] = scale;
        rows.sums[int64_t(row) * rows.groups + g] = float(total);
    }
}

// The weights of one panel and group as 8 vectors of 16 x 4 bytes, and the affine map to floats.
struct Group {
    Ints bytes[8];
    Floats scale, minimum;
};

template <Format format>
INLINE Group load_group(const uint8_t* block) {
    Group group;
    if constexpr (format == Format::int8_group) {
        std::memcpy(group.bytes, block, 512);
        group.scale = load_halves((const uint16_t*)(block + 512));
        group.minimum = group.scale * -128.0f;
    } else {
        UNROLL for (int i = 0; i < 4; ++i) {
            Words packed;
            std::memcpy(&packed, block + 64 * i, 64);
            group.bytes[2 * i] = (Ints)(packed & 0x0f0f0f0fu);
            group.bytes[2 * i + 1] = (Ints)((packed >> 4) & 0x0f0f0f0fu);
        }
        group.scale = load_halves((const uint16_t*)(block + 256));
        group.minimum = load_halves((const uint16_t*)(block + 288));
    }
    return group;
}

// R rows with one panel: integer dot products per group, then floats from group to group in order.
template <Format format, int R>
INLINE void group_panel(const uint8_t* panel, const QuantizedRows& rows, int row, Floats* acc) {
    constexpr int size = format == Format::int8_group ? octavo::INT8_BLOCK : octavo::INT4_BLOCK;
    const int groups = rows.groups;
    const int8_t* values[R];
    UNROLL for (int r = 0; r < R; ++r) values[r] = rows.values + int64_t(row + r) * groups * octavo::GROUP;
    for (int g = 0; g < groups; ++g, panel += size) {
        __builtin_prefetch(panel + 8192), __builtin_prefetch(panel + 8192 + 64);
        __builtin_prefetch(panel + 8192 + 128), __builtin_prefetch(panel + 8192 + 192);
        __builtin_prefetch(panel + 8192 + 256);
        const Group group = load_group<format>(panel);
        UNROLL for (int r = 0; r < R; ++r) {
            Ints dots{};
            UNROLL for (int i = 0; i < 8; ++i) {
                int32_t four;
                std::memcpy(&four, values[r] + g * octavo::GROUP + 4 * i, 4);
                dots = dot4(dots, group.bytes[i], four);
            }
            const int64_t at = int64_t(row + r) * groups + g;
            const Floats whole = fma(to_floats(dots), group.scale, group.minimum * rows.sums[at]);
            acc[r] = fma(whole, splat(rows.scales[at]), acc[r]);
        }
    }
}

INLINE void store_outputs(Floats value, const float* bias, float* out, int column, int outputs) {
    const int count = outputs - column < LANES ? outputs - column : LANES;
    if (bias) value += load_some(bias + column, count);
    if (count == LANES) {
        store(out + column, value);
    } else {
        float x[LANES];
        store(x, value);
        std::memcpy(out + column, x, size_t(count) * sizeof(float));
    }
}

template <Format format, int R>
INLINE void group_rows(const Matrix& m, const QuantizedRows& rows, int row, int panel,
                       const float* bias, float* out, int stride) {
    Floats acc[R] = {};
    const uint8_t* weights = m.panels + panel * octavo::panel_bytes(format, m.inputs);
    group_panel<format, R>(weights, rows, row, acc);
    UNROLL for (int r = 0; r < R; ++r)
        store_outputs(acc[r], bias, out + int64_t(row + r) * stride, panel * LANES, m.outputs);
}

template <Format format>
void group_product_of(const Matrix& m, const QuantizedRows& rows, int num_rows, int first, int end,
                      const float* bias, float* out, int stride) {
    for (int panel = first; panel < end; ++panel) {
        int row = 0;
        for (; row + 8 <= num_rows; row += 8) group_rows<format, 8>(m, rows, row, panel, bias, out, stride);
        if (row + 4 <= num_rows) group_rows<format, 4>(m, rows, row, panel, bias, out, stride), row += 4;
        if (row + 2 <= num_rows) group_rows<format, 2>(m, rows, row, panel, bias, out, stride), row += 2;
        if (row < num_rows) group_rows<format, 1>(m, rows, row, panel, bias, out, stride);
    }
}

void group_product(const Matrix& m, const QuantizedRows& rows, int num_rows, int first, int end,
                   const float* bias, float* out, int stride) {
    if (m.format == Format::int8_group)
        group_product_of<Format::int8_group>(m, rows, num_rows, first, end, bias, out, stride);
    else
        group_product_of<Format::int4_group>(m, rows, num_rows, first, end, bias, out, stride);
}

// bfloat16 weights with float activations: even and odd inputs have a sum each.
template <int R>
INLINE void bf16_rows(const Matrix& m, const float* x, int x_stride, int row, int panel,
                      const float* bias, float* out, int stride) {
    Floats even[R] = {}, odd[R] = {};
    const auto* weights = (const uint16_t*)(m.panels + panel * octavo::panel_bytes(Format::bf16, m.inputs));
    const float* in = x + int64_t(row) * x_stride;
    for (int i = 0; i < m.inputs; i += 2, weights += 2 * LANES) {
        __builtin_prefetch((const uint8_t*)weights + 8192);
        Floats first, second;
        load_pairs(weights, first, second);
        const bool is_pair = i + 1 < m.inputs;
        UNROLL for (int r = 0; r < R; ++r) {
            even[r] = fma(splat(in[int64_t(r) * x_stride + i]), first, even[r]);
            if (is_pair) odd[r] = fma(splat(in[int64_t(r) * x_stride + i + 1]), second, odd[r]);
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
        store_outputs(even[r] + odd[r], bias, out + int64_t(row + r) * stride, panel * LANES, m.outputs);
}

void bf16_product(const Matrix& m, const float* x, int x_stride, int num_rows, int first, int end,
                  const float* bias, float* out, int stride) {
    for (int panel = first; panel < end; ++panel) {
        int row = 0;
        for (; row + 8 <= num_rows; row += 8) bf16_rows<8>(m, x, x_stride, row, panel, bias, out, stride);
        if (row + 4 <= num_rows) bf16_rows<4>(m, x, x_stride, row, panel, bias, out, stride), row += 4;
        if (row + 2 <= num_rows) bf16_rows<2>(m, x, x_stride, row, panel, bias, out, stride), row += 2;
        if (row < num_rows) bf16_rows<1>(m, x, x_stride, row, panel, bias, out, stride);
    }
}

// --- attention over pages -------------------------------------------------------------------------
//
// A page of keys is tiles of 16 positions: [position / 16][dim / 2][16 positions][2 dims]; a page of
// values is [dim / 16][position / 2][16 dims][2 positions]. Dims are padded to 16. Float pages have the same order.

constexpr int SEGMENT = 256;

INLINE int64_t key_index(int slot, int dim, int head_dim) {
    return (int64_t(slot / 16) * head_dim + dim / 2 * 2) * 16 + (slot % 16) * 2 + dim % 2;
}

INLINE int64_t value_index(int slot, int dim, int block_size) {
    return (int64_t(dim / 16) * block_size + slot / 2 * 2) * 16 + (dim % 16) * 2 + slot % 2;
}

void write_kv(const float* k, const float* v, uint8_t* page, int slot, const Pages& pages) {
    const int size = pages.block_size, dims = pages.head_dim;
    const int64_t values = pages.page_elements();
    if (pages.element_bytes == 2) {
        auto* to = (uint16_t*)page;
        for (int d = 0; d < dims; ++d) {
            to[key_index(slot, d, dims)] = to_bf16(k[d]);
            to[values + value_index(slot, d, size)] = to_bf16(v[d]);
        }
    } else {
        auto* to = (float*)page;
        for (int d = 0; d < dims; ++d) {
            to[key_index(slot, d, dims)] = k[d];
            to[values + value_index(slot, d, size)] = v[d];
        }
    }
}

INLINE void load_pair(const uint16_t* from, Floats& first, Floats& second) { load_pairs(from, first, second); }

INLINE void load_pair(const float* from, Floats& first, Floats& second) {
    float a[LANES], b[LANES];
    for (int i = 0; i < LANES; ++i) a[i] = from[2 * i], b[i] = from[2 * i + 1];
    first = load(a), second = load(b);
}

// Rows of queries with 16 positions' keys: two running sums, over even and odd dims.
template <class Element, int R>
INLINE void score_tile(const float* q, int dims, const Element* keys, float* scores) {
    Floats even[R] = {}, odd[R] = {};
    for (int d = 0; d < dims; d += 2, keys += 32) {
        Floats first, second;
        load_pair(keys, first, second);
        UNROLL for (int r = 0; r < R; ++r) {
            even[r] = fma(splat(q[r * dims + d]), first, even[r]);
            odd[r] = fma(splat(q[r * dims + d + 1]), second, odd[r]);
        }
    }
    UNROLL for (int r = 0; r < R; ++r) store(scores + r * SEGMENT, even[r] + odd[r]);
}

// Rows of weights with 16 dims' values over one block's positions, added to the running sums.
template <class Element, int R>
INLINE void value_tile(const float* weights, int num_slots, const Element* values, Floats* even, Floats* odd) {
    for (int s = 0; s < num_slots; s += 2, values += 32) {
        Floats first, second;
        load_pair(values, first, second);
        // Beyond the context a page holds anything, NaN too, so it is not even multiplied by zero.
        const bool is_pair = s + 1 < num_slots;
        UNROLL for (int r = 0; r < R; ++r) {
            even[r] = fma(splat(weights[r * SEGMENT + s]), first, even[r]);
            if (is_pair) odd[r] = fma(splat(weights[r * SEGMENT + s + 1]), second, odd[r]);
        }
    }
}

constexpr int MAX_DIMS = 512;

// Attend with R query rows (at most one tile) over all segments, left to right.
template <class Element, int R>
void attend(const AttentionJob& job, const Pages& pages, const float* q, const int* positions, float* out) {
    const int dims = job.head_dim, size = pages.block_size;
    float scores[R * SEGMENT];
    float top[R], total[R];
    UNROLL for (int r = 0; r < R; ++r) top[r] = -INFINITY, total[r] = 0;
    std::memset(out, 0, sizeof(float) * size_t(R) * dims);
    const int low = positions[0], high = positions[R - 1];
    const int oldest = job.window && low >= job.window ? low - job.window + 1 : 0;
    for (int start = oldest / SEGMENT * SEGMENT; start <= high; start += SEGMENT) {
        const int length = high + 1 - start < SEGMENT ? high + 1 - start : SEGMENT;
        const int padded = (length + 15) / 16 * 16;
        for (int tile = 0; tile < padded; tile += 16) {
            const int position = start + tile;
            const auto* page = (const Element*)pages.page(job.layer, job.block_table[position / size], job.kv_head);
            score_tile<Element, R>(q, dims, page + int64_t(position % size) * dims, scores + tile);
        }
        float factor[R], weight[R];
        UNROLL for (int r = 0; r < R; ++r) {
            float* row = scores + r * SEGMENT;
            const int seen = positions[r] + 1 - start < length ? positions[r] + 1 - start : length;
            const int hidden = job.window ? positions[r] - job.window + 1 - start : 0;
            for (int i = 0; i < hidden && i < padded; ++i) row[i] = -INFINITY;
            for (int i = seen < 0 ? 0 : seen; i < padded; ++i) row[i] = -INFINITY;
            Floats best = splat(-INFINITY);
            for (int i = 0; i < padded; i += LANES) best = maximum(load(row + i), best);
            const float m = largest(best);
            if (!(m > -INFINITY)) {  // this row sees nothing here: its state stays bit for bit
                std::memset(row, 0, sizeof(float) * padded);
                factor[r] = 1, weight[r] = 0;
                continue;
            }
            Floats sums{};
            for (int i = 0; i < padded; i += LANES) {
                const Floats e = exponential(load(row + i) - m);
                store(row + i, e);
                sums += e;
            }
            const float next = top[r] > m ? top[r] : m;
            factor[r] = top[r] > -INFINITY ? std::exp(top[r] - next) : 0.0f;
            weight[r] = std::exp(m - next);
            total[r] = total[r] * factor[r] + sum(sums) * weight[r];
            top[r] = next;
        }
        for (int d = 0; d < dims; d += LANES) {
            Floats even[R] = {}, odd[R] = {};
            for (int first = 0; first < length; first += size) {
                const int position = start + first;
                const int slots = length - first < size ? length - first : size;
                const auto* page = (const Element*)pages.page(job.layer, job.block_table[position / size], job.kv_head);
                value_tile<Element, R>(scores + first, slots, page + pages.page_elements() + int64_t(d / 16) * size * 16,
                                       even, odd);
            }
            UNROLL for (int r = 0; r < R; ++r) {
                float* to = out + r * dims + d;
                store(to, fma(even[r] + odd[r], splat(weight[r]), load(to) * factor[r]));
            }
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
        for (int d = 0; d < dims; d += LANES) store(out + r * dims + d, load(out + r * dims + d) / total[r]);
}

// Query rows of one KV head: row i of the tile is head i % group of token i / group.
template <class Element, int R>
void attend_rows(const AttentionJob& job, const Pages& pages, int first) {
    float q[R * MAX_DIMS], out[R * MAX_DIMS];
    int positions[R];
    UNROLL for (int r = 0; r < R; ++r) {
        const int row = job.first_row + (first + r) / job.group, head = (first + r) % job.group;
        const float* from = job.q + int64_t(row) * job.q_stride + head * job.head_dim;
        for (int d = 0; d < job.head_dim; ++d) q[r * job.head_dim + d] = from[d] * job.scale;
        positions[r] = job.first_position + row;
    }
    attend<Element, R>(job, pages, q, positions, out);
    UNROLL for (int r = 0; r < R; ++r) {
        const int row = job.first_row + (first + r) / job.group, head = (first + r) % job.group;
        std::memcpy(job.out + int64_t(row) * job.out_stride + head * job.head_dim, out + r * job.head_dim,
                    sizeof(float) * job.head_dim);
    }
}

template <class Element>
void attention_of(const AttentionJob& job, const Pages& pages) {
    const int num = job.num_rows * job.group;
    int row = 0;
    for (; row + 8 <= num; row += 8) attend_rows<Element, 8>(job, pages, row);
    if (row + 4 <= num) attend_rows<Element, 4>(job, pages, row), row += 4;
    for (; row + 3 <= num; row += 3) attend_rows<Element, 3>(job, pages, row);
    if (row + 2 <= num) attend_rows<Element, 2>(job, pages, row), row += 2;
    if (row < num) attend_rows<Element, 1>(job, pages, row);
}

void attention(const AttentionJob& job, const Pages& pages) {
    if (pages.element_bytes == 2)
        attention_of<uint16_t>(job, pages);
    else
        attention_of<float>(job, pages);
}

}  // namespace
