// The threads that share a kernel's work: OpenMP's, which sleep between kernels so that other processes find free cores,
// or while a step is replayed a team, which stays awake from one kernel to the next. Waking a thread takes as long as
// a small kernel.
#pragma once

#include <omp.h>

#include <vector>

#include "turn.h"

namespace kvasir {

class Team {
   public:
    explicit Team(int size) : size_(size), finished_(size) {}

    int size() const { return size_; }

    // Calls body(thread, threads) on all threads.
    template <typename Body>
    void run(const Body& body) {
        job_ = [](const void* body, int thread, int threads) { (*(const Body*)body)(thread, threads); };
        body_ = &body;
        started_.raise(++turn_);
        body(0, size_);
        for (int thread = 1; thread < size_; thread++) finished_[thread].await(turn_, SPINS);
    }

    // What every thread but the first does until the team is dismissed.
    void follow(int thread) {
        for (uint32_t turn = 1;; turn++) {
            started_.await(turn, SPINS);
            if (!job_) return;
            job_(body_, thread, size_);
            finished_[thread].raise(turn);
        }
    }

    void dismiss() {
        job_ = nullptr;
        started_.raise(++turn_);
    }

   private:
    static constexpr int SPINS = 20'000;  // some 0.2 to 1 ms: more than one thread computes alone between two kernels

    int size_;
    uint32_t turn_ = 0;
    void (*job_)(const void*, int, int) = nullptr;
    const void* body_ = nullptr;
    Turn started_;
    std::vector<Turn> finished_;
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
