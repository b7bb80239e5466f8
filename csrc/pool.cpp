#include "pool.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {

namespace {

// Spins before a thread gives its CPU away: about 100 us, longer than the gap between two steps.
constexpr int SPINS = 4000;
constexpr int SPINS_BEFORE_YIELD = 200;

inline void relax() {
#if defined(__x86_64__)
    _mm_pause();
#endif
}

}  // namespace

Pool::Pool(int num_threads) {
    for (int i = 1; i < num_threads; ++i) workers_.emplace_back([this, i] { work(i); });
}

Pool::~Pool() {
    stopping_.store(true);
    epoch_.fetch_add(1);
    epoch_.notify_all();
    for (auto& worker : workers_) worker.join();
}

void Pool::run(const std::function<void(int)>& body) {
    body_ = &body;
    epoch_.fetch_add(1, std::memory_order_release);
    epoch_.notify_all();
    body(0);
    wait_for_all();
}

void Pool::wait_for_all() {
    const uint32_t round = barrier_.load(std::memory_order_relaxed);
    if (arrived_.fetch_add(1, std::memory_order_acq_rel) == num_threads() - 1) {
        // The others wait, so nobody claims a job until the counter starts anew.
        arrived_.store(0, std::memory_order_relaxed);
        next_.store(0, std::memory_order_relaxed);
        barrier_.store(round + 1, std::memory_order_release);
        return;
    }
    for (int spins = 0; barrier_.load(std::memory_order_acquire) == round; ++spins) {
        if (spins < SPINS_BEFORE_YIELD)
            relax();
        else
            std::this_thread::yield();
    }
}

void Pool::work(int thread) {
    for (uint32_t seen = 0;;) {
        for (int spins = 0; epoch_.load(std::memory_order_acquire) == seen && spins < SPINS; ++spins)
            relax();
        epoch_.wait(seen, std::memory_order_acquire);
        seen = epoch_.load(std::memory_order_acquire);
        if (stopping_.load()) return;
        (*body_)(thread);
        wait_for_all();
    }
}

}  // namespace octavo
