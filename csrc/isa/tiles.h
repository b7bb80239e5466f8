// AMX: tiles of 16 rows x 64 bytes, and the instructions on them.
//
// Own assembly, since GCC 12's intrinsics do not say that they read and write memory. Tiles 0-3 are for 16 x 16
// sums, 4 and 5 for first operands, 6 and 7 for second ones. A tile with fewer rows than 16 is computed
// whole; the rows that are missing must be readable.

#pragma once

#include <cstdint>

namespace {

constexpr int TILE = 16;

struct alignas(64) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes_per_row[16];
    uint8_t rows[16];
};

// Operands 64 bytes deep, and half as deep.
constexpr TileShapes WHOLE{.bytes_per_row = {64, 64, 64, 64, 64, 64, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 16, 16}};
constexpr TileShapes HALF{.bytes_per_row = {64, 64, 64, 64, 32, 32, 64, 64}, .rows = {16, 16, 16, 16, 16, 16, 8, 8}};

}  // namespace

#if defined(OCTAVO_EMULATED)
#include "../emulation/tiles.h"
#else

namespace {

// Tiles are usable while one of these lives.
class TileScope {
  public:
    explicit TileScope(const TileShapes& shapes) { asm volatile("ldtilecfg %0" ::"m"(shapes)); }
    ~TileScope() { asm volatile("tilerelease" ::: "memory"); }
    TileScope(const TileScope&) = delete;
};

template <int tile>
inline __attribute__((always_inline)) void load_tile(const void* from, long stride) {
    asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(from), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline __attribute__((always_inline)) void store_tile(void* to, long stride) {
    asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(to), "r"(stride), "i"(tile) : "memory");
}

template <int tile>
inline __attribute__((always_inline)) void clear_tile() {
    asm volatile("tilezero %%tmm%c0" ::"i"(tile));
}

// sums += a * b, of signed bytes or of bfloat16.
template <int sums, int a, int b>
inline __attribute__((always_inline)) void add_signed() {
    asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
}

// The bytes of a without a sign.
template <int sums, int a, int b>
inline __attribute__((always_inline)) void add_unsigned() {
    asm volatile("tdpbusd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
}

template <int sums, int a, int b>
inline __attribute__((always_inline)) void add_bf16() {
    asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(sums), "i"(a), "i"(b));
}

}  // namespace

#endif
