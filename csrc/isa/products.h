// Products with packed weights: out[row][16 panel + lane] = sum over inputs of activation * weight.
//
// Groups: integer dot products of 32 inputs, exact however they are computed, then floats from group
// to group in order: acc = fma(dot * weight scale, activation scale, acc), and for formats with a
// minimum acc = fma(minimum, scaled sum of the activations, acc). bfloat16: even and odd inputs have a
// running sum each. Tiles are R rows x one panel; a row's bits depend on neither.
// Limits: one row, memory; many, the two vector ports (8 dots and 3-4 float operations per group).

#pragma once

#include "../kernels.h"
#include "../pack.h"
#include "vector.h"

namespace {

using octavo::Activations;
using octavo::Format;
using octavo::GROUP;
using octavo::Matrix;


// Rows of the largest tile: as many as there are registers for.
constexpr int TILE_ROWS = PART == 16 ? 8 : 4;
// How far ahead weights are fetched: the hardware's prefetcher stops at each 4 KB page.
constexpr int AHEAD = 4096;

void quantize_row(const Activations& rows, int row) {
    const float* x = rows.x + int64_t(row) * rows.stride;
    for (int g = 0; g < rows.groups; ++g) {
        const int begin = g * GROUP, rest = rows.width - begin - LANES;
        const Floats a = load_some(x + begin, rows.width - begin);
        const Floats b = rest > 0 ? load_some(x + begin + LANES, rest) : Floats{};
        const float top = largest(maximum(maximum(a, -a), maximum(b, -b)));
        const Floats inverse = splat(top > 0 ? 127.0f / top : 0.0f);
        const Floats p = nearest(a * inverse), q = nearest(b * inverse);
        const int64_t at = rows.tile(row, g);
        store_bytes(rows.values + at * GROUP, p), store_bytes(rows.values + at * GROUP + LANES, q);
        // What is no number is in `total`, though the largest may have passed over it, and makes the scale NaN.
        const float total = sum(p + q);
        const bool is_number = total == total;
        const float scale = is_number ? top / 127.0f : total;
        rows.scales[at] = scale;
        rows.sums[at] = total * scale;
        rows.starts[at] = is_number ? int32_t(total) * -128 : 0;
    }
}

// Here bfloat16 weights meet floats; the tiles of amx.cpp need them rounded.
[[maybe_unused]] void prepare_row(Format format, const Activations& rows, int row) {
    if (format != Format::bf16) quantize_row(rows, row);
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
INLINE IntPart dot_add(IntPart sums, WordPart weights, int32_t row) {
#if defined(__AVX512VNNI__)
    return (IntPart)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(row));
#elif defined(__AVX2__)
    const __m256i r = _mm256_set1_epi32(row);
    if constexpr (format == Format::int4_group) {
        // Sixteen products below 15 * 127 fit into 16 bits: a whole group is added up there.
        return (IntPart)_mm256_add_epi16((__m256i)sums, _mm256_maddubs_epi16((__m256i)weights, r));
    } else {
        // The first factor is unsigned, so the sign moves to the second; 2 * 127 * 127 fits.
        const __m256i signs = _mm256_xor_si256((__m256i)weights, _mm256_set1_epi8(-128));
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(signs), _mm256_sign_epi8(r, signs));
        return (IntPart)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
#else
    // Two bytes at a time as 16-bit numbers: 255 * 127 fits.
    typedef int16_t Shorts __attribute__((vector_size(16)));
    const Shorts w = (Shorts)weights, r = (Shorts)(row - IntPart{});
    const IntPart even = (IntPart)((w & 255) * ((r << 8) >> 8));
    const IntPart odd = (IntPart)((Shorts)((WordPart)w >> 8 & 0x00ff00ffu) * (r >> 8));
    return sums + ((even << 16) >> 16) + (even >> 16) + ((odd << 16) >> 16) + (odd >> 16);
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

// The weights of inputs 4 i .. 4 i + 3 of a group, four bytes per lane.
template <Format format>
INLINE WordPart four_weights(const uint8_t* block, int i, int part) {
    WordPart bytes;
    if constexpr (format == Format::int8_group) {
        load_to(bytes, block + 64 * i + 4 * PART * part);
        return bytes;
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

// Add a bias, and write the columns that exist.
INLINE void store_outputs(Part* acc, const float* bias, float* out, int column, int outputs) {
    for (int part = 0; part < PARTS; ++part, column += PART) {
        if (column + PART <= outputs) {
            Part b{};
            if (bias) load_to(b, bias + column);
            store(out + column, bias ? acc[part] + b : acc[part]);
        } else {
            for (int i = 0; column + i < outputs; ++i)
                out[column + i] = bias ? acc[part][i] + bias[column + i] : acc[part][i];
        }
    }
}

// Up to R rows with one panel, all of one tile of activations. Rows that are missing are computed from
// whatever lies there, and not stored.
template <Format format, int R>
void group_tile(const Matrix& m, const Activations& rows, int row, int count, int panel, const float* bias,
                float* out, int stride) {
    const uint8_t* block = m.panels + panel * octavo::panel_bytes(format, m.inputs);
    Part acc[R][PARTS] = {};
    int64_t at = rows.tile(row, 0);
    for (int g = 0; g < rows.groups; ++g, block += block_size(format), at += 16) {
        prefetch(block + AHEAD, block_size(format));
        UNROLL for (int part = 0; part < PARTS; ++part) {
            forget_loads();
            IntPart dots[R];
            UNROLL for (int r = 0; r < R; ++r) dots[r] = dot_start<format>(rows.starts[at + r]);
            UNROLL for (int i = 0; i < GROUP / 4; ++i) {
                const WordPart weights = four_weights<format>(block, i, part);
                UNROLL for (int r = 0; r < R; ++r) {
                    int32_t four;
                    std::memcpy(&four, rows.values + (at + r) * GROUP + 4 * i, 4);
                    dots[r] = dot_add<format>(dots[r], weights, four);
                }
            }
            const auto* halves = (const uint16_t*)(block + scales_at(format)) + part * PART;
            const Part scale = load_halves(halves);
            const Part minimum = format == Format::int4_group ? load_halves(halves + LANES) : Part{};
            UNROLL for (int r = 0; r < R; ++r)
                acc[r][part] = add_group<format>(acc[r][part], dot_end<format>(dots[r]), scale, minimum,
                                                 rows.scales[at + r], rows.sums[at + r]);
        }
    }
    for (int r = 0; r < count; ++r)
        store_outputs(acc[r], bias, out + int64_t(row + r) * stride, panel * LANES, m.outputs);
}

template <int R>
void bf16_tile(const Matrix& m, const Activations& rows, int row, int count, int panel, const float* bias,
               float* out, int stride) {
    const auto* weights = (const uint16_t*)(m.panels + panel * octavo::panel_bytes(Format::bf16, m.inputs));
    const float* in[R];
    UNROLL for (int r = 0; r < R; ++r) in[r] = rows.x + int64_t(row + (r < count ? r : 0)) * rows.stride;
    Part even[R][PARTS] = {}, odd[R][PARTS] = {};
    for (int i = 0; i < m.inputs; i += 2, weights += 2 * LANES) {
        prefetch((const uint8_t*)weights + AHEAD, 64);
        const bool is_pair = i + 1 < m.inputs;
        UNROLL for (int part = 0; part < PARTS; ++part) {
            Part first, second, a, b{};
            load_pairs(weights + 2 * PART * part, first, second);
            UNROLL for (int r = 0; r < R; ++r) {
                splat_to(a, in[r][i]);
                if (is_pair) splat_to(b, in[r][i + 1]);
                even[r][part] = fma(a, first, even[r][part]);
                odd[r][part] = fma(b, second, odd[r][part]);
            }
        }
    }
    for (int r = 0; r < count; ++r) {
        Part acc[PARTS];
        for (int part = 0; part < PARTS; ++part) acc[part] = even[r][part] + odd[r][part];
        store_outputs(acc, bias, out + int64_t(row + r) * stride, panel * LANES, m.outputs);
    }
}

using Tile = void (*)(const Matrix&, const Activations&, int row, int count, int panel, const float* bias,
                      float* out, int stride);

template <int R>
Tile tile_of(Format format) {
    if (format == Format::bf16) return bf16_tile<R>;
    return format == Format::int8_group ? group_tile<Format::int8_group, R> : group_tile<Format::int4_group, R>;
}

// The rows [row, num_rows) with the panels [first, end).
void product_from(int row, const Matrix& m, const Activations& rows, int num_rows, int first, int end,
                  const float* bias, float* out, int stride) {
    const Tile one = tile_of<1>(m.format), four = tile_of<4>(m.format), most = tile_of<TILE_ROWS>(m.format);
    for (int panel = first; panel < end; ++panel) {
        for (int r = row; r < num_rows; r += TILE_ROWS) {
            const int count = num_rows - r < TILE_ROWS ? num_rows - r : TILE_ROWS;
            const Tile tile = count == 1 ? one : count <= 4 ? four : most;
            tile(m, rows, r, count, panel, bias, out, stride);
        }
    }
}

[[maybe_unused]] void product(const Matrix& m, const Activations& rows, int num_rows, int first, int end, const float* bias,
             float* out, int stride) {
    product_from(0, m, rows, num_rows, first, end, bias, out, stride);
}

}  // namespace
