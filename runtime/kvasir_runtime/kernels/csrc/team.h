// The threads that share a kernel's work: OpenMP's, which sleep between kernels so that other processes find free cores,
// or while a step is replayed a team, which stays awake from one kernel to the next. Waking a thread takes as long as
// a small kernel.
#pragma once

#include <omp.h>

#include <thread>
#include <utility>
#include <vector>

#include "turn.h"

namespace kvasir {

class Team {
   public:
    explicit Team(int size) : finished_(size) {
        for (int thread = 1; thread < size; thread++) threads_.emplace_back([this, thread] { follow(thread); });
    }

    ~Team() {
        await_all();
        is_ending_ = true;
        started_.raise(++turn_);
        for (std::thread& thread : threads_) thread.join();
    }

    int size() const { return int(finished_.size()); }

    // Calls body(thread, threads) on all threads. Those of the team stay awake afterwards.
    template <typename Body>
    void run(const Body& body) {
        begin([](const void* body, int thread, int threads) { (*(const Body*)body)(thread, threads); }, &body);
        body(0, size());
        await_all();
    }

    // How long the leader looked for others to be done, since it was asked last.
    double take_spun_seconds() { return std::exchange(spun_seconds_, 0); }

    // Nothing will come for a while: those that are awake go to sleep.
    void rest() {
        if (job_) begin(nullptr, nullptr);
    }

   private:
    using Job = void (*)(const void*, int, int);
    // More than a client or an API process keeps a core, for which it is dear to sleep and be woken. A thread that keeps
    // others waiting for longer has lost its core to a busy process, and gets one of theirs once they sleep.
    static constexpr double SPIN_SECONDS = 1e-3;

    void begin(Job job, const void* body) {
        await_all();  // they may be on their way to sleep
        job_ = job;
        body_ = body;
        started_.raise(++turn_);
    }

    void await_all() {
        for (int thread = 1; thread < size(); thread++)
            spun_seconds_ += finished_[thread].await_for(turn_, SPIN_SECONDS);
    }

    void follow(int thread) {
        bool is_awake = false;
        for (uint32_t turn = 1;; turn++) {
            started_.await_for(turn, is_awake ? SPIN_SECONDS : 0);
            if (is_ending_) return;
            is_awake = job_ != nullptr;
            if (is_awake) job_(body_, thread, size());
            finished_[thread].raise(turn);
        }
    }

    uint32_t turn_ = 0;
    double spun_seconds_ = 0;
    Job job_ = nullptr;
    const void* body_ = nullptr;
    bool is_ending_ = false;
    Turn started_;
    std::vector<Turn> finished_;
    std::vector<std::thread> threads_;
};

inline thread_local Team* awake_team = nullptr;

inline int max_threads() { return awake_team ? awake_team->size() : omp_get_max_threads(); }

// Calls body(thread, threads) on all threads, or where that does not pay as body(0, 1).
template <typename Body>
void on_all_threads(bool pays, const Body& body) {
    if (!pays) return body(0, 1);
    if (awake_team) return awake_team->run(body);
#pragma omp parallel
    body(omp_get_thread_num(), omp_get_num_threads());
}

// Calls each(i) for all i below `count`; every thread gets neighbours.
template <typename Each>
void parallel_for(int64_t count, bool pays, const Each& each) {
    on_all_threads(pays && count > 1, [&](int thread, int threads) {
        const int64_t end = count * (thread + 1) / threads;
        for (int64_t i = count * thread / threads; i < end; i++) each(i);
    });
}

}  // namespace kvasir
