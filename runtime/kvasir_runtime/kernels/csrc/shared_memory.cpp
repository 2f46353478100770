// Collectives between processes of one machine, over memory that all of them map.
//
// Each rank has a turn, a number that it raises when its data lies there, and two buffers. It writes into one of them,
// raises its turn, and waits until all others have raised theirs as far; then it reads. Two buffers spare the second
// wait: whoever writes into the first again has seen that all others began with the second, and so are done with it.

#include <algorithm>

#include "replay.h"
#include "team.h"
#include "vec.h"

using namespace kvasir;

namespace {

constexpr int SPINS = 2000;                    // looks before sleeping; some 20 to 80 us
constexpr int64_t PARALLEL_FROM = 32 * 1024;   // numbers; below, waking a thread costs more than it saves
constexpr int64_t TWO_STEPS_FROM = 16 * 1024;  // numbers; above, more than two ranks sum a part each

// One rank's view; its like lies in Python.
struct Member {
    char* memory;
    int64_t rank, size, capacity;  // capacity: bytes of a buffer
    uint32_t turn, buffer;         // how often this rank raised its turn, and wrote

    Turn& turn_of(int64_t other) const { return ((Turn*)memory)[other]; }
    char* buffer_of(int64_t other) const {
        return memory + size * sizeof(Turn) + (2 * other + (buffer & 1)) * capacity;
    }
    char* own() const { return buffer_of(rank); }
};

// Returns when all ranks have written what this turn is about.
void meet(Member& member) {
    member.turn_of(member.rank).raise(++member.turn);
    for (int64_t rank = 0; rank < member.size; rank++)
        if (rank != member.rank) member.turn_of(rank).await(member.turn, SPINS);
}

// Numbers [from, to) of all ranks' buffers, added in the order of ranks.
template <typename T>
void add_up(const Member& member, T* out, int64_t from, int64_t to) {
    const int64_t part = 4096, parts = (to - from + part - 1) / part;
    parallel_for(parts, to - from > PARALLEL_FROM, [&](int64_t p) {
        int64_t end = std::min(to, from + (p + 1) * part);
        for (int64_t i = from + p * part; i < end; i += LANES) {
            int n = int(std::min<int64_t>(LANES, end - i));
            vfloat total = load((const T*)member.buffer_of(0) + i, n);
            for (int64_t rank = 1; rank < member.size; rank++)
                total += load((const T*)member.buffer_of(rank) + i, n);
            store(out + i, total, n);
        }
    });
}

template <typename T>
void all_reduce(Member& member, T* data, int64_t count) {
    const int64_t most = member.capacity / int64_t(sizeof(T));
    for (int64_t start = 0; start < count; start += most) {
        const int64_t n = std::min(most, count - start);
        memcpy(member.own(), data + start, n * sizeof(T));
        meet(member);
        if (member.size == 2 || n < TWO_STEPS_FROM) {
            add_up(member, data + start, 0, n);
        } else {
            // Each rank sums its part into its own buffer, where nobody else reads that part before the second turn.
            const int64_t part = ((n + member.size - 1) / member.size + LANES - 1) / LANES * LANES;
            add_up(member, (T*)member.own(), std::min(n, member.rank * part), std::min(n, (member.rank + 1) * part));
            meet(member);
            for (int64_t rank = 0; rank < member.size; rank++) {
                int64_t from = std::min(n, rank * part), to = std::min(n, (rank + 1) * part);
                memcpy(data + start + from, (T*)member.buffer_of(rank) + from, (to - from) * sizeof(T));
            }
        }
        member.buffer++;
    }
}

// Columns [offset, offset + width) of some rows, from each rank's buffer into its place in `out`.
void copy_columns(const Member& member, char* out, int64_t rows, int64_t width, int64_t offset, int64_t row_bytes) {
    for (int64_t rank = 0; rank < member.size; rank++)
        for (int64_t row = 0; row < rows; row++)
            memcpy(out + (row * member.size + rank) * row_bytes + offset, member.buffer_of(rank) + row * width, width);
}

void all_gather(Member& member, const char* data, char* out, int64_t rows, int64_t row_bytes) {
    const int64_t most = std::min(row_bytes, member.capacity), most_rows = std::max<int64_t>(1, member.capacity / most);
    for (int64_t row = 0; row < rows; row += most_rows) {
        const int64_t n = std::min(most_rows, rows - row);
        for (int64_t offset = 0; offset < row_bytes; offset += most) {
            const int64_t width = std::min(most, row_bytes - offset);
            for (int64_t i = 0; i < n; i++)
                memcpy(member.own() + i * width, data + (row + i) * row_bytes + offset, width);
            meet(member);
            copy_columns(member, out + row * member.size * row_bytes, n, width, offset, row_bytes);
            member.buffer++;
        }
    }
}

void broadcast(Member& member, char* data, int64_t bytes, int64_t source) {
    for (int64_t start = 0; start < bytes; start += member.capacity) {
        const int64_t n = std::min(member.capacity, bytes - start);
        if (member.rank == source) memcpy(member.own(), data + start, n);
        meet(member);
        if (member.rank != source) memcpy(data + start, member.buffer_of(source), n);
        member.buffer++;
    }
}

}  // namespace

extern "C" {

// In place; every rank gets the same numbers.
void kvasir_shared_all_reduce(void* member, int dtype, void* data, int64_t count) {
    with_type(dtype, [&](auto type) { all_reduce(*(Member*)member, (decltype(type)*)data, count); });
}

// `data` [rows][row_bytes] to `out` [rows][size][row_bytes].
void kvasir_shared_all_gather(void* member, const void* data, void* out, int64_t rows, int64_t row_bytes) {
    all_gather(*(Member*)member, (const char*)data, (char*)out, rows, row_bytes);
}

void kvasir_shared_broadcast(void* member, void* data, int64_t bytes, int64_t source) {
    broadcast(*(Member*)member, (char*)data, bytes, source);
}

}  // extern "C"

KVASIR_REPLAYABLE(kvasir_shared_all_reduce)
KVASIR_REPLAYABLE(kvasir_shared_all_gather)
KVASIR_REPLAYABLE(kvasir_shared_broadcast)
