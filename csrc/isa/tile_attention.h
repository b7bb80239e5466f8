// Attention over bfloat16 pages with AMX: see attention.h.
//
// Pages are made of operands: 32 dims of 16 positions' keys, 32 positions of 16 dims' values. Queries are
// 16 N rows with 4 / N columns of operands: four sums, whose operands are loaded once for two products
// each. Weights are rounded as they are computed, into operands. Limit: a decoded row, memory; a prompt, the
// softmax, ten vector operations for 16 weights.

#pragma once

#include "attention.h"
#include "bf16.h"
#include "tiles.h"

namespace {

using Operand = uint16_t[TILE][DEPTH];

// What is multiplied: bfloat16, signed bytes, or bytes without a sign with signed ones.
enum class Kinds { bf16, signed_bytes, unsigned_bytes };

template <Kinds kinds, int sums, int a, int b>
INLINE void add_product() {
    if constexpr (kinds == Kinds::bf16) add_bf16<sums, a, b>();
    if constexpr (kinds == Kinds::signed_bytes) add_signed<sums, a, b>();
    if constexpr (kinds == Kinds::unsigned_bytes) add_unsigned<sums, a, b>();
}

// N x up to 4 / N tiles of products: 16 N rows, whose operands are a(n, k), with 16 columns each, whose
// operands are b(column, k). Writes them to `out`; `stride` numbers lie between rows.
template <int N, Kinds kinds, class A, class B, class Sum>
INLINE void multiply_tiles(A&& a, B&& b, int depth, int columns, Sum* out, int stride) {
    auto column = [&]<int c>(int k) __attribute__((always_inline)) {
        if (c >= columns) return;
        load_tile<6 + c % 2>(b(c, k), 64);
        add_product<kinds, c * N, 4, 6 + c % 2>();
        if (N == 2) add_product<kinds, c * N + N - 1, 5, 6 + c % 2>();
    };
    auto write = [&]<int c>() __attribute__((always_inline)) {
        if (c >= columns) return;
        store_tile<c * N>(out + c * LANES, stride * 4l);
        if (N == 2) store_tile<c * N + N - 1>(out + int64_t(TILE) * stride + c * LANES, stride * 4l);
    };
    clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
    for (int k = 0; k < depth; ++k) {
        load_tile<4>(a(0, k), 64);
        if (N == 2) load_tile<5>(a(1, k), 64);
        column.template operator()<0>(k), column.template operator()<1>(k);
        if constexpr (N == 1) column.template operator()<2>(k), column.template operator()<3>(k);
    }
    write.template operator()<0>(), write.template operator()<1>();
    if constexpr (N == 1) write.template operator()<2>(), write.template operator()<3>();
}

template <int N>
struct Bf16Tiles {
    static constexpr int ROWS = N * TILE, COLUMNS = 4 / N;
    alignas(64) Operand q[N][MAX_DIMS / DEPTH], weights[N][SEGMENT / DEPTH];
    alignas(64) Operand copy;  // of an operand that is not whole in its page

    void set_queries(int row, const float* from, int dims, float scale) {
        for (int d = 0; d < (dims + DEPTH - 1) / DEPTH * DEPTH; d += LANES)
            round(d < dims ? load(from + d) * splat(scale) : Floats{}, &q[row / TILE][d / DEPTH][row % TILE][d % DEPTH]);
    }

    // The keys of 16 positions from `at` on, dims [dim, dim + 32); those beyond the last are zero.
    const uint16_t* keys(const Segment& segment, int at, int dim) {
        const uint16_t* from = segment.keys<uint16_t>(at) + dim * LANES;
        if (dim + DEPTH <= segment.job.head_dim) return from;
        std::memset(copy, 0, sizeof copy);
        std::memcpy(copy, from, sizeof copy / 2);
        return copy[0];
    }

    void scores(const Segment& segment, int, int dims, float* out) {
        for (int at = 0; at < segment.length; at += COLUMNS * LANES) {
            const int columns = (segment.length - at + LANES - 1) / LANES;
            for (int c = 0; c < columns && c < COLUMNS; ++c) segment.fetch<uint16_t>(at + c * LANES);
            multiply_tiles<N, Kinds::bf16>([&](int n, int k) { return q[n][k]; },
                              [&](int c, int k) { return keys(segment, at + c * LANES, k * DEPTH); },
                              (dims + DEPTH - 1) / DEPTH, columns, out + at, SEGMENT);
        }
    }

