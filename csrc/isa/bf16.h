// Rounding to bfloat16, and the prepared rows of products that multiply it.

#pragma once

#include "products.h"

namespace {

constexpr int DEPTH = 32;  // numbers of a prepared row that lie side by side, and of a tile's operand

INLINE void round(Floats value, uint16_t* to) {
    const auto rounded = _mm512_cvtneps_pbh((__m512)value);
    std::memcpy(to, &rounded, 32);
}

// 2^x for x <= 0, to 9e-5: a twentieth of what bfloat16 rounds off. The least relative error on [0, 1) of
// cubic polynomials that begin with 1.
INLINE Floats coarse_two_to(Floats x) {
    const Floats f = (Floats)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Floats p = splat(7.706773e-2f);
    p = fma(p, f, splat(2.2764425e-1f));
    p = fma(p, f, splat(6.9511695e-1f));
    p = fma(p, f, splat(1.0f));
    return (Floats)_mm512_scalef_ps((__m512)p, (__m512)x);  // by the floor of x
}

void round_row(const Activations& rows, int row) {
    const float* x = rows.x + int64_t(row) * rows.stride;
    for (int i = 0; i < rows.groups * GROUP; i += LANES) {
        const Floats v = i < rows.width ? load_some(x + i, rows.width - i) : Floats{};
        round(v, rows.rounded + rows.tile(row, i / GROUP) * GROUP + i % GROUP);
    }
}

}  // namespace
