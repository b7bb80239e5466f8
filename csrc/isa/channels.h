// Products with one scale per output and integer sums over all inputs (formats int8 and int4).
//
//     out[row][output] = float(sum of weight * activation) * output scale * row scale
//
// Weights are whole numbers of at most 8 bits, activations of 16; a row's scale is such that no sum leaves
// 32 bits, so sums are exact, and the same however they are computed. A 4-bit code is multiplied out:
// weight = (code * multiplier + 64) / 128 - CENTER + offset, with a multiplier and an offset per output and
// group of 32; the offsets, zi + zf / 256 + CENTER, meet the groups' sums S as zi * S + zf * (S / 256).
// Tiles are R rows x one panel; with registers for 8 lanes both halves of it meet each activation that is loaded.
// Limits: one row, memory; many, 14 vector operations per 128 codes, of which 4 are repeated for each row (32
// products each).

#pragma once

#include "products.h"

namespace {

typedef uint16_t ShortPart __attribute__((vector_size(PART * 4)));  // two inputs of each lane

constexpr int CENTER = octavo::INT4_CENTER;
// Of a row of tiny numbers: its inverse is finite.
constexpr float LEAST_SCALE = 0x1p-120f;

// --- activations ----------------------------------------------------------------------------------

// The scale of a row, such that: a value fits into two signed bytes, and so does a group's sum; 255 times the
// sum of all magnitudes fits into 32 bits. Rounding can add half per input, hence what is subtracted.
float channel_scale(const Activations& rows, const float* x) {
    Floats top{}, total{};
    float group = 0;
    for (int begin = 0; begin < rows.width; begin += GROUP) {
        const int rest = rows.width - begin;
        const Floats a = load_some(x + begin, rest);
        const Floats b = rest > LANES ? load_some(x + begin + LANES, rest - LANES) : Floats{};
        const Floats p = maximum(a, -a), q = maximum(b, -b);
        top = maximum(top, maximum(p, q));
        total = total + (p + q);
        const float sum_of_group = std::fabs(sum(a + b));
        group = group > sum_of_group ? group : sum_of_group;
    }
    const float all = sum(total) / (8.3e6f - float(rows.width));
    const float widest = largest(top) / 32600.0f, sums = group / 32600.0f;
    const float scale = widest > sums ? widest : sums;
    // A NaN among the inputs is in `all`, and stays.
    const float found = scale > all ? scale : all;
    return found < LEAST_SCALE ? LEAST_SCALE : found;
}

// Calls put(index, 16 values) for each 16 inputs, and end(group, sum) for each group; returns the sum of all.
template <class Put, class End>
INLINE int32_t quantize_channel(const Activations& rows, const float* x, float scale, Put&& put, End&& end) {
    const Floats inverse = splat(scale > 0 ? 1.0f / scale : 0.0f);
    int32_t all = 0;
    for (int g = 0; g < rows.groups; ++g) {
        const int begin = g * GROUP, rest = rows.width - begin;
        const Floats a = nearest(load_some(x + begin, rest) * inverse);
        const Floats b = rest > LANES ? nearest(load_some(x + begin + LANES, rest - LANES) * inverse) : Floats{};
        put(begin, a), put(begin + LANES, b);
        const float exact = sum(a + b);
        const int32_t total = exact == exact ? int32_t(exact) : 0;  // of NaN: the scale tells
        end(g, total);
        all += total;
    }
    return all;
}

void channel_row(const Activations& rows, int row) {
    const float* x = rows.x + int64_t(row) * rows.stride;
    int16_t* shorts = rows.shorts + int64_t(row) * rows.groups * GROUP;
    int16_t* sums = rows.group_sums + int64_t(row) * rows.groups * 2;
    rows.row_scales[row] = channel_scale(rows, x);
    rows.row_sums[row] = quantize_channel(
        rows, x, rows.row_scales[row], [=](int i, Floats v) { store_shorts(shorts + i, v); },
        [=](int g, int32_t sum) { sums[2 * g] = int16_t(sum), sums[2 * g + 1] = int16_t((sum + 128) >> 8); });
}

[[maybe_unused]] void prepare_any_row(Format format, const Activations& rows, int row) {
    octavo::is_channel(format) ? channel_row(rows, row) : prepare_row(format, rows, row);
}

// --- weights --------------------------------------------------------------------------------------

// Add for each lane the products of its two weights with the two inputs in `pair`.
INLINE WordPart add_pair(WordPart sums, ShortPart weights, int32_t pair) {
#if defined(__AVX512VNNI__)
    return (WordPart)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(pair));
#elif defined(__AVX2__)
    return in_register(sums + (WordPart)_mm256_madd_epi16((__m256i)weights, _mm256_set1_epi32(pair)));
#elif defined(__SSE2__)
    return sums + (WordPart)_mm_madd_epi16((__m128i)weights, _mm_set1_epi32(pair));
#else
    const IntPart w = (IntPart)weights, p = pair - IntPart{};
    return sums + (WordPart)((w << 16 >> 16) * (p << 16 >> 16)) + (WordPart)((w >> 16) * (p >> 16));
#endif
}

