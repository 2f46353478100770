// An item in bfloat16 by whichever products this processor does faster: float32 multiply-adds, or bf16 dot products
// (AVX512-BF16) of pairs of numbers, for which weights are rounded to bfloat16, as on AMX tiles; their sum is not.
#pragma once

#include "attention_columns.h"

#if KVASIR_COLUMNS

namespace kvasir {

constexpr int FEW_ROWS = 8;  // up to which keys are transposed instead of queries

// Two rows of `dim` bf16 (a multiple of 32) as pairs of one of each; `odd` null: zeros.
inline void interleave_rows(const bf16* even, const bf16* odd, int dim, uint32_t* to) {
    alignas(64) static const struct Order {
        uint16_t index[2][32];
        constexpr Order() : index() {
            for (int half = 0; half < 2; half++)
                for (int i = 0; i < 16; i++) {
                    index[half][2 * i] = uint16_t(half * 16 + i);
                    index[half][2 * i + 1] = uint16_t(32 + half * 16 + i);
                }
        }
    } order;
    for (int d = 0; d < dim; d += 32) {
        const __m512i a = _mm512_loadu_si512(even + d);
        const __m512i b = odd ? _mm512_loadu_si512(odd + d) : _mm512_setzero_si512();
        _mm512_storeu_si512(to + d, _mm512_permutex2var_epi16(a, _mm512_load_si512(order.index[0]), b));
        _mm512_storeu_si512(to + d + 16, _mm512_permutex2var_epi16(a, _mm512_load_si512(order.index[1]), b));
    }
}

inline const uint32_t* widen_row(const bf16* from, int dim, uint32_t* to) {
    for (int d = 0; d < dim; d += LANES) store((float*)to + d, load(from + d));
    return to;
}

#if KVASIR_DOT_PRODUCTS

// Words that hold a pair of bf16: rows of the cache as they lie.
struct DotProducts {
    static constexpr int NUMBERS = 2;

    static __m512 add(__m512 sum, __m512i a, __m512i b) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

    static const uint32_t* row(const bf16* from, int, uint32_t*) { return (const uint32_t*)from; }

    static const uint32_t* columns(const uint32_t* pairs, int, uint32_t*) { return pairs; }

    static void values(const bf16* even, const bf16* odd, int dim, uint32_t* to) { interleave_rows(even, odd, dim, to); }

    // Weights [2 * pairs][ROWS] of 16 queries as pairs.
    static void weights(const float* scores, int pairs, uint32_t* to) {
        for (int pair = 0; pair < pairs; pair++, scores += 2 * ROWS, to += ROWS) {
            const __m256i even = (__m256i)narrow<bf16>(load(scores)), odd = (__m256i)narrow<bf16>(load(scores + ROWS));
            _mm512_storeu_si512(to, interleave(even, odd));
        }
    }
};

#endif

// Words that hold a float32: what is bf16 is widened once a tile, not once a product.
struct MultiplyAdds {
    static constexpr int NUMBERS = 1;

    static __m512 add(__m512 sum, __m512i a, __m512i b) {
        return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
    }

    static const uint32_t* row(const bf16* from, int dim, uint32_t* to) { return widen_row(from, dim, to); }

    // `count` columns of 16 pairs as twice as many, of their first and second numbers.
    static const uint32_t* columns(const uint32_t* pairs, int count, uint32_t* to) {
        for (int i = 0; i < count; i++) {
            const __m512i both = _mm512_loadu_si512(pairs + i * LANES);
            _mm512_storeu_si512(to + 2 * i * LANES, _mm512_slli_epi32(both, 16));
            _mm512_storeu_si512(to + (2 * i + 1) * LANES, _mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000u))));
        }
        return to;
    }

    static void values(const bf16* even, const bf16* odd, int dim, uint32_t* to) {
        widen_row(even, dim, to);
        if (odd) widen_row(odd, dim, to + dim);
    }

    static void weights(const float*, int, uint32_t*) {}  // used where they are
};

