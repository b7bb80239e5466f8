#include "tape.h"

#include <algorithm>
#include <cstring>

#include "pack.h"

namespace octavo {

namespace {

// Rows per job of what works row by row, at most: a tile, whose prepared rows share cache lines.
constexpr int ROWS_PER_JOB = 16;
// Jobs per thread in a product: enough that no thread waits long for the last one.
constexpr int JOBS_PER_THREAD = 6;
// Up to so many rows weights come from memory, which a thread reads fastest in one go.
constexpr int FEW_ROWS = 16;

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Formats that share one preparation of the rows that go into a product.
constexpr Format PREPARED_AS[] = {Format::bf16, Format::int8, Format::int8_group};

bool share_preparation(Format a, Format b) {
    return is_channel(a) == is_channel(b) && (a == Format::bf16) == (b == Format::bf16);
}

// Beside each other, and so that the rows of a tile do not all fall into one set of the cache.
int stride_of_halves(const Operation& op) { return 2 * PANEL * panels_of(op.matrices[0].outputs) + 32; }

// Of many rows in twos and threes, since tiles multiply so many panels with the rows that they load.
int panels_per_job(int num_panels, int rows, int num_threads) {
    if (rows <= FEW_ROWS) return ceil_div(num_panels, num_threads);
    const int share = num_panels / (num_threads * JOBS_PER_THREAD), whole = share >= 6 ? 6 : share >= 3 ? 3 : 1;
    return std::max(1, share / whole * whole);
}

// Whether a row of the outputs is made of that row of the inputs alone, by one thread.
bool is_by_row(const Operation& op) {
    return op.kind != Kind::linear && op.kind != Kind::attention && op.kind != Kind::sample;
}

}  // namespace

Tape::Tape(const Kernels& kernels, Pages pages, int max_rows, int num_threads)
    : kernels_(kernels), pages_(pages), max_rows_(max_rows), pool_(num_threads), sampler_(kernels, pool_) {}

void Tape::add(Operation operation) {
    if (operation.kind == Kind::linear) {
        const size_t rows = size_t(ceil_div(max_rows_, 16)) * 16, groups = groups_of(operation.matrices[0].inputs);
        for (auto* each : {&scales_, &sums_}) each->at_least(rows * groups);
        starts_.at_least(rows * groups);
        values_.at_least(rows * groups * GROUP), rounded_.at_least(rows * groups * GROUP);
        shorts_.at_least(rows * groups * GROUP), group_sums_.at_least(rows * groups * 2);
        row_scales_.at_least(rows), row_sums_.at_least(rows);
        planes_.at_least(rows * 2 * 64 * ((groups + 1) / 2 + (groups + 31) / 32));
        if (operation.is_gated) halves_.at_least(rows * stride_of_halves(operation));
    }
    if (operation.kind == Kind::select_rows) select_ = std::min(select_, int(operations_.size()));
    operations_.push_back(std::move(operation));
}

void Tape::run(const Step& step, int first, int end) {
    plans_.clear();
    for (int i = first; i < end;) {
        const int begin = i, rows = begin >= select_ ? step.num_logit_rows : step.num_rows;
        while (i < end && is_by_row(operations_[i]) && (i == begin || i != select_)) ++i;
        const Operation* whole = i < end && i != select_ ? &operations_[i] : nullptr;
        const Operation* product = whole && whole->kind == Kind::linear ? whole : nullptr;
        for (int each = begin; each < i + (whole ? 1 : 0); ++each) count(operations_[each], step, rows);
        if (i > begin || product) {
            over_rows(rows, [&](int row) {
                for (int each = begin; each < i; ++each) run_row(operations_[each], step, row);
                if (product) prepare_row(*product, step, rows, row);
            });
        }
        if (!whole) continue;
        if (product) linear(*product, step, rows);
        if (whole->kind == Kind::attention) attention(*whole, step);
        if (whole->kind == Kind::sample) sampler_.run(*step.draws, whole->x, step.first_logit_row, rows);
        ++i;
    }
}

void Tape::run_sliced(const Step& step, int head_rows) {
    const int end = int(operations_.size()), product = end - 2;
    // In one go where that is possible: the last norm and the preparation of its rows are one region.
    if (step.num_logit_rows <= head_rows) return run(step, 0, step.num_logit_rows ? end : std::min(select_, end));
    run(step, 0, product);
    for (int first = 0; first < step.num_logit_rows; first += head_rows) {
        Step slice = step;
        slice.first_logit_row = first, slice.logit_rows = step.logit_rows + first;
        slice.num_logit_rows = std::min(head_rows, step.num_logit_rows - first);
        run(slice, product, end);
    }
}

template <class Job>
void Tape::over_rows(int rows, Job&& job) {
    const int per_job = std::clamp(ceil_div(rows, num_threads()), 1, ROWS_PER_JOB);
    pool_.phase(ceil_div(rows, per_job), [&](int64_t index) {
        const int first = int(index) * per_job;
        for (int row = first; row < std::min(rows, first + per_job); ++row) job(row);
    });
}

// Per operation, and not per element: nothing that a step would feel.
void Tape::count(const Operation& op, const Step& step, int rows) {
    Counters& c = counters_;
    const int64_t position_bytes = pages_.page_bytes() / pages_.block_size * pages_.kv_heads;
    switch (op.kind) {
        case Kind::embed:
            c.weights += int64_t(rows) * panel_bytes(op.matrices[0].format, op.matrices[0].inputs) / PANEL;
            return;
        case Kind::linear:
            if (op.y.base) c.flops += int64_t(rows) * op.out.width;
            // As program/ops.py prices an activation, of SiLU and of GELU.
            if (op.is_gated) c.flops += int64_t(rows) * op.out.width * (op.gate == 0 ? 5 : 10);
            for (size_t i = 0; i < op.matrices.size(); ++i) {
                const Matrix& m = op.matrices[i];
                const int64_t biases = op.biases[i] ? m.outputs : 0;
                c.flops += rows * (2 * int64_t(m.outputs) * m.inputs + biases);
                c.weights += panels_of(m.outputs) * int64_t(panel_bytes(m.format, m.inputs)) + 4 * biases;
            }
            return;
        case Kind::rms_norm:
        case Kind::add_rms_norm:
            c.weights += 4 * (op.x.width / op.heads);
            return;
        case Kind::write_kv:
            c.kv_written += rows * position_bytes;
            return;
        case Kind::attention: {
            const AttentionPlan& plan = plan_of(op, step);
            c.flops += plan.pairs() * op.heads * (4 * op.head_dim + 4);
            c.kv_read += plan.positions() * position_bytes;
            return;
        }
        default:
            return;
    }
}

void Tape::run_row(const Operation& op, const Step& step, int row) {
    const Kernels& k = kernels_;
    switch (op.kind) {
        case Kind::embed: {
            float* out = op.out.row(row);
            unpack_row(op.matrices[0], step.token_ids[row], out);
            if (op.scale != 1)
                for (int i = 0; i < op.out.width; ++i) out[i] *= op.scale;
            return;
        }
        case Kind::rms_norm: {
            const int width = op.x.width / op.heads;
            for (int h = 0; h < op.heads; ++h)
                k.rms_norm(op.x.row(row) + h * width, op.weight, op.out.row(row) + h * width, width, op.eps);
            return;
        }
        case Kind::add_rms_norm:
            k.add(op.x.row(row), op.y.row(row), op.total.row(row), op.x.width);
            k.rms_norm(op.total.row(row), op.weight, op.out.row(row), op.x.width, op.eps);
            return;
        case Kind::rope: {
            const int64_t at = int64_t(step.positions[row]) * (op.head_dim / 2);
            k.rope(op.x.row(row), op.weight + at, op.sines + at, op.out.row(row), op.heads, op.head_dim);
            return;
        }
        case Kind::write_kv:
            write_kv(op, step, row);
            return;
        case Kind::gated_activation:
            k.gated_activation(op.x.row(row), op.y.row(row), op.out.row(row), op.out.width, op.gate);
            return;
        case Kind::add:
            k.add(op.x.row(row), op.y.row(row), op.out.row(row), op.out.width);
            return;
        case Kind::select_rows:
            std::memcpy(op.out.row(row), op.x.row(step.logit_rows[row]), sizeof(float) * op.x.width);
            return;
        case Kind::linear:
        case Kind::attention:
        case Kind::sample:
            return;  // not by row
    }
}

// A slice of the rows is read where it lies among all.
Activations Tape::activations(const Operation& op, const Step& step, int rows) {
    return {op.x.row(step.first_logit_row), op.x.stride, op.x.width, groups_of(op.x.width), values_.data(),
            scales_.data(), sums_.data(), starts_.data(), rounded_.data(), rows, shorts_.data(),
            group_sums_.data(), row_scales_.data(), row_sums_.data(), planes_.data()};
}

void Tape::prepare_row(const Operation& op, const Step& step, int rows, int row) {
    for (const Format format : PREPARED_AS) {
        auto needs = [=](const Matrix& matrix) { return share_preparation(matrix.format, format); };
        if (std::any_of(op.matrices.begin(), op.matrices.end(), needs))
            kernels_.prepare_row(format, activations(op, step, rows), row);
    }
}

void Tape::linear(const Operation& op, const Step& step, int rows) {
    const Activations in = activations(op, step, rows);
    int num_panels = 0;
    for (const Matrix& matrix : op.matrices) num_panels += panels_of(matrix.outputs);
    if (op.is_gated) num_panels /= 2;
    const int per_job = panels_per_job(num_panels, rows, num_threads());
    pool_.phase(ceil_div(num_panels, per_job), [&](int64_t job) {
        int begin = int(job) * per_job, end = std::min(num_panels, begin + per_job), column = 0;
        if (op.is_gated) return gated(op, in, begin, end);
        for (size_t i = 0; i < op.matrices.size(); ++i) {
            const Matrix& matrix = op.matrices[i];
            const int panels = panels_of(matrix.outputs);
            const int first = std::max(begin, 0), last = std::min(end, panels);
            const float* addend = op.y.base ? op.y.base + column : nullptr;
            const Output to{op.biases[i], op.out.base + column, op.out.stride, addend, op.y.stride};
            if (first < last) kernels_.product(matrix, in, rows, first, last, to);
            begin -= panels, end -= panels, column += matrix.outputs;
        }
    });
}

// The panels [first, end) of both matrices, and what becomes of them.
void Tape::gated(const Operation& op, const Activations& in, int first, int end) {
    const int outputs = op.matrices[0].outputs, stride = stride_of_halves(op);
    float* const halves[] = {halves_.data(), halves_.data() + panels_of(outputs) * PANEL};
    for (int i = 0; i < 2; ++i)
        kernels_.product(op.matrices[i], in, in.count, first, end, {op.biases[i], halves[i], stride, nullptr, 0});
    const int column = first * PANEL, width = std::min(end * PANEL, outputs) - column;
    for (int64_t row = 0; row < in.count; ++row)
        kernels_.gated_activation(halves[0] + row * stride + column, halves[1] + row * stride + column,
                                  op.out.row(row) + column, width, op.gate);
}

void Tape::write_kv(const Operation& op, const Step& step, int row) {
    const int32_t* starts = step.chunk_starts;
    const int64_t chunk = std::upper_bound(starts, starts + step.num_chunks, row) - starts - 1;
    const int position = step.positions[row];
    const int block = step.block_tables[chunk * step.table_width + position / pages_.block_size];
    for (int head = 0; head < pages_.kv_heads; ++head)
        kernels_.write_kv(op.x.row(row) + head * pages_.head_dim, op.y.row(row) + head * pages_.head_dim,
                          pages_.page(op.layer, block, head), position % pages_.block_size, pages_);
}

const AttentionPlan& Tape::plan_of(const Operation& op, const Step& step) {
    for (const AttentionPlan& plan : plans_)
        if (plan.is_of(op)) return plan;
    plans_.emplace_back(step, pages_.block_size, op, num_threads());
    parts_.at_least(size_t(plans_.back().num_floats()));
    return plans_.back();
}

void Tape::attention(const Operation& op, const Step& step) {
    const AttentionPlan& plan = plan_of(op, step);
    const Parts parts{parts_.data(), plan.starts(), op.heads, op.head_dim};
    // One thread attends for as many heads as leave enough jobs: their pages lie side by side.
    const int num_pieces = int(plan.pieces().size()), width = op.heads / op.kv_heads * op.head_dim;
    const int heads = std::clamp(num_pieces * op.kv_heads / (num_threads() * JOBS_PER_THREAD), 1, op.kv_heads);
    const int jobs_per_piece = ceil_div(op.kv_heads, heads);
    const auto first_head = [&](int64_t index) { return int(index % jobs_per_piece) * heads; };
    const auto keys_of = [&](int64_t index, int head) -> Upcoming {
        if (index >= int64_t(num_pieces) * jobs_per_piece) return {};
        const Piece& piece = plan.pieces()[index / jobs_per_piece];
        const int last = step.positions[plan.rows()[piece.first_row + piece.num_rows - 1]];
        return {step.block_tables + int64_t(piece.chunk) * step.table_width, piece.first * SEGMENT,
                std::min(last + 1, piece.end * SEGMENT), head};
    };
    pool_.phase(int64_t(num_pieces) * jobs_per_piece, [&](int64_t index) {
        const Piece& piece = plan.pieces()[index / jobs_per_piece];
        const int first = first_head(index), end = std::min(op.kv_heads, first + heads);
        const int64_t later = index + num_threads();  // most likely this thread's next job
        AttentionJob job{};
        job.q_stride = op.x.stride, job.out_stride = op.out.stride;
        job.rows = plan.rows() + piece.first_row, job.num_rows = piece.num_rows;
        job.first_segment = piece.first, job.end_segment = piece.end;
        job.positions = step.positions;
        job.block_table = step.block_tables + int64_t(piece.chunk) * step.table_width;
        job.group = op.heads / op.kv_heads, job.head_dim = op.head_dim, job.window = op.window, job.scale = op.scale;
        job.layer = op.layer;
        job.parts = piece.is_parted ? &parts : nullptr;
        for (int head = first; head < end; ++head) {
            job.q = op.x.base + head * width, job.out = op.out.base + head * width;
            job.kv_head = head;
            job.next = head + 1 < end ? keys_of(index, head + 1) : keys_of(later, first_head(later));
            kernels_.attention(job, pages_);
        }
    });
    const std::vector<int32_t>& rows = plan.parted_rows();
    pool_.phase(int64_t(rows.size()), [&](int64_t index) {
        const int row = rows[index];
        kernels_.merge_parts(parts, row, step.positions[row], op.window, op.out.row(row));
    });
}

}  // namespace octavo
