// A number that one thread raises and others wait for: threads of a process, or of several that map its memory.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstdint>

namespace kvasir {

inline void pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

inline double seconds_of(clockid_t clock) {
    timespec time;
    clock_gettime(clock, &time);
    return double(time.tv_sec) + 1e-9 * double(time.tv_nsec);
}

inline double now() { return seconds_of(CLOCK_MONOTONIC); }

struct alignas(64) Turn {
    std::atomic<uint32_t> number{0};
    std::atomic<uint32_t> sleepers{0};

    void raise(uint32_t to) {
        number.store(to);
        if (sleepers.load()) syscall(SYS_futex, (uint32_t*)&number, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    bool has_come(uint32_t to) const { return int32_t(number.load(std::memory_order_acquire) - to) >= 0; }

    // Returns once the number is as high as `to`: looks `spins` times, then sleeps.
    void await(uint32_t to, int spins) {
        for (int spin = 0; spin < spins; spin++) {
            if (has_come(to)) return;
            pause();
        }
        sleep(to);
    }

    // The same, but looks for so long; returns the seconds that it did.
    double await_for(uint32_t to, double seconds) {
        if (has_come(to)) return 0;
        const double begin = now();
        for (double spun = 0;; spun = now() - begin) {
            for (int spin = 0; spin < 16; spin++) {
                if (has_come(to)) return std::min(seconds, now() - begin);
                pause();
            }
            if (spun >= seconds) {
                sleep(to);
                return seconds;
            }
        }
    }

   private:
    void sleep(uint32_t to) {
        sleepers.fetch_add(1);
        uint32_t seen;
        while (int32_t((seen = number.load()) - to) < 0)
            syscall(SYS_futex, (uint32_t*)&number, FUTEX_WAIT, seen, nullptr, nullptr, 0);
        sleepers.fetch_sub(1);
    }
};

}  // namespace kvasir
