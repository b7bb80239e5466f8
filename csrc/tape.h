// Runs a model, as a tape of operations, for one step at a time.
//
// What works row by row is one parallel region from one product or attention to the next, the quantising of a
// product's rows included: ten regions in a layer of Llama (norm, QKV, rotations and pages, attention, rows of
// its output, O, norm, gate and up, rows of what they give, down), where one for each operation would be 15.

#pragma once

#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "attention_plan.h"
#include "kernels.h"
#include "pool.h"
#include "sample.h"
#include "step.h"

namespace octavo {

// Zeros to begin with, in whole cache lines: a tile whose rows each straddle two of them loads half as fast. Memory is
// taken where they are first used, which a small step does not do with most of them.
template <class T>
class Lines {
  public:
    // Make room for so many; what was there is lost.
    void at_least(size_t size) {
        if (size <= size_) return;
        size_ = size;
        memory_.reset(std::calloc(1, size * sizeof(T) + LINE));
        if (!memory_) throw std::bad_alloc();
    }
    T* data() { return reinterpret_cast<T*>((reinterpret_cast<uintptr_t>(memory_.get()) + LINE - 1) / LINE * LINE); }

  private:
    static constexpr size_t LINE = 64;
    struct Free {
        void operator()(void* memory) const { std::free(memory); }
    };
    std::unique_ptr<void, Free> memory_;
    size_t size_ = 0;
};

class Tape {
  public:
    // max_rows: most rows of a step. The kernels decide the bits; the threads only the time.
    Tape(const Kernels& kernels, Pages pages, int max_rows, int num_threads);

    void add(Operation operation);

    // Run the operations [first, end). From the first `select_rows` on, rows are those of step.logit_rows.
    void run(const Step& step, int first, int end);

    // Run everything; the vocabulary's product and the draw, the last two, on at most `head_rows` rows at a time.
    void run_sliced(const Step& step, int head_rows);

    int num_threads() const { return pool_.num_threads(); }
    const Counters& counters() const { return counters_; }

  private:
    void count(const Operation& op, const Step& step, int rows);
    void run_row(const Operation& op, const Step& step, int row);
    Activations activations(const Operation& op, const Step& step, int rows);
    void prepare_row(const Operation& op, const Step& step, int rows, int row);
    void linear(const Operation& op, const Step& step, int rows);
    void gated(const Operation& op, const Activations& in, int first, int end);
    void attention(const Operation& op, const Step& step);
    const AttentionPlan& plan_of(const Operation& op, const Step& step);
    void write_kv(const Operation& op, const Step& step, int row);

    // Call job(first, end) for slices of the rows, on all threads.
    template <class Job>
    void over_rows(int rows, Job&& job);

    const Kernels& kernels_;
    Pages pages_;
    int max_rows_;
    Pool pool_;
    Sampler sampler_;
    Counters counters_;
    std::vector<Operation> operations_;
    int select_ = INT32_MAX;  // index of the first select_rows
    // The rows that go into a linear, prepared for its weights' formats: see Activations.
    Lines<int8_t> values_;
    Lines<uint16_t> rounded_;
    Lines<float> scales_, sums_;
    Lines<int32_t> starts_, row_sums_;
    Lines<int16_t> shorts_, group_sums_;
    Lines<float> row_scales_;
    Lines<int8_t> planes_;
    Lines<float> halves_;  // what a gated linear makes of its two matrices
    std::vector<AttentionPlan> plans_;  // of this step, for each window that the model has
    Lines<float> parts_;                // of one attention at a time
};

}  // namespace octavo
