#include "sample.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>

namespace octavo {

// Memory that the draws of one thread use again and again.
struct SampleScratch {
    std::vector<double> adjusted;  // a row after bans, bias and penalties
    std::vector<int32_t> counts;   // of each id in the history; 0 between draws
};

namespace {

// Sums are cut at multiples of the first; of each of the second one knows the largest.
constexpr int SEGMENT = 4096, BLOCK = 256;
constexpr double NOTHING = -std::numeric_limits<double>::infinity();
// Any two different float32 are further apart than this temperature times 700.
constexpr double COLDEST = 1e-60;
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15;

int ceil_div(int a, int b) { return (a + b - 1) / b; }

// --- a row and its parts ---------------------------------------------------------------------------

void maxima_of(const Kernels& k, const float* x, int count, float* out) { k.maxima(x, count, out); }
void maxima_of(const Kernels& k, const double* x, int count, double* out) { k.maxima_wide(x, count, out); }
double weigh(const Kernels& k, const float* x, int count, double top, double inverse, double* out) {
    return k.weigh(x, count, top, inverse, out);
}
double weigh(const Kernels& k, const double* x, int count, double top, double inverse, double* out) {
    return k.weigh_wide(x, count, top, inverse, out);
}

// Does the segments of a row: on the pool's threads, or here where rows are shared among them.
struct Runner {
    const Kernels& kernels;
    Pool* pool;

    template <class Job>
    void over_segments(int count, Job&& job) const {
        const auto segment = [&](int64_t index) {
            const int start = int(index) * SEGMENT;
            job(int(index), start, std::min(SEGMENT, count - start));
        };
        const int num_segments = ceil_div(count, SEGMENT);
        if (pool) return pool->phase(num_segments, [&](int64_t index) { segment(index); });
        for (int index = 0; index < num_segments; ++index) segment(index);
    }
};

// A whole row of logits (float), or what bans, bias and penalties made of it (double).
template <class Element>
struct Row {
    Row(const Runner& runner, const Element* x, int n) : values(x), count(n), maxima(ceil_div(n, BLOCK)) {
        runner.over_segments(n, [&](int, int start, int length) {
            maxima_of(runner.kernels, x + start, length, maxima.data() + start / BLOCK);
        });
        // Of equal ones the first; a NaN is larger than anything.
        size_t block = 0;
        for (size_t i = 1; i < maxima.size() && maxima[block] == maxima[block]; ++i)
            if (!(maxima[i] <= maxima[block])) block = i;
        const Element largest = maxima[block];
        best = int(block) * BLOCK;
        while (best + 1 < n && values[best] != largest && values[best] == values[best]) ++best;
    }

    double top() const { return values[best]; }

    const Element* values;
    int count, best;
    std::vector<Element> maxima;  // of each block
};

// What filters have left of a row: ids ascending, and their values.
struct Kept {
    std::vector<int32_t> ids;
    std::vector<double> values;

    // Add those of a block of `row` that reach `bound`. No branch here or below: which do is a coin's toss.
    template <class Element>
    void add_block(const Element* row, int start, int stop, double bound) {
        size_t end = ids.size();
        ids.resize(end + BLOCK), values.resize(end + BLOCK);
        for (int id = start; id < stop; ++id) {
            ids[end] = id, values[end] = row[id];
            end += row[id] >= bound;
        }
        ids.resize(end), values.resize(end);
    }

    template <class Keep>
    void filter(Keep&& keep) {
        size_t end = 0;
        for (size_t i = 0; i < ids.size(); ++i) {
            const bool stays = keep(values[i]);
            ids[end] = ids[i], values[end] = values[i];
            end += stays;
        }
        ids.resize(end), values.resize(end);
    }

    // Keep `count` values of at least `bound`; of those equal to it, the last give way.
    void first_reaching(double bound, size_t count) {
        const size_t above = size_t(std::count_if(values.begin(), values.end(), [&](double v) { return v > bound; }));
        size_t ties = count - above;
        filter([&](double v) {
            const bool is_tie = (v == bound) & (ties > 0);
            ties -= is_tie;
            return (v > bound) | is_tie;
        });
    }

