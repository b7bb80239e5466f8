// Attention over pages: softmax(scale q k^T + mask) v for the query rows of one KV head.
//
// A page of keys is tiles of 16 positions: [position / 16][dim / 2][16 positions][2 dims]; a page of
// values is [dim / 16][position / 2][16 dims][2 positions]. Float pages have the same order.
// Positions are cut into segments of 256 at absolute multiples. Each starts from fresh softmax state
// and is merged left to right; a row that sees nothing of one keeps its state bit for bit. Row i of a
// tile is head i % group of token i / group. Limit: a decoded row, memory; a prompt, the vector ports.

#pragma once

#include "../kernels.h"
#include "vector.h"

namespace {

using octavo::AttentionJob;
using octavo::Pages;

constexpr int SEGMENT = 256;
constexpr int MAX_DIMS = 512;
// Scores are multiplied by it, so that weights are powers of two.
constexpr float LOG2_E = 1.44269504f;

// Positions [start, start + length) of one segment, and where their keys and values lie.
struct Segment {
    const AttentionJob& job;
    const Pages& pages;
    int start, length;
    bool is_cold;  // the first to read it fetches ahead, beyond what the hardware foresees

    // Called for positions [offset, offset + 16): fetch what comes a block later, and their values.
    template <class Element>
    void fetch(int offset) const {
        if (!is_cold) return;
        const int bytes = LANES * pages.head_dim * int(sizeof(Element)), block = pages.block_size;
        const int part = (start + offset) % block / LANES * LANES * pages.head_dim;
        prefetch_far(page<Element>(offset) + pages.page_elements() + part, bytes);
        if (offset + block < length) prefetch_far(page<Element>(offset + block) + part, bytes);
    }

    template <class Element>
    const Element* keys(int offset) const {
        return page<Element>(offset) + int64_t((start + offset) % pages.block_size) * pages.head_dim;
    }

    // Of dims [dim, dim + 16), from the block of position start + offset on.
    template <class Element>
    const Element* values(int offset, int dim) const {
        return page<Element>(offset) + pages.page_elements() + int64_t(dim) * pages.block_size +
               (start + offset) % pages.block_size * 16;
    }

  private:
    template <class Element>
    const Element* page(int offset) const {
        const int block = job.block_table[(start + offset) / pages.block_size];
        return (const Element*)pages.page(job.layer, block, job.kv_head);
    }
};

// --- scores and sums in float, R rows at a time -----------------------------------------------------

// R queries with 16 positions' keys: a running sum over even dims, and one over odd.
template <class Element, int R>
void score_tile(const float* q, int dims, const Element* keys, float* scores) {
    Part even[R][PARTS] = {}, odd[R][PARTS] = {};
    for (int d = 0; d < dims; d += 2, keys += 2 * LANES) {
        UNROLL for (int part = 0; part < PARTS; ++part) {
            Part first, second, a, b;
            load_pairs(keys + 2 * PART * part, first, second);
            UNROLL for (int r = 0; r < R; ++r) {
                splat_to(a, q[r * dims + d]), splat_to(b, q[r * dims + d + 1]);
                even[r][part] = fma(a, first, even[r][part]);
                odd[r][part] = fma(b, second, odd[r][part]);
            }
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int part = 0; part < PARTS; ++part)
            store(scores + r * SEGMENT + part * PART, even[r][part] + odd[r][part]);
}

// R rows of weights with 16 dims' values over a segment: a running sum over even positions, one over odd.
template <class Element, int R>
void value_tile(const Segment& segment, const float* weights, int dim, float* sums, int stride) {
    Part even[R][PARTS] = {}, odd[R][PARTS] = {};
    const int block = segment.pages.block_size;
    for (int at = 0; at < segment.length; at += block) {
        const Element* values = segment.values<Element>(at, dim);
        const int end = at + block < segment.length ? at + block : segment.length;
        for (int s = at; s < end; s += 2, values += 2 * LANES) {
            UNROLL for (int part = 0; part < PARTS; ++part) {
                Part first, second, a, b;
                load_pairs(values + 2 * PART * part, first, second);
                // Beyond the context a page holds anything, NaN too: zero times it would not be zero.
                if (s + 1 == end) second = Part{};
                UNROLL for (int r = 0; r < R; ++r) {
                    splat_to(a, weights[r * SEGMENT + s]), splat_to(b, weights[r * SEGMENT + s + 1]);
                    even[r][part] = fma(a, first, even[r][part]);
                    odd[r][part] = fma(b, second, odd[r][part]);
                }
            }
        }
    }
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int part = 0; part < PARTS; ++part)
            store(sums + r * stride + dim + part * PART, even[r][part] + odd[r][part]);
}

template <class Element>
struct FloatTiles {
    static constexpr int ROWS = PART == 16 ? 8 : 4;
    alignas(64) float q[ROWS * MAX_DIMS];

    void set_queries(int row, const float* from, int dims, float scale) {
        for (int d = 0; d < dims; d += LANES) store(q + row * dims + d, load(from + d) * splat(scale));
    }

    void scores(const Segment& segment, int rows, int dims, float* out) {
        const auto tile = rows == 1 ? score_tile<Element, 1>
                          : rows <= 4 ? score_tile<Element, 4> : score_tile<Element, ROWS>;
        for (int at = 0; at < segment.length; at += LANES) {
            segment.fetch<Element>(at);
            tile(q, dims, segment.keys<Element>(at), out + at);
        }
    }

