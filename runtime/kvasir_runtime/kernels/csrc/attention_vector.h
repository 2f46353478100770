// One item on vectors: scores against transposed keys, the online softmax, and the sum of values, in float32.
#pragma once

#include <initializer_list>

#include "attention_call.h"

namespace kvasir {

constexpr int SCORE_VECTORS = KEYS / LANES;
constexpr int WIDE = LANES == 16 ? 4 : 2;  // vectors of a register block
constexpr int BLOCK_ROWS = 4;              // rows of a register block

struct Tile {
    float* query;    // [ROWS][dim]
    float* scores;   // [ROWS][KEYS]
    uint32_t* keys;  // transposed: bf16 pairs [dim / 2][KEYS], or float32 [dim][KEYS]
};

// Adds a row of one split to that of the splits before it, in place. Not inlined: everywhere it must round alike.
__attribute__((noinline)) inline void merge_split(int dim, const float* split, float split_max, float split_sum,
                                                  float* outputs, float& row_max, float& row_sum) {
    if (split_max == -INFINITY) return;  // the row sees none of its keys
    const float new_max = std::max(row_max, split_max);
    const vfloat kept = exponential(splat(row_max - new_max)), added = exponential(splat(split_max - new_max));
    for (int d = 0; d < dim; d += LANES)
        store(outputs + d, load(outputs + d, dim - d) * kept + load(split + d, dim - d) * added, dim - d);
    row_sum = row_sum * kept[0] + split_sum * added[0];
    row_max = new_max;
}

// The results of an item's rows, before the division by row_sum: of one split of the keys at a time, which are merged.
class Results {
   public:
    float* outputs;  // of the split at hand: [kv_heads][ROWS][dim]
    float* row_max;  // [kv_heads][ROWS] largest score so far
    float* row_sum;  // [kv_heads][ROWS] sum of exponentials so far

    static int64_t floats(const Call& call, const Item& item) { return 2 * one(call, item); }

    // In `memory` of so many floats. `rows` of each head are used.
    Results(const Call& call, const Item& item, int rows, float* memory)
        : heads_(item.kv_heads), rows_(rows), dim_(call.head_dim) {
        merged_ = memory + one(call, item);
        clear(memory);
    }

    // To be called when all of a split's keys are summed up.
    void end_split() {
        float* const split = outputs;
        float *const split_max = row_max, *const split_sum = row_sum;
        if (!is_merged_) {
            clear(merged_);
            is_merged_ = true;
        } else {
            place(merged_);
        }
        for (int h = 0; h < heads_; h++)
            for (int at = h * ROWS; at < h * ROWS + rows_; at++)
                merge_split(dim_, split + int64_t(at) * dim_, split_max[at], split_sum[at],
                            outputs + int64_t(at) * dim_, row_max[at], row_sum[at]);
        clear(split);
    }

    // Leaves the results of all splits in place of the last one's.
    void end() {
        if (!is_merged_) return;
        end_split();
        place(merged_);
    }

   private:
    static int64_t one(const Call& call, const Item& item) { return int64_t(item.kv_heads) * ROWS * (call.head_dim + 2); }

    void place(float* memory) {
        outputs = memory;
        row_max = outputs + int64_t(heads_) * ROWS * dim_;
        row_sum = row_max + heads_ * ROWS;
    }

    void clear(float* memory) {
        place(memory);
        const int used = (rows_ + 15) / 16 * 16;  // columns are computed 16 at a time
        for (int h = 0; h < heads_; h++) memset(outputs + int64_t(h) * ROWS * dim_, 0, used * dim_ * sizeof(float));
        std::fill(row_max, row_max + heads_ * ROWS, -INFINITY);
        std::fill(row_sum, row_sum + heads_ * ROWS, 0.0f);
    }

