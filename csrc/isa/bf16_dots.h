// Products and attention with the instruction that adds two products of bfloat16 to each float.
//
//     out[row][16 panel + lane] = sum over pairs of inputs, in order, of odd product + even product
//
// Both operands are rounded: activations, queries and weights of softmax too. A tile is R rows x C columns of 16
// lanes, a column being a panel, 16 positions' keys or 16 dims' values: each pair of a row is loaded once for
// C products, each line of a column once for R.
// Limits: one row, memory; many, the instruction, two a cycle on Zen 5, 495 Gflop/s there. Measured, one thread: 64 rows
// with bfloat16 weights all of it; attention of 512 tokens, whose softmax does not count, 306.

#pragma once

#include "attention.h"
#include "bf16.h"

namespace {

INLINE WordPart load_line(const uint16_t* from) {
    WordPart line;
    load_to(line, from);
    return line;
}

INLINE uint32_t pair_of(const uint16_t* from) {
    uint32_t pair;
    std::memcpy(&pair, from, 4);
    return pair;
}

// Add R rows' pairs times a line of each of C columns.
template <int R, int C>
INLINE void add_pairs_of(Floats (&sums)[R][C], const uint32_t (&pairs)[R], const WordPart (&lines)[C]) {
    each<R>([&]<int r>() INLINED {
        const auto pair = (__m512bh)_mm512_set1_epi32(int32_t(pairs[r]));
        each<C>([&]<int c>() INLINED {
            sums[r][c] = (Floats)_mm512_dpbf16_ps((__m512)sums[r][c], (__m512bh)lines[c], pair);
        });
    });
}

// Call body<R, C>(row, column) for tiles that cover `rows` x `columns`; rows that a tile has beyond them can be
// read, and mean nothing.
template <class Body>
INLINE void each_dots_tile(int rows, int columns, Body&& body) {
    for (int row = 0; row < rows; row += 8) {
        int column = 0;
        if (rows - row <= 4)
            for (; column + 4 <= columns; column += 4)
                rows - row == 1 ? body.template operator()<1, 4>(row, column)
                                : body.template operator()<4, 4>(row, column);
        else
            for (; column + 2 <= columns; column += 2) body.template operator()<8, 2>(row, column);
        for (; column < columns; ++column)
            rows - row == 1   ? body.template operator()<1, 1>(row, column)
            : rows - row <= 4 ? body.template operator()<4, 1>(row, column)
                              : body.template operator()<8, 1>(row, column);
    }
}

// --- products ----------------------------------------------------------------------------------------

void dots_prepare_row(Format format, const Activations& rows, int row) {
    format == Format::bf16 ? round_row(rows, row) : prepare_any_row(format, rows, row);
}

template <int R, int C>
void dots_tile(const Matrix& m, const Activations& rows, int row, int count, int panel, const Output& to) {
    const int64_t bytes = octavo::panel_bytes(Format::bf16, m.inputs);
    const uint16_t* weights[C];
    each<C>([&]<int c>() INLINED { weights[c] = (const uint16_t*)(m.panels + (panel + c) * bytes); });
    Floats sums[R][C] = {};
    const int num_pairs = (m.inputs + 1) / 2;
    for (int i = 0; i < num_pairs; i += GROUP / 2) {
        const uint16_t* at = rows.rounded + rows.tile(row, i / (GROUP / 2)) * GROUP;
        const int end = num_pairs - i < GROUP / 2 ? num_pairs - i : GROUP / 2;
        for (int k = 0; k < end; ++k) {
            uint32_t pairs[R];
            WordPart lines[C];
            each<R>([&]<int r>() INLINED { pairs[r] = pair_of(at + r * GROUP + 2 * k); });
            each<C>([&]<int c>() INLINED {
                prefetch((const uint8_t*)weights[c] + AHEAD, 64);
                lines[c] = load_line(weights[c]), weights[c] += 2 * LANES;
            });
            add_pairs_of(sums, pairs, lines);
        }
    }
    each<R>([&]<int r>() INLINED {
        if (r >= count) return;
        each<C>([&]<int c>() INLINED { store_outputs(&sums[r][c], to, row + r, panel + c, m.outputs); });
    });
}

void dots_product(const Matrix& m, const Activations& rows, int num_rows, int first, int end, const Output& to) {
    if (m.format != Format::bf16) return any_product(m, rows, num_rows, first, end, to);
    each_dots_tile(num_rows, end - first, [&]<int R, int C>(int row, int column) INLINED {
        dots_tile<R, C>(m, rows, row, num_rows - row < R ? num_rows - row : R, first + column, to);
    });
}

// --- attention over bfloat16 pages ---------------------------------------------------------------------

struct Bf16Dots {
    static constexpr int ROWS = 8;
    alignas(64) uint16_t q[ROWS][MAX_DIMS], weights[ROWS][SEGMENT];

