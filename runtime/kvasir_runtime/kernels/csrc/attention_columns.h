// What attention in bfloat16 by tiles and by products have in common. Scores are computed transposed, keys x queries:
// keys are then read as they lie, and the softmax of 16 queries runs along vector lanes with no reduction across them.
#pragma once

#include "attention_vector.h"

#if KVASIR_COLUMNS

namespace kvasir {

constexpr int COLUMN_BLOCKS = ROWS / LANES;

// What the queries of a column block see, lane by lane. Lanes beyond the last row do as that one does.
struct Sight {
    vint first[COLUMN_BLOCKS], last[COLUMN_BLOCKS];  // keys
    int common_first[COLUMN_BLOCKS], common_last[COLUMN_BLOCKS];

    Sight(const Call& call, const Query* queries, int rows) {
        const int group = call.group();
        for (int block = 0, query = 0, head = 0; block * LANES < rows; block++) {
            alignas(64) int32_t firsts[LANES], lasts[LANES];
            common_first[block] = 0;
            common_last[block] = INT32_MAX;
            for (int lane = 0; lane < LANES; lane++) {
                const int position = queries[query].position;
                firsts[lane] = call.first_key_seen(position);
                lasts[lane] = position;
                common_first[block] = std::max(common_first[block], firsts[lane]);
                common_last[block] = std::min(common_last[block], position);
                const bool ends = ++head == group && (query + 1) * group < rows;
                query += ends;
                head = ends ? 0 : std::min(head, group - 1);
            }
            memcpy(&first[block], firsts, sizeof(firsts));
            memcpy(&last[block], lasts, sizeof(lasts));
        }
    }
};

// The query heads of a key head as columns [rows / 16][dim / 2][16] of pairs of numbers, zeros beyond the last row.
inline void load_query_columns(const Call& call, const Item& item, const Query* queries, int kv_head, uint32_t* to) {
    const int group = call.group(), dim = call.head_dim, rows = item.tokens * group;
    const bf16* query = (const bf16*)call.query + int64_t(kv_head) * group * dim;
    for (int first = 0; first < rows; first += LANES)
        for (int step = 0; step < dim / 32; step++, to += LANES * LANES) {
            __m512i lines[LANES];
            for (int i = 0; i < LANES; i++) {
                const int row = first + i;
                lines[i] = _mm512_setzero_si512();
                if (row >= rows) continue;
                const bf16* from = query + queries[row / group].token * call.query_stride + row % group * dim;
                lines[i] = _mm512_loadu_si512(from + step * 32);
            }
            transpose(lines);
            for (int i = 0; i < LANES; i++) _mm512_storeu_si512(to + i * LANES, lines[i]);
        }
}

inline __m512i interleave(__m256i even, __m256i odd) {
    return _mm512_or_si512(_mm512_cvtepu16_epi32(even), _mm512_slli_epi32(_mm512_cvtepu16_epi32(odd), 16));
}

// 2^x with relative error below 2e-7, exactly 0 below -125: a minimax polynomial of degree 5 for what rounding leaves.
inline vfloat power_of_two(vfloat x) {
    const vfloat whole = (vfloat)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vfloat rest = x - whole;
    vfloat series = splat(1.3264727184e-3f);
    series = series * rest + 9.6715126406e-3f;
    series = series * rest + 5.5507337433e-2f;
    series = series * rest + 2.4022242085e-1f;
    series = series * rest + 6.9314697760e-1f;
    series = series * rest + 1.0f;
    const __mmask16 is_seen = _mm512_cmp_ps_mask((__m512)x, (__m512)splat(-125.0f), _CMP_NLT_UQ);
    return (vfloat)_mm512_maskz_scalef_ps(is_seen, (__m512)series, (__m512)whole);
}

// The factors that turn a dot product, capped already where there is a cap, into a score, and into a power of two.
struct ScoreScale {
    float natural, binary;
    explicit ScoreScale(const Call& call)
        : natural(call.softcap > 0 ? 1.0f : call.scale), binary(natural * LOG2_E) {}
};

inline vfloat capped(const Call& call, vfloat product) {
    return call.softcap * hyperbolic_tangent(product * call.scale / call.softcap);
}

inline vfloat weight_of(const ScoreScale& scale, vfloat product, vfloat base) {
    const __m512 binary_base = _mm512_mul_ps((__m512)base, (__m512)splat(LOG2_E));
    return power_of_two((vfloat)_mm512_fmsub_ps((__m512)product, (__m512)splat(scale.binary), binary_base));
}

// The sum of all weights [KEYS][ROWS] of 16 queries, in the order of `sum_of_row`.
inline vfloat sum_of_columns(const float* weights) {
    vfloat sums[LANES];
    for (int k = 0; k < LANES; k++) {
        sums[k] = load(weights + k * ROWS);
        for (int next = k + LANES; next < KEYS; next += LANES) sums[k] += load(weights + next * ROWS);
    }
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int k = 0; k < half; k++) sums[k] += sums[k + half];
    return sums[0];
}

