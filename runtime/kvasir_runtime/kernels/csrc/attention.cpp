// Paged attention for batches that mix prefill chunks and decodes, with the online softmax of FlashAttention
// (Dao et al. 2022) and, for few queries over many keys, the split along the keys of Flash-Decoding.
//
// The work is cut into items by request alone: query tiles of fixed size, key tiles at fixed absolute positions, splits
// of fixed length. Threads and neighbours decide only who computes an item and when, so a request's result does not
// depend on them. The query heads that share a key head are rows of one tile, so keys and values are read once; so are
// the single tokens of requests that share the blocks of a whole split (a common prefix), row by row the same arithmetic.

#include <omp.h>

#include <algorithm>
#include <cstdlib>
#include <initializer_list>
#include <map>
#include <vector>

#include "vec.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__AVX512BF16__) && defined(__linux__)
#define KVASIR_AMX 1
#endif

using namespace kvasir;

namespace {

constexpr int KEYS = 64;           // keys of a tile; tiles start at multiples of it
constexpr int ROWS = 64;           // rows of a query tile: (token, head of the group) pairs
constexpr int SPLIT = 512;         // keys of a split, a multiple of KEYS
constexpr int SPLIT_MOST_QUERY = 8;  // tokens; longer chunks have query tiles enough to share out
constexpr int SCORE_VECTORS = KEYS / LANES;
constexpr int WIDE = LANES == 16 ? 4 : 2;   // vectors of a register block
constexpr int BLOCK_ROWS = 4;               // rows of a register block

struct Call {
    const void* query;
    int64_t query_stride;
    void* out;
    int64_t out_stride;
    const void* key_cache;
    const void* value_cache;
    int64_t block_stride, slot_stride, head_stride;
    const int32_t* query_starts;
    const int32_t* seq_lens;
    const int32_t* block_table;
    int64_t table_stride;
    int requests, heads, kv_heads, head_dim, block_size;
    float scale;
    int window;     // keys seen including the token's own; 0: all
    float softcap;  // 0: none
    bool use_amx;
    int group() const { return heads / kv_heads; }
};

// One token whose query heads are rows of an item.
struct Query {
    int token;        // index into the batch
    int position;     // in its request; -1 sees nothing
    int64_t partial;  // index of its first head among partial results, or -1: the item writes the output itself
};

struct Item {
    int request;               // whose blocks are read
    int kv_head, kv_heads;
    int first_query, tokens;   // of Plan.queries
    int first_key, end_key;
    bool is_shared = false;    // tokens of several requests
    int64_t cost() const { return int64_t(end_key - first_key) * tokens * kv_heads; }
};


// A result split along the keys: rows [first, first + splits * rows) of the partial results, split by split.
struct Join {
    int request, token, tokens;
    int64_t partial;
    int splits;
};

int key_start(const Call& call, int position) {
    return call.window > 0 ? std::max(0, position - call.window + 1) : 0;
}

// The keys of one tile, as offsets of their rows into the caches, alike for keys and values.
struct KeyTile {
    int begin = 0, count = 0;
    int64_t offsets[KEYS];
};

void find_keys(const Call& call, const Item& item, int tile_start, KeyTile& tile) {
    tile.begin = std::max(tile_start, item.first_key);
    tile.count = std::max(0, std::min(tile_start + KEYS, item.end_key) - tile.begin);
    if (tile.count == 0) return;
    const int32_t* block = call.block_table + item.request * call.table_stride + tile.begin / call.block_size;
    int in_block = tile.begin % call.block_size;
    for (int k = 0; k < tile.count; k++, in_block++) {
        if (in_block == call.block_size) {
            in_block = 0;
            block++;
        }
        tile.offsets[k] = *block * call.block_stride + in_block * call.slot_stride;
    }
}

// Fetches the next keys and values a few lines at a time between the arithmetic, in the order in which they lie in
// memory. The core can wait for 16 lines at once: fetched in one burst they would hold it up as long as reading them.
class Ahead {
   public:
    // Keys [from, to) of a tile, for a range of heads. `tile` must outlive this.
    template <typename T>
    Ahead(const Call& call, const KeyTile& tile, int from, int to, int kv_head, int kv_heads, const T*)
        : offsets_(tile.offsets), from_(from), to_(to), key_(from), size_(sizeof(T)) {
        bytes_ = ((kv_heads - 1) * call.head_stride + call.head_dim) * size_;
        cache_ = (const char*)((const T*)call.key_cache + kv_head * call.head_stride);
        next_cache_ = (const char*)((const T*)call.value_cache + kv_head * call.head_stride);
    }