// Words that are summed up: of V vectors, `vector_stride` apart, one word a step.
struct Columns {
    const uint32_t* words;
    int vector_stride, step_stride, steps;
};

// sums [N][V vectors] = or += the products of the rows' words, which lie ROW_STEP apart, and the columns'.
template <typename Products, int N, int V, int ROW_STEP, bool starts>
inline void sum_products(const uint32_t* const* rows, const Columns& columns, float* sums, int sum_stride,
                         Prefetch& prefetch) {
    const uint32_t* row[N];
    __m512 block[N][V];
#pragma GCC unroll 16
    for (int r = 0; r < N; r++) {
        row[r] = rows[r];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
            block[r][v] = starts ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * sum_stride + v * LANES);
    }
    for (int step = 0; step < columns.steps;) {
        prefetch.fetch(V == 1 ? 16 : 8);
        const int end = std::min(step + 8, columns.steps);
        for (; step < end; step++) {
            __m512i column[V];
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) {
                __m512i words =
                    _mm512_loadu_si512(columns.words + v * columns.vector_stride + step * columns.step_stride);
                asm("" : "+v"(words));  // kept in its register: read anew for each row it would be the bottleneck
                column[v] = words;
            }
#pragma GCC unroll 16
            for (int r = 0; r < N; r++) {
                const __m512i word = _mm512_set1_epi32(int32_t(row[r][step * ROW_STEP]));
#pragma GCC unroll 4
                for (int v = 0; v < V; v++) block[r][v] = Products::add(block[r][v], column[v], word);
            }
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) _mm512_storeu_ps(sums + r * sum_stride + v * LANES, block[r][v]);
}

// Scores [KEYS][ROWS] of `count` keys and V vectors of queries.
template <typename Products, int V>
inline void score_keys(const uint32_t* const* keys, int count, const Columns& queries, float* scores,
                       Prefetch& prefetch) {
    constexpr int N = V > 2 ? 4 : 16 / V;
    for (int k = 0; k < count; k += N)
        sum_products<Products, N, V, 1, true>(keys + k, queries, scores + k * ROWS, ROWS, prefetch);
}

// outputs [rows][dim] += the rows' weights, ROW_STEP words apart, times the values of their keys. Of the last rows some may
// be copies.
template <typename Products, int ROW_STEP>
inline void sum_values(const uint32_t* const* weights, int rows, Columns values, int dim, float* outputs,
                       Prefetch& prefetch) {
    const uint32_t* const words = values.words;
    for (int row = 0; row < rows; row += BLOCK_ROWS)
        for (int d = 0; d < dim; d += 4 * LANES) {
            values.words = words + d;
            float* to = outputs + row * dim + d;
            if (d + 4 * LANES <= dim)
                sum_products<Products, BLOCK_ROWS, 4, ROW_STEP, false>(weights + row, values, to, dim, prefetch);
            else
                sum_products<Products, BLOCK_ROWS, 2, ROW_STEP, false>(weights + row, values, to, dim, prefetch);
        }
}

// One head of an item and the keys of one tile.
struct HeadTile {
    const Call& call;
    int rows, begin, count;
    const bf16* keys[KEYS];  // rows of the cache; beyond `count`, copies of the last
    Columns values;          // [KEYS / NUMBERS][dim]
    float *outputs, *row_max, *row_sum;
    float* scores;      // [KEYS][ROWS], or [ROWS][KEYS]
    uint32_t* weights;  // [KEYS / NUMBERS][ROWS], or [ROWS][KEYS / NUMBERS]; of float32 in the memory of the scores
    uint32_t* layout;   // [KEYS][dim] words for another layout of the keys
};

