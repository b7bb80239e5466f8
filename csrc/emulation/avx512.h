// AVX-512 for machines that lack it: included before a kernel's source, in builds for tests alone.
//
// Every intrinsic that the sources use is replaced by one of the same meaning on two halves with AVX2, or lane by
// lane where AVX2 has no such instruction; bits are those of the instruction, NaN and denormals included. What
// is not here does not compile, so nothing is emulated by mistake.

#pragma once

#include <immintrin.h>

#include <cmath>
#include <cstdint>
#include <cstring>

#define OCTAVO_EMULATED

namespace {
namespace emulated {

#define EMULATED inline __attribute__((always_inline))

typedef int8_t Bytes __attribute__((vector_size(64)));
typedef int16_t Shorts __attribute__((vector_size(64)));
typedef uint32_t Words __attribute__((vector_size(64)));

struct Floats {
    __m256 low, high;

    EMULATED Floats(__m256 l, __m256 h) : low(l), high(h) {}
    EMULATED Floats(__m512 from) { std::memcpy(this, &from, sizeof from); }
    EMULATED operator __m512() const {
        __m512 whole;
        std::memcpy(&whole, this, sizeof whole);
        return whole;
    }
};

struct Ints {
    __m256i low, high;

    EMULATED Ints(__m256i l, __m256i h) : low(l), high(h) {}
    EMULATED Ints(__m512i from) { std::memcpy(this, &from, sizeof from); }
    EMULATED operator __m512i() const {
        __m512i whole;
        std::memcpy(&whole, this, sizeof whole);
        return whole;
    }
};

// --- floats -----------------------------------------------------------------------------------------

EMULATED __m512 max_ps(Floats a, Floats b) { return Floats(_mm256_max_ps(a.low, b.low), _mm256_max_ps(a.high, b.high)); }
EMULATED __m512 min_ps(Floats a, Floats b) { return Floats(_mm256_min_ps(a.low, b.low), _mm256_min_ps(a.high, b.high)); }
EMULATED __m512 fmadd_ps(Floats a, Floats b, Floats c) {
    return Floats(_mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high));
}
EMULATED __m256 castps512_ps256(Floats a) { return a.low; }
EMULATED __m256 extractf32x8_ps(Floats a, int half) { return half ? a.high : a.low; }
EMULATED __m512 cvtph_ps(__m256i a) {
    return Floats(_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1)));
}

// What is left beyond a whole number: only rounding to minus infinity, with no bits behind the point kept.
EMULATED __m256 reduce_half(__m256 a) {
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a);
    const __m256 is_infinite = _mm256_cmp_ps(magnitude, _mm256_set1_ps(INFINITY), _CMP_EQ_OQ);
    return _mm256_andnot_ps(is_infinite, _mm256_sub_ps(a, _mm256_floor_ps(a)));
}
template <int mode>
EMULATED __m512 reduce_ps(Floats a) {
    static_assert(mode == (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC));
    return Floats(reduce_half(a.low), reduce_half(a.high));
}

// a * 2^floor(b), rounded once: in double a product with a power of two is exact.
EMULATED float scale_by(float a, float b) {
    if (b != b || (std::fabs(b) == INFINITY && (b > 0 ? a == 0 : std::fabs(a) == INFINITY))) return NAN;
    // Further no float would stay one.
    const float n = std::floor(b < -300 ? -300.0f : b > 300 ? 300.0f : b);
    const uint64_t bits = uint64_t(int64_t(n) + 1023) << 52;
    double power;
    std::memcpy(&power, &bits, sizeof power);
    return float(double(a) * power);
}
EMULATED __m512 scalef_ps(__m512 a, __m512 b) {
    float x[16], y[16];
    std::memcpy(x, &a, sizeof x), std::memcpy(y, &b, sizeof y);
    for (int i = 0; i < 16; ++i) x[i] = scale_by(x[i], y[i]);
    std::memcpy(&a, x, sizeof x);
    return a;
}

// To the nearest bfloat16, ties to even; denormals become zeros, NaN stays one that is quiet.
EMULATED __m256i cvtneps_pbh(__m512 a) {
    uint32_t bits[16];
    uint16_t rounded[16];
    std::memcpy(bits, &a, sizeof bits);
    for (int i = 0; i < 16; ++i) {
        const uint32_t x = bits[i], magnitude = x & 0x7fffffff;
        const uint32_t up = magnitude < 0x00800000   ? x & 0x80000000
                            : magnitude > 0x7f800000 ? x | 0x00400000
                                                     : x + 0x7fff + (x >> 16 & 1);
        rounded[i] = uint16_t(up >> 16);
    }
    __m256i out;
    std::memcpy(&out, rounded, sizeof out);
    return out;
}

// sums + the products of each lane's second numbers, then of its first ones; denormals are zeros on either side.
EMULATED __m512 flushed(__m512 a) {
    uint32_t bits[16];
    std::memcpy(bits, &a, sizeof bits);
    for (uint32_t& x : bits) x = x & 0x7f800000 ? x : x & 0x80000000;
    std::memcpy(&a, bits, sizeof bits);
    return a;
}
template <class Pairs>
EMULATED __m512 dpbf16_ps(__m512 sums, Pairs a, Pairs b) {
    const auto product = [](__m512 to, __m512i x, __m512i y) {
        return flushed(fmadd_ps(flushed((__m512)x), flushed((__m512)y), to));
    };
    const Words x = (Words)a, y = (Words)b;
    sums = product(flushed(sums), (__m512i)(x & 0xffff0000u), (__m512i)(y & 0xffff0000u));
    return product(sums, (__m512i)(x << 16), (__m512i)(y << 16));
}

