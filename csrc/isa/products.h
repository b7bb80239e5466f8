// Products with bfloat16 weights: out[row][16 panel + lane] = sum of even inputs' products + sum of odd inputs',
// each in order; and the choice of a tile for products with groups too.
//
// Tiles are R rows x one panel, with two sums for each row and lane: as many rows as leave registers for a panel's
// two parts of weights, since a sum that lies in memory costs a load and a store for each product.
// Limits: one row, memory; many, the two ports that multiply floats (AVX2: 16 products a cycle). Measured (EPYC of
// Zen 3, 64 rows, one thread beside other work): 36 G products/s, two thirds of that; with sums in memory 11.

#pragma once

#include "groups.h"

namespace {

constexpr int BF16_ROWS = PART == 8 ? 3 : TILE_ROWS, FEW_BF16_ROWS = BF16_ROWS < 4 ? BF16_ROWS : 4;

// Here bfloat16 weights meet floats; the tiles of amx.cpp need them rounded.
[[maybe_unused]] void prepare_row(Format format, const Activations& rows, int row) {
    if (format != Format::bf16) quantize_row(rows, row);
}

template <int R>
void bf16_tile(const Matrix& m, const Activations& rows, int row, int count, int panel, const Output& to) {
    const auto* weights = (const uint16_t*)(m.panels + panel * octavo::panel_bytes(Format::bf16, m.inputs));
    const float* in[R];
    UNROLL for (int r = 0; r < R; ++r) in[r] = rows.x + int64_t(row + (r < count ? r : 0)) * rows.stride;
    Part even[R][PARTS] = {}, odd[R][PARTS] = {};
    for (int i = 0; i + 1 < m.inputs; i += 2, weights += 2 * LANES) {
        prefetch((const uint8_t*)weights + AHEAD, 64);
        add_products<R>(even, odd, weights, true, [&](int r) INLINED { return in[r] + i; });
    }
    if (m.inputs % 2) {
        float last[R][2] = {};
        for (int r = 0; r < R; ++r) last[r][0] = in[r][m.inputs - 1];
        add_products<R>(even, odd, weights, true, [&](int r) INLINED { return last[r]; });
    }
    each<R>([&]<int r>() INLINED {
        if (r >= count) return;
        Part acc[PARTS];
        each<PARTS>([&]<int p>() INLINED { acc[p] = even[r][p] + odd[r][p]; });
        store_outputs(acc, to, row + r, panel, m.outputs);
    });
}

using Tile = void (*)(const Matrix&, const Activations&, int row, int count, int panel, const Output& to);

template <int R, int P>
Tile group_tile_of(Format format) {
    return format == Format::int8_group ? group_tile<Format::int8_group, R, P> : group_tile<Format::int4_group, R, P>;
}

// The least tile for so many rows.
Tile tile_of(Format format, int count) {
    const bool is_small = count <= 4;
    if (format == Format::bf16) return count == 1 ? bf16_tile<1> : is_small ? bf16_tile<FEW_BF16_ROWS> : bf16_tile<BF16_ROWS>;
    return count == 1 ? group_tile_of<1, 1>(format) : is_small ? group_tile_of<4, 1>(format) : group_tile_of<TILE_ROWS, 1>(format);
}

// The rows [row, num_rows) with the panels [first, end): so many rows at a time as the second cache holds.
void product_from(int row, const Matrix& m, const Activations& rows, int num_rows, int first, int end,
                  const Output& to) {
    const bool is_wide = PART == 16 && m.format != Format::bf16 && num_rows - row >= MANY_ROWS;
    const int most = is_wide ? WIDE_ROWS : m.format == Format::bf16 ? BF16_ROWS : TILE_ROWS;
    const int block = BLOCK_ROWS / most * most;
    for (int begin = row; begin < num_rows; begin += block) {
        const int block_end = num_rows - begin < block ? num_rows : begin + block;
        for (int panel = first, panels; panel < end; panel += panels) {
            panels = is_wide && end - panel >= WIDE_PANELS ? WIDE_PANELS : 1;
            for (int r = begin; r < block_end; r += most) {
                const int count = block_end - r < most ? block_end - r : most;
                const Tile tile = panels > 1 ? group_tile_of<WIDE_ROWS, WIDE_PANELS>(m.format) : tile_of(m.format, count);
                tile(m, rows, r, count, panel, to);
            }
        }
    }
}

[[maybe_unused]] void product(const Matrix& m, const Activations& rows, int num_rows, int first, int end,
                              const Output& to) {
    if constexpr (PART == 8) {
        if (num_rows > TILE_ROWS && m.format == Format::int8_group)
            return group_blocks<Format::int8_group>(m, rows, num_rows, first, end, to);
        if (num_rows > TILE_ROWS && m.format == Format::int4_group)
            return group_blocks<Format::int4_group>(m, rows, num_rows, first, end, to);
    }
    product_from(0, m, rows, num_rows, first, end, to);
}

}  // namespace
