#include "limits.h"

#include <algorithm>

namespace octavo {

namespace {

bool within(std::span<const int32_t> values, int64_t limit) {
    return std::all_of(values.begin(), values.end(), [&](int32_t value) { return 0 <= value && value < limit; });
}

// Whether chunks part the rows in order, and each one's positions follow one another up to its context's end.
bool are_parted(const Step& step) {
    int64_t row = 0;
    for (int chunk = 0; chunk < step.num_chunks; ++chunk) {
        const int64_t end = step.chunk_starts[chunk + 1], offset = step.context_lengths[chunk] - end;
        if (step.chunk_starts[chunk] != row || end <= row || end > step.num_rows) return false;
        for (; row < end; ++row)
            if (step.positions[row] != offset + row) return false;
    }
    return row == step.num_rows;
}

}  // namespace

bool Limits::allow(const Step& step, std::span<const int32_t> copies, std::span<const int32_t> state_rows) const {
    const int32_t rows = step.num_rows;
    const int64_t held = std::min(int64_t(step.table_width) * block_size, int64_t(max_positions));
    const auto array = [](const int32_t* first, int64_t size) { return std::span(first, size_t(size)); };
    return rows > 0 && std::max(rows, step.num_logit_rows) <= max_rows && state_rows.size() <= size_t(max_rows) &&
           within(array(step.token_ids, rows), num_tokens) && within(array(step.positions, rows), held) &&
           within(array(step.block_tables, int64_t(step.num_chunks) * step.table_width), num_blocks) &&
           within(array(step.logit_rows, step.num_logit_rows), rows) && within(copies, num_blocks) &&
           within(state_rows, rows) && are_parted(step);
}

}  // namespace octavo
