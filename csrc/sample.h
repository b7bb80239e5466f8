// The last operation of a step: from rows of logits to tokens and log-probabilities.
//
// octavo/executors/sampling.py specifies what is computed, in the same words and with the same bits.
// Nothing here points into Python's memory but the masks. Invariant: what a row draws depends on its
// logits and its parameters alone, not on the batch, the threads or the instruction set.

#pragma once

#include <cmath>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "kernels.h"
#include "pool.h"
#include "step.h"

namespace octavo {

// What a request asked for: it stays the same from step to step. Ids are those of the vocabulary.
struct Sampling {
    double temperature = 1, top_p = 1, min_p = 0;
    double repetition_penalty = 1, presence_penalty = 0, frequency_penalty = 0;
    int32_t top_k = 0;  // 0: all
    uint64_t seed = 0;
    int64_t min_tokens = 0;
    bool reports = false;  // the likeliest `num_top` besides
    int32_t num_top = 0;
    bool is_limited = false;  // to the `allowed` ids
    std::vector<int32_t> allowed, stop_ids, biased_ids, prompt;
    std::vector<double> biases;  // parallel to biased_ids
    std::vector<std::vector<int32_t>> bad_words;
};

struct Report {
    int32_t token_id = 0;
    double logprob = 0;
    int64_t rank = 0;
    std::vector<int32_t> top_ids;
    std::vector<double> top_logprobs;
};

// One token to draw, or, without `sampling`, a known one to report on; and what came of it.
struct Draw {
    const Sampling* sampling = nullptr;
    int32_t logit_row = 0;
    int64_t index = 0, position = 0, num_output = 0;
    bool has_history = false;
    std::vector<int64_t> generated;  // with a history: the ids after the prompt
    const uint32_t* mask = nullptr;  // a bit per id, the lowest first; null: all may be drawn
    bool reports = false;
    int32_t num_top = 0;

    Report report;      // its token_id is the token
    float largest = 0;  // of the logits; no number if the row is unusable
    bool is_stuck = false;  // the mask allows nothing

    bool failed() const { return is_stuck || !std::isfinite(largest); }
};

// All draws of a step; Python makes them before and reads them afterwards.
class Draws {
  public:
    // num_rows: rows of logits. Throws std::invalid_argument for what is out of range, here and below.
    Draws(int vocab_size, int num_rows) : vocab_size_(vocab_size), num_rows_(num_rows) {}

    void add_samples(const std::vector<const Sampling*>& samplings, const std::vector<int64_t>& logit_rows,
                     const std::vector<int64_t>& indices, const std::vector<int64_t>& positions,
                     const std::vector<int64_t>& nums_output);
    void add_known(const std::vector<int64_t>& logit_rows, const std::vector<int64_t>& token_ids,
                   const std::vector<int64_t>& nums_top);
    void set_history(size_t place, std::vector<int64_t> generated);
    void set_mask(size_t place, const uint32_t* mask, size_t num_words);

    // Those of the rows of logits [first, end).
    std::vector<Draw*> within(int first, int end);

    int vocab_size() const { return vocab_size_; }
    std::vector<Draw> samples, known;

  private:
    Draw& add(std::vector<Draw>& to, int64_t logit_row);

    int vocab_size_, num_rows_;
};

struct SampleScratch;

class Sampler {
  public:
    Sampler(const Kernels& kernels, Pool& pool);
    ~Sampler();

    // Do the draws of `num_rows` rows of logits, which are the batch's from `first` on.
    void run(Draws& draws, const Value& logits, int first, int num_rows);

  private:
    const Kernels& kernels_;
    Pool& pool_;
    std::mutex lock_;
    std::vector<std::unique_ptr<SampleScratch>> free_;  // at most one per thread exists
};

}  // namespace octavo
