// Products of formats int8 and int4 with AMX, for more rows than a few: the same sums as channels.h.
//
// A 16-bit activation is two signed bytes, 256 h + l, and each meets the weights in a sum of its own. A tile is
// 16 rows x two panels x (h, l), so per 64 inputs four products and four loads; a last panel alone takes half.
// Codes of 4 bits are multiplied out to bytes once per panel for all rows. What their offsets add is one more
// block of inputs per 32 groups: l meets zi with S % 256 and zf with S / 256, h meets zi with S / 256.
// Limits: 9 to 16 rows, multiplying out (128 operations on one port per 1,024 codes, against 2 x 16 cycles);
// many, tiles at half of their peak, as loads and the scaling of sums share the time.

#pragma once

#include "channels.h"
#include "tiles.h"

namespace {

constexpr int DEPTH_BYTES = 64;                      // inputs of one block
constexpr int BLOCK_BYTES = TILE * DEPTH_BYTES;      // of one plane of activations, or of one panel's weights
constexpr int GROUPS_PER_OFFSETS = 32;               // groups whose offsets fit into one block
constexpr int CHUNK_GROUPS = 64, CHUNK_BLOCKS = 32;  // as many are multiplied out at a time
// Fewer rows are faster without tiles.
constexpr int FEW_ROWS = 4;
constexpr int CHANNEL_ROWS = 512;

int blocks_of(int groups) { return (groups + 1) / 2; }
int offset_blocks_of(int groups) { return (groups + GROUPS_PER_OFFSETS - 1) / GROUPS_PER_OFFSETS; }

// Where row `row` has its h of block `block`; its l is BLOCK_BYTES further. The blocks of offsets come last.
INLINE int8_t* plane(const Activations& rows, int64_t row, int block) {
    const int64_t blocks = blocks_of(rows.groups) + offset_blocks_of(rows.groups);
    return rows.planes + ((row / TILE) * blocks + block) * 2 * BLOCK_BYTES + row % TILE * DEPTH_BYTES;
}

// Four bytes of a lane are the inputs 0, 2, 1, 3.
INLINE void store_plane(int8_t* to, __m512i values) {
    const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
    _mm_storeu_si128((__m128i*)to, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(values), order));
}

void channel_planes(const Activations& rows, int row) {
    const float* x = rows.x + int64_t(row) * rows.stride;
    const int num_blocks = blocks_of(rows.groups);
    for (int b = rows.groups / 2; b < num_blocks + offset_blocks_of(rows.groups); ++b)
        for (int p = 0; p < 2; ++p) std::memset(plane(rows, row, b) + p * BLOCK_BYTES, 0, DEPTH_BYTES);
    rows.row_scales[row] = channel_scale(rows, x);
    rows.row_sums[row] = quantize_channel(
        rows, x, rows.row_scales[row],
        [&](int i, Floats v) INLINED {
            const __m512i a = _mm512_cvtps_epi32((__m512)v);
            const __m512i h = _mm512_srai_epi32(_mm512_add_epi32(a, _mm512_set1_epi32(128)), 8);
            int8_t* to = plane(rows, row, i / DEPTH_BYTES) + i % DEPTH_BYTES;
            store_plane(to, h), store_plane(to + BLOCK_BYTES, a);  // of a the lowest byte, which is l
        },
        [&](int g, int32_t sum) INLINED {
            int8_t* to = plane(rows, row, num_blocks + g / GROUPS_PER_OFFSETS) + g % GROUPS_PER_OFFSETS * 2;
            const int8_t high = int8_t((sum + 128) >> 8);
            to[0] = high, to[BLOCK_BYTES] = int8_t(sum), to[BLOCK_BYTES + 1] = high;
        });
}

// The weights of some groups of a panel as blocks of signed bytes, and their offsets after them. Half of the last
// block may be anything: activations are zero there.
struct Bytes {
    alignas(64) int8_t blocks[CHUNK_BLOCKS + CHUNK_GROUPS / GROUPS_PER_OFFSETS][TILE][DEPTH_BYTES];