    inline void fetch(int lines) {
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

    inline void fetch_rest() {
        while (key_ < to_) fetch(1 << 20);
    }

   private:
    const int64_t* offsets_;
    int from_, to_, key_;
    int64_t size_, bytes_, line_ = 0;
    const char *cache_, *next_cache_;
};

constexpr int LINES_AHEAD = 3;  // per step of the inner loops: finishes a tile's lines with its arithmetic

// ---- one query tile against one key tile ----

struct Room {
    float* memory = nullptr;
    size_t size = 0;
    ~Room() { free(memory); }
    float* at_least(size_t floats) {
        if (size < floats) {
            free(memory);
            size = (floats + 1023) / 1024 * 1024;
            memory = (float*)aligned_alloc(64, size * sizeof(float));
        }
        return memory;
    }
};

struct Tile {
    float* query;    // [ROWS][dim]
    float* scores;   // [ROWS][KEYS]
    uint32_t* keys;  // transposed: bf16 pairs [dim / 2][KEYS], or float32 [dim][KEYS]
    float* sums;     // [kv_heads][ROWS][dim]
    float* most;     // [kv_heads][ROWS] largest score so far
    float* weight;   // [kv_heads][ROWS] sum of exponentials so far
};

#if defined(__AVX512F__)
// Transposes 16 x 16 numbers of 32 bits: pairs, quads, then the four 128-bit lanes.
inline void transpose(__m512i (&rows)[16]) {
    __m512i a[16], b[16];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) {
        a[2 * i] = _mm512_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm512_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        b[4 * i] = _mm512_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm512_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm512_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm512_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        a[i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0x88);
        a[4 + i] = _mm512_shuffle_i32x4(b[i], b[4 + i], 0xdd);
        a[8 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0x88);
        a[12 + i] = _mm512_shuffle_i32x4(b[8 + i], b[12 + i], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0x88);
        rows[8 + i] = _mm512_shuffle_i32x4(a[i], a[8 + i], 0xdd);
        rows[4 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0x88);
        rows[12 + i] = _mm512_shuffle_i32x4(a[4 + i], a[12 + i], 0xdd);
    }
}
#endif

// Turns `count` key rows of `words` 32-bit numbers into columns of to[words][KEYS]. The columns up to a multiple of 16
// may receive copies of other rows: they are masked later.
inline void transpose_keys(const uint32_t* const* rows, int count, int words, uint32_t* to) {
    int word = 0;
#if defined(__AVX512F__)
    for (; word + 16 <= words; word += 16)
        for (int k = 0; k < count; k += 16) {
            __m512i block[16];
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) block[i] = _mm512_loadu_si512(rows[std::min(k + i, count - 1)] + word);
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < 16; i++) _mm512_storeu_si512(to + (word + i) * KEYS + k, block[i]);
        }
#endif
    for (; word < words; word++)
        for (int k = 0; k < count; k++) to[word * KEYS + k] = rows[k][word];
}

template <int N>
inline void score_block(const float* query, int dim, const uint32_t* keys, float* scores, int first, Ahead& ahead,
                        const bf16*) {
    vfloat sums[N][WIDE] = {};
    for (int pair = 0; pair < dim / 2; pair++) {
        ahead.fetch(LINES_AHEAD);
        vuint bits[WIDE];
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) memcpy(&bits[v], keys + pair * KEYS + first + v * LANES, sizeof(vuint));
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) {
            float even = query[r * dim + 2 * pair], odd = query[r * dim + 2 * pair + 1];
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) sums[r][v] += (vfloat)(bits[v] << 16) * even;
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) sums[r][v] += (vfloat)(bits[v] & 0xffff0000u) * odd;
        }
    }
    for (int r = 0; r < N; r++)
        for (int v = 0; v < WIDE; v++) store(scores + r * KEYS + first + v * LANES, sums[r][v]);
}

template <int N>
inline void score_block(const float* query, int dim, const uint32_t* keys, float* scores, int first, Ahead& ahead,
                        const float*) {
    vfloat sums[N][WIDE] = {};
    for (int d = 0; d < dim; d++) {
        ahead.fetch(LINES_AHEAD);
        vfloat column[WIDE];
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) column[v] = load((const float*)keys + d * KEYS + first + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < N; r++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) sums[r][v] += column[v] * query[r * dim + d];
    }
    for (int r = 0; r < N; r++)
        for (int v = 0; v < WIDE; v++) store(scores + r * KEYS + first + v * LANES, sums[r][v]);
}

template <typename T>
void score(const Tile& tile, int rows, int dim, int count, Ahead& ahead) {
    const T* type = nullptr;
    for (int first = 0; first < count; first += WIDE * LANES)
        for (int row = 0; row < rows; row += BLOCK_ROWS) {
            const float* query = tile.query + row * dim;
            float* scores = tile.scores + row * KEYS;
            switch (std::min(BLOCK_ROWS, rows - row)) {
                case 1: score_block<1>(query, dim, tile.keys, scores, first, ahead, type); break;
                case 2: score_block<2>(query, dim, tile.keys, scores, first, ahead, type); break;
                case 3: score_block<3>(query, dim, tile.keys, scores, first, ahead, type); break;
                default: score_block<4>(query, dim, tile.keys, scores, first, ahead, type);
            }
        }
}