// What a group's codes are multiplied with: each lane's number twice, and sixteen times it.
struct Multipliers {
    ShortPart once, by_16;
};

INLINE Multipliers multipliers(const uint8_t* block, int part) {
    typedef uint16_t Stored __attribute__((vector_size(PART * 2)));
    Stored stored;
    load_to(stored, block + 256 + part * PART * 2);
    const WordPart wide = __builtin_convertvector(stored, WordPart);
    const ShortPart once = (ShortPart)(wide | wide << 16);
    return {once, once << 4};
}

// (code * multiplier + 64) / 128 for the codes in bits 4 j to 4 j + 3 of each half lane: 0 to 240.
template <int j>
INLINE ShortPart multiply_codes(ShortPart codes, const Multipliers& by) {
#if defined(__AVX2__)
    // Rounded (a * b) / 2^15: a code may stand in bits 4-7 or 8-11.
    const ShortPart at = j == 0 ? codes << 4 : j == 3 ? codes >> 4 : codes;
    constexpr uint16_t MASK = j < 2 ? 0x00f0 : 0x0f00;
    const ShortPart a = at & MASK, b = j < 2 ? by.by_16 : by.once;
#if defined(__AVX512F__)
    return (ShortPart)_mm512_mulhrs_epi16((__m512i)a, (__m512i)b);
#else
    return (ShortPart)_mm256_mulhrs_epi16((__m256i)a, (__m256i)b);
#endif
#else
    return ((codes >> 4 * j & 15) * by.once + 64) >> 7;
#endif
}

// Each lane's (zi, zf) of a group.
INLINE ShortPart load_offsets(const uint8_t* block, int part) {
    typedef int8_t Stored __attribute__((vector_size(PART * 2)));
    typedef int16_t Wide __attribute__((vector_size(PART * 4)));
    Stored stored;
    load_to(stored, block + 288 + part * PART * 2);
    return (ShortPart)__builtin_convertvector(stored, Wide);
}

// Call add<i>(weights) for each two inputs i and i + 1 of a group, with those of STRIP parts from `first` on.
template <Format format, class Add>
INLINE void each_pair(const uint8_t* block, int first, Add&& add) {
    const auto load_codes = [&](ShortPart(&x)[STRIP], int i) INLINED {
        each<STRIP>([&]<int p>() INLINED { load_to(x[p], block + 64 * i + 4 * PART * (first + p)); });
    };
    if constexpr (format == Format::int4) {
        Multipliers by[STRIP];
        each<STRIP>([&]<int p>() INLINED { by[p] = multipliers(block, first + p); });
        each<4>([&]<int i>() INLINED {
            ShortPart x[STRIP], weights[STRIP];
            load_codes(x, i);
            each<4>([&]<int j>() INLINED {
                each<STRIP>([&]<int p>() INLINED { weights[p] = multiply_codes<j>(x[p], by[p]); });
                add.template operator()<8 * i + 2 * j>(weights);
            });
        });
    } else {
        typedef int16_t Signed __attribute__((vector_size(PART * 4)));
        each<8>([&]<int i>() INLINED {
            ShortPart x[STRIP], weights[STRIP];
            load_codes(x, i);
            each<STRIP>([&]<int p>() INLINED { weights[p] = (ShortPart)((Signed)(x[p] << 8) >> 8); });
            add.template operator()<4 * i>(weights);
            each<STRIP>([&]<int p>() INLINED { weights[p] = (ShortPart)((Signed)x[p] >> 8); });
            add.template operator()<4 * i + 2>(weights);
        });
    }
}

INLINE int32_t pair_at(const int16_t* from) {
    int32_t pair;
    std::memcpy(&pair, from, 4);
    return pair;
}

// --- tiles ----------------------------------------------------------------------------------------