    int heads_, rows_, dim_;
    float* merged_;
    bool is_merged_ = false;
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

inline __m512i load_words(const uint32_t* from) { return _mm512_loadu_si512(from); }
inline void store_words(uint32_t* to, __m512i words) { _mm512_storeu_si512(to, words); }
#elif defined(__AVX2__)
// The same of 8 x 8.
inline void transpose(__m256i (&rows)[8]) {
    __m256i a[8], b[8];
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm256_unpacklo_epi32(rows[2 * i], rows[2 * i + 1]);
        a[2 * i + 1] = _mm256_unpackhi_epi32(rows[2 * i], rows[2 * i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm256_unpacklo_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm256_unpackhi_epi64(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm256_unpacklo_epi64(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm256_unpackhi_epi64(a[4 * i + 1], a[4 * i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        rows[i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x20);
        rows[4 + i] = _mm256_permute2x128_si256(b[i], b[4 + i], 0x31);
    }
}

inline __m256i load_words(const uint32_t* from) { return _mm256_loadu_si256((const __m256i*)from); }
inline void store_words(uint32_t* to, __m256i words) { _mm256_storeu_si256((__m256i*)to, words); }
#endif

// Turns `count` key rows of `words` 32-bit numbers into columns of to[words][KEYS]. The columns up to a multiple of 16
// may receive copies of other rows, which are masked later; those behind are zero, since what multiplies numbers that were
// left there by others may take a hundred times as long (subnormal ones).
inline void transpose_keys(const uint32_t* const* rows, int count, int words, uint32_t* to) {
    int word = 0;
#if defined(__AVX2__)
    for (; word + LANES <= words; word += LANES)
        for (int k = 0; k < (count + 15) / 16 * 16; k += LANES) {
            decltype(load_words(to)) block[LANES];
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) block[i] = load_words(rows[std::min(k + i, count - 1)] + word);
            transpose(block);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) store_words(to + (word + i) * KEYS + k, block[i]);
        }
#endif
    for (; word < words; word++)
        for (int k = 0; k < (count + 15) / 16 * 16; k++) to[word * KEYS + k] = rows[std::min(k, count - 1)][word];
    const int end = (count + 15) / 16 * 16;
    for (int w = 0; end < KEYS && w < words; w++) memset(to + w * KEYS + end, 0, (KEYS - end) * sizeof(uint32_t));
}

// Scores of N query rows against the keys of a register block. A word of transposed keys holds one float32, or two
// numbers of 16 bits.
template <typename T, int N>
inline void score_block(const float* query, int dim, const uint32_t* keys, float* scores, int first,
                        Prefetch& prefetch) {
    constexpr int NUMBERS = 4 / sizeof(T);
    vfloat sums[N][WIDE] = {};
    for (int word = 0; word < dim / NUMBERS; word++) {
        prefetch.fetch(PREFETCH_LINES);
        vuint words[WIDE];
#pragma GCC unroll 4
        for (int v = 0; v < WIDE; v++) memcpy(&words[v], keys + word * KEYS + first + v * LANES, sizeof(vuint));
#pragma GCC unroll 2
        for (int i = 0; i < NUMBERS; i++) {
            vfloat column[WIDE];
#pragma GCC unroll 4
            for (int v = 0; v < WIDE; v++) column[v] = widen_part<T>(words[v], i);
#pragma GCC unroll 4
            for (int r = 0; r < N; r++)
#pragma GCC unroll 4
                for (int v = 0; v < WIDE; v++) sums[r][v] += column[v] * query[r * dim + NUMBERS * word + i];
        }
    }
    for (int r = 0; r < N; r++)
        for (int v = 0; v < WIDE; v++) store(scores + r * KEYS + first + v * LANES, sums[r][v]);
}

template <typename T>
void score(const Tile& tile, int rows, int dim, int count, Prefetch& prefetch) {
    for (int first = 0; first < count; first += WIDE * LANES)
        for (int row = 0; row < rows; row += BLOCK_ROWS) {
            const float* query = tile.query + row * dim;
            float* scores = tile.scores + row * KEYS;
            switch (std::min(BLOCK_ROWS, rows - row)) {
                case 1: score_block<T, 1>(query, dim, tile.keys, scores, first, prefetch); break;
                case 2: score_block<T, 2>(query, dim, tile.keys, scores, first, prefetch); break;
                case 3: score_block<T, 3>(query, dim, tile.keys, scores, first, prefetch); break;
                default: score_block<T, 4>(query, dim, tile.keys, scores, first, prefetch);
            }
        }
}

// Turns one row of products into weights, which may take their place; keys outside [begin, end) of the tile weigh
// nothing. Returns the factor by which what was summed before must rescale.
using Softmax = float(const Call& call, const float* products, int begin, int end, float& row_max, float& row_sum,
                      float* weights);

inline float online_softmax(const Call& call, const float* products, int begin, int end, float& row_max, float& row_sum,
                            float* weights) {
    vfloat row[SCORE_VECTORS];
    vfloat largest_score = splat(-INFINITY);
    vint index;
    for (int i = 0; i < LANES; i++) index[i] = i;
    for (int v = 0; v < SCORE_VECTORS; v++) {
        vfloat score = load(products + v * LANES) * call.scale;
        if (call.softcap > 0) score = call.softcap * hyperbolic_tangent(score / call.softcap);
        vint at = index + v * LANES;
        row[v] = ((at >= begin) & (at < end)) ? score : splat(-INFINITY);
        largest_score = maximum(largest_score, row[v]);
    }
    float new_max = std::max(row_max, largest(largest_score));
    if (new_max == -INFINITY) {
        memset(weights, 0, KEYS * sizeof(float));
        return 1.0f;
    }
    vfloat total = {};
    for (int v = 0; v < SCORE_VECTORS; v++) {
        row[v] = exponential(row[v] - new_max);
        total += row[v];
        store(weights + v * LANES, row[v]);
    }
    float rescale = row_max == -INFINITY ? 0.0f : exponential(splat(row_max - new_max))[0];
    row_max = new_max;
    row_sum = row_sum * rescale + sum(total);
    return rescale;
}

template <typename T, int N, int V>
inline void accumulate_block(const float* weights, const T* const* values, int begin, int end, int d, int n,
                             float* outputs, int dim, Prefetch& prefetch) {
    vfloat block[N][V];
#pragma GCC unroll 4
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) block[r][v] = load(outputs + r * dim + d + v * LANES, n);
    for (int k = begin; k < end; k++) {
        prefetch.fetch(PREFETCH_LINES);
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
        for (int v = 0; v < V; v++) store(outputs + r * dim + d + v * LANES, block[r][v], n);
}

template <typename T, int N>
inline void accumulate_rows(const float* weights, const T* const* values, int begin, int end, float* outputs, int dim,
                        Prefetch& prefetch) {
    int d = 0;
    for (; d + WIDE * LANES <= dim; d += WIDE * LANES)
        accumulate_block<T, N, WIDE>(weights, values, begin, end, d, LANES, outputs, dim, prefetch);
    for (; d + LANES <= dim; d += LANES)
        accumulate_block<T, N, 1>(weights, values, begin, end, d, LANES, outputs, dim, prefetch);
    if (d < dim) accumulate_block<T, N, 1>(weights, values, begin, end, d, dim - d, outputs, dim, prefetch);
}

template <typename T>
void accumulate(const float* weights, int rows, const T* const* values, int begin, int end, float* outputs, int dim,
            Prefetch& prefetch) {
    for (int row = 0; row < rows; row += BLOCK_ROWS) {
        const float* from = weights + row * KEYS;
        float* to = outputs + row * dim;
        switch (std::min(BLOCK_ROWS, rows - row)) {
            case 1: accumulate_rows<T, 1>(from, values, begin, end, to, dim, prefetch); break;
            case 2: accumulate_rows<T, 2>(from, values, begin, end, to, dim, prefetch); break;
            case 3: accumulate_rows<T, 3>(from, values, begin, end, to, dim, prefetch); break;
            default: accumulate_rows<T, 4>(from, values, begin, end, to, dim, prefetch);
        }
    }
}

inline void scale_row(float* row, int dim, float factor) {
    for (int d = 0; d < dim; d += LANES) store(row + d, load(row + d, dim - d) * factor, dim - d);
}

template <typename T>
void load_query(const Call& call, const Item& item, const Query* queries, int kv_head, float* to) {
    const int group = call.group(), dim = call.head_dim;
    for (int t = 0; t < item.tokens; t++)
        for (int g = 0; g < group; g++) {
            const T* from =
                (const T*)call.query + queries[t].token * call.query_stride + int64_t(kv_head * group + g) * dim;
            float* row = to + (t * group + g) * dim;
            for (int d = 0; d < dim; d += LANES) store(row + d, load(from + d, dim - d), dim - d);
        }
}

template <typename T>
inline void write_row(const float* outputs, float row_sum, int dim, T* to) {
    const float factor = row_sum > 0 ? 1.0f / row_sum : 0.0f;
    for (int d = 0; d < dim; d += LANES) store(to + d, load(outputs + d, dim - d) * factor, dim - d);
}

template <typename T>
void write_result(const Call& call, const Item& item, const Query* queries, Results& result, float* partials) {
    result.end();
    const int group = call.group(), dim = call.head_dim;
    for (int h = 0; h < item.kv_heads; h++)
        for (int row = 0; row < item.tokens * group; row++) {
            const Query& query = queries[row / group];
            const int head = (item.kv_head + h) * group + row % group;
            const float* outputs = result.outputs + int64_t(h * ROWS + row) * dim;
            const float row_max = result.row_max[h * ROWS + row], row_sum = result.row_sum[h * ROWS + row];
            if (query.partial >= 0) {
                float* to = partials + (query.partial + head) * (dim + 2);
                to[0] = row_max;
                to[1] = row_sum;
                memcpy(to + 2, outputs, dim * sizeof(float));
                continue;
            }
            write_row(outputs, row_sum, dim, (T*)call.out + query.token * call.out_stride + head * dim);
        }
}

template <typename T>
void attend_item(const Call& call, const Item& item, const Query* item_queries, Scratch& scratch, float* partials,
                 Softmax& softmax = online_softmax) {
    const int group = call.group(), dim = call.head_dim, rows = item.tokens * group, heads = item.kv_heads;
    const int words = dim * int(sizeof(T)) / 4;
    const int64_t per_head = int64_t(ROWS) * dim;
    float* queries = scratch.at_least(heads * per_head + ROWS * KEYS + int64_t(words) * KEYS +
                                      Results::floats(call, item) + 256);
    Tile tile;
    tile.scores = queries + heads * per_head;
    tile.keys = (uint32_t*)(tile.scores + ROWS * KEYS);
    Results result(call, item, rows, (float*)(tile.keys + int64_t(words) * KEYS));
    for (int h = 0; h < heads; h++)
        load_query<T>(call, item, item_queries, item.kv_head + h, queries + h * per_head);

    const uint32_t* key_rows[KEYS];
    const T* value_rows[KEYS];
    KeyTile current, next;
    int tile_start = item.first_key / KEYS * KEYS;
    find_keys(call, item, tile_start, next);
    Prefetch(call, next, 0, next.count, item.kv_head, heads, sizeof(T)).fetch_rest();
    while (next.count > 0) {
        current = next;
        tile_start += KEYS;
        find_keys(call, item, tile_start, next);
        const int begin = current.begin, count = current.count;
        for (int h = 0; h < heads; h++) {
            Prefetch prefetch(call, next, next.count * h / heads, next.count * (h + 1) / heads, item.kv_head, heads,
                              sizeof(T));
            const int64_t head_offset = (item.kv_head + h) * call.head_stride;
            for (int k = 0; k < count; k++) {
                key_rows[k] = (const uint32_t*)((const T*)call.key_cache + current.offsets[k] + head_offset);
                value_rows[k] = (const T*)call.value_cache + current.offsets[k] + head_offset;
            }
            transpose_keys(key_rows, count, words, tile.keys);
            tile.query = queries + h * per_head;
            score<T>(tile, rows, dim, count, prefetch);
            for (int row = 0; row < rows; row++) {
                const int position = item_queries[row / group].position, at = h * ROWS + row;
                const int row_begin = std::max(0, call.first_key_seen(position) - begin);
                const int row_end = std::min(count, position + 1 - begin);
                float* scores = tile.scores + row * KEYS;
                float rescale =
                    softmax(call, scores, row_begin, row_end, result.row_max[at], result.row_sum[at], scores);
                if (rescale != 1.0f) scale_row(result.outputs + int64_t(at) * dim, dim, rescale);
            }
            float* outputs = result.outputs + h * per_head;
            accumulate<T>(tile.scores, rows, value_rows, 0, count, outputs, dim, prefetch);
            prefetch.fetch_rest();
        }
        if (tile_start % SPLIT == 0 && next.count > 0) result.end_split();
    }
    write_result<T>(call, item, item_queries, result, partials);
}

}  // namespace kvasir
