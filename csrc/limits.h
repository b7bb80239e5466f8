// Which steps a tape may be given. octavo/executors/limits.py specifies them, and says of a refused one why.

#pragma once

#include <cstdint>
#include <span>

#include "step.h"

namespace octavo {

// What there is: ids, blocks, positions of a block, and the most rows of a step and positions of a sequence.
struct Limits {
    int32_t num_tokens, num_blocks, block_size, max_rows, max_positions;

    // Whether a step, whose arrays have the lengths that it says, names only what exists. copies, state_rows:
    // what else its batch has.
    bool allow(const Step& step, std::span<const int32_t> copies, std::span<const int32_t> state_rows) const;
};

}  // namespace octavo
