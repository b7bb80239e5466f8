// Sixteen lanes, whatever the instruction set: the primitives that every operator is written with.
//
// `Part` is what one register holds: 16, 8 or 4 floats. `Floats`, always 16 lanes, is a Part or a pair
// of halves down to it, so that all of it stays in registers. Each file in isa/ includes this with
// its own compiler flags, inside an anonymous namespace, so no code compiled for one instruction set
// can be linked into another. A lane's arithmetic never depends on the other lanes; contraction is
// off, so a fused multiply-add happens only where written.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

namespace {

constexpr int LANES = 16;

#define INLINE inline __attribute__((always_inline))
#define INLINED __attribute__((always_inline))  // a lambda
// Loops over the rows of a tile: unrolled, so that their sums stay in registers.
#define UNROLL _Pragma("GCC unroll 16")

#if defined(__AVX512F__)
constexpr int PART = 16;
#elif defined(__AVX2__)
constexpr int PART = 8;
#else
constexpr int PART = 4;
#endif
constexpr int PARTS = LANES / PART;

typedef float Part __attribute__((vector_size(PART * 4)));
typedef int32_t IntPart __attribute__((vector_size(PART * 4)));
typedef uint32_t WordPart __attribute__((vector_size(PART * 4)));
typedef int16_t Int16Part __attribute__((vector_size(PART * 4)));

INLINE void prefetch(const void* from, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)from + i);
}

// Into the second cache: for more than the first one holds.
INLINE void prefetch_far(const void* from, int bytes) {
    for (int i = 0; i < bytes; i += 64) __builtin_prefetch((const char*)from + i, 0, 2);
}

// Where a tile has several parts: what one part has loaded of the rows is loaded again for the next. Else
// the compiler keeps it all, in memory, since registers are few.
INLINE void forget_loads() {
    if (PARTS > 1) asm volatile("" ::: "memory");
}

// A sum so far, or what several products share. Else the compiler turns a chain of additions of integers into a
// tree, for which registers are too few, and loads what is shared anew for each product.
template <class T>
INLINE T in_register(T value) {
#if defined(OCTAVO_EMULATED)
    // Emulated vectors fit into none.
#elif defined(__AVX512F__)
    asm("" : "+v"(value));
#elif defined(__AVX2__)
    asm("" : "+x"(value));
#endif
    return value;
}

// --- one register ---------------------------------------------------------------------------------

template <class T>
INLINE void load_to(T& value, const void* from) { std::memcpy(&value, from, sizeof value); }
INLINE void store(float* to, Part value) { std::memcpy(to, &value, sizeof value); }
// Subtracting zero changes nothing, not even the sign of a zero, so the compiler leaves it out.
INLINE void splat_to(Part& value, float x) { value = x - Part{}; }

// a * b + c: rounded once where the instruction set has it, else twice.
INLINE Part fma(Part a, Part b, Part c) {
#if defined(__AVX512F__)
    return (Part)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
    return (Part)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
    return a * b + c;
#endif
}

// As the instructions have it: where either is NaN, the second.
#if defined(__AVX512F__)
INLINE Part maximum(Part a, Part b) { return (Part)_mm512_max_ps((__m512)a, (__m512)b); }
INLINE Part minimum(Part a, Part b) { return (Part)_mm512_min_ps((__m512)a, (__m512)b); }
#elif defined(__AVX2__)
INLINE Part maximum(Part a, Part b) { return (Part)_mm256_max_ps((__m256)a, (__m256)b); }
INLINE Part minimum(Part a, Part b) { return (Part)_mm256_min_ps((__m256)a, (__m256)b); }
#else
INLINE Part maximum(Part a, Part b) { return a > b ? a : b; }
INLINE Part minimum(Part a, Part b) { return a < b ? a : b; }
#endif
INLINE Part zero_below(Part x, Part low, Part value) { return x < low ? Part{} : value; }
// 2^n for whole n from -126 to 127.
INLINE Part power_of_two(Part n) { return (Part)((__builtin_convertvector(n, IntPart) + 127) << 23); }

// value * 2^n where x >= low, else 0. `shifted` is 1.5 * 2^23 + n: its lowest bits are n.
INLINE Part scale_above(Part x, Part low, Part value, Part shifted) {
    const Part scaled = (Part)((IntPart)value + ((IntPart)shifted << 23));
    return zero_below(x, low, scaled);
}

