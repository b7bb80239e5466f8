// Products with scales per group: out[row][16 panel + lane] = sum over groups of 32 inputs, in order, of
//     fma(dot * weight scale, activation scale, .), and with a minimum fma(minimum, scaled sum of activations, .)
//
// A group's dot product is of whole numbers, exact however it is computed. Tiles are R rows x P panels: one panel
// for few rows, three from 17 rows on where registers have 16 lanes. With registers for 8 lanes both halves of a
// panel meet each activation that is loaded, and from five rows on panels are unpacked, 8 groups at a time, for a
// block of 128 rows.
// Limits: one row, memory; many, the vector ports. AVX2, per 32 products: with 4 bits 2 operations and an eighth of
// 5 on floats, so four ports give 48 products a cycle; with 8 bits 4 operations and as much, 29 a cycle.
// Measured (EPYC of Zen 3, 64 rows, 4 bits, both threads of a core): 149 G products/s where 95 were reached with
// sums in memory. AVX-512, on a Zen 5 with 4 and 8 bits: eleven or ten operations of a group and row share two ports, 789
// and 868 Gflop/s a core; a tile of one panel also loads 94 or 96 times for 88 or 80 of them, of which two a cycle.
// Measured (512 rows, one thread): 640 to 710, and 690 to 770. AMX: see amx.cpp.

#pragma once

#include "store.h"

namespace {

// Rows of the largest tile: as many as there are registers for.
constexpr int TILE_ROWS = PART == 16 ? 8 : 4;
// Parts of a panel that meet the same loaded activations.
constexpr int STRIP = PART == 8 ? 2 : 1;
// From so many rows on, tiles are WIDE_ROWS x WIDE_PANELS: what is loaded of a row then meets three panels. Fewer
// rows are bound by memory, which is fastest read in one stream.
constexpr int MANY_ROWS = 17, WIDE_ROWS = 4, WIDE_PANELS = 3;
// Whether int8 weights meet activations as signed bytes, or as they are stored.
constexpr bool IS_SIGNED = PART == 8;
constexpr int BLOCK_ROWS = 128;

// --- activations ----------------------------------------------------------------------------------

// The 32 inputs of a group.
INLINE Pair<Floats> group_of(const Activations& rows, const float* x, int group) {
    const int begin = group * GROUP, rest = rows.width - begin;
    return {load_some(x + begin, rest), rest > LANES ? load_some(x + begin + LANES, rest - LANES) : Floats{}};
}

// Sixteen groups at a time, so that a vector has one number of each. Sums are of whole numbers, exact in any order.
void quantize_row(const Activations& rows, int row) {
    const float* x = rows.x + int64_t(row) * rows.stride;
    const Floats most = splat(127), least = splat(0x1p-100f);  // of a scale whose inverse is finite
    for (int first = 0; first < rows.groups; first += LANES) {
        const int count = rows.groups - first < LANES ? rows.groups - first : LANES;
        Floats tops[LANES] = {}, totals[LANES] = {};
        alignas(64) float inverses[LANES], scales[LANES], sums[LANES];
        for (int g = 0; g < count; ++g) {
            const Pair<Floats> v = group_of(rows, x, first + g);
            tops[g] = maximum(maximum(v.low, -v.low), maximum(v.high, -v.high));
        }
        const Floats top = maximum(fold_each(tops, Larger{}), least);
        store(inverses, most / top), store(scales, top / most);
        for (int g = 0; g < count; ++g) {
            const Floats inverse = splat(inverses[g]);
            const Pair<Floats> v = group_of(rows, x, first + g);
            const Floats p = nearest(v.low * inverse), q = nearest(v.high * inverse);
            int8_t* to = rows.values + rows.tile(row, first + g) * GROUP;
            store_bytes(to, p), store_bytes(to + LANES, q);
            totals[g] = p + q;
        }
        store(sums, fold_each(totals, Plus{}));
        for (int g = 0; g < count; ++g) {
            const int64_t at = rows.tile(row, first + g);
            // What is no number is in the sum, though the largest may have passed over it, and makes the scale NaN.
            const float total = sums[g];
            const bool is_number = total == total;
            const float scale = is_number ? scales[g] : total;
            rows.scales[at] = scale, rows.sums[at] = total * scale;
            rows.starts[at] = is_number ? int32_t(total) * -128 : 0;
        }
    }
}

// --- dot products of one part of a panel with the bytes of one row, exactly -------------------------

// int8 weights are stored as value + 128; `start` is -128 times the sum of the row's bytes.
template <Format format>
INLINE IntPart dot_start([[maybe_unused]] int32_t start) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    return IntPart{};
#else
    return format == Format::int8_group ? start - IntPart{} : IntPart{};
#endif
}

// Add for each lane the products of its four bytes of `weights` with the four of `row`, |row| <= 127.
template <Format format>
INLINE IntPart dot_add(IntPart sums, WordPart weights, IntPart row) {
#if defined(__AVX512VNNI__)
    return (IntPart)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, (__m512i)row);