// --- integers ---------------------------------------------------------------------------------------

EMULATED __m512i set1_epi32(int32_t x) { return (__m512i)(uint32_t(x) - Words{}); }
EMULATED __m512i set1_epi8(char x) { return (__m512i)(int8_t(x) - Bytes{}); }
EMULATED __m512i add_epi32(__m512i a, __m512i b) { return (__m512i)((Words)a + (Words)b); }
EMULATED __m512i sub_epi8(Ints a, Ints b) { return Ints(_mm256_sub_epi8(a.low, b.low), _mm256_sub_epi8(a.high, b.high)); }
EMULATED __m512i or_si512(__m512i a, __m512i b) { return a | b; }
EMULATED __m512i slli_epi32(Ints a, int n) { return Ints(_mm256_slli_epi32(a.low, n), _mm256_slli_epi32(a.high, n)); }
EMULATED __m512i srai_epi32(Ints a, int n) { return Ints(_mm256_srai_epi32(a.low, n), _mm256_srai_epi32(a.high, n)); }
EMULATED __m512i mulhrs_epi16(Ints a, Ints b) {
    return Ints(_mm256_mulhrs_epi16(a.low, b.low), _mm256_mulhrs_epi16(a.high, b.high));
}
EMULATED __m512i cvtps_epi32(Floats a) { return Ints(_mm256_cvtps_epi32(a.low), _mm256_cvtps_epi32(a.high)); }
EMULATED __m512i cvtepu16_epi32(__m256i a) {
    return Ints(_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)), _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1)));
}

// The lowest bits of each lane, not the nearest number.
template <class Narrow, class Out>
EMULATED Out cut(__m512i a) {
    typedef Narrow Lanes __attribute__((vector_size(16 * sizeof(Narrow))));
    return (Out)__builtin_convertvector((Words)a, Lanes);
}
EMULATED __m128i cvtepi32_epi8(__m512i a) { return cut<uint8_t, __m128i>(a); }
EMULATED __m256i cvtepi32_epi16(__m512i a) { return cut<uint16_t, __m256i>(a); }

// sums + the products of each lane's two numbers of 16 bits, modulo 2^32.
EMULATED __m512i dpwssd_epi32(__m512i sums, Ints a, Ints b) {
    const __m512i pairs = Ints(_mm256_madd_epi16(a.low, b.low), _mm256_madd_epi16(a.high, b.high));
    return add_epi32(sums, pairs);
}

// sums + the products of each lane's four bytes, those of `a` without a sign, modulo 2^32: nothing saturates.
EMULATED __m512i dpbusd_epi32(__m512i sums, __m512i a, __m512i b) {
    const Shorts even = (Shorts)a & 255, odd = (Shorts)((Words)a >> 8 & 0x00ff00ffu);
    return dpwssd_epi32(dpwssd_epi32(sums, (__m512i)even, (__m512i)((Shorts)b << 8 >> 8)), (__m512i)odd,
                        (__m512i)((Shorts)b >> 8));
}

// --- memory: whole lines, as the instructions demand ----------------------------------------------------

EMULATED void check_line(const void* at) {
    if (uintptr_t(at) % 64) __builtin_trap();
}
EMULATED __m512i load_si512(const void* from) {
    check_line(from);
    __m512i value;
    std::memcpy(&value, from, sizeof value);
    return value;
}
EMULATED void store_si512(void* to, __m512i value) {
    check_line(to);
    std::memcpy(to, &value, sizeof value);
}

#undef EMULATED

}  // namespace emulated
}  // namespace

#define __AVX512F__ 1
#define __AVX512BW__ 1
#define __AVX512DQ__ 1
#define __AVX512VL__ 1
#define __AVX512VNNI__ 1
#define __AVX512BF16__ 1

#undef _mm512_extractf32x8_ps  // a macro of the compiler's where it does not optimise, as are three below
#undef _mm512_reduce_ps
#undef _mm512_slli_epi32
#undef _mm512_srai_epi32

#define _mm512_add_epi32 emulated::add_epi32
#define _mm512_castps512_ps256 emulated::castps512_ps256
#define _mm512_cvtepi32_epi16 emulated::cvtepi32_epi16
#define _mm512_cvtepi32_epi8 emulated::cvtepi32_epi8
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtps_epi32 emulated::cvtps_epi32
#define _mm512_dpbf16_ps emulated::dpbf16_ps
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
#define _mm512_dpwssd_epi32 emulated::dpwssd_epi32
#define _mm512_extractf32x8_ps emulated::extractf32x8_ps
#define _mm512_fmadd_ps emulated::fmadd_ps
#define _mm512_load_si512 emulated::load_si512
#define _mm512_max_ps emulated::max_ps
#define _mm512_min_ps emulated::min_ps
#define _mm512_mulhrs_epi16 emulated::mulhrs_epi16
#define _mm512_or_si512 emulated::or_si512
#define _mm512_reduce_ps(a, mode) emulated::reduce_ps<(mode)>(a)
#define _mm512_scalef_ps emulated::scalef_ps
#define _mm512_set1_epi32 emulated::set1_epi32
#define _mm512_set1_epi8 emulated::set1_epi8
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_srai_epi32 emulated::srai_epi32
#define _mm512_store_si512 emulated::store_si512
#define _mm512_sub_epi8 emulated::sub_epi8
