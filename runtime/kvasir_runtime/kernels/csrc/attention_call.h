// What the parts of attention share: the call, how it is cut into items, where an item's keys lie, and its prefetching.
#pragma once

#include <algorithm>
#include <cstdlib>

#include "vec.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#define KVASIR_COLUMNS 1
#endif
#if KVASIR_COLUMNS && defined(__AVX512BF16__)
#define KVASIR_DOT_PRODUCTS 1
#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define KVASIR_AMX 1
#endif
#endif

namespace kvasir {

constexpr int KEYS = 64;   // keys of a tile; tiles start at multiples of it
constexpr int ROWS = 64;   // rows of a query tile: (token, head of the group) pairs
constexpr int SPLIT = 512;  // keys of a split, a multiple of KEYS

// What all layers of a step have in common that see equally far back and have equal heads.
struct Step {
    int dtype;
    const int32_t* query_starts;
    const int32_t* seq_lens;
    const int32_t* block_table;  // of all rows; request i reads row rows[i]
    int64_t table_stride;
    const int32_t* rows;
    int requests, heads, kv_heads, head_dim, block_size;
    int window;  // keys seen including the token's own; 0: all
    bool use_amx, use_dot;
    int group() const { return heads / kv_heads; }
    const int32_t* blocks_of(int request) const { return block_table + rows[request] * table_stride; }
    int first_key_seen(int position) const { return window > 0 ? std::max(0, position - window + 1) : 0; }
};

// One layer's attention.
struct Call : Step {
    const void* query;
    int64_t query_stride;
    void* out;
    int64_t out_stride;
    const void* key_cache;
    const void* value_cache;
    int64_t block_stride, slot_stride, head_stride;
    float scale;
    float softcap;  // 0: none
};

// One token whose query heads are rows of an item.
struct Query {
    int token;        // index into the batch
    int position;     // in its request; -1 sees nothing
    int64_t partial;  // index of its first head among partial results, or -1: the item writes the output itself
};

struct Item {
    int request;              // whose blocks are read
    int kv_head, kv_heads;
    int first_query, tokens;  // of Plan.queries
    int first_key, end_key;
    int64_t cost() const { return int64_t(end_key - first_key) * tokens * kv_heads; }
};

// The keys of one tile, as offsets of their rows into the caches, alike for keys and values. It begins at a multiple of
// KEYS for every query: those before the item's first key, which no row sees, are copies of that one.
struct KeyTile {
    int begin = 0, count = 0;
    int64_t offsets[KEYS];
};

inline void find_keys(const Call& call, const Item& item, int tile_start, KeyTile& tile) {
    tile.begin = tile_start;
    tile.count = std::max(0, std::min(KEYS, item.end_key - tile_start));
    if (tile.count == 0) return;
    const int first_key = std::max(tile_start, item.first_key), unseen = first_key - tile_start;
    const int32_t* block = call.blocks_of(item.request) + first_key / call.block_size;
    int in_block = first_key % call.block_size;
    for (int k = unseen; k < tile.count; k++, in_block++) {
        if (in_block == call.block_size) {
            in_block = 0;
            block++;
        }
        tile.offsets[k] = *block * call.block_stride + in_block * call.slot_stride;
    }
    std::fill(tile.offsets, tile.offsets + unseen, tile.offsets[unseen]);
}

// Fetches the next keys and values a few lines at a time between the arithmetic, in the order in which they lie in
// memory. The core can wait for 16 lines at once: fetched in one burst they would hold it up as long as reading them.
class Prefetch {
   public:
    // Keys [from, to) of a tile, for a range of heads and numbers of `size` bytes. `tile` must outlive this.
    Prefetch(const Call& call, const KeyTile& tile, int from, int to, int kv_head, int kv_heads, int64_t size)
        : offsets_(tile.offsets), from_(from), to_(to), key_(from), size_(size) {
        bytes_ = ((kv_heads - 1) * call.head_stride + call.head_dim) * size;
        cache_ = (const char*)call.key_cache + kv_head * call.head_stride * size;
        next_cache_ = (const char*)call.value_cache + kv_head * call.head_stride * size;
    }

    void fetch(int lines) {
        for (int i = 0; i < lines && key_ < to_; i++) {
            __builtin_prefetch(cache_ + offsets_[key_] * size_ + line_, 0, 2);
            line_ += 64;
            if (line_ < bytes_) continue;
            line_ = 0;
            if (++key_ == to_ && next_cache_) {
                cache_ = next_cache_;
                next_cache_ = nullptr;
                key_ = from_;
            }
        }
    }

    void fetch_rest() {
        while (key_ < to_) fetch(1 << 20);
    }

   private:
    const int64_t* offsets_;
    int from_, to_, key_;
    int64_t size_, bytes_, line_ = 0;
    const char *cache_, *next_cache_;
};

constexpr int PREFETCH_LINES = 3;  // per step of the inner loops: finishes a tile's lines with its arithmetic

// Memory that a thread keeps between calls.
struct Scratch {
    float* memory = nullptr;
    size_t size = 0;
    ~Scratch() { free(memory); }
    float* at_least(size_t floats) {
        if (size < floats) {
            free(memory);
            size = (floats + 1023) / 1024 * 1024;
            memory = (float*)aligned_alloc(64, size * sizeof(float));
        }
        return memory;
    }
};

}  // namespace kvasir