    void set_queries(int row, const float* from, int dims, float scale) {
        for (int d = 0; d < dims; d += LANES) round(load(from + d) * splat(scale), q[row] + d);
    }

    template <int R, int C>
    void score(const Segment& segment, int at, int dims, float* out) {
        const uint16_t* keys[C];
        each<C>([&]<int c>() INLINED { keys[c] = segment.keys<uint16_t>(at + c * LANES); });
        const int64_t to_values = segment.to_values();
        Floats sums[R][C] = {};
        for (int d = 0; d < dims; d += 2) {
            uint32_t pairs[R];
            WordPart lines[C];
            each<R>([&]<int r>() INLINED { pairs[r] = pair_of(q[r] + d); });
            each<C>([&]<int c>() INLINED {
                const uint16_t* line = keys[c] + d * LANES;
                prefetch((const uint8_t*)line + to_values, 64);
                lines[c] = load_line(line);
            });
            add_pairs_of(sums, pairs, lines);
        }
        each<R>([&]<int r>() INLINED {
            each<C>([&]<int c>() INLINED { store(out + r * SEGMENT + at + c * LANES, sums[r][c]); });
        });
    }

    void scores(const Segment& segment, int rows, int dims, float* out) {
        const int columns = (segment.length + LANES - 1) / LANES;
        each_dots_tile(rows, columns, [&]<int R, int C>(int, int column) INLINED {
            score<R, C>(segment, column * LANES, dims, out);
        });
    }

    float weigh(const Segment&, int row, float* scores, const Seen& seen, float* lanes) {
        const Floats top = splat(hide(scores, seen));
        Floats sums{};
        for (int i = 0; i < seen.padded; i += LANES) {
            const bool is_seen = i >= seen.first() && i < seen.last();
            const Floats weight = is_seen ? coarse_two_to(load(scores + i) - top) : Floats{};
            sums = sums + weight;
            round(weight, weights[row] + i);
        }
        store(lanes, sums);
        return top[0];
    }

    template <int R, int C>
    void mix_dims(const Segment& segment, int dim, float* out, int stride) {
        Floats sums[R][C] = {};
        const int block = segment.pages.block_size;
        for (int at = 0; at < segment.length; at += block) {
            const uint16_t* values[C];
            each<C>([&]<int c>() INLINED { values[c] = segment.values<uint16_t>(at, dim + c * LANES); });
            const int64_t to_next_keys = segment.to_next_keys<uint16_t>(at);
            const int end = at + block < segment.length ? at + block : segment.length;
            for (int s = at; s < end; s += 2) {
                uint32_t pairs[R];
                WordPart lines[C];
                // Beyond the context a page holds anything, NaN too: zero times it would not be zero.
                const uint32_t mask = s + 1 < end ? 0xffffffffu : 0x0000ffffu;
                each<R>([&]<int r>() INLINED { pairs[r] = pair_of(weights[r] + s); });
                each<C>([&]<int c>() INLINED {
                    prefetch((const uint8_t*)values[c] + to_next_keys, 64);
                    lines[c] = load_line(values[c]) & mask, values[c] += 2 * LANES;
                });
                add_pairs_of(sums, pairs, lines);
            }
        }
        each<R>([&]<int r>() INLINED {
            each<C>([&]<int c>() INLINED { store(out + r * stride + dim + c * LANES, sums[r][c]); });
        });
    }

    void mix(const Segment& segment, int rows, int dims, const float*, float* out, int stride) {
        each_dots_tile(rows, dims / LANES, [&]<int R, int C>(int, int column) INLINED {
            mix_dims<R, C>(segment, column * LANES, out, stride);
        });
    }
};

void dots_attention(const AttentionJob& job, const Pages& pages) {
    pages.element_bytes == 2 ? attention_of<Bf16Dots>(job, pages) : attention(job, pages);
}

}  // namespace