    void sums(const Segment& segment, int rows, int dims, const float* weights, float* out) {
        const auto tile = rows == 1 ? value_tile<Element, 1>
                          : rows <= 4 ? value_tile<Element, 4> : value_tile<Element, ROWS>;
        for (int d = 0; d < dims; d += LANES) tile(segment, weights, d, out, dims);
    }
};

// --- softmax and merging, whatever computes the tiles ------------------------------------------------

struct Softmax {
    float top = -INFINITY, total = 0;
    float keep = 1, take = 0;  // factors of what was merged before, and of the segment at hand
};

// Turn one row's scores of positions [0, padded) into weights, of which [begin, end) are visible.
INLINE void weigh(float* scores, int begin, int end, int padded, Softmax& state) {
    for (int i = 0; i < begin && i < padded; ++i) scores[i] = -INFINITY;
    for (int i = end < 0 ? 0 : end; i < padded; ++i) scores[i] = -INFINITY;
    Floats best = splat(-INFINITY);
    for (int i = 0; i < padded; i += LANES) best = maximum(best, load(scores + i));
    const float top = largest(best);
    if (!(top > -INFINITY)) {  // nothing is visible
        std::memset(scores, 0, sizeof(float) * padded);
        state.keep = 1, state.take = 0;
        return;
    }
    Floats sums{};
    for (int i = 0; i < padded; i += LANES) {
        const Floats e = two_to(load(scores + i) - splat(top));
        store(scores + i, e);
        sums = sums + e;
    }
    const float next = state.top > top ? state.top : top;
    state.keep = state.top > -INFINITY ? std::exp2(state.top - next) : 0.0f;
    state.take = std::exp2(top - next);
    state.total = state.total * state.keep + sum(sums) * state.take;
    state.top = next;
}

// Attend with `count` query rows, from row `first` of the job on.
template <class Tiles>
void attend(const AttentionJob& job, const Pages& pages, int first, int count) {
    constexpr int ROWS = Tiles::ROWS;
    const int dims = job.head_dim;
    Tiles tiles;
    Softmax state[ROWS];
    int position[ROWS];
    alignas(64) float scores[ROWS * SEGMENT], sums[ROWS * MAX_DIMS], merged[ROWS * MAX_DIMS];
    for (int r = 0; r < ROWS; ++r) {  // rows that are missing repeat the last one
        const int i = first + (r < count ? r : count - 1), row = job.first_row + i / job.group;
        const float* q = job.q + int64_t(row) * job.q_stride + i % job.group * dims;
        tiles.set_queries(r, q, dims, job.scale * LOG2_E);
        position[r] = job.first_position + row;
        std::memset(merged + r * dims, 0, sizeof(float) * dims);
    }
    const int low = position[0], high = position[count - 1];
    const int oldest = job.window && low >= job.window ? low - job.window + 1 : 0;
    for (int start = oldest / SEGMENT * SEGMENT; start <= high; start += SEGMENT) {
        const int length = high + 1 - start < SEGMENT ? high + 1 - start : SEGMENT;
        const int padded = (length + LANES - 1) / LANES * LANES;
        const Segment segment{job, pages, start, length, first == 0};
        tiles.scores(segment, count, dims, scores);
        for (int r = 0; r < count; ++r) {
            const int end = position[r] + 1 - start < length ? position[r] + 1 - start : length;
            const int begin = job.window ? position[r] - job.window + 1 - start : 0;
            weigh(scores + r * SEGMENT, begin, end, padded, state[r]);
        }
        tiles.sums(segment, count, dims, scores, sums);
        for (int r = 0; r < count; ++r) {
            const Floats keep = splat(state[r].keep), take = splat(state[r].take);
            for (int d = r * dims; d < (r + 1) * dims; d += LANES)
                store(merged + d, fma(load(sums + d), take, load(merged + d) * keep));
        }
    }
    for (int r = 0; r < count; ++r) {
        const int row = job.first_row + (first + r) / job.group, head = (first + r) % job.group;
        float* out = job.out + int64_t(row) * job.out_stride + head * dims;
        const Floats total = splat(state[r].total);
        for (int d = 0; d < dims; d += LANES) store(out + d, load(merged + r * dims + d) / total);
    }
}

template <class Tiles>
void attention_of(const AttentionJob& job, const Pages& pages) {
    const int rows = job.num_rows * job.group;
    for (int row = 0; row < rows; row += Tiles::ROWS)
        attend<Tiles>(job, pages, row, rows - row < Tiles::ROWS ? rows - row : Tiles::ROWS);
}

void attention(const AttentionJob& job, const Pages& pages) {
    const auto run = pages.element_bytes == 2 ? attention_of<FloatTiles<uint16_t>> : attention_of<FloatTiles<float>>;
    run(job, pages);
}

// --- writing ---------------------------------------------------------------------------------------

template <class Element, class Convert>
INLINE void scatter_kv(const float* k, const float* v, Element* page, int slot, const Pages& pages, Convert&& to) {
    Element* keys = page + int64_t(slot / 16) * pages.head_dim * 16 + slot % 16 * 2;
    Element* values = page + pages.page_elements() + slot / 2 * 32 + slot % 2;
    for (int d = 0; d < pages.head_dim; d += 2, keys += 32) keys[0] = to(k[d]), keys[1] = to(k[d + 1]);
    for (int d = 0; d < pages.head_dim; d += 16, values += 16 * pages.block_size)
        for (int i = 0; i < 16; ++i) values[2 * i] = to(v[d + i]);
}

void write_kv(const float* k, const float* v, uint8_t* page, int slot, const Pages& pages) {
    if (pages.element_bytes == 2)
        scatter_kv(k, v, (uint16_t*)page, slot, pages, to_bf16);
    else
        scatter_kv(k, v, (float*)page, slot, pages, [](float x) { return x; });
}

}  // namespace