// Lanes as a tree: each half is folded onto the other. The shape is the same for every instruction set.
template <class Fold>
INLINE float fold(Part v, Fold&& both) {
    typedef float Quarter __attribute__((vector_size(16)));
#if defined(__AVX512F__)
    const __m256 half = both(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#elif defined(__AVX2__)
    const __m256 half = (__m256)v;
#endif
#if defined(__AVX2__)
    const Quarter x = (Quarter)both(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
#else
    const Quarter x = v;
#endif
    const Quarter pairs = both(x, Quarter{x[2], x[3], x[2], x[3]});
    return both(pairs, Quarter{pairs[1], pairs[1], pairs[1], pairs[1]})[0];
}

// Of pairs of bfloat16 or of floats the first of each, or the second.
template <int which>
INLINE Part load_half_of_pairs(const uint16_t* from) {
    WordPart pairs;
    load_to(pairs, from);
    return (Part)(which == 0 ? pairs << 16 : pairs & 0xffff0000u);
}

template <int which>
INLINE Part load_half_of_pairs(const float* from) {
    Part half;
    UNROLL for (int i = 0; i < PART; ++i) half[i] = from[2 * i + which];
    return half;
}

// Pairs of int16 in lanes: those of bytes 0 and 2 of each lane, and those of bytes 1 and 3.
INLINE IntPart even_bytes(Int16Part bytes) { return (IntPart)((bytes << 8) >> 8); }
INLINE IntPart odd_bytes(Int16Part bytes) { return (IntPart)(bytes >> 8); }

// sums + the products of the int16 of each lane.
INLINE IntPart add_pairs(IntPart sums, IntPart a, IntPart b) {
#if defined(__AVX512F__)
    return (IntPart)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return in_register((IntPart)_mm256_add_epi32((__m256i)sums, _mm256_madd_epi16((__m256i)a, (__m256i)b)));
#else
    return sums + ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// Half-precision numbers as floats, exactly.
INLINE Part load_halves(const uint16_t* from) {
#if defined(__AVX512F__)
    return (Part)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#elif defined(__F16C__)
    return (Part)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#else
    // Multiplying by 2^112 moves the exponent from half's bias to float's; it is exact for
    // subnormal halves too, and weights are never infinite.
    WordPart bits;
    for (int i = 0; i < PART; ++i) bits[i] = from[i];
    const Part magnitude = (Part)((bits & 0x7fff) << 13) * 0x1p112f;
    return (Part)((WordPart)magnitude | (bits & 0x8000) << 16);
#endif
}

// Whole numbers of at most 24 bits.
INLINE void store_ints(int32_t* to, Part value) {
    const IntPart whole = __builtin_convertvector(value, IntPart);
    std::memcpy(to, &whole, sizeof whole);
}

INLINE Part load_ints(const int32_t* from, Part) {
    IntPart whole;
    load_to(whole, from);
    return __builtin_convertvector(whole, Part);
}

#if defined(__AVX2__)
// Numbers that fit into 16 bits.
INLINE __m128i narrowed(__m256i whole) {
    return _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
}
#endif

// Whole numbers as 16 bits.
INLINE void store_shorts(int16_t* to, Part value) {
    const IntPart whole = __builtin_convertvector(value, IntPart);
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)to, _mm512_cvtepi32_epi16((__m512i)whole));
#elif defined(__AVX2__)
    _mm_storeu_si128((__m128i*)to, narrowed((__m256i)whole));
#else
    for (int i = 0; i < PART; ++i) to[i] = int16_t(whole[i]);
#endif
}

// Whole numbers from -127 to 127 as bytes.
INLINE void store_bytes(int8_t* to, Part value) {
    const IntPart whole = __builtin_convertvector(value, IntPart);
#if defined(__AVX512F__)
    _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)whole));
#elif defined(__AVX2__)
    const __m128i shorts = narrowed((__m256i)whole);
    _mm_storel_epi64((__m128i*)to, _mm_packs_epi16(shorts, shorts));
#else
    for (int i = 0; i < PART; ++i) to[i] = int8_t(whole[i]);
#endif
}

// --- sixteen lanes --------------------------------------------------------------------------------

template <class Half>
struct Pair {
    Half low, high;
};

#if defined(__AVX512F__)
typedef Part Floats;
#elif defined(__AVX2__)
typedef Pair<Part> Floats;
#else
typedef Pair<Pair<Part>> Floats;
#endif