// Turns one row of scores into weights, in place; keys outside [begin, end) of the tile weigh nothing. Returns the
// factor by which what was summed before must shrink.
inline float soften(const Call& call, float* scores, int begin, int end, float& most, float& weight) {
    vfloat row[SCORE_VECTORS];
    vfloat largest_yet = splat(-INFINITY);
    vint index;
    for (int i = 0; i < LANES; i++) index[i] = i;
    for (int v = 0; v < SCORE_VECTORS; v++) {
        vfloat score = load(scores + v * LANES) * call.scale;
        if (call.softcap > 0) score = call.softcap * hyperbolic_tangent(score / call.softcap);
        vint at = index + v * LANES;
        row[v] = ((at >= begin) & (at < end)) ? score : splat(-INFINITY);
        largest_yet = maximum(largest_yet, row[v]);
    }
    float now = std::max(most, largest(largest_yet));
    if (now == -INFINITY) {
        memset(scores, 0, KEYS * sizeof(float));
        return 1.0f;
    }
    vfloat total = {};
    for (int v = 0; v < SCORE_VECTORS; v++) {
        row[v] = exponential(row[v] - now);
        total += row[v];
        store(scores + v * LANES, row[v]);
    }
    float shrink = most == -INFINITY ? 0.0f : exponential(splat(most - now))[0];
    most = now;
    weight = weight * shrink + sum(total);
    return shrink;
}

template <typename T, int N, int V>
inline void gather_block(const float* weights, const T* const* values, int begin, int end, int d, int n, float* sums,
                         int dim, Ahead& ahead) {
    vfloat block[N][V];
#pragma GCC unroll 4
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) block[r][v] = load(sums + r * dim + d + v * LANES, n);
    for (int k = begin; k < end; k++) {
        ahead.fetch(LINES_AHEAD);
        vfloat value[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) value[v] = load(values[k] + d + v * LANES, n);
#pragma GCC unroll 4
        for (int r = 0; r < N; r++)
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) block[r][v] += value[v] * weights[r * KEYS + k];
    }
#pragma GCC unroll 4
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) store(sums + r * dim + d + v * LANES, block[r][v], n);
}

template <typename T, int N>
inline void gather_rows(const float* weights, const T* const* values, int begin, int end, float* sums, int dim,
                        Ahead& ahead) {
    int d = 0;
    for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
        gather_block<T, N, WIDE>(weights, values, begin, end, d, LANES, sums, dim, ahead);
    for (; d + LANES <= dim; d += LANES) gather_block<T, N, 1>(weights, values, begin, end, d, LANES, sums, dim, ahead);
    if (d < dim) gather_block<T, N, 1>(weights, values, begin, end, d, dim - d, sums, dim, ahead);
}

template <typename T>
void gather(const float* weights, int rows, const T* const* values, int begin, int end, float* sums, int dim,
            Ahead& ahead) {
    for (int row = 0; row < rows; row += BLOCK_ROWS) {
        const float* from = weights + row * KEYS;
        float* to = sums + row * dim;
        switch (std::min(BLOCK_ROWS, rows - row)) {
            case 1: gather_rows<T, 1>(from, values, begin, end, to, dim, ahead); break;
            case 2: gather_rows<T, 2>(from, values, begin, end, to, dim, ahead); break;
            case 3: gather_rows<T, 3>(from, values, begin, end, to, dim, ahead); break;
            default: gather_rows<T, 4>(from, values, begin, end, to, dim, ahead);
        }
    }
}

inline void scale_row(float* row, int dim, float factor) {
    for (int d = 0; d < dim; d += LANES) store(row + d, load(row + d, dim - d) * factor, dim - d);
}

// ---- items ----

template <typename T>
void load_query(const Call& call, const Item& item, const Query* queries, int kv_head, float* to) {
    const int group = call.group(), dim = call.head_dim;
    for (int t = 0; t < item.tokens; t++)
        for (int g = 0; g < group; g++) {
            const T* from =
                (const T*)call.query + queries[t].token * call.query_stride + int64_t(kv_head * group + g) * dim;
            for (int d = 0; d < dim; d += LANES) store(to + (t * group + g) * dim + d, load(from + d, dim - d), dim - d);
        }
}