    // Keep the `count` largest; of equal ones the first.
    void keep_largest(size_t count) {
        if (count >= values.size()) return;
        std::vector<double> order = values;
        const auto last = order.begin() + int64_t(count) - 1;
        std::nth_element(order.begin(), last, order.end(), std::greater<>());
        first_reaching(*last, count);
    }
};

template <class Element>
Kept at_least(const Row<Element>& row, double bound) {
    Kept kept;
    for (size_t block = 0; block < row.maxima.size(); ++block) {
        const int start = int(block) * BLOCK;
        if (row.maxima[block] >= bound) kept.add_block(row.values, start, std::min(row.count, start + BLOCK), bound);
    }
    return kept;
}

// The `count` largest of a row. As many blocks as tokens are wanted have one above the first bound.
template <class Element>
Kept largest(const Row<Element>& row, size_t count) {
    Kept kept;
    double bound = NOTHING;
    if (count <= row.maxima.size()) {
        std::vector<Element> order = row.maxima;
        const auto last = order.begin() + int64_t(count) - 1;
        std::nth_element(order.begin(), last, order.end(), std::greater<>());
        bound = *last;
    }
    for (size_t block = 0; block < row.maxima.size(); ++block) {
        if (row.maxima[block] < bound) continue;
        const int start = int(block) * BLOCK;
        kept.add_block(row.values, start, std::min(row.count, start + BLOCK), bound);
        if (kept.ids.size() < 2 * count + SEGMENT) continue;
        kept.keep_largest(count);
        bound = std::max(bound, *std::min_element(kept.values.begin(), kept.values.end()));
    }
    kept.keep_largest(count);
    return kept;
}

// The weights' sum up to the end of each segment, merged left to right.
template <class Element>
std::vector<double> running_sums(const Runner& runner, const Element* values, int count, double top, double inverse) {
    std::vector<double> sums(size_t(ceil_div(count, SEGMENT)));
    runner.over_segments(count, [&](int index, int start, int length) {
        sums[index] = weigh(runner.kernels, values + start, length, top, inverse, nullptr);
    });
    std::partial_sum(sums.begin(), sums.end(), sums.begin());
    return sums;
}

// --- before the temperature: what changes logits ---------------------------------------------------

bool is_masked(const uint32_t* mask, int id) { return mask && !(mask[id / 32] >> (id % 32) & 1); }

// Call `ban(id)` for each id that would complete a bad word, and for end tokens that come too early.
template <class Ban>
void for_banned(const Draw& draw, Ban&& ban) {
    const auto& generated = draw.generated;
    for (const auto& word : draw.sampling->bad_words)
        if (word.size() - 1 <= generated.size() &&
            std::equal(word.begin(), word.end() - 1, generated.end() - int64_t(word.size() - 1)))
            ban(word.back());
    if (draw.num_output < draw.sampling->min_tokens)
        for (int32_t id : draw.sampling->stop_ids) ban(id);
}

bool changes_logits(const Draw& draw) {
    const Sampling& asked = *draw.sampling;
    bool changes = asked.is_limited || draw.mask || draw.has_history || !asked.biases.empty();
    for_banned(draw, [&](int32_t) { changes = true; });
    return changes;
}

// Repetition counts prompt and output; frequency and presence, after it, only the output.
void penalise(const Draw& draw, SampleScratch& scratch) {
    const Sampling& asked = *draw.sampling;
    std::vector<double>& values = scratch.adjusted;
    std::vector<int32_t>& counts = scratch.counts;
    counts.resize(values.size());
    const auto is_known = [&](int64_t id) { return id >= 0 && id < int64_t(values.size()); };
    const auto once_each = [&](const auto& ids, auto&& apply) {
        for (int64_t id : ids)
            if (is_known(id) && counts[id]++ == 0) apply(values[id]);
    };
    const auto forget = [&](const auto& ids) {
        for (int64_t id : ids)
            if (is_known(id)) counts[id] = 0;
    };
    if (asked.repetition_penalty != 1) {
        const auto repeat = [&](double& v) {
            v = v > 0 ? v / asked.repetition_penalty : v * asked.repetition_penalty;
        };
        once_each(asked.prompt, repeat), once_each(draw.generated, repeat);
        forget(asked.prompt), forget(draw.generated);
    }
    if (asked.frequency_penalty == 0 && asked.presence_penalty == 0) return;
    for (int64_t id : draw.generated) counts[is_known(id) ? id : 0] += is_known(id);
    for (int64_t id : draw.generated)
        if (is_known(id) && counts[id]) {
            values[id] -= asked.frequency_penalty * counts[id] + asked.presence_penalty;
            counts[id] = 0;
        }
}

void adjust(const float* logits, int count, const Draw& draw, SampleScratch& scratch) {
    const Sampling& asked = *draw.sampling;
    std::vector<double>& values = scratch.adjusted;
    values.resize(size_t(count));
    if (asked.is_limited) {
        std::fill(values.begin(), values.end(), NOTHING);
        for (int32_t id : asked.allowed) values[id] = logits[id];
    } else {
        std::copy(logits, logits + count, values.begin());
    }
    if (draw.mask)
        for (int id = 0; id < count; ++id) values[id] = is_masked(draw.mask, id) ? NOTHING : values[id];
    for_banned(draw, [&](int32_t id) { values[id] = NOTHING; });
    for (size_t i = 0; i < asked.biases.size(); ++i) values[asked.biased_ids[i]] += asked.biases[i];
    if (draw.has_history) penalise(draw, scratch);
}

// The likeliest token where nothing is left: a ban gives way before a whitelist does, that before a mask, and
// a mask never; if that is empty there is none.
std::optional<int> least_bad(const float* logits, int count, const Draw& draw) {
    std::vector<char> allowed(size_t(count), false);
    for (int32_t id : draw.sampling->allowed) allowed[id] = true;
    const auto likeliest = [&](auto&& may) {
        std::optional<int> best;
        for (int id = 0; id < count; ++id)
            if (may(id) && (!best || logits[id] > logits[*best])) best = id;
        return best;
    };
    const auto best = likeliest([&](int id) { return allowed[id] && !is_masked(draw.mask, id); });
    return best ? best : likeliest([&](int id) { return !is_masked(draw.mask, id); });
}

// --- from the temperature on: which tokens stay, and the draw --------------------------------------

uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
    return z ^ (z >> 31);
}

// In [0, 1), with 53 random bits.
double uniform(uint64_t seed, int64_t index, int64_t position) {
    const uint64_t state = mix(mix(seed + GOLDEN) + (uint64_t(index) + 1) * GOLDEN);
    return double(mix(state + (uint64_t(position) + 1) * GOLDEN) >> 11) * 0x1p-53;
}

// Where `running` first exceeds `target`; if rounding lets none, where it reaches its end.
int first_above(const double* running, int count, double target) {
    const double* end = running + count;
    const double* at = std::upper_bound(running, end, target);
    return int((at < end ? at : std::lower_bound(running, end, end[-1])) - running);
}

// The first place at which the running sum of weights exceeds u times their total.
template <class Element>
int draw_from(const Kernels& kernels, const Element* values, int count, double top, double inverse,
              const std::vector<double>& sums, double u) {
    const double target = u * sums.back();
    const int segment = first_above(sums.data(), int(sums.size()), target);
    const double before = segment ? sums[segment - 1] : 0.0;
    const int start = segment * SEGMENT, length = std::min(SEGMENT, count - start);
    double weights[SEGMENT];
    weigh(kernels, values + start, length, top, inverse, weights);
    std::partial_sum(weights, weights + length, weights);
    return start + first_above(weights, length, target - before);
}

// The least and the number of the fewest likeliest values that together reach `target`.
//
// Values fall into bins of equal width, about eight into each, and as many bins are sorted as the sum needs.
std::pair<double, size_t> nucleus(const Kernels& kernels, const std::vector<double>& values, double top,
                                  double inverse, double target) {
    const double width = top - *std::min_element(values.begin(), values.end());
    const size_t count = values.size(), num_bins = count / 8 + 1;
    const double bins_per_unit = double(num_bins - 1) / width;
    // One bin for all where they are equal, or so close (subnormal numbers apart) that no double is the scale.
    const double scale = std::isfinite(bins_per_unit) ? bins_per_unit : 0;
    const auto bin_of = [&](double v) { return std::min(num_bins - 1, size_t((top - v) * scale)); };
    std::vector<size_t> ends(num_bins + 1);
    for (double v : values) ++ends[bin_of(v) + 1];
    std::partial_sum(ends.begin(), ends.end(), ends.begin());
    std::vector<double> order(count);
    for (double v : values) order[ends[bin_of(v)]++] = v;  // now each bin's end, where its begin was
    double running = 0, weights[SEGMENT];
    size_t done = 0, sorted = 0;
    for (size_t bin = 0; bin < num_bins; ++bin) {
        std::sort(order.begin() + int64_t(sorted), order.begin() + int64_t(ends[bin]), std::greater<>());
        sorted = ends[bin];
        if (sorted - done < BLOCK && sorted < count) continue;
        for (size_t length; done < sorted; done += length) {
            length = std::min(size_t(SEGMENT), sorted - done);
            weigh(kernels, order.data() + done, int(length), top, inverse, weights);
            for (size_t i = 0; i < length; ++i)
                if ((running += weights[i]) >= target) return {order[done + i], done + i + 1};
        }
    }
    return {order.back(), count};
}

// Sums of the raw logits' weights at temperature 1: reports need them, and often the draw as well.
struct RawSums {
    const Runner& runner;
    const Row<float>& row;
    std::vector<double> sums;

