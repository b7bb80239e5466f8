// AVX-512 with AMX. Group products have the same bits as avx512's: the same integer sums, the same
// order of floats. Products and attention in bfloat16 are the tiles' own: both operands rounded, even
// and odd inputs summed apart within a tile of 32; every number of rows goes through them.
//
// What was measured on Emerald Rapids: storing a tile takes 16 cycles that its product (16, half that
// deep) does not hide, and for about 90 cycles after any tile instruction only one of the two vector
// ports multiplies.

#include "operators.h"
#include "tiles.h"

namespace {

// --- products with groups --------------------------------------------------------------------------
//
// A tile of 16 rows x one panel. Weights are unpacked to signed bytes once per panel and block of rows,
// CHUNK groups at a time so that they stay in the first cache. Limit: the one vector port, which turns
// each group's sums into floats, 16 x 3 or 4 operations, where avx512 needs 16 x 11 or 12 on two.

constexpr int BLOCK_ROWS = 128;
constexpr int CHUNK = 32;
// A tile with fewer rows is faster without AMX.
constexpr int MIN_ROWS = 9;
// What a tile stores cannot be read back at once, so group g is turned into floats while group g + AHEAD_BY
// is multiplied.
constexpr int AHEAD_BY = 4;

struct Weights {
    alignas(64) int8_t bytes[CHUNK][8 * 64];
    Part scales[CHUNK], minima[CHUNK];
};

template <Format format>
void unpack(const uint8_t* block, int groups, Weights& weights) {
    for (int g = 0; g < groups; ++g, block += block_size(format)) {
        prefetch(block + AHEAD, block_size(format));
        UNROLL for (int i = 0; i < 8; ++i) {
            WordPart bytes = four_weights<format>(block, i, 0);
            if (format == Format::int8_group) bytes ^= 0x80808080u;
            std::memcpy(weights.bytes[g] + 64 * i, &bytes, 64);
        }
        const auto* halves = (const uint16_t*)(block + scales_at(format));
        weights.scales[g] = load_halves(halves);
        if (format == Format::int4_group) weights.minima[g] = load_halves(halves + LANES);
    }
}

// The dot products of 16 rows with a panel, over one group.
INLINE void multiply(const int8_t* values, const int8_t* weights, int32_t* dots) {
    clear_tile<0>();
    load_tile<6>(values, GROUP);
    load_tile<7>(weights, 64);
    add_signed<0, 6, 7>();
    store_tile<0>(dots, 64);
}

// Add `groups` groups to the sums of 16 rows; their activations begin at `at`.
template <Format format>
void add_groups(const Weights& weights, const Activations& rows, int64_t at, int groups, bool is_first, Part* sums) {
    alignas(64) int32_t dots[2 * AHEAD_BY][TILE * LANES];
    const int8_t* values = rows.values + at * GROUP;
    Part acc[TILE];
    UNROLL for (int r = 0; r < TILE; ++r) acc[r] = is_first ? Part{} : sums[r];
    for (int next = 0; next < groups + AHEAD_BY; ++next) {
        if (next < groups)
            multiply(values + next * TILE * GROUP, weights.bytes[next], dots[next % (2 * AHEAD_BY)]);
        const int g = next - AHEAD_BY;
        if (g < 0) continue;
        const Part scale = weights.scales[g], minimum = weights.minima[g];
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
void group_tiles(const Matrix& m, const Activations& rows, int num_rows, int first, int end, const float* bias,
                 float* out, int stride) {
    const TileScope scope;
    Weights weights;
    Part sums[BLOCK_ROWS];
    for (int begin = 0; begin < num_rows; begin += BLOCK_ROWS) {
        const int block = num_rows - begin < BLOCK_ROWS ? num_rows - begin : BLOCK_ROWS;
        for (int panel = first; panel < end; ++panel) {
            const uint8_t* packed = m.panels + panel * octavo::panel_bytes(format, m.inputs);
            for (int g = 0; g < rows.groups; g += CHUNK) {
                const int groups = rows.groups - g < CHUNK ? rows.groups - g : CHUNK;
                unpack<format>(packed + int64_t(g) * block_size(format), groups, weights);
                for (int row = 0; row < block; row += TILE)
                    add_groups<format>(weights, rows, rows.tile(begin + row, g), groups, g == 0, sums + row);
            }
            for (int row = 0; row < block; ++row)
                store_outputs(sums + row, bias, out + int64_t(begin + row) * stride, panel * LANES, m.outputs);
        }
    }
}

void amx_product(const Matrix& m, const Activations& rows, int num_rows, int first, int end, const float* bias,
                 float* out, int stride) {
    const int rest = num_rows % TILE < MIN_ROWS ? num_rows % TILE : 0, tiled = num_rows - rest;
    if (m.format == Format::bf16) return product(m, rows, num_rows, first, end, bias, out, stride);
    const auto tiles = m.format == Format::int8_group ? group_tiles<Format::int8_group>
                                                      : group_tiles<Format::int4_group>;
    if (tiled) tiles(m, rows, tiled, first, end, bias, out, stride);
    if (rest) product_from(tiled, m, rows, num_rows, first, end, bias, out, stride);
}

// --- attention over bfloat16 pages ------------------------------------------------------------------
//
// Pages are made of operands: 32 dims of 16 positions' keys, 32 positions of 16 dims' values. A tile of
// queries is 16 rows; four tiles of sums are under way at once.

struct Bf16Tiles {
    static constexpr int ROWS = TILE;
    static constexpr int DEPTH = 32;  // dims, or positions, of one operand
    alignas(64) uint16_t q[MAX_DIMS / DEPTH][TILE][DEPTH];
    alignas(64) uint16_t weights[SEGMENT / DEPTH][TILE][DEPTH];
    alignas(64) uint16_t copy[DEPTH / 2][LANES][2];  // of values

    static void round(const float* from, uint16_t* to) {
        const auto rounded = _mm512_cvtneps_pbh((__m512)load(from));
        std::memcpy(to, &rounded, 32);
    }

    void set_queries(int row, const float* from, int dims, float scale) {
        alignas(64) float scaled[LANES];
        for (int d = 0; d < dims; d += LANES) {
            store(scaled, load(from + d) * splat(scale));
            round(scaled, &q[d / DEPTH][row][d % DEPTH]);
        }
    }

    // Scores of 16 positions, whose keys begin at `keys`.
    template <int sums>
    void score(const uint16_t* keys, int dims, float* out) const {
        clear_tile<sums>();
        int d = 0;
        for (; d + DEPTH <= dims; d += DEPTH) {
            load_tile<4>(q[d / DEPTH], 64);
            load_tile<5>(keys + d * LANES, 64);
            add_bf16<sums, 4, 5>();
        }
        if (d < dims) {
            load_tile<6>(q[d / DEPTH], 64);
            load_tile<7>(keys + d * LANES, 64);
            add_bf16<sums, 6, 7>();
        }
        store_tile<sums>(out, SEGMENT * sizeof(float));
    }

    void scores(const Segment& segment, int, int dims, float* out) const {
        for (int at = 0; at < segment.length; at += 2 * LANES) {
            segment.fetch<uint16_t>(at);
            score<0>(segment.keys<uint16_t>(at), dims, out + at);
            if (at + LANES >= segment.length) break;
            segment.fetch<uint16_t>(at + LANES);
            score<1>(segment.keys<uint16_t>(at + LANES), dims, out + at + LANES);
        }
    }

    // The values of 16 dims at positions [at, at + 32): in the page, or a copy of those that exist. What
    // lies beyond the context may be anything, NaN too, so it is not even multiplied by zero.
    const uint16_t* operand(const Segment& segment, int at, int dim) {
        const int block = segment.pages.block_size;
        const int count = segment.length - at < DEPTH ? segment.length - at : DEPTH;
        if (count == DEPTH && (segment.start + at) % block + DEPTH <= block)
            return segment.values<uint16_t>(at, dim);
        std::memset(copy, 0, sizeof copy);
        for (int i = 0; i < count; i += 2) {
            std::memcpy(copy[i / 2], segment.values<uint16_t>(at + i, dim), sizeof copy[0]);
            if (i + 1 == count)
                for (int lane = 0; lane < LANES; ++lane) copy[i / 2][lane][1] = 0;
        }
        return copy[0][0];
    }

    template <int sums>
    INLINE void add_values(const Segment& segment, int at, int dim) {
        load_tile<5>(operand(segment, at, dim), 64);
        add_bf16<sums, 4, 5>();
    }

    void sums(const Segment& segment, int rows, int dims, const float* from, float* out) {
        for (int at = 0; at < segment.length; at += LANES)
            for (int r = 0; r < rows; ++r)
                round(from + r * SEGMENT + at, &weights[at / DEPTH][r][at % DEPTH]);
        if (const int end = (segment.length + LANES - 1) / LANES * LANES; end % DEPTH)
            for (int r = 0; r < rows; ++r) std::memset(&weights[end / DEPTH][r][LANES], 0, 32);
        for (int d = 0; d < dims; d += 4 * LANES) {
            const int tiles = (dims - d) / LANES;
            clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
            for (int at = 0; at < segment.length; at += DEPTH) {
                load_tile<4>(weights[at / DEPTH], 64);
                add_values<0>(segment, at, d);
                if (tiles > 1) add_values<1>(segment, at, d + LANES);
                if (tiles > 2) add_values<2>(segment, at, d + 2 * LANES);
                if (tiles > 3) add_values<3>(segment, at, d + 3 * LANES);
            }
            const long stride = dims * long(sizeof(float));
            store_tile<0>(out + d, stride);
            if (tiles > 1) store_tile<1>(out + d + LANES, stride);
            if (tiles > 2) store_tile<2>(out + d + 2 * LANES, stride);
            if (tiles > 3) store_tile<3>(out + d + 3 * LANES, stride);
        }
    }
};

void amx_attention(const AttentionJob& job, const Pages& pages) {
    if (pages.element_bytes != 2) return attention(job, pages);
    const TileScope scope;
    attention_of<Bf16Tiles>(job, pages);
}

}  // namespace

namespace octavo {

const Kernels* amx_kernels() {
    static constexpr Kernels kernels = {"amx", rms_norm, add, gated_activation, rope,
                                        prepare_row, amx_product, write_kv, amx_attention};
    return &kernels;
}

}  // namespace octavo