template <typename T>
void write_result(const Call& call, const Item& item, const Query* queries, const Tile& tile, float* partials) {
    const int group = call.group(), dim = call.head_dim;
    for (int h = 0; h < item.kv_heads; h++)
        for (int row = 0; row < item.tokens * group; row++) {
            const Query& query = queries[row / group];
            const int head = (item.kv_head + h) * group + row % group;
            float* sums = tile.sums + int64_t(h * ROWS + row) * dim;
            float most = tile.most[h * ROWS + row], weight = tile.weight[h * ROWS + row];
            if (query.partial >= 0) {
                float* to = partials + (query.partial + head) * (dim + 2);
                to[0] = most;
                to[1] = weight;
                memcpy(to + 2, sums, dim * sizeof(float));
                continue;
            }
            T* to = (T*)call.out + query.token * call.out_stride + head * dim;
            float share = weight > 0 ? 1.0f / weight : 0.0f;
            for (int d = 0; d < dim; d += LANES) store(to + d, load(sums + d, dim - d) * share, dim - d);
        }
}

template <typename T>
void attend_item(const Call& call, const Item& item, const Query* item_queries, Room& room, float* partials) {
    const int group = call.group(), dim = call.head_dim, rows = item.tokens * group, heads = item.kv_heads;
    const int words = dim * int(sizeof(T)) / 4;
    const int64_t per_head = int64_t(ROWS) * dim;
    float* memory = room.at_least(2 * heads * per_head + ROWS * KEYS + int64_t(words) * KEYS + 2 * heads * ROWS + 256);
    Tile tile;
    tile.sums = memory;
    float* queries = tile.sums + heads * per_head;
    tile.scores = queries + heads * per_head;
    tile.keys = (uint32_t*)(tile.scores + ROWS * KEYS);
    tile.most = (float*)(tile.keys + int64_t(words) * KEYS);
    tile.weight = tile.most + heads * ROWS;
    for (int h = 0; h < heads; h++) {
        load_query<T>(call, item, item_queries, item.kv_head + h, queries + h * per_head);
        memset(tile.sums + h * per_head, 0, rows * dim * sizeof(float));
    }
    std::fill(tile.most, tile.most + heads * ROWS, -INFINITY);
    std::fill(tile.weight, tile.weight + heads * ROWS, 0.0f);

    const uint32_t* key_rows[KEYS];
    const T* value_rows[KEYS];
    KeyTile current, next;
    int tile_start = item.first_key / KEYS * KEYS;
    find_keys(call, item, tile_start, next);
    Ahead(call, next, 0, next.count, item.kv_head, heads, (const T*)nullptr).fetch_rest();
    while (next.count > 0) {
        current = next;
        tile_start += KEYS;
        find_keys(call, item, tile_start, next);
        const int begin = current.begin, count = current.count;
        for (int h = 0; h < heads; h++) {
            Ahead ahead(call, next, next.count * h / heads, next.count * (h + 1) / heads, item.kv_head, heads,
                        (const T*)nullptr);
            const int64_t head_offset = (item.kv_head + h) * call.head_stride;
            for (int k = 0; k < count; k++) {
                key_rows[k] = (const uint32_t*)((const T*)call.key_cache + current.offsets[k] + head_offset);
                value_rows[k] = (const T*)call.value_cache + current.offsets[k] + head_offset;
            }
            transpose_keys(key_rows, count, words, tile.keys);
            tile.query = queries + h * per_head;
            score<T>(tile, rows, dim, count, ahead);
            for (int row = 0; row < rows; row++) {
                const int position = item_queries[row / group].position, at = h * ROWS + row;
                const int row_begin = std::max(0, key_start(call, position) - begin);
                const int row_end = std::min(count, position + 1 - begin);
                float shrink =
                    soften(call, tile.scores + row * KEYS, row_begin, row_end, tile.most[at], tile.weight[at]);
                if (shrink != 1.0f) scale_row(tile.sums + int64_t(at) * dim, dim, shrink);
            }
            gather<T>(tile.scores, rows, value_rows, 0, count, tile.sums + h * per_head, dim, ahead);
            ahead.fetch_rest();
        }
    }
    write_result<T>(call, item, item_queries, tile, partials);
}

// ---- the same item on AMX tiles, for many query rows in bfloat16 ----
//
// Scores are computed transposed, keys x queries: keys then load as they lie, and the softmax of 16 queries runs along
// vector lanes with no reduction across them.

#if KVASIR_AMX

constexpr int TILE = 16;           // rows of a tile, and its columns of 32 bits
constexpr int TILE_WORDS = TILE * TILE;
constexpr int AMX_FEWEST_ROWS = 16;  // fewer leave tiles mostly empty

struct __attribute__((packed)) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
};

struct Tiles {
    uint32_t* queries;  // [ROWS / 16][dim / 32] tiles: 16 pairs of numbers x 16 queries
    bf16* keys;         // [KEYS][dim]
    uint32_t* values;   // [KEYS / 32][dim / 16] tiles: 16 pairs of keys x 16 numbers
    float* scores;      // [KEYS][ROWS], then their exponentials
    uint32_t* weights;  // [ROWS / 16][KEYS / 32] tiles: 16 queries x 32 keys
};

