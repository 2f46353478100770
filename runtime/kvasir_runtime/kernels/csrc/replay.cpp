// Recorded calls of kernels, made again one after the other by a team that stays awake meanwhile.

#include "replay.h"

#include "team.h"

using namespace kvasir;

struct RecordedCall {
    void (*again)(const Word*);
    const Word* words;
};

extern "C" void kvasir_replay(const RecordedCall* calls, int64_t count) {
    Team team(omp_get_max_threads());
#pragma omp parallel num_threads(team.size())
    if (omp_get_thread_num() > 0) {
        team.follow(omp_get_thread_num());
    } else {
        awake_team = omp_get_num_threads() == team.size() ? &team : nullptr;
        for (int64_t i = 0; i < count; i++) calls[i].again(calls[i].words);
        awake_team = nullptr;
        team.dismiss();
    }
}
