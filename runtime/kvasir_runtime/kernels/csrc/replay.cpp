// Recorded calls of kernels, made again one after the other by a team that stays awake meanwhile.

#include "replay.h"

#include <memory>

#include "team.h"

using namespace kvasir;

struct RecordedCall {
    void (*again)(const Word*);
    const Word* words;
};

extern "C" void kvasir_replay(const RecordedCall* calls, int64_t count) {
    static thread_local std::unique_ptr<Team> team;
    if (!team || team->size() != omp_get_max_threads()) team = std::make_unique<Team>(omp_get_max_threads());
    awake_team = team.get();
    for (int64_t i = 0; i < count; i++) calls[i].again(calls[i].words);
    awake_team = nullptr;
    team->rest();
}
