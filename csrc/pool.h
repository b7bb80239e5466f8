// The threads of one engine. They live as long as it does, spin a little when idle, then sleep.
//
// One thread, the caller's, goes through a step; the others help with the jobs of its current phase. It
// waits for jobs that were claimed, never for a thread that has not come: a thread that lost its CPU
// to another program delays only the job that it holds. Who computes what never changes a bit.

#pragma once

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

namespace octavo {

class Pool {
  public:
    explicit Pool(int num_threads);
    ~Pool();
    Pool(const Pool&) = delete;

    int num_threads() const { return int(workers_.size()) + 1; }

    // Call `job(index)` for each index in [0, num_jobs), on whatever threads are free, and return when
    // all are done. Only one thread at a time may call it.
    template <class Job>
    void phase(int64_t num_jobs, Job&& job) {
        if (num_jobs <= 1 || workers_.empty()) {
            for (int64_t index = 0; index < num_jobs; ++index) job(index);
            return;
        }
        auto call = [](void* context, uint32_t index) { (*static_cast<Job*>(context))(index); };
        share(uint32_t(num_jobs), call, &job);
    }

  private:
    using Call = void (*)(void* context, uint32_t index);

    void share(uint32_t num_jobs, Call call, void* context);
    bool help();
    void work();

    std::vector<std::thread> workers_;
    // The number of the phase, and in the lower half the next job to claim. It changes as a whole, so
    // a claim succeeds only in the phase whose job was read.
    alignas(64) std::atomic<uint64_t> ticket_{~uint32_t{0}};
    alignas(64) std::atomic<uint32_t> num_done_{0};
    alignas(64) std::atomic<uint32_t> num_jobs_{0};
    std::atomic<Call> call_{nullptr};
    std::atomic<void*> context_{nullptr};
    alignas(64) std::atomic<uint32_t> calls_for_help_{0};
    std::atomic<int32_t> num_asleep_{0};
    std::atomic<bool> stopping_{false};
};

}  // namespace octavo
