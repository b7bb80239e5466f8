// Conversions between floats and the two 16-bit formats, for packing: not for the inner loops.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

namespace octavo {

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

inline float float_of_bits(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, 4);
    return x;
}

// Rounded to nearest, ties to even.
inline uint16_t bf16_of(float x) {
    const uint32_t bits = bits_of(x);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

inline float float_of_bf16(uint16_t x) { return float_of_bits(uint32_t(x) << 16); }

inline float float_of_half(uint16_t half) {
    // Times 2^112 moves the exponent from half's bias to float's, for subnormal halves too.
    const float magnitude = float_of_bits(uint32_t(half & 0x7fff) << 13) * 0x1p112f;
    return half & 0x8000 ? -magnitude : magnitude;
}

// Rounded to nearest, ties to even; magnitudes beyond 65504 become 65504.
inline uint16_t half_of(float x) {
    const uint32_t sign = (bits_of(x) >> 16) & 0x8000;
    float magnitude = std::fabs(x);
    if (magnitude > 65504.f) magnitude = 65504.f;
    if (magnitude < 0x1p-14f)  // subnormal: steps of 2^-24
        return uint16_t(sign | uint32_t(std::lrintf(magnitude * 0x1p24f)));
    const uint32_t bits = bits_of(magnitude) - (112u << 23);
    return uint16_t(sign | ((bits + 0xfff + ((bits >> 13) & 1)) >> 13));
}

}  // namespace octavo
