// Recorded calls of kernels, made again one after the other by a team that stays awake meanwhile, of as many threads as
// the machine has cores for at the time. What they compute does not depend on their number.

#include "replay.h"

#include <memory>

#include "team.h"
#include "team_size.h"

using namespace kvasir;

struct RecordedCall {
    void (*again)(const Word*);
    const Word* words;
};

namespace {

// The team of the thread that replays, of as many threads as pay at the time.
class ReplayTeam {
   public:
    void begin() {
        if (size_.most != omp_get_max_threads()) size_ = TeamSize::of(omp_get_max_threads());
        begun_ = time();
        gather();
    }

    // To be called between two kernels, and at the end. Looks at the time where others were waited for.
    void look(bool is_end) {
        spun_ += team_->take_spun_seconds();
        if (!is_end && spun_ < MUCH_SPUN) return;
        const LeaderTime ended = time();
        size_.observe(now(), {ended.wall - begun_.wall, ended.on_core - begun_.on_core, spun_});
        begun_ = ended;
        spun_ = 0;
        if (!is_end) gather();
    }

    void end() {
        look(true);
        awake_team = nullptr;
        team_->rest();
    }

   private:
    static constexpr double MUCH_SPUN = 1e-3;  // seconds

    static LeaderTime time() { return {now(), seconds_of(CLOCK_THREAD_CPUTIME_ID), 0}; }

    void gather() {
        if (!team_ || team_->size() != size_.threads) team_ = std::make_unique<Team>(size_.threads);
        awake_team = team_.get();
    }

    TeamSize size_{};
    std::unique_ptr<Team> team_;
    LeaderTime begun_{};
    double spun_ = 0;
};

}  // namespace

extern "C" void kvasir_replay(const RecordedCall* calls, int64_t count) {
    static thread_local ReplayTeam team;
    team.begin();
    for (int64_t i = 0; i < count; i++) {
        calls[i].again(calls[i].words);
        team.look(false);
    }
    team.end();
}

// Lets a TeamSize in the caller's memory, zeros at first, observe what work took with up to `most` threads.
extern "C" void kvasir_team_size_observe(TeamSize* size, int64_t most, double now, double wall, double on_core, double spun) {
    if (size->most != most) *size = TeamSize::of(most);
    size->observe(now, {wall, on_core, spun});
}