    const std::vector<double>& get() {
        if (sums.empty()) sums = running_sums(runner, row.values, row.count, row.top(), 1.0);
        return sums;
    }
};

std::vector<double> sums_of(const Runner& runner, const Row<float>& row, double inverse, RawSums& raw) {
    if (inverse == 1 && row.values == raw.row.values) return raw.get();
    return running_sums(runner, row.values, row.count, row.top(), inverse);
}

std::vector<double> sums_of(const Runner& runner, const Row<double>& row, double inverse, RawSums&) {
    return running_sums(runner, row.values, row.count, row.top(), inverse);
}

// Draw from a row at a temperature above 0, as octavo.executors.sampling's _candidates and _draw do.
template <class Element>
int draw_token(const Runner& runner, const Row<Element>& row, const Draw& draw, RawSums& raw) {
    const Sampling& asked = *draw.sampling;
    const double top = row.top(), inverse = 1 / std::max(asked.temperature, COLDEST);
    const double u = uniform(asked.seed, draw.index, draw.position);
    Kept kept;
    bool whole = true;
    if (0 < asked.top_k && asked.top_k < row.count) {
        kept = largest(row, size_t(asked.top_k));
        whole = false;
    }
    if (asked.min_p > 0) {
        const double bound = top + asked.temperature * std::log(asked.min_p);
        if (whole)
            kept = at_least(row, bound);
        else
            kept.filter([=](double v) { return v >= bound; });
        whole = false;
    }
    const auto kept_sums = [&] {
        return running_sums(runner, kept.values.data(), int(kept.values.size()), top, inverse);
    };
    if (asked.top_p < 1) {
        const double total = (whole ? sums_of(runner, row, inverse, raw) : kept_sums()).back();
        const size_t count = whole ? size_t(row.count) : kept.ids.size();
        // Tokens no heavier than their share of the rest hold at most that rest together.
        const double share = (1 - asked.top_p) * total / double(count);
        const double bound = std::min(top, top + asked.temperature * std::log(share));
        if (whole)
            kept = at_least(row, bound);
        else
            kept.filter([=](double v) { return v >= bound; });
        const auto [last, num] = nucleus(runner.kernels, kept.values, top, inverse, asked.top_p * total);
        kept.first_reaching(last, num);
        whole = false;
    }
    if (whole)
        return draw_from(runner.kernels, row.values, row.count, top, inverse, sums_of(runner, row, inverse, raw), u);
    const int count = int(kept.values.size());
    return kept.ids[draw_from(runner.kernels, kept.values.data(), count, top, inverse, kept_sums(), u)];
}

// --- the reports, and one row -----------------------------------------------------------------------

int64_t rank_of(const Row<float>& row, int token_id) {
    const float own = row.values[token_id];
    int64_t num_ahead = 0;
    for (size_t block = 0; block < row.maxima.size(); ++block) {
        if (row.maxima[block] < own) continue;
        const int start = int(block) * BLOCK, end = std::min(row.count, start + BLOCK);
        int above = 0;
        for (int id = start; id < end; ++id) above += row.values[id] > own;
        for (int id = start; id < std::min(end, token_id); ++id) above += row.values[id] == own;
        num_ahead += above;
    }
    return num_ahead + 1;
}

void report(const Row<float>& row, RawSums& raw, int num_top, Report& out) {
    const double top = row.top(), log_total = std::log(raw.get().back());
    out.logprob = (double(row.values[out.token_id]) - top) - log_total;
    out.rank = rank_of(row, out.token_id);
    if (num_top == 0) return;
    const Kept kept = largest(row, size_t(std::min(num_top, row.count)));
    out.top_ids = kept.ids;
    std::sort(out.top_ids.begin(), out.top_ids.end(), [&](int32_t a, int32_t b) {
        return row.values[a] > row.values[b] || (row.values[a] == row.values[b] && a < b);
    });
    for (int32_t id : out.top_ids) out.top_logprobs.push_back((double(row.values[id]) - top) - log_total);
}

std::optional<int> sampled(const Runner& runner, const Row<float>& row, const Draw& draw, RawSums& raw, SampleScratch& scratch) {
    const bool is_greedy = draw.sampling->temperature == 0;
    if (!changes_logits(draw)) return is_greedy ? row.best : draw_token(runner, row, draw, raw);
    adjust(row.values, row.count, draw, scratch);
    const Row<double> adjusted(runner, scratch.adjusted.data(), row.count);
    if (adjusted.top() == NOTHING) return least_bad(row.values, row.count, draw);
    return is_greedy ? adjusted.best : draw_token(runner, adjusted, draw, raw);
}

void do_draw(const Runner& runner, const float* logits, int count, Draw& draw, SampleScratch& scratch) {
    const Row<float> row(runner, logits, count);
    draw.largest = logits[row.best];
    if (!std::isfinite(draw.largest)) return;
    RawSums raw{runner, row, {}};
    if (draw.sampling) {
        const std::optional<int> token_id = sampled(runner, row, draw, raw, scratch);
        draw.is_stuck = !token_id;
        draw.report.token_id = token_id.value_or(0);
    }
    if (draw.reports && !draw.is_stuck) report(row, raw, draw.num_top, draw.report);
}

int32_t checked(int64_t value, int64_t limit, const char* message) {
    if (value < 0 || value >= limit) throw std::invalid_argument(message);
    return int32_t(value);
}

}  // namespace

