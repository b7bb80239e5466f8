// Sixteen lanes, whatever the instruction set: the primitives that every operator is written with.
//
// Each file in isa/ includes this with its own compiler flags, inside an anonymous namespace, so no
// code compiled for one instruction set can be linked into another. A lane's arithmetic never
// depends on the other lanes; contraction is off, so a fused multiply-add happens only where written.

#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;

typedef float Floats __attribute__((vector_size(64)));
typedef int32_t Ints __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

#define INLINE inline __attribute__((always_inline))
// Loops over the rows of a tile: unrolled, so that their sums stay in registers.
#define UNROLL _Pragma("GCC unroll 16")

INLINE Floats load(const float* from) {
    Floats value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

INLINE void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

// Subtracting zero changes nothing, not even the sign of a zero, so the compiler leaves it out.
INLINE Floats splat(float x) { return x - Floats{}; }

// a * b + c: rounded once where the instruction set has it, else twice.
INLINE Floats fma(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
    return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    __m256 x[2], y[2], z[2];
    std::memcpy(x, &a, 64), std::memcpy(y, &b, 64), std::memcpy(z, &c, 64);
    z[0] = _mm256_fmadd_ps(x[0], y[0], z[0]);
    z[1] = _mm256_fmadd_ps(x[1], y[1], z[1]);
    std::memcpy(&c, z, 64);
    return c;
#else
    return a * b + c;
#endif
}

INLINE Floats maximum(Floats a, Floats b) { return a > b ? a : b; }

// Sums and maxima over lanes as a tree of fixed shape.
INLINE float sum(Floats v) {
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) x[i] += x[i + width];
    return x[0];
}

INLINE float largest(Floats v) {
    float x[LANES];
    store(x, v);
    for (int width = LANES / 2; width; width /= 2)
        for (int i = 0; i < width; ++i) x[i] = x[i] > x[i + width] ? x[i] : x[i + width];
    return x[0];
}

INLINE Floats to_floats(Ints v) { return __builtin_convertvector(v, Floats); }

// bfloat16: the upper half of a float, rounded to nearest, ties to even; NaN stays NaN.
INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

INLINE float from_bf16(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// Sixteen pairs of bfloat16, as two vectors: the first of each pair, and the second.
INLINE void load_pairs(const uint16_t* from, Floats& first, Floats& second) {
    Words pairs;
    std::memcpy(&pairs, from, sizeof pairs);
    first = (Floats)(pairs << 16);
    second = (Floats)(pairs & 0xffff0000u);
}

// Sixteen half-precision numbers as floats, exactly.
INLINE Floats load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    __m256 x[2] = {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from)),
                   _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(from + 8)))};
    Floats value;
    std::memcpy(&value, x, 64);
    return value;
#else
    float x[LANES];
    for (int i = 0; i < LANES; ++i) {
        // Multiplying by 2^112 moves the exponent from half's bias to float's; it is exact for
        // subnormal halves too, and weights are never infinite.
        uint32_t bits = uint32_t(from[i] & 0x7fff) << 13, power = 0x77800000;
        float magnitude, factor;
        std::memcpy(&magnitude, &bits, 4), std::memcpy(&factor, &power, 4);
        x[i] = from[i] & 0x8000 ? -magnitude * factor : magnitude * factor;
    }
    return load(x);
#endif
}

// For each lane, sums + the dot product of its four unsigned bytes of `weights` with the four signed
// bytes of `row`. Exact: |row| <= 127.
INLINE Ints dot4(Ints sums, Ints weights, int32_t row) {
#if defined(__AVX512VNNI__)
    return (Ints)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)weights, _mm512_set1_epi32(row));
#elif defined(__AVX2__)
    // maddubs saturates at 16 bits, so the bytes are multiplied as words: even ones, then odd ones.
    __m256i w[2], s[2];
    std::memcpy(w, &weights, 64), std::memcpy(s, &sums, 64);
    const __m256i r = _mm256_set1_epi32(row), low = _mm256_set1_epi16(0xff);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(r, 8), 8);
    const __m256i odd = _mm256_srai_epi16(r, 8);
    for (int i = 0; i < 2; ++i) {
        __m256i a = _mm256_madd_epi16(_mm256_and_si256(w[i], low), even);
        __m256i b = _mm256_madd_epi16(_mm256_srli_epi16(w[i], 8), odd);
        s[i] = _mm256_add_epi32(s[i], _mm256_add_epi32(a, b));
    }
    std::memcpy(&sums, s, 64);
    return sums;
#else
    uint8_t w[64];
    int8_t r[4];
    std::memcpy(w, &weights, 64), std::memcpy(r, &row, 4);
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < 4; ++j) sums[i] += int32_t(w[4 * i + j]) * r[j];
    return sums;
#endif
}

// e^x to within 2 units in the last place, after Cephes: x = n ln 2 + r, a polynomial in r, times 2^n.
// Below -87 the result is 0.
INLINE Floats exponential(Floats x) {
    const Floats low = splat(-87.0f), high = splat(88.0f);
    const Floats inside = x > high ? high : (x < low ? low : x);
    const Floats scaled = inside * 1.44269504f;
    const Floats magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
    const Floats n = (scaled + magic) - magic;
    Floats r = fma(n, splat(-0.693359375f), inside);
    r = fma(n, splat(2.12194440e-4f), r);
    Floats p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    const Ints exponent = (__builtin_convertvector(n, Ints) + 127) << 23;
    const Floats value = p * (Floats)exponent;
    return x < low ? Floats{} : value;
}

}  // namespace
