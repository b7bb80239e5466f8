#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

namespace {

// Looks at the ticket before a helper sleeps: about 200 us, longer than the gap between two steps.
constexpr int IDLE_LOOKS = 4000;
// Looks at the last claimed jobs before the caller gives its CPU away.
constexpr int LOOKS_BEFORE_YIELD = 400;
// A phase that nobody may join: its next job is beyond any number of jobs.
constexpr uint64_t CLOSED = ~uint32_t{0};

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

}  // namespace

Pool::Pool(int num_threads) {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this] { work(); });
}

Pool::~Pool() {
    stopping_.store(true);
    calls_for_help_.fetch_add(1);
    calls_for_help_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::share(uint32_t num_jobs, Call call, void* context) {
    // Close the old phase before its job is overwritten: a helper that read some of the old and some
    // of the new then fails to claim.
    const uint64_t phase = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
    ticket_.store(phase << 32 | CLOSED);
    num_jobs_.store(num_jobs, std::memory_order_release);
    call_.store(call, std::memory_order_release);
    context_.store(context, std::memory_order_release);
    num_done_.store(0, std::memory_order_relaxed);
    ticket_.store((phase + 1) << 32);
    if (num_asleep_.load() > 0) {
        calls_for_help_.fetch_add(1);
        calls_for_help_.notify_all();
    }
    help();
    for (int looks = 0; num_done_.load(std::memory_order_acquire) != num_jobs; ++looks) {
        if (looks < LOOKS_BEFORE_YIELD)
            relax();
        else
            std::this_thread::yield();
    }
}

// Claim and do jobs until none is left; tell whether there was one.
bool Pool::help() {
    bool helped = false;
    for (uint64_t ticket = ticket_.load();;) {
        const uint32_t index = uint32_t(ticket);
        const Call call = call_.load(std::memory_order_acquire);
        void* const context = context_.load(std::memory_order_acquire);
        if (index >= num_jobs_.load(std::memory_order_acquire)) return helped;
        if (!ticket_.compare_exchange_weak(ticket, ticket + 1)) continue;
        call(context, index);
        num_done_.fetch_add(1, std::memory_order_release);
        helped = true;
        ticket = ticket_.load();
    }
}

void Pool::work() {
    for (;;) {
        const uint32_t seen = calls_for_help_.load();
        if (stopping_.load()) return;
        for (int looks = 0; looks < IDLE_LOOKS; ++looks) {
            if (help())
                looks = 0;
            else
                relax();
        }
        // A phase that begins just now may be missed; the next one sees a sleeper and calls.
        num_asleep_.fetch_add(1);
        calls_for_help_.wait(seen);
        num_asleep_.fetch_sub(1);
    }
}

}  // namespace octavo