    float weigh(const Segment&, int row, float* scores, const Seen& seen, float* lanes) {
        const Floats top = splat(hide(scores, seen));
        const int depth = (seen.padded + DEPTH - 1) / DEPTH * DEPTH;
        Floats sums{};
        for (int i = 0; i < depth; i += LANES) {
            const bool is_seen = i >= seen.first() && i < seen.last();
            const Floats weight = is_seen ? coarse_two_to(load(scores + i) - top) : Floats{};
            sums = sums + weight;
            round(weight, &weights[row / TILE][i / DEPTH][row % TILE][i % DEPTH]);
        }
        store(lanes, sums);
        return top[0];
    }

    // The values of 16 dims at positions [at, at + 32). What lies beyond the context may be anything, NaN
    // too, so it is not even multiplied by zero.
    const uint16_t* values(const Segment& segment, int at, int dim) {
        const int block = segment.pages.block_size;
        const int count = segment.length - at < DEPTH ? segment.length - at : DEPTH;
        if (count == DEPTH && (segment.start + at) % block + DEPTH <= block) return segment.values<uint16_t>(at, dim);
        std::memset(copy, 0, sizeof copy);
        for (int i = 0; i < count; i += 2) {
            std::memcpy(copy[i / 2], segment.values<uint16_t>(at + i, dim), sizeof copy[0]);
            if (i + 1 == count)
                for (int lane = 0; lane < LANES; ++lane) copy[i / 2][2 * lane + 1] = 0;
        }
        return copy[0];
    }

    void mix(const Segment& segment, int, int dims, const float*, float* out, int stride) {
        const int depth = (segment.length + DEPTH - 1) / DEPTH;
        for (int d = 0; d < dims; d += COLUMNS * LANES)
            multiply_tiles<N, Kinds::bf16>([&](int n, int k) { return weights[n][k]; },
                              [&](int c, int k) { return values(segment, k * DEPTH, d + c * LANES); }, depth,
                              (dims - d) / LANES, out + d, stride);
    }
};

// --- int8 pages ----------------------------------------------------------------------------------------
//
// An operand of keys is 64 dims of 16 positions, of values 64 positions of 16 dims. The two planes of a query
// or of weights are rows of one operand: h of rows 0 to 7, then l. Integer sums are exact in any order.

constexpr int BYTES = 64;  // of an operand's row

template <int N>
struct Int8Planes {
    static constexpr int HALF_TILE = TILE / 2, ROWS = N * HALF_TILE, COLUMNS = 4 / N;
    using Bytes = int8_t[TILE][BYTES];
    alignas(64) Bytes q[N][MAX_DIMS / BYTES], weights[N][SEGMENT / BYTES];
    alignas(64) Bytes copy;  // of an operand that is not whole in its page
    alignas(64) int32_t whole[MAX_DIMS], sums[N * TILE * MAX_DIMS];
    float q_scales[ROWS], weight_scales[ROWS];
    Scales scales_of;

    // Split 16 whole numbers at `at` of a row into planes; `rest` is added to get h rounded, not cut.
    INLINE static void split(const int32_t* from, int rest, Bytes* to, int row, int at) {
        IntPart x;
        load_to(x, from + at);
        const IntPart high = (x + rest) >> 8;
        int8_t* h = to[at / BYTES][row] + at % BYTES;
        _mm_storeu_si128((__m128i*)h, _mm512_cvtepi32_epi8((__m512i)high));
        _mm_storeu_si128((__m128i*)(h + HALF_TILE * BYTES), _mm512_cvtepi32_epi8((__m512i)x));
    }

    void set_queries(int row, const float* from, int dims, float scale) {
        std::memset(whole, 0, sizeof whole);
        q_scales[row] = quantize(from, dims, QUERY_TOP, whole) * scale;
        for (int d = 0; d < dims || d % BYTES; d += LANES)
            split(whole, 128, q[row / HALF_TILE], row % HALF_TILE, d);
    }