template <class H>
INLINE void load_to(Pair<H>& value, const void* from) {
    load_to(value.low, from), load_to(value.high, (const char*)from + sizeof(H));
}
template <class H>
INLINE void store(float* to, Pair<H> v) {
    store(to, v.low), store(to + sizeof(H) / 4, v.high);
}
template <class H>
INLINE void splat_to(Pair<H>& value, float x) {
    splat_to(value.low, x), splat_to(value.high, x);
}
template <class H>
INLINE Pair<H> operator+(Pair<H> a, Pair<H> b) { return {a.low + b.low, a.high + b.high}; }
template <class H>
INLINE Pair<H> operator-(Pair<H> a, Pair<H> b) { return {a.low - b.low, a.high - b.high}; }
template <class H>
INLINE Pair<H> operator*(Pair<H> a, Pair<H> b) { return {a.low * b.low, a.high * b.high}; }
template <class H>
INLINE Pair<H> operator/(Pair<H> a, Pair<H> b) { return {a.low / b.low, a.high / b.high}; }
template <class H>
INLINE Pair<H> operator-(Pair<H> a) { return {-a.low, -a.high}; }
template <class H>
INLINE Pair<H> fma(Pair<H> a, Pair<H> b, Pair<H> c) {
    return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)};
}
template <class H>
INLINE Pair<H> maximum(Pair<H> a, Pair<H> b) { return {maximum(a.low, b.low), maximum(a.high, b.high)}; }
template <class H>
INLINE Pair<H> minimum(Pair<H> a, Pair<H> b) { return {minimum(a.low, b.low), minimum(a.high, b.high)}; }
template <class H>
INLINE Pair<H> zero_below(Pair<H> x, Pair<H> low, Pair<H> v) {
    return {zero_below(x.low, low.low, v.low), zero_below(x.high, low.high, v.high)};
}
template <class H>
INLINE Pair<H> scale_above(Pair<H> x, Pair<H> low, Pair<H> v, Pair<H> n) {
    return {scale_above(x.low, low.low, v.low, n.low), scale_above(x.high, low.high, v.high, n.high)};
}
template <class H>
INLINE Pair<H> power_of_two(Pair<H> n) { return {power_of_two(n.low), power_of_two(n.high)}; }
template <class H, class Fold>
INLINE float fold(Pair<H> v, Fold&& both) { return fold(both(v.low, v.high), both); }
template <class H>
INLINE void store_shorts(int16_t* to, Pair<H> v) {
    store_shorts(to, v.low), store_shorts(to + sizeof(H) / 4, v.high);
}
template <class H>
INLINE void store_bytes(int8_t* to, Pair<H> v) {
    store_bytes(to, v.low), store_bytes(to + sizeof(H) / 4, v.high);
}

template <class H>
INLINE void store_ints(int32_t* to, Pair<H> v) {
    store_ints(to, v.low), store_ints(to + sizeof(H) / 4, v.high);
}
template <class H>
INLINE Pair<H> load_ints(const int32_t* from, Pair<H>) {
    return {load_ints(from, H{}), load_ints(from + sizeof(H) / 4, H{})};
}

// --- what is built from them ----------------------------------------------------------------------

INLINE Floats load(const float* from) {
    Floats value;
    load_to(value, from);
    return value;
}

INLINE Floats load_some(const float* from, int count) {
    if (count >= LANES) return load(from);
    float x[LANES] = {};
    std::memcpy(x, from, size_t(count) * sizeof(float));
    return load(x);
}

INLINE void store_some(float* to, Floats value, int count) {
    if (count >= LANES) return store(to, value);
    float x[LANES];
    store(x, value);
    std::memcpy(to, x, size_t(count) * sizeof(float));
}

INLINE Floats splat(float x) {
    Floats value;
    splat_to(value, x);
    return value;
}

// Calls body<0>() to body<N - 1>(): unlike a loop, early enough for arrays to become registers.
template <int N, int i = 0, class Body>
INLINE void each(Body&& body) {
    if constexpr (i < N) {
        body.template operator()<i>();
        each<N, i + 1>(body);
    }
}

struct Plus {
    template <class T>
    INLINE T operator()(T a, T b) const { return a + b; }
};

struct Larger {
    template <class T>
    INLINE T operator()(T a, T b) const {
        if constexpr (requires { a.low; })
            return maximum(a, b);
        else
            return a > b ? a : b;
    }
};

INLINE float sum(Floats v) { return fold(v, Plus{}); }
INLINE float largest(Floats v) { return fold(v, Larger{}); }