void load_query_tiles(const Call& call, const Item& item, const Query* queries, int groups, uint32_t* to) {
    const int group = call.group(), dim = call.head_dim, rows = item.tokens * group;
    const bf16* query = (const bf16*)call.query + int64_t(item.kv_head) * group * dim;
    for (int block = 0; block < groups; block++)
        for (int step = 0; step < dim / 32; step++, to += TILE_WORDS) {
            __m512i lines[TILE];
            for (int i = 0; i < TILE; i++) {
                const int row = block * TILE + i;
                lines[i] = _mm512_setzero_si512();
                if (row >= rows) continue;
                const bf16* from = query + queries[row / group].token * call.query_stride + row % group * dim;
                lines[i] = _mm512_loadu_si512(from + step * 32);
            }
            transpose(lines);
            for (int i = 0; i < TILE; i++) _mm512_storeu_si512(to + i * TILE, lines[i]);
        }
}

inline __m512i interleave(__m256i even, __m256i odd) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// Copies keys and interleaves values of `count` tokens; absent ones become zeros, which 0 weights cannot turn into NaN.
void load_key_tiles(const Call& call, const int64_t* offsets, int kv_head, int count, const Tiles& tiles) {
    const int dim = call.head_dim;
    const bf16* keys = (const bf16*)call.key_cache + kv_head * call.head_stride;
    const bf16* values = (const bf16*)call.value_cache + kv_head * call.head_stride;
    for (int k = 0; k < (count + 15) / 16 * 16; k++)
        memcpy((void*)(tiles.keys + k * dim), keys + offsets[std::min(k, count - 1)], dim * sizeof(bf16));
    for (int step = 0; step < (count + 31) / 32; step++)
        for (int pair = 0; pair < TILE; pair++) {
            const int k = step * 32 + 2 * pair;
            for (int d = 0; d < dim / TILE; d++) {
                __m256i even = {}, odd = {};
                if (k < count) even = _mm256_loadu_si256((const __m256i*)(values + offsets[k] + d * TILE));
                if (k + 1 < count) odd = _mm256_loadu_si256((const __m256i*)(values + offsets[k + 1] + d * TILE));
                uint32_t* to = tiles.values + (step * (dim / TILE) + d) * TILE_WORDS + pair * TILE;
                _mm512_storeu_si512(to, interleave(even, odd));
            }
        }
}

void score_tiles(const Tiles& tiles, int groups, int dim, int count) {
    const int steps = dim / 32;
    for (int k = 0; k < count; k += TILE) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int step = 0; step < steps; step++) {
            const uint32_t* queries = tiles.queries + step * TILE_WORDS;
            _tile_loadd(4, tiles.keys + k * dim + step * 32, dim * 2);
            _tile_loadd(5, queries, 64);
            _tile_dpbf16ps(0, 4, 5);
            if (groups > 1) {
                _tile_loadd(6, queries + steps * TILE_WORDS, 64);
                _tile_dpbf16ps(1, 4, 6);
            }
            if (groups > 2) {
                _tile_loadd(5, queries + 2 * steps * TILE_WORDS, 64);
                _tile_dpbf16ps(2, 4, 5);
            }
            if (groups > 3) {
                _tile_loadd(6, queries + 3 * steps * TILE_WORDS, 64);
                _tile_dpbf16ps(3, 4, 6);
            }
        }
        float* scores = tiles.scores + k * ROWS;
        _tile_stored(0, scores, ROWS * 4);
        if (groups > 1) _tile_stored(1, scores + TILE, ROWS * 4);
        if (groups > 2) _tile_stored(2, scores + 2 * TILE, ROWS * 4);
        if (groups > 3) _tile_stored(3, scores + 3 * TILE, ROWS * 4);
    }
}

// The online softmax of 16 queries. `seen_from` and `position` hold each query's first and last visible key.
vfloat soften_tile(const Call& call, float* scores, int first_key, int count, vint seen_from, vint position, float* most,
                   float* weight) {
    const vfloat before = load(most);
    vfloat now = before;
    for (int k = 0; k < count; k++) {
        vfloat score = load(scores + k * ROWS) * call.scale;
        if (call.softcap > 0) score = call.softcap * hyperbolic_tangent(score / call.softcap);
        const vint key = vint{} + (first_key + k);
        score = ((key >= seen_from) & (key <= position)) ? score : splat(-INFINITY);
        store(scores + k * ROWS, score);
        now = maximum(now, score);
    }
    const vfloat base = now == splat(-INFINITY) ? vfloat{} : now;
    vfloat total = {};
    for (int k = 0; k < count; k++) {
        vfloat exponent = exponential(load(scores + k * ROWS) - base);
        store(scores + k * ROWS, exponent);
        total += exponent;
    }
    const vfloat shrink = exponential(before - base);
    store(most, now);
    store(weight, load(weight) * shrink + total);
    return shrink;
}

