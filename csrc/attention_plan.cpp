#include "attention_plan.h"

#include <algorithm>
#include <numeric>

namespace octavo {

namespace {

// Rows per piece: whole tiles for groups of any size.
constexpr int ROWS_PER_PIECE = 32;
// Chunks with more rows are limited by arithmetic, so they gain nothing by reading together.
constexpr int MAX_SHARING_ROWS = 8;
// Pieces per thread: enough that none waits long for the last one.
constexpr int PIECES_PER_THREAD = 4;

}  // namespace

AttentionPlan::AttentionPlan(const Step& step, int block_size, const Operation& op, int num_threads)
    : step_(step), block_size_(block_size), window_(op.window), heads_(op.heads),
      part_floats_(int64_t(op.heads) * Parts::floats(op.head_dim)), rows_(step.num_rows), starts_(step.num_rows),
      alone_from_(step.num_chunks), is_parted_(step.num_chunks) {
    std::iota(rows_.begin(), rows_.end(), 0);
    std::vector<int32_t> chunks;
    for (int c = 0; c < step.num_chunks; ++c)
        if (num_rows(c) <= MAX_SHARING_ROWS) chunks.push_back(c);
    share(chunks, 0);
    cut(num_threads, op.kv_heads);
    count();
    std::stable_sort(pieces_.begin(), pieces_.end(), [](const Piece& a, const Piece& b) { return a.work() > b.work(); });
}

// Find those of `chunks`, which share all segments before this one, that share it too.
void AttentionPlan::share(std::span<int32_t> chunks, int segment) {
    const auto end = std::partition(chunks.begin(), chunks.end(),
                                    [&](int c) { return first_position(c) / SEGMENT > segment; });
    std::sort(chunks.begin(), end, [&](int a, int b) {
        return std::ranges::lexicographical_compare(blocks(a, segment), blocks(b, segment));
    });
    for (auto first = chunks.begin(); first != end;) {
        const auto last = std::find_if(first, end, [&](int c) { return !is_same(*first, c, segment); });
        if (last - first > 1) {
            share_segment({first, last}, segment);
            share({first, last}, segment + 1);
        }
        first = last;
    }
}

bool AttentionPlan::is_same(int a, int b, int segment) const {
    return a == b || std::ranges::equal(blocks(a, segment), blocks(b, segment));
}

// Attend together with a segment that all of `chunks` have, if there is room for its parts.
void AttentionPlan::share_segment(std::span<const int32_t> chunks, int segment) {
    const int32_t begin = int32_t(rows_.size());
    for (int c : chunks) {
        // Whoever sees none of it, or has no room, or went alone before, reads on alone.
        const int oldest = first_segment(first_position(c), window_);
        if (std::max(alone_from_[c], oldest) != segment || !part(c)) continue;
        alone_from_[c] = segment + 1;
        for (int row = step_.chunk_starts[c]; row < step_.chunk_starts[c + 1]; ++row) rows_.push_back(row);
    }
    const int32_t end = int32_t(rows_.size());
    for (int32_t row = begin; row < end; row += ROWS_PER_PIECE)
        pieces_.push_back({row, std::min(ROWS_PER_PIECE, end - row), chunks[0], segment, segment + 1, true});
}

// Cut what chunks attend to alone.
void AttentionPlan::cut(int num_threads, int kv_heads) {
    std::vector<Piece> tiles;
    int64_t work = 0;
    for (int c = 0; c < step_.num_chunks; ++c) {
        for (int row = 0; row < num_rows(c); row += ROWS_PER_PIECE) {
            const int count = std::min(ROWS_PER_PIECE, num_rows(c) - row), position = first_position(c) + row;
            const int first = std::max(alone_from_[c], first_segment(position, window_));
            tiles.push_back({step_.chunk_starts[c] + row, count, c, first, end_segment(position + count - 1), false});
            work += tiles.back().end - first;
        }
    }
    const int64_t share = num_threads > 1 ? work * kv_heads / (num_threads * PIECES_PER_THREAD) : work;
    const int span = int(std::max<int64_t>(1, share));
    for (const Piece& tile : tiles)
        if (tile.end - tile.first > span) part(tile.chunk);
    for (Piece piece : tiles) {
        const int end = piece.end;
        for (piece.is_parted = is_parted_[piece.chunk]; piece.first < end; piece.first = piece.end) {
            piece.end = piece.is_parted ? std::min(end, piece.first + span) : end;
            pieces_.push_back(piece);
        }
    }
}

// A chunk sees one interval [low, high), which its pieces cover between them.
void AttentionPlan::count() {
    std::vector<int64_t> low(step_.num_chunks, INT64_MAX), high(step_.num_chunks, 0);
    for (const Piece& piece : pieces_)
        for (int i = piece.first_row; i < piece.first_row + piece.num_rows; ++i) {
            const int row = rows_[i];
            const int64_t position = step_.positions[row], oldest = window_ ? std::max<int64_t>(0, position - window_ + 1) : 0;
            const int64_t begin = std::max<int64_t>(oldest, int64_t(piece.first) * SEGMENT);
            const int64_t end = std::min<int64_t>(position + 1, int64_t(piece.end) * SEGMENT);
            if (begin >= end) continue;
            const int32_t* starts = step_.chunk_starts;
            const int64_t chunk = std::upper_bound(starts, starts + step_.num_chunks, row) - starts - 1;
            pairs_ += end - begin;
            low[chunk] = std::min(low[chunk], begin), high[chunk] = std::max(high[chunk], end);
        }
    for (int c = 0; c < step_.num_chunks; ++c) positions_ += std::max<int64_t>(0, high[c] - low[c]);
}

// Give a chunk's rows parts for all segments that they see; false if there is no room.
bool AttentionPlan::part(int chunk) {
    if (is_parted_[chunk]) return true;
    int64_t needed = 0;
    for (int row = step_.chunk_starts[chunk]; row < step_.chunk_starts[chunk + 1]; ++row)
        needed += end_segment(step_.positions[row]) - first_segment(step_.positions[row], window_);
    if ((num_parts_ + needed) * part_floats_ > MAX_FLOATS) return false;
    for (int row = step_.chunk_starts[chunk]; row < step_.chunk_starts[chunk + 1]; ++row) {
        starts_[row] = num_parts_ - first_segment(step_.positions[row], window_);
        num_parts_ += end_segment(step_.positions[row]) - first_segment(step_.positions[row], window_);
        parted_rows_.push_back(row);
    }
    is_parted_[chunk] = true;
    return true;
}

}  // namespace octavo