// Turns dot products [KEYS][ROWS], of which `count` are there, into weights, in place. Returns the factors by which what
// was summed before must rescale.
template <bool is_masked>
inline vfloat softmax_columns(const Call& call, float* scores, int first_key, int count, vint first, vint last,
                              float* row_max, float* row_sum) {
    const ScoreScale scale(call);
    if (call.softcap > 0)
        for (int k = 0; k < count; k++) store(scores + k * ROWS, capped(call, load(scores + k * ROWS)));
    const auto product = [&](int k) {
        const vint key = vint{} + (first_key + k);
        const vfloat value = load(scores + k * ROWS);
        return is_masked ? ((key >= first) & (key <= last)) ? value : splat(-INFINITY) : value;
    };
    vfloat largest = splat(-INFINITY), largest_odd = largest;
    for (int k = 0; k + 1 < count; k += 2) {
        largest = maximum(largest, product(k));
        largest_odd = maximum(largest_odd, product(k + 1));
    }
    if (count % 2) largest = maximum(largest, product(count - 1));
    const vfloat old_max = load(row_max), new_max = maximum(old_max, maximum(largest, largest_odd) * scale.natural);
    const vfloat base = new_max == splat(-INFINITY) ? vfloat{} : new_max;
    for (int k = 0; k < count; k++) store(scores + k * ROWS, weight_of(scale, product(k), base));
    for (int k = count; k < KEYS; k++) store(scores + k * ROWS, vfloat{});
    const vfloat rescale = exponential(old_max - base), total = sum_of_columns(scores);
    store(row_max, new_max);
    store(row_sum, (vfloat)_mm512_fmadd_ps((__m512)load(row_sum), (__m512)rescale, (__m512)total));
    return rescale;
}

// The same for a column block of an item, which sees the keys from `first_key` on wholly or in part.
inline vfloat softmax_columns(const Call& call, float* scores, int first_key, int count, const Sight& sight, int block,
                              float* row_max, float* row_sum) {
    const vint first = sight.first[block], last = sight.last[block];
    if (first_key >= sight.common_first[block] && first_key + count - 1 <= sight.common_last[block])
        return softmax_columns<false>(call, scores, first_key, count, first, last, row_max, row_sum);
    return softmax_columns<true>(call, scores, first_key, count, first, last, row_max, row_sum);
}

inline float sum_of_row(vfloat sums) {
    const __m256 half = _mm256_add_ps(_mm512_castps512_ps256((__m512)sums), _mm512_extractf32x8_ps((__m512)sums, 1));
    const __m128 quarter = _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    const __m128 pair = _mm_add_ps(quarter, _mm_movehl_ps(quarter, quarter));
    return _mm_cvtss_f32(_mm_add_ss(pair, _mm_movehdup_ps(pair)));
}

// Turns the dot products [KEYS] of one query, which sees the keys [begin, end), into weights of type W, perhaps in place.
// The same numbers as by columns, so that nothing depends on how many queries are computed together.
template <typename W>
inline float softmax_row(const Call& call, const float* scores, int begin, int end, float& row_max, float& row_sum,
                         W* weights) {
    constexpr int VECTORS = KEYS / LANES;
    const ScoreScale scale(call);
    vfloat product[VECTORS], largest_product = splat(-INFINITY);
    vint lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    for (int v = 0; v < VECTORS; v++) {
        const vint key = lane + v * LANES;
        const vfloat value = load(scores + v * LANES);
        product[v] = ((key >= begin) & (key < end)) ? call.softcap > 0 ? capped(call, value) : value : splat(-INFINITY);
        largest_product = maximum(largest_product, product[v]);
    }
    const float old_max = row_max, new_max = std::max(old_max, largest(largest_product) * scale.natural);
    const float base = new_max == -INFINITY ? 0.0f : new_max;
    vfloat total = {};
    for (int v = 0; v < VECTORS; v++) {
        const vfloat weight = weight_of(scale, product[v], splat(base));
        store(weights + v * LANES, weight);
        total = v > 0 ? total + weight : weight;
    }
    const float rescale = exponential(splat(old_max - base))[0];
    row_max = new_max;
    row_sum = __builtin_fmaf(row_sum, rescale, sum_of_row(total));
    return rescale;
}

inline void scale_rows(float* rows, int dim, vfloat factors) {
    alignas(64) float factor[LANES];
    store(factor, factors);
    unsigned changed = _mm512_cmp_ps_mask((__m512)factors, (__m512)splat(1.0f), _CMP_NEQ_UQ);
    for (; changed; changed &= changed - 1) {
        const int row = __builtin_ctz(changed);
        scale_row(rows + row * dim, dim, factor[row]);
    }
}

}  // namespace kvasir

#endif
