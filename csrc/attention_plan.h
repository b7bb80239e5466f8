// How the attention of one step is cut into pieces, which threads claim one by one.
//
// A piece is up to 32 rows with some segments of one block table. Chunks whose tables begin with the
// same blocks read whole segments of those together; what remains is cut where one piece would keep
// a thread busy for longer than its share. Then segments leave their results in parts, by row and
// head, to be merged left to right. Invariant: how a step is cut never changes a bit.

#pragma once

#include <span>
#include <vector>

#include "kernels.h"

namespace octavo {

// Rows rows()[first_row...] with segments [first, end) of a chunk's block table.
struct Piece {
    int32_t first_row, num_rows, chunk, first, end;
    bool is_parted;  // results go to parts

    int64_t work() const { return int64_t(num_rows) * (end - first); }
};

class AttentionPlan {
  public:
    // Parts hold at most so many floats; what would need more is left in one piece.
    static constexpr int64_t MAX_FLOATS = 1 << 22;

    AttentionPlan(const Step& step, int block_size, const Operation& op, int num_threads);

    bool is_of(const Operation& op) const { return op.window == window_ && op.heads == heads_; }
    // The longest first.
    const std::vector<Piece>& pieces() const { return pieces_; }
    const int32_t* rows() const { return rows_.data(); }
    // Rows whose parts have to be merged.
    const std::vector<int32_t>& parted_rows() const { return parted_rows_; }
    // See Parts.
    const int64_t* starts() const { return starts_.data(); }
    int64_t num_floats() const { return num_parts_ * part_floats_; }
    // Pairs of a row and a position that it sees, and positions that chunks see: what the pieces cover.
    int64_t pairs() const { return pairs_; }
    int64_t positions() const { return positions_; }

  private:
    void share(std::span<int32_t> chunks, int segment);
    void share_segment(std::span<const int32_t> chunks, int segment);
    bool is_same(int a, int b, int segment) const;
    void cut(int num_threads, int kv_heads);
    bool part(int chunk);
    void count();

    int first_position(int chunk) const { return step_.positions[step_.chunk_starts[chunk]]; }
    int num_rows(int chunk) const { return step_.chunk_starts[chunk + 1] - step_.chunk_starts[chunk]; }
    std::span<const int32_t> blocks(int chunk, int segment) const {
        const size_t count = size_t(SEGMENT / block_size_);
        return {step_.block_tables + int64_t(chunk) * step_.table_width + segment * int64_t(count), count};
    }

    const Step& step_;
    int block_size_, window_, heads_;
    int64_t part_floats_, num_parts_ = 0, pairs_ = 0, positions_ = 0;
    std::vector<Piece> pieces_;
    std::vector<int32_t> rows_;  // all of the batch; then those that share segments
    std::vector<int32_t> parted_rows_;
    std::vector<int64_t> starts_;
    std::vector<int32_t> alone_from_;  // of each chunk: the first segment that it does not share
    std::vector<char> is_parted_;      // of each chunk
};

}  // namespace octavo
