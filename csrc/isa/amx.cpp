// AVX-512 with AMX. Group products have the same bits as avx512's: the same integer sums, the same
// order of floats. Products and attention in bfloat16 are the tiles' own: both operands rounded, even
// and odd inputs summed apart within a tile of 32; every number of rows goes through them.
//
// What was measured on Emerald Rapids: storing a tile takes 16 cycles that its product (16, half that
// deep) does not hide, and for about 90 cycles after any tile instruction only one of the two vector
// ports multiplies.

#include "amx_channels.h"
#include "operators.h"
#include "tile_attention.h"
#include "tiles.h"

namespace {

// --- products with groups --------------------------------------------------------------------------
//
// A tile of 16 rows x one panel. Weights are unpacked to signed bytes once per panel and block of rows, 32
// groups at a time so that they stay in the first cache. Limit: the one vector port, which turns
// each group's sums into floats, 16 x 3 or 4 operations, where avx512 needs 16 x 11 or 12 on two.

// A tile with fewer rows is faster without AMX.
constexpr int MIN_ROWS = 9;
// What a tile stores cannot be read back at once, so group g is turned into floats while group g + AHEAD_BY
// is multiplied.
constexpr int AHEAD_BY = 4;

// The dot products of 16 rows with a panel, over one group.
INLINE void multiply(const int8_t* values, const int8_t* weights, int32_t* dots) {
    clear_tile<0>();
    load_tile<4>(values, GROUP);
    load_tile<6>(weights, 64);
    add_signed<0, 4, 6>();
    store_tile<0>(dots, 64);
}

// Add `groups` groups to the sums of 16 rows; their activations begin at `at`.
template <Format format>
void add_groups(const Unpacked& weights, const Activations& rows, int64_t at, int groups, bool is_first, Part* sums) {
    alignas(64) int32_t dots[2 * AHEAD_BY][TILE * LANES];
    const int8_t* values = rows.values + at * GROUP;
    Part acc[TILE];
    UNROLL for (int r = 0; r < TILE; ++r) acc[r] = is_first ? Part{} : sums[r];
    for (int next = 0; next < groups + AHEAD_BY; ++next) {
        if (next < groups)
            multiply(values + next * TILE * GROUP, weights.bytes[next][0], dots[next % (2 * AHEAD_BY)]);
        const int g = next - AHEAD_BY;
        if (g < 0) continue;
        const Part scale = weights.scales[g][0], minimum = weights.minima[g][0];
        const int64_t row = at + TILE * g;
        UNROLL for (int r = 0; r < TILE; ++r) {
            IntPart dot;
            load_to(dot, dots[g % (2 * AHEAD_BY)] + r * LANES);
            acc[r] = add_group<format>(acc[r], dot, scale, minimum, rows.scales[row + r], rows.sums[row + r]);
        }
    }
    UNROLL for (int r = 0; r < TILE; ++r) sums[r] = acc[r];
}

template <Format format>
void group_tiles(const Matrix& m, const Activations& rows, int num_rows, int first, int end, const Output& to) {
    const TileScope scope(HALF);
    Unpacked weights;
    Part sums[BLOCK_ROWS];
    for (int begin = 0; begin < num_rows; begin += BLOCK_ROWS) {
        const int block = num_rows - begin < BLOCK_ROWS ? num_rows - begin : BLOCK_ROWS;
        for (int panel = first; panel < end; ++panel) {
            const uint8_t* packed = m.panels + panel * octavo::panel_bytes(format, m.inputs);
            for (int g = 0; g < rows.groups; g += Unpacked::GROUPS) {
                const int groups = rows.groups - g < Unpacked::GROUPS ? rows.groups - g : Unpacked::GROUPS;
                weights.unpack<format>(packed + int64_t(g) * block_size(format), groups);
                for (int row = 0; row < block; row += TILE)
                    add_groups<format>(weights, rows, rows.tile(begin + row, g), groups, g == 0, sums + row);
            }
            for (int row = 0; row < block; ++row)
                store_outputs(sums + row, to, begin + row, panel, m.outputs);
        }
    }
}

// --- products with bfloat16 --------------------------------------------------------------------------
//
// Up to 16 rows with four panels, or 32 with two; a panel is a stack of operands. Limits: few rows,
// memory; many, loading operands, one for each product of two.

void amx_prepare_row(Format format, const Activations& rows, int row) {
    if (format == Format::bf16) return round_row(rows, row);
    if (!octavo::is_channel(format)) return quantize_row(rows, row);
    rows.count <= FEW_ROWS ? channel_row(rows, row) : channel_planes(rows, row);
}

// Rows [row, row + count), at most 16 N, with `columns` panels from `panel` on.
template <int N>
void bf16_strip(const Matrix& m, const Activations& rows, int row, int count, int panel, int columns,
                const Output& to) {
    alignas(64) float sums[N * TILE * 4 / N * LANES];
    alignas(64) Operand tail;
    const int64_t bytes = octavo::panel_bytes(Format::bf16, m.inputs);
    const int tail_rows = (m.inputs + 1) / 2 % TILE;
    auto weights = [&](int c, int k) -> const void* {
        const uint8_t* operand = m.panels + (panel + c) * bytes + k * int64_t(sizeof tail);
        prefetch(operand + AHEAD, sizeof tail);
        if (!tail_rows || k + 1 < rows.groups) return operand;
        std::memset(tail, 0, sizeof tail);
        std::memcpy(tail, operand, size_t(tail_rows) * 64);
        return tail;
    };
    auto inputs = [&](int n, int k) { return rows.rounded + rows.tile(row + n * TILE, k) * GROUP; };
    multiply_tiles<N, Kinds::bf16>(inputs, weights, rows.groups, columns, sums, 4 / N * LANES);
    for (int r = 0; r < count; ++r) {
        for (int c = 0; c < columns; ++c) {
            Part sum;
            load_to(sum, sums + (r * (4 / N) + c) * LANES);
            store_outputs(&sum, to, row + r, panel + c, m.outputs);
        }
    }
}

void bf16_tiles(const Matrix& m, const Activations& rows, int num_rows, int first, int end, const Output& to) {
    const TileScope scope(WHOLE);
    const int columns = num_rows <= TILE ? 4 : 2;
    for (int panel = first; panel < end; panel += columns) {
        const int panels = end - panel < columns ? end - panel : columns;
        for (int row = 0; row < num_rows; row += 2 * TILE) {
            const int count = num_rows - row < 2 * TILE ? num_rows - row : 2 * TILE;
            const auto strip = count <= TILE ? bf16_strip<1> : bf16_strip<2>;
            strip(m, rows, row, count, panel, panels, to);
        }
    }
}

void amx_product(const Matrix& m, const Activations& rows, int num_rows, int first, int end, const Output& to) {
    if (octavo::is_channel(m.format)) return amx_channel_product(m, rows, num_rows, first, end, to);
    const int rest = num_rows % TILE < MIN_ROWS ? num_rows % TILE : 0, tiled = num_rows - rest;
    if (m.format == Format::bf16) return bf16_tiles(m, rows, num_rows, first, end, to);
    const auto tiles = m.format == Format::int8_group ? group_tiles<Format::int8_group>
                                                      : group_tiles<Format::int4_group>;
    if (tiled) tiles(m, rows, tiled, first, end, to);
    if (rest) product_from(tiled, m, rows, num_rows, first, end, to);
}

}  // namespace

namespace octavo {

const Kernels* amx_kernels() {
    static constexpr Kernels kernels = {"amx", rms_norm, add, gated_activation, rope,
                                        amx_prepare_row, amx_product, write_kv, amx_attention, merge_parts,
                                        maxima, maxima_wide, weigh, weigh_wide};
    return &kernels;
}

}  // namespace octavo