Draw& Draws::add(std::vector<Draw>& to, int64_t logit_row) {
    Draw& draw = to.emplace_back();
    draw.logit_row = checked(logit_row, num_rows_, "a row to sample is not among the batch's logit_rows");
    return draw;
}

void Draws::add_samples(const std::vector<const Sampling*>& samplings, const std::vector<int64_t>& logit_rows,
                        const std::vector<int64_t>& indices, const std::vector<int64_t>& positions,
                        const std::vector<int64_t>& nums_output) {
    samples.reserve(samplings.size());
    for (size_t i = 0; i < samplings.size(); ++i) {
        Draw& draw = add(samples, logit_rows.at(i));
        draw.sampling = samplings[i];
        draw.index = indices.at(i), draw.position = positions.at(i), draw.num_output = nums_output.at(i);
        draw.reports = samplings[i]->reports, draw.num_top = samplings[i]->num_top;
    }
}

void Draws::add_known(const std::vector<int64_t>& logit_rows, const std::vector<int64_t>& token_ids,
                      const std::vector<int64_t>& nums_top) {
    known.reserve(logit_rows.size());
    for (size_t i = 0; i < logit_rows.size(); ++i) {
        Draw& draw = add(known, logit_rows[i]);
        draw.report.token_id = checked(token_ids.at(i), vocab_size_, "a known token is not in the vocabulary");
        draw.reports = true;
        draw.num_top = int32_t(std::min<int64_t>(nums_top.at(i), vocab_size_));
    }
}