void load_weight_tiles(const float* scores, int count, uint32_t* to) {
    for (int step = 0; step < (count + 31) / 32; step++, to += TILE_WORDS) {
        __m512i lines[TILE];
        for (int pair = 0; pair < TILE; pair++) {
            const int k = step * 32 + 2 * pair;
            __m512 even = k < count ? _mm512_loadu_ps(scores + k * ROWS) : _mm512_setzero_ps();
            __m512 odd = k + 1 < count ? _mm512_loadu_ps(scores + (k + 1) * ROWS) : _mm512_setzero_ps();
            lines[pair] = interleave((__m256i)_mm512_cvtneps_pbh(even), (__m256i)_mm512_cvtneps_pbh(odd));
        }
        transpose(lines);
        for (int i = 0; i < TILE; i++) _mm512_storeu_si512(to + i * TILE, lines[i]);
    }
}

// sums [16][dim] += weights [16][count] * values [count][dim], four tiles of numbers at a time.
void gather_tiles(const uint32_t* weights, const uint32_t* values, int count, float* sums, int dim) {
    const int columns = dim / TILE;
    for (int d = 0; d < columns; d += 4, sums += 4 * TILE) {
        const int wide = std::min(4, columns - d);
        _tile_loadd(0, sums, dim * 4);
        if (wide > 1) _tile_loadd(1, sums + TILE, dim * 4);
        if (wide > 2) _tile_loadd(2, sums + 2 * TILE, dim * 4);
        if (wide > 3) _tile_loadd(3, sums + 3 * TILE, dim * 4);
        for (int step = 0; step < (count + 31) / 32; step++) {
            const uint32_t* from = values + (step * columns + d) * TILE_WORDS;
            _tile_loadd(4, weights + step * TILE_WORDS, 64);
            _tile_loadd(5, from, 64);
            _tile_dpbf16ps(0, 4, 5);
            if (wide > 1) {
                _tile_loadd(6, from + TILE_WORDS, 64);
                _tile_dpbf16ps(1, 4, 6);
            }
            if (wide > 2) {
                _tile_loadd(5, from + 2 * TILE_WORDS, 64);
                _tile_dpbf16ps(2, 4, 5);
            }
            if (wide > 3) {
                _tile_loadd(6, from + 3 * TILE_WORDS, 64);
                _tile_dpbf16ps(3, 4, 6);
            }
        }
        _tile_stored(0, sums, dim * 4);
        if (wide > 1) _tile_stored(1, sums + TILE, dim * 4);
        if (wide > 2) _tile_stored(2, sums + 2 * TILE, dim * 4);
        if (wide > 3) _tile_stored(3, sums + 3 * TILE, dim * 4);
    }
}

void attend_item_tiles(const Call& call, const Item& item, const Query* queries, Room& room, float* partials) {
    const int group = call.group(), dim = call.head_dim, rows = item.tokens * group, groups = (rows + TILE - 1) / TILE;
    float* memory = room.at_least(int64_t(ROWS) * dim * 3 / 2 + int64_t(KEYS) * dim + 2 * KEYS * ROWS + 4 * ROWS);
    Tile result;
    result.sums = memory;
    result.most = result.sums + ROWS * dim;
    result.weight = result.most + ROWS;
    Tiles tiles;
    tiles.scores = result.weight + ROWS;
    tiles.queries = (uint32_t*)(tiles.scores + KEYS * ROWS);
    tiles.keys = (bf16*)(tiles.queries + ROWS * dim / 2);
    tiles.values = (uint32_t*)(tiles.keys + KEYS * dim);
    tiles.weights = tiles.values + KEYS * dim / 2;

    memset(result.sums, 0, groups * TILE * dim * sizeof(float));
    std::fill(result.most, result.most + ROWS, -INFINITY);
    std::fill(result.weight, result.weight + ROWS, 0.0f);
    load_query_tiles(call, item, queries, groups, tiles.queries);
    vint position[ROWS / TILE], seen_from[ROWS / TILE];
    for (int row = 0; row < groups * TILE; row++) {
        const int at = row < rows ? queries[row / group].position : -1;  // -1: an empty row sees nothing
        position[row / TILE][row % TILE] = at;
        seen_from[row / TILE][row % TILE] = key_start(call, at);
    }
    const TileShapes shapes;
    _tile_loadconfig(&shapes);
    KeyTile current, next;
    int tile_start = item.first_key / KEYS * KEYS;
    find_keys(call, item, tile_start, next);
    while (next.count > 0) {
        current = next;
        tile_start += KEYS;
        find_keys(call, item, tile_start, next);
        Ahead(call, next, 0, next.count, item.kv_head, 1, (const bf16*)nullptr).fetch_rest();
        const int begin = current.begin, count = current.count;
        load_key_tiles(call, current.offsets, item.kv_head, count, tiles);
        score_tiles(tiles, groups, dim, count);
        for (int block = 0; block < groups; block++) {
            float* sums = result.sums + block * TILE * dim;
            float* scores = tiles.scores + block * TILE;
            vfloat shrink = soften_tile(call, scores, begin, count, seen_from[block], position[block],
                                        result.most + block * TILE, result.weight + block * TILE);
            for (int i = 0; i < TILE; i++)
                if (shrink[i] != 1.0f) scale_row(sums + i * dim, dim, shrink[i]);
            load_weight_tiles(scores, count, tiles.weights);
            gather_tiles(tiles.weights, tiles.values, count, sums, dim);
        }
    }
    _tile_release();
    write_result<bf16>(call, item, queries, result, partials);
}