    // 256 h + l of row r at column c; the planes are HALF_TILE rows apart.
    INLINE Floats joined(int row, int column, int stride) const {
        const int32_t* high = sums + (row / HALF_TILE * TILE + row % HALF_TILE) * stride + column;
        return fma(load_ints(high, Floats{}), splat(256.0f), load_ints(high + HALF_TILE * stride, Floats{}));
    }

    const int8_t* keys(const Segment& segment, int at, int dim) {
        const int8_t* from = segment.keys<int8_t>(at) + dim * LANES;
        const int rest = segment.job.head_dim - dim;
        if (rest >= BYTES) return from;
        std::memset(copy, 0, sizeof copy);
        std::memcpy(copy, from, size_t(rest) * LANES);
        return copy[0];
    }

    void scores(const Segment& segment, int rows, int dims, float* out) {
        scales_of.read(segment);
        for (int at = 0; at < segment.length; at += COLUMNS * LANES) {
            const int columns = (segment.length - at + LANES - 1) / LANES;
            for (int c = 0; c < columns && c < COLUMNS; ++c) segment.fetch<int8_t>(at + c * LANES);
            multiply_tiles<N, Kinds::signed_bytes>(
                [&](int n, int k) { return q[n][k]; },
                [&](int c, int k) { return keys(segment, at + c * LANES, k * BYTES); },
                (dims + BYTES - 1) / BYTES, columns, sums + at, SEGMENT);
        }
        for (int r = 0; r < rows; ++r)
            for (int i = 0; i < segment.length; i += LANES)
                store(out + r * SEGMENT + i,
                      joined(r, i, SEGMENT) * (splat(q_scales[r]) * load(scales_of.keys + i)));
    }

    float weigh(const Segment&, int row, float* scores, const Seen& seen, float* lanes) {
        const float top = weigh_whole(scores, seen, scales_of.values, lanes, whole, weight_scales[row]);
        for (int i = 0; i < seen.padded || i % BYTES; i += LANES) {
            if (i >= seen.padded) std::memset(whole + i, 0, sizeof(int32_t) * LANES);
            split(whole, 0, weights[row / HALF_TILE], row % HALF_TILE, i);
        }
        return top;
    }

    // The values of 16 dims at positions [at, at + 64): what lies beyond the context has weight 0.
    const int8_t* values(const Segment& segment, int at, int dim) {
        const int block = segment.pages.block_size;
        if (at % block + BYTES <= block) return segment.values<int8_t>(at, dim);
        for (int i = 0; i < BYTES; i += block) {
            const size_t bytes = size_t(LANES) * (block < BYTES ? block : BYTES);
            if (at + i < segment.length)
                std::memcpy(copy[0] + i * LANES, segment.values<int8_t>(at + i, dim), bytes);
            else
                std::memset(copy[0] + i * LANES, 0, bytes);
        }
        return copy[0];
    }

    void mix(const Segment& segment, int rows, int dims, const float*, float* out, int stride) {
        const int depth = (segment.length + BYTES - 1) / BYTES;
        for (int d = 0; d < dims; d += COLUMNS * LANES)
            multiply_tiles<N, Kinds::unsigned_bytes>(
                [&](int n, int k) { return weights[n][k]; },
                [&](int c, int k) { return values(segment, k * BYTES, d + c * LANES); }, depth,
                (dims - d) / LANES, sums + d, dims);
        for (int r = 0; r < rows; ++r)
            for (int d = 0; d < dims; d += LANES)
                store(out + r * stride + d, joined(r, d, dims) * splat(weight_scales[r]));
    }
};

template <template <int> class Tiles>
void tile_attention(const AttentionJob& job, const Pages& pages) {
    constexpr int ROWS = Tiles<1>::ROWS;
    const TileScope scope(WHOLE);
    const int rows = job.num_rows * job.group;
    for (int row = 0; row < rows; row += 2 * ROWS) {
        const int count = rows - row < 2 * ROWS ? rows - row : 2 * ROWS;
        count <= ROWS ? attend<Tiles<1>>(job, pages, row, count) : attend<Tiles<2>>(job, pages, row, count);
    }
}

void amx_attention(const AttentionJob& job, const Pages& pages) {
    pages.element_bytes == 1   ? tile_attention<Int8Planes>(job, pages)
    : pages.element_bytes == 2 ? tile_attention<Bf16Tiles>(job, pages)
                               : attention(job, pages);
}

}  // namespace
