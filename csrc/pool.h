// The threads of one engine. They live as long as it does, spin a little between steps, then sleep.
//
// Work is claimed in small jobs from a counter, so a thread that lost its CPU delays only its own
// job. Which thread computes what never changes a bit.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <vector>

namespace octavo {

class Pool {
  public:
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;

    int num_threads() const { return int(workers_.size()) + 1; }

    // Run `body(thread)` on every thread, the caller's included, and return when all are done.
    void run(const std::function<void(int)>& body);

    // Inside `run`: claim the jobs [0, num_jobs) of the current phase one by one and call
    // `job(index)` for each, then wait for the other threads. Every thread must call it equally often.
    template <class Job>
    void phase(int64_t num_jobs, Job&& job) {
        for (int64_t index; (index = next_.fetch_add(1, std::memory_order_relaxed)) < num_jobs;)
            job(index);
        wait_for_all();
    }

  private:
    void wait_for_all();
    void work(int thread);

    std::vector<std::thread> workers_;
    const std::function<void(int)>* body_ = nullptr;
    alignas(64) std::atomic<int64_t> next_{0};
    alignas(64) std::atomic<uint32_t> epoch_{0};
    alignas(64) std::atomic<int32_t> arrived_{0};
    alignas(64) std::atomic<uint32_t> barrier_{0};
    std::atomic<bool> stopping_{false};
};

}  // namespace octavo
