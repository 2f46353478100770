// How many threads share the work of replays: fewer while others have the cores, or where they gain nothing. At each
// kernel all wait for the slowest thread, so one that loses its core for some milliseconds a step costs more than it
// computes.
#pragma once

#include <algorithm>
#include <cstdint>

namespace kvasir {

// Seconds of the thread that leads a team.
struct LeaderTime {
    double wall, on_core;
    double spun;  // on its core, but only looking whether others are done

    void operator+=(const LeaderTime& other) {
        wall += other.wall, on_core += other.on_core, spun += other.spun;
    }

    void operator*=(double factor) { wall *= factor, on_core *= factor, spun *= factor; }
};

// Threads share work evenly, so n of them compute n times what the leader does. What a second's worth of that takes is
// compared: where fewer threads could be faster they are tried, where there are fewer more are, and what is better is kept.
// Tries in vain, of which each costs a window, come ever more rarely.
struct TeamSize {
    static constexpr double WINDOW = 0.02;  // seconds of work that are judged
    static constexpr double KEPT = 0.8;     // of what earlier windows of as many threads say
    static constexpr double MARGIN = 1.2;   // by which n threads take longer than n - 1 would that lose no time
    static constexpr double LEAST_PAUSE = 0.1, MOST_PAUSE = 2;

    int64_t most, threads;
    int64_t before;       // threads that others are tried instead of; 0: nothing is being tried
    int64_t step;         // threads less or more in the next try
    bool fewer_in_vain;   // the last try was of fewer, which were no better
    double cost_before;   // seconds that a second's worth of their work took
    double pause, next_try;
    LeaderTime window, history;  // of as many threads; history: of all windows, the last ones counting more

    static TeamSize of(int64_t most) { return {most, most, 0, 1, false, 0, LEAST_PAUSE, 0, {}, {}}; }

    // What work took that ended now.
    void observe(double now, const LeaderTime& time) {
        window += time;
        if (window.wall < WINDOW) return;
        history *= KEPT;
        history += window;
        window = {};
        const double computed = std::max(1e-9, history.on_core - history.spun);
        const double cost = history.wall / (computed * double(threads));
        if (before)
            judge(now, cost);
        else if (now >= next_try)
            attempt(cost);
    }

   private:
    void attempt(double cost) {
        const bool fewer_could_be_faster = cost * double(threads - 1) > MARGIN, may_grow = threads < most;
        int64_t other = threads;
        if (fewer_could_be_faster && !(may_grow && fewer_in_vain))
            other = std::max<int64_t>(1, threads - step);
        else if (may_grow)
            other = std::min(most, threads + step);
        if (other == threads) return;
        before = threads;
        cost_before = cost;
        threads = other;
        history = {};
    }

    void judge(double now, double cost) {
        const bool is_better = cost < cost_before, is_smaller = threads < before;
        fewer_in_vain = is_smaller && !is_better;
        step = is_better == is_smaller ? 1 : std::min(most, 2 * step);
        pause = is_better ? std::max(LEAST_PAUSE, pause / 2) : std::min(MOST_PAUSE, 2 * pause);
        next_try = now + pause;
        if (!is_better) {
            threads = before;
            history = {};
        }
        before = 0;
    }
};

}  // namespace kvasir
