// What all products share: how far ahead they fetch, and how a tile is written.

#pragma once

#include "../kernels.h"
#include "../pack.h"
#include "vector.h"

namespace {

using octavo::Activations;
using octavo::Format;
using octavo::GROUP;
using octavo::Matrix;
using octavo::Output;

// How far ahead weights are fetched: the hardware's prefetcher stops at each 4 KB page.
constexpr int AHEAD = 8192;

// Write the columns of a row's panel that exist, with what is added to them.
INLINE void store_outputs(const Part* acc, const Output& to, int row, int panel, int outputs) {
    float* out = to.out + int64_t(row) * to.stride;
    const float* addend = to.addend ? to.addend + int64_t(row) * to.addend_stride : nullptr;
    for (int part = 0, column = panel * LANES; part < PARTS; ++part, column += PART) {
        Part sum = acc[part], more;
        if (column + PART <= outputs) {
            if (to.bias) load_to(more, to.bias + column), sum += more;
            if (addend) load_to(more, addend + column), sum += more;
            store(out + column, sum);
        } else {
            for (int i = 0; column + i < outputs; ++i) {
                float each = sum[i];
                if (to.bias) each += to.bias[column + i];
                if (addend) each += addend[column + i];
                out[column + i] = each;
            }
        }
    }
}

}  // namespace
