// What sampling does with every element of a row of logits, as floats or, once adjusted, as doubles:
// the largest of each block of 256, and the weights e^((x - top) / temperature).
//
// Doubles are never fused, sums keep 32 lanes and add them left to right: the same bits on every
// instruction set, and in octavo/executors/sampling.py, which has the same formula. Weights take 34
// operations an element, which bound the time: about half of the arithmetic limit is reached on AVX2
// (2.6 ns an element, other work of a row included). The maxima are bound by memory.

#pragma once

#include "vector.h"

namespace {

constexpr int MAXIMUM_BLOCK = 256;  // as in sample.h
constexpr int WEIGHT_LANES = 32;
constexpr int WIDE = PART / 2;

typedef double Wide __attribute__((vector_size(WIDE * 8)));
typedef int64_t LongWide __attribute__((vector_size(WIDE * 8)));
typedef float NarrowWide __attribute__((vector_size(WIDE * 4)));

INLINE Wide load_wide(const double* from) {
    Wide value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

INLINE Wide load_wide(const float* from) {
    NarrowWide value;
    std::memcpy(&value, from, sizeof value);
    return __builtin_convertvector(value, Wide);
}

// e^x for x <= 0 to within a unit in the last place: x = n ln 2 + r, 2^n (1 + r + r^2 p(r)). p is the
// least even error of degree 9 on |r| <= ln 2 / 2, 1.6e-17. Below -708 it is 0.
INLINE Wide weight_of(Wide x) {
    constexpr double LOWEST = -708.0, MAGIC = 0x1.8p52;
    const Wide inside = x > LOWEST ? x : LOWEST - Wide{};
    const Wide shifted = inside * 1.4426950408889634 + MAGIC;
    const Wide n = shifted - MAGIC;
    const Wide r = (inside - n * 0.6931471803691238) - n * 1.9082149292705877e-10;
    Wide p = r * 2.510038549551032e-08 + 2.7620088445409746e-07;
    p = p * r + 2.7557268459997064e-06;
    p = p * r + 2.4801521295954376e-05;
    p = p * r + 0.00019841269863053618;
    p = p * r + 0.0013888888917213717;
    p = p * r + 0.008333333333330062;
    p = p * r + 0.04166666666662413;
    p = p * r + 0.16666666666666669;
    p = p * r + 0.5000000000000001;
    p = (p * (r * r) + r) + 1.0;
    // The lowest bits of `shifted` are n.
    const Wide scaled = (Wide)((LongWide)p + ((LongWide)shifted << 52));
    return x < LOWEST ? Wide{} : scaled;
}

// `out`, of whole lanes, gets the weights unless it is null.
template <class Element>
double weigh_elements(const Element* x, int count, double top, double inverse, double* out) {
    Wide sums[WEIGHT_LANES / WIDE] = {};
    Element tail[WEIGHT_LANES];
    for (int i = 0; i < count; i += WEIGHT_LANES) {
        const Element* from = x + i;
        if (count - i < WEIGHT_LANES) {
            for (Element& each : tail) each = -INFINITY;
            std::memcpy(tail, from, size_t(count - i) * sizeof(Element));
            from = tail;
        }
        for (int part = 0; part < WEIGHT_LANES / WIDE; ++part) {
            const Wide weight = weight_of((load_wide(from + part * WIDE) - top) * inverse);
            sums[part] += weight;
            if (out) std::memcpy(out + i + part * WIDE, &weight, sizeof weight);
        }
    }
    double lanes[WEIGHT_LANES], total = 0;
    std::memcpy(lanes, sums, sizeof lanes);
    for (double lane : lanes) total += lane;
    return total;
}

// Several running maxima, so that one need not wait for the other; the block is whole.
template <class Vector, class Element>
INLINE Element largest_of_block(const Element* x) {
    constexpr int LENGTH = sizeof(Vector) / sizeof(Element), CHAINS = 4;
    Vector best[CHAINS];
    decltype(best[0] != best[0]) is_nan{};
    std::memcpy(best, x, sizeof best);
    for (int i = 0; i < MAXIMUM_BLOCK; i += CHAINS * LENGTH)
        for (int chain = 0; chain < CHAINS; ++chain) {
            Vector value;
            std::memcpy(&value, x + i + chain * LENGTH, sizeof value);
            best[chain] = value > best[chain] ? value : best[chain];
            is_nan |= value != value;
        }
    Element lanes[CHAINS * LENGTH], largest = -INFINITY;
    std::memcpy(lanes, best, sizeof lanes);
    for (Element lane : lanes) largest = lane > largest ? lane : largest;
    for (int lane = 0; lane < LENGTH; ++lane)
        if (is_nan[lane]) return NAN;
    return largest;
}

template <class Vector, class Element>
void maxima_of(const Element* x, int count, Element* out) {
    Element tail[MAXIMUM_BLOCK];
    for (int i = 0; i < count; i += MAXIMUM_BLOCK) {
        const Element* from = x + i;
        if (count - i < MAXIMUM_BLOCK) {
            for (Element& each : tail) each = -INFINITY;
            std::memcpy(tail, from, size_t(count - i) * sizeof(Element));
            from = tail;
        }
        *out++ = largest_of_block<Vector>(from);
    }
}

double weigh(const float* x, int count, double top, double inverse, double* out) {
    return weigh_elements(x, count, top, inverse, out);
}

double weigh_wide(const double* x, int count, double top, double inverse, double* out) {
    return weigh_elements(x, count, top, inverse, out);
}

void maxima(const float* x, int count, float* out) { maxima_of<Part>(x, count, out); }

void maxima_wide(const double* x, int count, double* out) { maxima_of<Wide>(x, count, out); }

}  // namespace
