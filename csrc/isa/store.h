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

// How far ahead weights are fetched: the hardware's prefetcher stops at each 4 KB page.
constexpr int AHEAD = 4096;

// Add a bias, and write the columns that exist.
INLINE void store_outputs(Part* acc, const float* bias, float* out, int column, int outputs) {
    for (int part = 0; part < PARTS; ++part, column += PART) {
        if (column + PART <= outputs) {
            Part b{};
            if (bias) load_to(b, bias + column);
            store(out + column, bias ? acc[part] + b : acc[part]);
        } else {
            for (int i = 0; column + i < outputs; ++i)
                out[column + i] = bias ? acc[part][i] + bias[column + i] : acc[part][i];
        }
    }
}

}  // namespace