// Many queries, 16 of them in a vector: [rows / 16][dim / NUMBERS][16].
template <typename Products>
inline void attend_columns(const HeadTile& tile, const uint32_t* queries, const Sight& sight, Prefetch& prefetch) {
    const int dim = tile.call.head_dim, steps = dim / Products::NUMBERS, blocks = (tile.rows + LANES - 1) / LANES;
    const Columns columns{queries, steps * LANES, LANES, steps};
    const uint32_t* keys[KEYS];
    for (int k = 0; k < KEYS; k++) keys[k] = Products::row(tile.keys[k], dim, tile.layout + k * dim);
    switch (blocks) {
        case 1: score_keys<Products, 1>(keys, tile.count, columns, tile.scores, prefetch); break;
        case 2: score_keys<Products, 2>(keys, tile.count, columns, tile.scores, prefetch); break;
        case 3: score_keys<Products, 3>(keys, tile.count, columns, tile.scores, prefetch); break;
        default: score_keys<Products, 4>(keys, tile.count, columns, tile.scores, prefetch);
    }
    for (int row = 0; row < tile.rows; row += LANES) {
        float* scores = tile.scores + row;
        const vfloat rescale = softmax_columns(tile.call, scores, tile.begin, tile.count, sight, row / LANES,
                                               tile.row_max + row, tile.row_sum + row);
        scale_rows(tile.outputs + row * dim, dim, rescale);
        Products::weights(scores, tile.values.steps, tile.weights + row);
    }
    const uint32_t* weights[ROWS];
    for (int row = 0; row < ROWS; row++) weights[row] = tile.weights + row;
    sum_values<Products, ROWS>(weights, tile.rows, tile.values, dim, tile.outputs, prefetch);
}

#if KVASIR_DOT_PRODUCTS

// Few queries, each along 64 transposed keys.
inline void attend_rows(const HeadTile& tile, const uint32_t* const* queries, const Query* item_queries,
                        Prefetch& prefetch) {
    const int dim = tile.call.head_dim, group = tile.call.group();
    transpose_keys((const uint32_t* const*)tile.keys, tile.count, dim / 2, tile.layout);
    const Columns columns{tile.layout, LANES, KEYS, dim / 2};
    for (int row = 0; row < tile.rows; row += BLOCK_ROWS)
        sum_products<DotProducts, BLOCK_ROWS, 4, 1, true>(queries + row, columns, tile.scores + row * KEYS, KEYS,
                                                          prefetch);
    const uint32_t* weights[FEW_ROWS];
    for (int row = 0; row < FEW_ROWS; row++) {
        weights[row] = tile.weights + std::min(row, tile.rows - 1) * (KEYS / 2);
        if (row >= tile.rows) continue;
        const int position = item_queries[row / group].position;
        const int row_begin = tile.call.first_key_seen(position) - tile.begin;
        const int row_end = std::min(tile.count, position + 1 - tile.begin);
        const float rescale = softmax_row(tile.call, tile.scores + row * KEYS, row_begin, row_end, tile.row_max[row],
                                          tile.row_sum[row], (bf16*)weights[row]);
        if (rescale != 1.0f) scale_row(tile.outputs + row * dim, dim, rescale);
    }
    sum_values<DotProducts, 1>(weights, tile.rows, tile.values, dim, tile.outputs, prefetch);
}

#endif