#endif

// Which way an item goes depends on the request alone.
void compute_item(const Call& call, const Item& item, const Query* queries, Room& room, float* partials, const float*) {
    attend_item<float>(call, item, queries, room, partials);
}

void compute_item(const Call& call, const Item& item, const Query* queries, Room& room, float* partials, const bf16*) {
#if KVASIR_AMX
    const int rows_of_request = (item.is_shared ? 1 : item.tokens) * call.group();
    if (call.use_amx && call.head_dim % 32 == 0 && rows_of_request >= AMX_FEWEST_ROWS) {
        for (int head = 0; head < item.kv_heads; head++) {
            Item one = item;
            one.kv_head += head;
            one.kv_heads = 1;
            attend_item_tiles(call, one, queries, room, partials);
        }
        return;
    }
#endif
    attend_item<bf16>(call, item, queries, room, partials);
}

template <typename T>
void join_splits(const Call& call, const Join& join, const float* partials) {
    const int dim = call.head_dim;
    const int64_t rows = int64_t(join.tokens) * call.heads;
    for (int64_t row = 0; row < rows; row++) {
        const float* first = partials + (join.partial + row) * (dim + 2);
        const int64_t step = rows * (dim + 2);
        float most = -INFINITY, weight = 0;
        for (int s = 0; s < join.splits; s++) most = std::max(most, first[s * step]);
        for (int s = 0; s < join.splits; s++) weight += first[s * step + 1] * std::exp(first[s * step] - most);
        T* to = (T*)call.out + (call.query_starts[join.request] + join.token + row / call.heads) * call.out_stride +
                row % call.heads * dim;
        for (int d = 0; d < dim; d += LANES) {
            vfloat total = {};
            for (int s = 0; s < join.splits; s++)
                total += load(first + s * step + 2 + d, dim - d) * std::exp(first[s * step] - most);
            store(to + d, total / weight, dim - d);
        }
    }
}

struct Plan {
    std::vector<Item> items;
    std::vector<Query> queries;
    std::vector<Join> joins;
    int64_t partial_rows = 0;
    int64_t cost = 0;
};

int add_queries(const Call& call, int request, int query_len, int first, int count, int64_t partial, Plan& plan) {
    const int at = plan.queries.size(), position = call.seq_lens[request] - query_len;
    for (int t = first; t < first + count; t++)
        plan.queries.push_back(
            {call.query_starts[request] + t, position + t, partial < 0 ? -1 : partial + int64_t(t) * call.heads});
    return at;
}

// A request whose single token sees all keys of a split, where its partial results go.
struct Reader {
    int request;
    int64_t partial;
};

using Readers = std::map<std::vector<int32_t>, std::vector<Reader>>;  // by the blocks of a whole split

void add_split(const Call& call, int request, int query_len, int first_key, int end_key, int64_t partial, int heads_each,
               Plan& plan) {
    const int queries = add_queries(call, request, query_len, 0, query_len, partial, plan);
    for (int head = 0; head < call.kv_heads; head += heads_each)
        plan.items.push_back(
            {request, head, std::min(heads_each, call.kv_heads - head), queries, query_len, first_key, end_key});
}

// A short chunk over many keys: one query tile, divided along the keys. A single token's whole splits are put aside in
// `readers`, by split, until it is known who else reads the same blocks.
void plan_short_chunk(const Call& call, int request, int query_len, int seq_len, int heads_each,
                      std::vector<Readers>& readers, Plan& plan) {
    const int first = key_start(call, seq_len - query_len);
    const int first_split = first / SPLIT, splits = (seq_len - 1) / SPLIT - first_split + 1;
    const int64_t rows = int64_t(query_len) * call.heads;
    const int64_t joined = splits > 1 ? plan.partial_rows : -1;
    for (int s = 0; s < splits; s++) {
        const int split = first_split + s, begin = split * SPLIT, end = begin + SPLIT;
        const int64_t partial = joined < 0 ? -1 : joined + s * rows;
        if (query_len == 1 && first <= begin && end <= seq_len && SPLIT % call.block_size == 0) {
            const int32_t* blocks = call.block_table + request * call.table_stride + begin / call.block_size;
            if (int(readers.size()) <= split) readers.resize(split + 1);
            readers[split][{blocks, blocks + SPLIT / call.block_size}].push_back({request, partial});
        } else {
            add_split(call, request, query_len, std::max(first, begin), std::min(seq_len, end), partial, heads_each, plan);
        }
    }
    if (splits > 1) {
        plan.joins.push_back({request, 0, query_len, joined, splits});
        plan.partial_rows += splits * rows;
    }
}