#elif defined(__AVX2__)
    const __m256i r = (__m256i)row;
    if constexpr (format == Format::int4_group) {
        // Sixteen products below 15 * 127 fit into 16 bits: a whole group is added up there.
        return in_register((IntPart)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)weights, r)));
    } else {
        // The first factor is unsigned, so the sign moves to the second; 2 * 127 * 127 fits.
        const __m256i w = (__m256i)weights;
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(r, w));
        return in_register((IntPart)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1))));
    }
#else
    // Two bytes at a time as 16-bit numbers: 255 * 127 fits.
    typedef int16_t Shorts __attribute__((vector_size(16)));
    const Shorts w = (Shorts)weights, r = (Shorts)row;
    const IntPart even = (IntPart)((w & 255) * ((r << 8) >> 8));
    const IntPart odd = (IntPart)((Shorts)((WordPart)w >> 8 & 0x00ff00ffu) * (r >> 8));
    return sums + ((even << 16) >> 16) + (even >> 16) + ((odd << 16) >> 16) + (odd >> 16);
#endif
}

// The four bytes at `from` in each lane.
INLINE IntPart splat_four(const int8_t* from) {
    int32_t four;
    std::memcpy(&four, from, 4);
#if defined(__AVX512F__)
    return in_register((IntPart)_mm512_set1_epi32(four));
#elif defined(__AVX2__)
    return (IntPart)_mm256_set1_epi32(four);
#else
    return four - IntPart{};
#endif
}

template <Format format>
INLINE IntPart dot_end(IntPart sums) {
#if defined(__AVX2__) && !defined(__AVX512F__)
    if constexpr (format == Format::int4_group)
        return (IntPart)_mm256_madd_epi16((__m256i)sums, _mm256_set1_epi16(1));
#endif
    return sums;
}

// The weights of inputs 4 i .. 4 i + 3 of a group, four bytes per lane; int8 ones as signed bytes, or as stored.
template <Format format, bool is_signed>
INLINE WordPart four_weights(const uint8_t* block, int i, int part) {
    WordPart bytes;
    if constexpr (format == Format::int8_group) {
        load_to(bytes, block + 64 * i + 4 * PART * part);
        return is_signed ? bytes ^ 0x80808080u : bytes;
    }
    load_to(bytes, block + 64 * (i / 2) + 4 * PART * part);
    return (i % 2 ? bytes >> 4 : bytes) & 0x0f0f0f0fu;
}

// --- tiles ----------------------------------------------------------------------------------------

constexpr int block_size(Format format) {
    return format == Format::int8_group ? octavo::INT8_BLOCK : octavo::INT4_BLOCK;
}

// Where a group's scales lie in its block; its minima follow.
constexpr int scales_at(Format format) { return format == Format::int8_group ? 512 : 256; }

// What one group adds to a sum. Every instruction set has this order of operations.
template <Format format>
INLINE Part add_group(Part acc, IntPart dots, Part scale, Part minimum, float row_scale, float row_sum) {
    Part x, s;
    splat_to(x, row_scale), splat_to(s, row_sum);
    acc = fma(__builtin_convertvector(dots, Part) * scale, x, acc);
    return format == Format::int4_group ? fma(minimum, s, acc) : acc;
}

// One group of some panels, as it lies in memory. A column is a part of a panel.
template <Format format>
struct Packed {
    const uint8_t* block;
    int64_t panel_bytes;

    INLINE WordPart four(int i, int column) const {
        return four_weights<format, IS_SIGNED>(at(column), i, column % PARTS);
    }
    INLINE Part scale(int column) const { return load_halves(halves(column)); }
    INLINE Part minimum(int column) const {
        return format == Format::int4_group ? load_halves(halves(column) + LANES) : Part{};
    }

  private:
    INLINE const uint8_t* at(int column) const { return block + column / PARTS * panel_bytes; }
    INLINE const uint16_t* halves(int column) const {
        return (const uint16_t*)(at(column) + scales_at(format)) + column % PARTS * PART;
    }
};

// Some groups of a panel, unpacked once for many rows; int8 weights are signed bytes.
struct Unpacked {
    static constexpr int GROUPS = PART == 16 ? 32 : 8;  // as many as leave room in the first cache
    alignas(64) int8_t bytes[GROUPS][8][64];
    Part scales[GROUPS][PARTS], minima[GROUPS][PARTS];

    template <Format format>
    void unpack(const uint8_t* block, int groups) {
        for (int g = 0; g < groups; ++g, block += block_size(format)) {
            prefetch(block + AHEAD, block_size(format));
            const Packed<format> packed{block, 0};
            UNROLL for (int part = 0; part < PARTS; ++part) {
                UNROLL for (int i = 0; i < 8; ++i) {
                    const WordPart four = four_weights<format, true>(block, i, part);
                    std::memcpy(bytes[g][i] + 4 * PART * part, &four, sizeof four);
                }
                scales[g][part] = packed.scale(part), minima[g][part] = packed.minimum(part);
            }
        }
    }
};

// A group of them.
struct UnpackedGroup {
    const Unpacked& all;
    int g;

    INLINE WordPart four(int i, int part) const {
        WordPart four;
        load_to(four, all.bytes[g][i] + 4 * PART * part);
        return four;
    }
    INLINE Part scale(int part) const { return all.scales[g][part]; }
    INLINE Part minimum(int part) const { return all.minima[g][part]; }
};

