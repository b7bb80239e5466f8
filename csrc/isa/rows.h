// Operators on single rows: norms, rotations, activations.
//
// Every reduction keeps 16 partial sums in lanes and adds them as a tree at the end. Widths need not be
// multiples of 16: tails go through a zero-padded copy, so a tail lane does what a full one does.

#pragma once

#include "vector.h"

namespace {

// Apply `body(vector of x, vector of y) -> vector` lane by lane; x and y may be `out`.
template <class Body>
INLINE void map(const float* x, const float* y, float* out, int width, Body&& body) {
    for (int i = 0; i < width; i += LANES) {
        const int rest = width - i;
        store_some(out + i, body(load_some(x + i, rest), load_some(y + i, rest)), rest);
    }
}

void rms_norm(const float* x, const float* weight, float* out, int width, float eps) {
    Floats squares{};
    for (int i = 0; i < width; i += LANES) {
        const Floats v = load_some(x + i, width - i);
        squares = fma(v, v, squares);
    }
    const Floats factor = splat(1.0f / std::sqrt(sum(squares) / float(width) + eps));
    map(x, weight, out, width, [=](Floats v, Floats w) { return v * factor * w; });
}

void add(const float* x, const float* y, float* out, int width) {
    map(x, y, out, width, [](Floats a, Floats b) { return a + b; });
}

// kind 0: silu(gate) * up. kind 1: gelu(gate) * up, with the approximation by tanh.
void gated_activation(const float* gate, const float* up, float* out, int width, int kind) {
    const Floats one = splat(1.0f);
    map(gate, up, out, width, [=](Floats g, Floats u) {
        // x/2 (1 + tanh t) = x / (1 + e^-2t)
        const Floats t = kind == 0 ? -g : fma(g * g * g, splat(0.044715f), g) * splat(-2 * 0.797884561f);
        return g / (exponential(t) + one) * u;
    });
}

void rope(const float* x, const float* cosines, const float* sines, float* out, int heads, int head_dim) {
    const int half = head_dim / 2;
    for (int h = 0; h < heads; ++h, x += head_dim, out += head_dim) {
        for (int i = 0; i < half; i += LANES) {
            const int count = half - i;
            const Floats c = load_some(cosines + i, count), s = load_some(sines + i, count);
            const Floats a = load_some(x + i, count), b = load_some(x + half + i, count);
            store_some(out + i, a * c - b * s, count);
            store_some(out + half + i, b * c + a * s, count);
        }
    }
}

}  // namespace
