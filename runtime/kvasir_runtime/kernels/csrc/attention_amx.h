// An item in bfloat16 on AMX tiles, those of few query rows too: tiles sum in an order of their own.
#pragma once

#include "attention_columns.h"

#if KVASIR_AMX

namespace kvasir {

constexpr int TILE = LANES;  // rows of a tile, and its columns of 32 bits
constexpr int TILE_WORDS = TILE * TILE;

struct __attribute__((packed)) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {TILE, TILE, TILE, TILE, TILE, TILE, TILE, TILE};
};

struct Tiles {
    uint32_t* queries;  // columns; 16 pairs of each are a tile
    bf16* keys;         // [KEYS][dim]
    uint32_t* values;   // [KEYS / 32][dim / 16] tiles: 16 pairs of keys x 16 numbers
    float* scores;      // [KEYS][ROWS], then their exponentials
    uint32_t* weights;  // [ROWS / 16][KEYS / 32] tiles: 16 queries x 32 keys
};

// Copies keys and interleaves values of `count` tokens; absent ones become zeros, which 0 weights cannot turn into NaN.
inline void load_key_tiles(const Call& call, const int64_t* offsets, int kv_head, int count, const Tiles& tiles) {
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

inline void score_tiles(const Tiles& tiles, int groups, int dim, int count) {
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

inline void load_weight_tiles(const float* scores, int count, uint32_t* to) {
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

// outputs [16][dim] += weights [16][count] * values [count][dim], four tiles of numbers at a time.
inline void accumulate_tiles(const uint32_t* weights, const uint32_t* values, int count, float* outputs, int dim) {
    const int columns = dim / TILE;
    for (int d = 0; d < columns; d += 4, outputs += 4 * TILE) {
        const int wide = std::min(4, columns - d);
        _tile_loadd(0, outputs, dim * 4);
        if (wide > 1) _tile_loadd(1, outputs + TILE, dim * 4);
        if (wide > 2) _tile_loadd(2, outputs + 2 * TILE, dim * 4);
        if (wide > 3) _tile_loadd(3, outputs + 3 * TILE, dim * 4);
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
        _tile_stored(0, outputs, dim * 4);
        if (wide > 1) _tile_stored(1, outputs + TILE, dim * 4);
        if (wide > 2) _tile_stored(2, outputs + 2 * TILE, dim * 4);
        if (wide > 3) _tile_stored(3, outputs + 3 * TILE, dim * 4);
    }
}

inline void attend_item_tiles(const Call& call, const Item& item, const Query* queries, Scratch& scratch,
                              float* partials) {
    const int group = call.group(), dim = call.head_dim, rows = item.tokens * group, groups = (rows + TILE - 1) / TILE;
    float* memory = scratch.at_least(Results::floats(call, item) + int64_t(ROWS) * dim / 2 + int64_t(KEYS) * dim +
                                     2 * KEYS * ROWS);
    Results result(call, item, rows, memory);
    Tiles tiles;
    tiles.scores = memory + Results::floats(call, item);
    tiles.queries = (uint32_t*)(tiles.scores + KEYS * ROWS);
    tiles.keys = (bf16*)(tiles.queries + ROWS * dim / 2);
    tiles.values = (uint32_t*)(tiles.keys + KEYS * dim);
    tiles.weights = tiles.values + KEYS * dim / 2;

    load_query_columns(call, item, queries, item.kv_head, tiles.queries);
    const Sight sight(call, queries, rows);
    const TileShapes shapes;
    _tile_loadconfig(&shapes);
    KeyTile current, next;
    int tile_start = item.first_key / KEYS * KEYS;
    find_keys(call, item, tile_start, next);
    while (next.count > 0) {
        current = next;
        tile_start += KEYS;
        find_keys(call, item, tile_start, next);
        Prefetch(call, next, 0, next.count, item.kv_head, 1, sizeof(bf16)).fetch_rest();
        const int begin = current.begin, count = current.count;
        load_key_tiles(call, current.offsets, item.kv_head, count, tiles);
        score_tiles(tiles, groups, dim, count);
        for (int block = 0; block < groups; block++) {
            float* outputs = result.outputs + block * TILE * dim;
            float* scores = tiles.scores + block * TILE;
            const vfloat rescale = softmax_columns(call, scores, begin, count, sight, block,
                                                   result.row_max + block * TILE, result.row_sum + block * TILE);
            scale_rows(outputs, dim, rescale);
            load_weight_tiles(scores, count, tiles.weights);
            accumulate_tiles(tiles.weights, tiles.values, count, outputs, dim);
        }
        if (tile_start % SPLIT == 0 && next.count > 0) result.end_split();
    }
    _tile_release();
    write_result<bf16>(call, item, queries, result, partials);
}

}  // namespace kvasir

#endif
