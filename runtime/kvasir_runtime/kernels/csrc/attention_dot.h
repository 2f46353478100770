// Scores and sums of values by bf16 dot products (AVX512-BF16): twice the numbers of a float32 multiply-add. Weights are
// rounded to bfloat16 for it, as on AMX tiles; their sum is not.
#pragma once

#include "attention_call.h"

#if defined(__AVX512BF16__) && defined(__AVX512F__) && defined(__AVX512BW__)
#define KVASIR_DOT_ATTENTION 1

namespace kvasir {

constexpr int DOT_VECTORS = 4;  // vectors of a register block
constexpr int DOT_ROWS = 4;     // rows of a register block

// Two rows of `dim` bf16 (a multiple of 32) as pairs.
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

// sums [N][V vectors] += pairs [steps][stride] of 16 columns each times the rows' pairs [N][row_stride].
template <int N, int V>
inline void sum_pairs(const uint32_t* rows, int row_stride, const uint32_t* columns, int stride, int steps, int lines,
                      float* sums, int sum_stride, bool starts, Prefetch& prefetch) {
    __m512 block[N][V];
#pragma GCC unroll 4
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++)
            block[r][v] = starts ? _mm512_setzero_ps() : _mm512_loadu_ps(sums + r * sum_stride + v * LANES);
    for (int step = 0; step < steps; step++) {
        prefetch.fetch(lines);
        __m512bh column[V];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) column[v] = (__m512bh)_mm512_loadu_si512(columns + step * stride + v * LANES);
#pragma GCC unroll 4
        for (int r = 0; r < N; r++) {
            const __m512bh pair = (__m512bh)_mm512_set1_epi32(int32_t(rows[r * row_stride + step]));
#pragma GCC unroll 4
            for (int v = 0; v < V; v++) block[r][v] = _mm512_dpbf16_ps(block[r][v], column[v], pair);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < N; r++)
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) _mm512_storeu_ps(sums + r * sum_stride + v * LANES, block[r][v]);
}

// All rows, and `width` columns: a multiple of 32.
inline void sum_all_pairs(const uint32_t* rows, int num_rows, int row_stride, const uint32_t* columns, int stride,
                          int width, int steps, int lines, float* sums, int sum_stride, bool starts,
                          Prefetch& prefetch) {
    for (int first = 0; first < width; first += DOT_VECTORS * LANES) {
        const bool is_wide = first + DOT_VECTORS * LANES <= width;
        for (int row = 0; row < num_rows; row += DOT_ROWS) {
            const auto go = [&](auto n, auto v) {
                sum_pairs<n, v>(rows + row * row_stride, row_stride, columns + first, stride, steps, lines,
                                sums + row * sum_stride + first, sum_stride, starts, prefetch);
            };
            const auto with_width = [&](auto n) {
                is_wide ? go(n, std::integral_constant<int, DOT_VECTORS>{}) : go(n, std::integral_constant<int, 2>{});
            };
            switch (std::min(DOT_ROWS, num_rows - row)) {
                case 1: with_width(std::integral_constant<int, 1>{}); break;
                case 2: with_width(std::integral_constant<int, 2>{}); break;
                case 3: with_width(std::integral_constant<int, 3>{}); break;
                default: with_width(std::integral_constant<int, DOT_ROWS>{});
            }
        }
    }
}

}  // namespace kvasir

#endif