    void unpack(const uint8_t* packed, int groups) {
        const int num_blocks = blocks_of(groups), num_offsets = offset_blocks_of(groups);
        std::memset(blocks[num_blocks], 0, size_t(num_offsets) * BLOCK_BYTES);
        for (int g = 0; g < groups; ++g, packed += octavo::CHANNEL_INT4_BLOCK) {
            prefetch(packed + AHEAD, octavo::CHANNEL_INT4_BLOCK);
            int8_t* rows = blocks[g / 2][g % 2 * 8];
            ShortPart first{};
            each_pair<Format::int4>(packed, 0, [&]<int i>(const ShortPart(&weights)[1]) INLINED {
                if (i % 4 == 0) return void(first = weights[0]);
                const ShortPart both = first | weights[0] << 8;
                _mm512_store_si512(rows + i / 4 * DEPTH_BYTES,
                                   _mm512_sub_epi8((__m512i)both, _mm512_set1_epi8(CENTER)));
            });
            int8_t* offsets = blocks[num_blocks + g / GROUPS_PER_OFFSETS][g % GROUPS_PER_OFFSETS / 2];
            const __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)(packed + 288)));
            const __m512i there = g % 2 ? _mm512_slli_epi32(wide, 16) : wide;
            _mm512_store_si512(offsets, _mm512_or_si512(there, _mm512_load_si512(offsets)));
        }
    }
};

// The sums of 16 rows x two panels, each as h's and l's.
using Sums = int32_t[2][2][TILE][LANES];

// One or two panels with up to CHANNEL_ROWS rows.
template <Format format, int PANELS>
class ChannelTiles {
  public:
    ChannelTiles(const Matrix& m, const Activations& rows, int panel) : m_(m), rows_(rows), panel_(panel) {
        for (int p = 0; p < PANELS; ++p) packed_[p] = m.panels + (panel + p) * octavo::panel_bytes(format, m.inputs);
    }

    void run(int begin, int end, const Output& to) {
        for (int g = 0; g < rows_.groups; g += CHUNK_GROUPS) {
            const int groups = rows_.groups - g < CHUNK_GROUPS ? rows_.groups - g : CHUNK_GROUPS;
            is_first_ = g == 0, is_last_ = g + groups == rows_.groups;
            if constexpr (format == Format::int4)
                for (int p = 0; p < PANELS; ++p)
                    bytes_[p].unpack(packed_[p] + octavo::CHANNEL_SCALES + int64_t(g) * octavo::CHANNEL_INT4_BLOCK, groups);
            // What a tile stores cannot be read back at once: its sums are scaled after the next one's products.
            int turn = 0;
            for (int row = begin; row < end; row += TILE, turn ^= 1) {
                multiply(row, g, groups, row == begin, tile_sums_[turn]);
                if (row > begin) finish(row - TILE, TILE, begin, tile_sums_[turn ^ 1], to);
            }
            const int last = (end - begin - 1) / TILE * TILE + begin;
            finish(last, end - last, begin, tile_sums_[turn ^ 1], to);
        }
    }

  private:
    void multiply(int row, int g, int groups, bool is_cold, Sums& sums) {
        const int num_blocks = blocks_of(groups);
        clear_tile<0>(), clear_tile<1>(), clear_tile<2>(), clear_tile<3>();
        if constexpr (format == Format::int4) {
            const int8_t *first = bytes_[0].blocks[0][0], *second = bytes_[PANELS - 1].blocks[0][0];
            add_blocks(plane(rows_, row, g / 2), first, second, num_blocks, false);
            const int offsets = blocks_of(rows_.groups) + g / GROUPS_PER_OFFSETS;
            add_blocks(plane(rows_, row, offsets), first + num_blocks * BLOCK_BYTES, second + num_blocks * BLOCK_BYTES,
                       offset_blocks_of(groups), false);
        } else {
            const int64_t from = octavo::CHANNEL_SCALES + int64_t(g) * octavo::CHANNEL_INT8_BLOCK;
            add_blocks(plane(rows_, row, g / 2), (const int8_t*)packed_[0] + from,
                       (const int8_t*)packed_[PANELS - 1] + from, num_blocks, is_cold);
        }
        store_tile<0>(sums[0][0], DEPTH_BYTES), store_tile<1>(sums[0][1], DEPTH_BYTES);
        if constexpr (PANELS == 2) store_tile<2>(sums[1][0], DEPTH_BYTES), store_tile<3>(sums[1][1], DEPTH_BYTES);
    }