// The last step, the same wherever the sums come from.
INLINE Part scale_sums(WordPart sums, Part scales, float row_scale) {
    Part scale;
    splat_to(scale, row_scale);
    return __builtin_convertvector((IntPart)sums, Part) * scales * scale;
}

template <Format format, int R>
void channel_tile(const Matrix& m, const Activations& rows, int row, int count, int panel, const Output& to) {
    // Sums that do not wait for each other.
    constexpr int CHAINS = R == 1 ? 4 : R == 2 ? 2 : 1;
    constexpr int BLOCK = format == Format::int4 ? octavo::CHANNEL_INT4_BLOCK : octavo::CHANNEL_INT8_BLOCK;
    const uint8_t* scales = m.panels + panel * octavo::panel_bytes(format, m.inputs);
    const uint8_t* block = scales + octavo::CHANNEL_SCALES;
    WordPart acc[R][PARTS][CHAINS] = {};
    const int16_t *in[R], *group_sums[R];
    each<R>([&]<int r>() INLINED {
        const int64_t at = row + (r < count ? r : 0);
        in[r] = rows.shorts + at * rows.groups * GROUP, group_sums[r] = rows.group_sums + at * rows.groups * 2;
        if (format == Format::int4)
            each<PARTS>([&]<int p>() INLINED { acc[r][p][0] -= uint32_t(CENTER * rows.row_sums[at]); });
    });
    for (int g = 0; g < rows.groups; ++g, block += BLOCK) {
        prefetch(block + AHEAD, BLOCK);
        each<PARTS / STRIP>([&]<int strip>() INLINED {
            constexpr int FIRST = strip * STRIP;
            if (PARTS > STRIP) forget_loads();
            each_pair<format>(block, FIRST, [&]<int i>(const ShortPart(&weights)[STRIP]) INLINED {
                each<R>([&]<int r>() INLINED {
                    const int32_t pair = pair_at(in[r] + g * GROUP + i);
                    each<STRIP>([&]<int p>() INLINED {
                        WordPart& sums = acc[r][FIRST + p][i / 2 % CHAINS];
                        sums = add_pair(sums, weights[p], pair);
                    });
                });
            });
            if constexpr (format == Format::int4) {
                ShortPart offsets[STRIP];
                each<STRIP>([&]<int p>() INLINED { offsets[p] = load_offsets(block, FIRST + p); });
                each<R>([&]<int r>() INLINED {
                    const int32_t pair = pair_at(group_sums[r] + 2 * g);
                    each<STRIP>([&]<int p>() INLINED {
                        acc[r][FIRST + p][0] = add_pair(acc[r][FIRST + p][0], offsets[p], pair);
                    });
                });
            }
        });
    }
    each<R>([&]<int r>() INLINED {
        if (r >= count) return;
        Part sums[PARTS];
        each<PARTS>([&]<int p>() INLINED {
            WordPart all = acc[r][p][0];
            each<CHAINS - 1>([&]<int c>() INLINED { all += acc[r][p][c + 1]; });
            Part scale;
            load_to(scale, scales + p * sizeof scale);
            sums[p] = scale_sums(all, scale, rows.row_scales[row + r]);
        });
        store_outputs(sums, to, row + r, panel, m.outputs);
    });
}

template <int R>
Tile channel_tile_of(Format format) {
    return format == Format::int4 ? channel_tile<Format::int4, R> : channel_tile<Format::int8, R>;
}

[[maybe_unused]] void channel_product(const Matrix& m, const Activations& rows, int num_rows, int first, int end,
                                      const Output& to) {
    const Tile tiles[] = {channel_tile_of<1>(m.format), channel_tile_of<2>(m.format), channel_tile_of<4>(m.format),
                          channel_tile_of<TILE_ROWS>(m.format)};
    for (int panel = first; panel < end; ++panel) {
        for (int r = 0; r < num_rows; r += TILE_ROWS) {
            const int count = num_rows - r < TILE_ROWS ? num_rows - r : TILE_ROWS;
            tiles[count == 1 ? 0 : count == 2 ? 1 : count <= 4 ? 2 : 3](m, rows, r, count, panel, to);
        }
    }
}

[[maybe_unused]] void any_product(const Matrix& m, const Activations& rows, int num_rows, int first, int end,
                                  const Output& to) {
    const auto function = octavo::is_channel(m.format) ? channel_product : product;
    function(m, rows, num_rows, first, end, to);
}

}  // namespace