// For heads of a multiple of 32 numbers; by multiply-adds only many queries.
template <typename Products>
void attend_item_products(const Call& call, const Item& item, const Query* item_queries, Scratch& scratch,
                          float* partials) {
    constexpr int NUMBERS = Products::NUMBERS;
    const int group = call.group(), dim = call.head_dim, rows = item.tokens * group, heads = item.kv_heads;
    const bool is_few = rows <= FEW_ROWS;
    const int64_t per_head = int64_t(ROWS) * dim, head_words = per_head / NUMBERS;
    float* memory = scratch.at_least(Results::floats(call, item) + heads * head_words + 2 * KEYS * (ROWS + dim));
    Results result(call, item, rows, memory);
    uint32_t* queries = (uint32_t*)(memory + Results::floats(call, item));
    float* scores = (float*)(queries + heads * head_words);
    uint32_t* weights = (uint32_t*)(NUMBERS == 1 ? scores : scores + KEYS * ROWS);
    uint32_t* values = (uint32_t*)(scores + 2 * KEYS * ROWS);
    uint32_t* layout = values + KEYS * dim;
    for (int h = 0; h < heads; h++) {
        uint32_t* to = queries + h * head_words;
        uint32_t* pairs = NUMBERS == 1 ? layout : to;
        if (!is_few) {
            load_query_columns(call, item, item_queries, item.kv_head + h, pairs);
            Products::columns(pairs, (rows + LANES - 1) / LANES * dim / 2, to);
        }
    }
    const Sight sight(call, item_queries, is_few ? 0 : rows);

    KeyTile current, next;
    int tile_start = item.first_key / KEYS * KEYS;
    find_keys(call, item, tile_start, next);
    Prefetch(call, next, 0, next.count, item.kv_head, heads, sizeof(bf16)).fetch_rest();
    while (next.count > 0) {
        current = next;
        tile_start += KEYS;
        find_keys(call, item, tile_start, next);
        const int count = current.count;
        for (int h = 0; h < heads; h++) {
            Prefetch prefetch(call, next, next.count * h / heads, next.count * (h + 1) / heads, item.kv_head, heads,
                              sizeof(bf16));
            HeadTile tile{call, rows, current.begin, count, {}, {values, LANES, dim, (count + NUMBERS - 1) / NUMBERS},
                          result.outputs + h * per_head, result.row_max + h * ROWS, result.row_sum + h * ROWS, scores,
                          weights, layout};
            const int64_t head_offset = (item.kv_head + h) * call.head_stride;
            for (int k = 0; k < KEYS; k++)
                tile.keys[k] = (const bf16*)call.key_cache + current.offsets[std::min(k, count - 1)] + head_offset;
            const auto value = [&](int k) {
                return k < count ? (const bf16*)call.value_cache + current.offsets[k] + head_offset : nullptr;
            };
            for (int k = 0; k < count; k += 2)
                Products::values(value(k), value(k + 1), dim, values + k / NUMBERS * dim);
#if KVASIR_DOT_PRODUCTS
            if (NUMBERS == 2 && is_few) {
                const uint32_t* few[FEW_ROWS];
                for (int row = 0; row < FEW_ROWS; row++) {
                    const int there = std::min(row, rows - 1), head = (item.kv_head + h) * group + there % group;
                    few[row] = (const uint32_t*)((const bf16*)call.query +
                                                 item_queries[there / group].token * call.query_stride + head * dim);
                }
                attend_rows(tile, few, item_queries, prefetch);
                prefetch.fetch_rest();
                continue;
            }
#endif
            attend_columns<Products>(tile, queries + h * head_words, sight, prefetch);
            prefetch.fetch_rest();
        }
        if (tile_start % SPLIT == 0 && next.count > 0) result.end_split();
    }
    write_result<bf16>(call, item, item_queries, result, partials);
}

// An item of bf16, such that nothing depends on how many queries are computed together.
inline void attend_item_bf16(const Call& call, const Item& item, const Query* item_queries, Scratch& scratch,
                             float* partials) {
    if (call.head_dim % 32 != 0) return attend_item<bf16>(call, item, item_queries, scratch, partials);
#if KVASIR_DOT_PRODUCTS
    if (call.use_dot) return attend_item_products<DotProducts>(call, item, item_queries, scratch, partials);
#endif
    if (item.tokens * call.group() <= FEW_ROWS)
        return attend_item<bf16>(call, item, item_queries, scratch, partials, softmax_row<float>);
    attend_item_products<MultiplyAdds>(call, item, item_queries, scratch, partials);
}

}  // namespace kvasir

#endif