    // Add `num_blocks` blocks of inputs to the sums in the tiles 0 to 3. Cold weights are fetched ahead.
    INLINE static void add_blocks(const int8_t* activations, const int8_t* first, const int8_t* second, int num_blocks,
                                  bool is_cold) {
        for (int b = 0; b < num_blocks; ++b, activations += 2 * BLOCK_BYTES, first += BLOCK_BYTES, second += BLOCK_BYTES) {
            if (is_cold) prefetch_far(first + AHEAD, BLOCK_BYTES);
            load_tile<4>(activations, DEPTH_BYTES);
            load_tile<6>(first, DEPTH_BYTES);
            add_signed<0, 4, 6>();
            load_tile<5>(activations + BLOCK_BYTES, DEPTH_BYTES);
            add_signed<1, 5, 6>();
            if constexpr (PANELS == 2) {
                if (is_cold) prefetch_far(second + AHEAD, BLOCK_BYTES);
                load_tile<7>(second, DEPTH_BYTES);
                add_signed<2, 4, 7>();
                add_signed<3, 5, 7>();
            }
        }
    }

    // Scale the sums of `count` rows, or keep them for the next groups.
    void finish(int row, int count, int begin, const Sums& sums, const Output& to) {
        const bool is_first = is_first_, is_last = is_last_;
        for (int p = 0; p < PANELS; ++p) {
            Part scales;
            load_to(scales, packed_[p]);
            for (int r = 0; r < count; ++r) {
                WordPart high, low, before{};
                load_to(high, sums[p][0][r]), load_to(low, sums[p][1][r]);
                uint32_t* kept = kept_[row - begin + r][p];
                if (!is_first) load_to(before, kept);
                const WordPart all = (high << 8) + low + before;
                if (!is_last) {
                    std::memcpy(kept, &all, sizeof all);
                    continue;
                }
                Part scaled = scale_sums(all, scales, rows_.row_scales[row + r]);
                store_outputs(&scaled, to, row + r, panel_ + p, m_.outputs);
            }
        }
    }

    const Matrix& m_;
    const Activations& rows_;
    const int panel_;
    bool is_first_ = true, is_last_ = true;
    const uint8_t* packed_[PANELS];
    alignas(64) Sums tile_sums_[2];
    Bytes bytes_[format == Format::int4 ? PANELS : 1];
    alignas(64) uint32_t kept_[CHANNEL_ROWS][PANELS][LANES];
};

template <Format format>
void channel_tiles(const Matrix& m, const Activations& rows, int num_rows, int first, int end, const Output& to) {
    const TileScope scope(WHOLE);
    for (int begin = 0; begin < num_rows; begin += CHANNEL_ROWS) {
        const int last = num_rows - begin < CHANNEL_ROWS ? num_rows : begin + CHANNEL_ROWS;
        int panel = first;
        for (; panel + 1 < end; panel += 2) ChannelTiles<format, 2>(m, rows, panel).run(begin, last, to);
        if (panel < end) ChannelTiles<format, 1>(m, rows, panel).run(begin, last, to);
    }
}

void amx_channel_product(const Matrix& m, const Activations& rows, int num_rows, int first, int end, const Output& to) {
    if (num_rows <= FEW_ROWS) return channel_product(m, rows, num_rows, first, end, to);
    const auto tiles = m.format == Format::int4 ? channel_tiles<Format::int4> : channel_tiles<Format::int8>;
    tiles(m, rows, num_rows, first, end, to);
}

}  // namespace