// Fold 16 vectors to a number each, in an order of its own: for what is the same in any order.
template <class Both>
INLINE Floats fold_each(const Floats (&v)[LANES], Both&& both) {
#if defined(__AVX512F__)
    // Halve two vectors into one: first by quarters, so that w[k] has four lanes each of v[4 k] to v[4 k + 3].
    const auto quarters = [&](Part a, Part b) INLINED {
        return both(__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                    __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31));
    };
    const auto pairs = [&](Part a, Part b) INLINED {
        return both(__builtin_shufflevector(a, b, 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                    __builtin_shufflevector(a, b, 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    };
    const auto lanes = [&](Part a, Part b) INLINED {
        return both(__builtin_shufflevector(a, b, 0, 2, 16, 18, 4, 6, 20, 22, 8, 10, 24, 26, 12, 14, 28, 30),
                    __builtin_shufflevector(a, b, 1, 3, 17, 19, 5, 7, 21, 23, 9, 11, 25, 27, 13, 15, 29, 31));
    };
    Part w[4];
    each<4>([&]<int k>() INLINED {
        w[k] = quarters(quarters(v[4 * k], v[4 * k + 1]), quarters(v[4 * k + 2], v[4 * k + 3]));
    });
    const Part all = lanes(pairs(w[0], w[1]), pairs(w[2], w[3]));
    return __builtin_shufflevector(all, all, 0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
#else
    float folded[LANES];
    for (int i = 0; i < LANES; ++i) folded[i] = fold(v[i], both);
    return load(folded);
#endif
}

// Add R rows' products with 16 lanes of pairs: even += the row's first number * the first of each pair, odd += the
// second * the second, or * 0 if there is none. at(r) has the two numbers of row r.
template <int R, class Element, class At>
INLINE void add_products(Part (&even)[R][PARTS], Part (&odd)[R][PARTS], const Element* pairs, bool has_second, At&& at) {
    Part of_pairs[PARTS];
    each<PARTS>([&]<int p>() INLINED { of_pairs[p] = load_half_of_pairs<0>(pairs + 2 * PART * p); });
    each<R>([&]<int r>() INLINED {
        Part number;
        splat_to(number, at(r)[0]);
        each<PARTS>([&]<int p>() INLINED { even[r][p] = fma(number, of_pairs[p], even[r][p]); });
    });
    if (PARTS > 1) asm("" : "+r"(pairs));  // load them again: registers are few
    each<PARTS>([&]<int p>() INLINED {
        of_pairs[p] = has_second ? load_half_of_pairs<1>(pairs + 2 * PART * p) : Part{};
    });
    each<R>([&]<int r>() INLINED {
        Part number;
        splat_to(number, at(r)[1]);
        each<PARTS>([&]<int p>() INLINED { odd[r][p] = fma(number, of_pairs[p], odd[r][p]); });
    });
}

// The nearest whole number, ties to even, for |x| below 2^22: adding 1.5 * 2^23 rounds.
INLINE Floats nearest(Floats x) {
    const Floats magic = splat(12582912.0f);
    return (x + magic) - magic;
}

// e^x to within 2 units in the last place, after Cephes: x = n ln 2 + r, a polynomial in r, times 2^n.
// Below -87 the result is 0.
INLINE Floats exponential(Floats x) {
    const Floats low = splat(-87.0f);
    const Floats inside = minimum(splat(88.0f), maximum(low, x));
    const Floats n = nearest(inside * splat(1.44269504f));
    Floats r = fma(n, splat(-0.693359375f), inside);
    r = fma(n, splat(2.12194440e-4f), r);
    Floats p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + splat(1.0f);
    return zero_below(x, low, p * power_of_two(n));
}

// 2^x for finite x <= 0, within 4 units in the last place; far below 2^-126 it is 0. The polynomial is the
// least squares one of 2^r, reweighted until its error was even, on [0, 1) where one instruction takes the
// floor of x off and another puts it back, else on [-1/2, 1/2]. Half the work of e^x, or less.
INLINE Floats two_to(Floats x) {
#if defined(__AVX512F__)
    const Floats f = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Floats q = splat(1.86714e-3f);
    q = fma(q, f, splat(9.01701e-3f));
    q = fma(q, f, splat(5.579993e-2f));
    q = fma(q, f, splat(2.4016445e-1f));
    q = fma(q, f, splat(6.9315131e-1f));
    return (Floats)_mm512_scalef_ps((__m512)fma(q, f, splat(1.0f)), (__m512)x);
#else
    const Floats low = splat(-126.0f), magic = splat(12582912.0f);
    const Floats inside = maximum(low, x), shifted = inside + magic;
    const Floats r = inside - (shifted - magic);
    Floats p = splat(1.3264727e-3f);
    p = fma(p, r, splat(9.6715127e-3f));
    p = fma(p, r, splat(5.5507337e-2f));
    p = fma(p, r, splat(2.4022242e-1f));
    p = fma(p, r, splat(6.9314698e-1f));
    return scale_above(x, low, fma(p, r, splat(1.0f)), shifted);
#endif
}

// bfloat16: the upper half of a float, rounded to nearest, ties to even; NaN stays NaN.
INLINE uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return uint16_t((bits >> 16) | 0x40);
    return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

}  // namespace