void Draws::set_history(size_t place, std::vector<int64_t> generated) {
    samples.at(place).has_history = true;
    samples.at(place).generated = std::move(generated);
}

void Draws::set_mask(size_t place, const uint32_t* mask, size_t num_words) {
    if (num_words * 32 < size_t(vocab_size_)) throw std::invalid_argument("a mask has too few words");
    samples.at(place).mask = mask;
}

std::vector<Draw*> Draws::within(int first, int end) {
    std::vector<Draw*> found;
    for (auto* draws : {&samples, &known})
        for (Draw& draw : *draws)
            if (draw.logit_row >= first && draw.logit_row < end) found.push_back(&draw);
    return found;
}

Sampler::Sampler(const Kernels& kernels, Pool& pool) : kernels_(kernels), pool_(pool) {}
Sampler::~Sampler() = default;

void Sampler::run(Draws& draws, const Value& logits, int first, int num_rows) {
    const std::vector<Draw*> wanted = draws.within(first, first + num_rows);
    // Rows are shared among threads, or, where they are fewer than those, each row's segments.
    const bool by_rows = int(wanted.size()) >= pool_.num_threads();
    const Runner runner{kernels_, by_rows ? nullptr : &pool_};
    const auto job = [&](int64_t index) {
        std::unique_ptr<SampleScratch> scratch;
        {
            const std::lock_guard guard(lock_);
            if (!free_.empty()) scratch = std::move(free_.back()), free_.pop_back();
        }
        if (!scratch) scratch = std::make_unique<SampleScratch>();
        Draw& draw = *wanted[size_t(index)];
        do_draw(runner, logits.row(draw.logit_row - first), draws.vocab_size(), draw, *scratch);
        const std::lock_guard guard(lock_);
        free_.push_back(std::move(scratch));
    };
    if (by_rows) return pool_.phase(int64_t(wanted.size()), [&](int64_t index) { job(index); });
    for (size_t index = 0; index < wanted.size(); ++index) job(int64_t(index));
}

}  // namespace octavo
