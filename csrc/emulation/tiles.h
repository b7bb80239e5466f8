// The tile unit in software, for machines that lack AMX: in builds for tests alone, included by isa/tiles.h.
//
// Eight tiles per thread. What the hardware refuses (no or a wrong configuration, tiles whose shapes do not fit
// together) ends the process. Products of bfloat16 as Intel documents them: within one instruction, pairs'
// first elements and their second ones are summed apart, each by fused multiply-adds; the two sums are
// added, and that is added to the tile. Denormals are zeros, before and after; ties go to even.

#pragma once

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

struct SoftwareTile {
    int rows = 0, bytes = 0;  // as configured; beyond them a tile is zero
    alignas(64) uint8_t content[16][64] = {};
};

thread_local SoftwareTile software_tiles[8];
thread_local bool is_configured = false;

[[noreturn]] inline void refuse(const char* why) {
    std::fprintf(stderr, "emulated tiles: %s\n", why);
    std::abort();
}

inline SoftwareTile& usable_tile(int number) {
    if (!is_configured) refuse("used without a configuration");
    if (!software_tiles[number].rows) refuse("a tile without a shape");
    return software_tiles[number];
}

class TileScope {
  public:
    explicit TileScope(const TileShapes& shapes) {
        if (shapes.palette != 1 || shapes.start_row) refuse("another palette than 1, or a row to start from");
        for (uint8_t byte : shapes.reserved)
            if (byte) refuse("a reserved byte is not zero");
        for (int i = 0; i < 16; ++i) {
            const int rows = shapes.rows[i], bytes = shapes.bytes_per_row[i];
            if (rows > (i < 8 ? 16 : 0) || bytes > (i < 8 ? 64 : 0) || !rows != !bytes) refuse("an impossible shape");
            if (i < 8) software_tiles[i] = {rows, bytes, {}};
        }
        is_configured = true;
    }
    ~TileScope() { is_configured = false; }
    TileScope(const TileScope&) = delete;
};

template <int tile>
void clear_tile() {
    std::memset(usable_tile(tile).content, 0, sizeof software_tiles[tile].content);
}

template <int tile>
void load_tile(const void* from, long stride) {
    clear_tile<tile>();
    SoftwareTile& to = usable_tile(tile);
    for (int row = 0; row < to.rows; ++row) std::memcpy(to.content[row], (const char*)from + row * stride, size_t(to.bytes));
}

template <int tile>
void store_tile(void* to, long stride) {
    const SoftwareTile& from = usable_tile(tile);
    for (int row = 0; row < from.rows; ++row) std::memcpy((char*)to + row * stride, from.content[row], size_t(from.bytes));
}

// One row of a tile: four bytes, or two bfloat16, in each of 16 lanes.
typedef uint32_t TileWords __attribute__((vector_size(64)));
typedef int32_t TileInts __attribute__((vector_size(64)));
typedef float TileFloats __attribute__((vector_size(64)));

template <class Row>
inline Row tile_row(const SoftwareTile& tile, int row) {
    Row value;
    std::memcpy(&value, tile.content[row], sizeof value);
    return value;
}

// For each row of a: row of sums = body(row of sums, words of a's row, how many, b).
template <int sums, int a, int b, class Row, class Body>
inline void for_rows(Body&& body) {
    SoftwareTile &out = usable_tile(sums), &first = usable_tile(a), &second = usable_tile(b);
    if (out.rows != first.rows || out.bytes != second.bytes || first.bytes != 4 * second.rows)
        refuse("shapes that do not fit together");
    for (int row = 0; row < out.rows; ++row) {
        uint32_t words[16];
        std::memcpy(words, first.content[row], sizeof words);
        const Row sum = body(tile_row<Row>(out, row), words, first.bytes / 4, second);
        std::memcpy(out.content[row], &sum, size_t(out.bytes));
    }
}

// Products of four bytes in each lane, modulo 2^32; those of `a` with a sign or without one.
template <int sums, int a, int b, bool is_signed>
inline void add_bytes() {
    for_rows<sums, a, b, TileWords>([](TileWords sum, const uint32_t* words, int depth, const SoftwareTile& second) {
        for (int k = 0; k < depth; ++k) {
            const TileWords weights = tile_row<TileWords>(second, k);
            for (int i = 0; i < 4; ++i) {
                const uint32_t byte = words[k] >> 8 * i & 255;
                const uint32_t value = is_signed ? uint32_t(int32_t(int8_t(byte))) : byte;
                sum += value * (TileWords)((TileInts)(weights << (24 - 8 * i)) >> 24);
            }
        }
        return sum;
    });
}

template <int sums, int a, int b>
void add_signed() { add_bytes<sums, a, b, true>(); }

template <int sums, int a, int b>
void add_unsigned() { add_bytes<sums, a, b, false>(); }

// Denormals as zeros of their sign.
inline TileFloats flushed(TileFloats x) {
    const TileWords bits = (TileWords)x;
    return (TileFloats)((bits & 0x7f800000u) == 0 ? bits & 0x80000000u : bits);
}

// sums + x * y, rounded once.
inline TileFloats add_flushed(TileFloats sum, uint32_t x, TileFloats y) {
    const TileFloats lanes = flushed((TileFloats)(x - TileWords{}));
    return flushed((TileFloats)_mm512_fmadd_ps((__m512)lanes, (__m512)y, (__m512)sum));
}

template <int sums, int a, int b>
void add_bf16() {
    TileFloats first[16], second[16];  // of b's pairs
    for (int k = 0; k < 16; ++k) {
        const TileWords pairs = tile_row<TileWords>(usable_tile(b), k);
        first[k] = flushed((TileFloats)(pairs << 16)), second[k] = flushed((TileFloats)(pairs & 0xffff0000u));
    }
    for_rows<sums, a, b, TileFloats>([&](TileFloats sum, const uint32_t* words, int depth, const SoftwareTile&) {
        TileFloats of_first{}, of_second{};
        for (int k = 0; k < depth; ++k) {
            of_first = add_flushed(of_first, words[k] << 16, first[k]);
            of_second = add_flushed(of_second, words[k] & 0xffff0000u, second[k]);
        }
        return flushed(flushed(sum) + flushed(of_first + of_second));
    });
}

}  // namespace
