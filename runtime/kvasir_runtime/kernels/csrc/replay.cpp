// Recorded calls of kernels, made again one after the other.

#include "replay.h"

struct RecordedCall {
    void (*again)(const kvasir::Word*);
    const kvasir::Word* words;
};

extern "C" void kvasir_replay(const RecordedCall* calls, int64_t count) {
    for (int64_t i = 0; i < count; i++) calls[i].again(calls[i].words);
}