// Add one group to the sums of R rows x C columns, whose activations are at `at`. What is loaded of a row
// meets a strip of columns.
template <Format format, int R, int C, class Group>
INLINE void add_group_to(Part (&acc)[R][C], const Group& group, const Activations& rows, int64_t at) {
    constexpr int COLUMNS = PART == 16 ? C : STRIP;
    UNROLL for (int first = 0; first < C; first += COLUMNS) {
        forget_loads();
        IntPart dots[R][COLUMNS];
        UNROLL for (int r = 0; r < R; ++r)
            UNROLL for (int c = 0; c < COLUMNS; ++c) dots[r][c] = dot_start<format>(rows.starts[at + r]);
        UNROLL for (int i = 0; i < GROUP / 4; ++i) {
            WordPart weights[COLUMNS];
            UNROLL for (int c = 0; c < COLUMNS; ++c) weights[c] = group.four(i, first + c);
            UNROLL for (int r = 0; r < R; ++r) {
                const IntPart four = splat_four(rows.values + (at + r) * GROUP + 4 * i);
                UNROLL for (int c = 0; c < COLUMNS; ++c) dots[r][c] = dot_add<format>(dots[r][c], weights[c], four);
            }
        }
        UNROLL for (int c = 0; c < COLUMNS; ++c) {
            const Part scale = group.scale(first + c), minimum = group.minimum(first + c);
            UNROLL for (int r = 0; r < R; ++r)
                acc[r][first + c] = add_group<format>(acc[r][first + c], dot_end<format>(dots[r][c]), scale, minimum,
                                                      rows.scales[at + r], rows.sums[at + r]);
        }
    }
}

// Up to R rows, all of one tile of activations, with P panels. Rows that are missing are computed from
// whatever lies there, and not stored.
template <Format format, int R, int P>
void group_tile(const Matrix& m, const Activations& rows, int row, int count, int panel, const Output& to) {
    const int64_t bytes = octavo::panel_bytes(format, m.inputs);
    const uint8_t* block = m.panels + panel * bytes;
    Part acc[R][P * PARTS] = {};
    int64_t at = rows.tile(row, 0);
    for (int g = 0; g < rows.groups; ++g, block += block_size(format), at += 16) {
        if (row % BLOCK_ROWS == 0) {  // the block's first rows fetch weights for all
            UNROLL for (int p = 0; p < P; ++p) prefetch(block + p * bytes + AHEAD / P, block_size(format));
        }
        if (P > 1) prefetch(rows.values + (at + 2 * 16) * GROUP, R * GROUP);
        add_group_to<format>(acc, Packed<format>{block, bytes}, rows, at);
    }
    // Indexed by constants alone, else all sums lie in memory, and each group stores them.
    each<R>([&]<int r>() INLINED {
        if (r >= count) return;
        each<P>([&]<int p>() INLINED { store_outputs(&acc[r][p * PARTS], to, row + r, panel + p, m.outputs); });
    });
}

// Add unpacked groups to the sums of R rows.
template <Format format, int R>
void add_unpacked(const Unpacked& weights, const Activations& rows, int64_t at, int groups, Part (*sums)[PARTS]) {
    Part acc[R][PARTS];
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int part = 0; part < PARTS; ++part) acc[r][part] = sums[r][part];
    for (int g = 0; g < groups; ++g, at += 16) add_group_to<format>(acc, UnpackedGroup{weights, g}, rows, at);
    UNROLL for (int r = 0; r < R; ++r)
        UNROLL for (int part = 0; part < PARTS; ++part) sums[r][part] = acc[r][part];
}

// Many rows: panels are unpacked for a block of them, which stays in the second cache.
template <Format format>
[[maybe_unused]] void group_blocks(const Matrix& m, const Activations& rows, int num_rows, int first, int end, const Output& to) {
    Unpacked weights;
    Part sums[BLOCK_ROWS][PARTS];
    for (int begin = 0; begin < num_rows; begin += BLOCK_ROWS) {
        const int block = num_rows - begin < BLOCK_ROWS ? num_rows - begin : BLOCK_ROWS;
        for (int panel = first; panel < end; ++panel) {
            const uint8_t* packed = m.panels + panel * octavo::panel_bytes(format, m.inputs);
            std::memset(sums, 0, sizeof(sums[0]) * ((block + 3) / 4 * 4));
            for (int g = 0; g < rows.groups; g += Unpacked::GROUPS) {
                const int groups = rows.groups - g < Unpacked::GROUPS ? rows.groups - g : Unpacked::GROUPS;
                weights.unpack<format>(packed + int64_t(g) * block_size(format), groups);
                for (int row = 0; row < block; row += 4) {
                    const auto add = block - row == 1 ? add_unpacked<format, 1> : add_unpacked<format, 4>;
                    add(weights, rows, rows.tile(begin + row, g), groups, sums + row);
                }
            }
            for (int row = 0; row < block; ++row)
                store_outputs(sums[row], to, begin + row, panel, m.outputs);
        }
    }
}

}  // namespace