void plan_readers(const Call& call, const std::vector<Readers>& readers, int heads_each, Plan& plan) {
    const int most = std::max(1, ROWS / call.group());
    for (int split = 0; split < int(readers.size()); split++)
        for (const auto& [blocks, together] : readers[split])
            for (size_t from = 0; from < together.size(); from += most) {
                const int count = std::min<int>(most, together.size() - from), begin = split * SPLIT;
                const Reader* each = &together[from];
                if (count == 1) {
                    add_split(call, each->request, 1, begin, begin + SPLIT, each->partial, heads_each, plan);
                    continue;
                }
                const int first = plan.queries.size();
                for (int i = 0; i < count; i++) add_queries(call, each[i].request, 1, 0, 1, each[i].partial, plan);
                for (int head = 0; head < call.kv_heads; head++)
                    plan.items.push_back({each->request, head, 1, first, count, begin, begin + SPLIT, true});
            }
}

void plan_long_chunk(const Call& call, int request, int query_len, int seq_len, Plan& plan) {
    const int step = std::max(1, ROWS / call.group());
    const int queries = add_queries(call, request, query_len, 0, query_len, -1, plan);
    for (int head = 0; head < call.kv_heads; head++)
        for (int token = 0; token < query_len; token += step) {
            const int position = seq_len - query_len + token, tokens = std::min(step, query_len - token);
            plan.items.push_back(
                {request, head, 1, queries + token, tokens, key_start(call, position), position + tokens});
        }
}

Plan make_plan(const Call& call) {
    Plan plan;
    std::vector<Readers> readers;
    const int threads = omp_get_max_threads();
    // Neighbouring heads lie in the same memory pages, so one thread reads all of them unless that leaves threads idle.
    const int wanted = (3 * threads + call.requests - 1) / call.requests;
    const int heads_each = std::max(1, call.kv_heads / std::min(call.kv_heads, wanted));
    for (int request = 0; request < call.requests; request++) {
        const int query_len = call.query_starts[request + 1] - call.query_starts[request];
        const int seq_len = call.seq_lens[request];
        if (query_len <= 0) continue;
        if (query_len <= SPLIT_MOST_QUERY && query_len * call.group() <= ROWS)
            plan_short_chunk(call, request, query_len, seq_len, heads_each, readers, plan);
        else
            plan_long_chunk(call, request, query_len, seq_len, plan);
    }
    plan_readers(call, readers, heads_each, plan);
    for (const Item& item : plan.items) plan.cost += item.cost();
    std::stable_sort(plan.items.begin(), plan.items.end(),
                     [](const Item& a, const Item& b) { return a.cost() > b.cost(); });
    return plan;
}

template <typename T>
void attend(const Call& call) {
    static thread_local Room partial_room;
    const Plan plan = make_plan(call);
    float* partials = partial_room.at_least(plan.partial_rows * (call.head_dim + 2));
    const int64_t items = plan.items.size(), joins = plan.joins.size();
#pragma omp parallel if (items > 1 && plan.cost * call.group() * call.head_dim > 100000)
    {
        static thread_local Room room;
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < items; i++) {
            const Item& item = plan.items[i];
            compute_item(call, item, &plan.queries[item.first_query], room, partials, (const T*)nullptr);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < joins; i++) join_splits<T>(call, plan.joins[i], partials);
    }
}

}  // namespace

extern "C" void kvasir_attention(int dtype, const void* query, int64_t query_stride, void* out, int64_t out_stride,
                                 const void* key_cache, const void* value_cache, int64_t block_stride,
                                 int64_t slot_stride, int64_t head_stride, const int32_t* query_starts,
                                 const int32_t* seq_lens, const int32_t* block_table, int64_t table_stride,
                                 int requests, int heads, int kv_heads, int head_dim, int block_size, float scale,
                                 int window, float softcap, int use_amx) {
    Call call{query, query_stride, out, out_stride, key_cache, value_cache, block_stride, slot_stride, head_stride,
              query_starts, seq_lens, block_table, table_stride, requests, heads, kv_heads, head_dim, block_size,
              scale, window, softcap, use_amx != 0};
    if (dtype == FLOAT32)
        attend<float>(call);
    else
        attend<bf16>(call);
}
