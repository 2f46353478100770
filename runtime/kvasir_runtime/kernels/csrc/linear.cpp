// y = x W^T + b for bfloat16, on weights packed once: [N / 16][K / 2][16][2], both ends padded with zeros.
// One vector load holds a pair of inputs for 16 outputs, which is what AMX tiles and bf16 dot products read, and what
// float32 multiply-adds widen with one shift or mask. So one copy of the weight serves every instruction set and batch size.

#include <algorithm>
#include <cstdlib>
#include <type_traits>

#include "replay.h"
#include "team.h"
#include "vec.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__)
#define KVASIR_AMX 1
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(__AVX512BF16__) && defined(__AVX512F__)
#define KVASIR_DOT 1
#endif

using namespace kvasir;

namespace {

constexpr int PANEL = 16;            // outputs that are packed together
constexpr int64_t DEPTH_STEP = 32;   // K is padded to this: one AMX tile
constexpr int64_t CACHE_BYTES = 768 * 1024;  // of packed weight that one core keeps in its L2 while rows pass by
constexpr int64_t ROWS_CACHE_BYTES = 1024 * 1024;  // of x that one core keeps there while AMX lets the weight pass by
constexpr int64_t FEW_ROWS_BYTES = 512 * 1024;     // the same without AMX, beside two panels and the next two

struct PackedWeight {
    const uint32_t* pairs;  // [panels][depth / 2][16]
    const float* bias;      // [panels * 16] or null
    int64_t outputs, inputs, panels, depth;
};

struct Product {
    const PackedWeight* weight;
    const bf16* x;  // [rows][depth]
    int64_t x_stride;
    bf16* out;
    int64_t out_stride;
    // Of a grouped product, whose rows are pairs of a token and an expert: row r reads x of the token pairs[r] / top_k,
    // or writes the output of the pair pairs[r]. Null: rows are read, or written, in their order.
    const int32_t* x_pairs = nullptr;
    int64_t top_k = 1;
    const int32_t* out_pairs = nullptr;

    const bf16* x_row(int64_t row) const { return x + (x_pairs ? x_pairs[row] / top_k : row) * x_stride; }
    bf16* out_row(int64_t row) const { return out + (out_pairs ? out_pairs[row] : row) * out_stride; }

    // The same from `row` on.
    Product from(int64_t row) const {
        Product rest = *this;
        if (x_pairs) rest.x_pairs += row;
        else rest.x += row * x_stride;
        if (out_pairs) rest.out_pairs += row;
        else rest.out += row * out_stride;
        return rest;
    }
};

struct Block {
    int64_t row, rows;
    int64_t panel, panels;
};

// Adds the bias and stores one row of one panel, leaving out the padding.
inline void store_row(const Product& product, int64_t row, int64_t panel, const float* sums) {
    const PackedWeight& weight = *product.weight;
    int64_t column = panel * PANEL;
    int64_t n = std::min<int64_t>(PANEL, weight.outputs - column);
    bf16* to = product.out_row(row) + column;
    for (int64_t i = 0; i < n; i += LANES) {
        vfloat value = load(sums + i);
        if (weight.bias) value += load(weight.bias + column + i);
        store(to + i, value, int(n - i));
    }
}

// Memory for a copy of x in another layout. Every thread keeps its own between calls.
void* thread_scratch(size_t bytes) {
    struct Scratch {
        void* memory = nullptr;
        size_t bytes = 0;
        ~Scratch() { free(memory); }
    };
    static thread_local Scratch scratch;
    if (scratch.bytes < bytes) {
        free(scratch.memory);
        scratch.bytes = (bytes + 4095) / 4096 * 4096;
        scratch.memory = aligned_alloc(64, scratch.bytes);
    }
    return scratch.memory;
}

// Calls `multiply` with the number of rows, from 1 to MAX, as a constant.
template <int MAX, typename Multiply>
inline void with_rows(int64_t rows, const Multiply& multiply) {
    if (rows == MAX) return multiply(std::integral_constant<int, MAX>());
    if constexpr (MAX > 1) with_rows<MAX - 1>(rows, multiply);
}

// Two panels at a time pass by all rows, which stay in the cache; the next two are fetched from memory meanwhile.
// `Rows::multiply<PANELS, LINES>(row, rows, panel, next)` multiplies up to Rows::MAX of them by a panel or two, and fetches
// LINES cache lines from `next` on into the L2 cache for each pair of inputs.
template <typename Rows>
void stream_panels(const Rows& products, const PackedWeight& weight, const Block& block) {
    const int64_t parts = (block.rows + Rows::MAX - 1) / Rows::MAX, part_rows = (block.rows + parts - 1) / parts;
    const int64_t end = block.row + block.rows, last = block.panel + block.panels, pairs = weight.depth / 2;
    for (int64_t panel = block.panel; panel < last; panel += 2) {
        const char* next = (const char*)(weight.pairs + (panel + 2) * pairs * PANEL);
        for (int64_t row = block.row; row < end; row += part_rows) {
            const int64_t rows = std::min(part_rows, end - row);
            if (panel + 2 > last)
                products.template multiply<1, 0>(row, rows, panel, next);
            else if (parts == 1)
                products.template multiply<2, 2>(row, rows, panel, next);
            else if (row < block.row + 2 * part_rows)
                products.template multiply<2, 1>(row, rows, panel, next + (row > block.row) * pairs * 64);
            else
                products.template multiply<2, 0>(row, rows, panel, next);
        }
    }
}

// The panels of a block stay in the cache while its rows, of which there are many, pass by.
template <typename Rows>
void pass_rows(const Rows& products, const Block& block) {
    const int64_t end = block.row + block.rows, last = block.panel + block.panels;
    for (int64_t row = block.row; row < end; row += Rows::MAX) {
        const int64_t rows = std::min<int64_t>(Rows::MAX, end - row);
        int64_t panel = block.panel;
        for (; panel + 2 <= last; panel += 2) products.template multiply<2, 0>(row, rows, panel, nullptr);
        if (panel < last) products.template multiply<1, 0>(row, rows, panel, nullptr);
    }
}

// ---- float32 multiply-add on weights widened in registers: any CPU ----

constexpr int VECTORS = PANEL / LANES;  // registers that hold one panel's 16 sums

template <int ROWS, int PANELS, int LINES>
void multiply_widened(const Product& product, const float* x, int64_t x_stride, int64_t row, int64_t panel,
                      const char* next) {
    const PackedWeight& weight = *product.weight;
    constexpr int WIDTH = PANELS * VECTORS;
    const uint32_t* from[PANELS];
    for (int p = 0; p < PANELS; p++) from[p] = weight.pairs + (panel + p) * (weight.depth / 2) * PANEL;
    vfloat sums[ROWS][WIDTH] = {};
    const float* rows = x + row * x_stride;
    for (int64_t pair = 0; pair < weight.depth / 2; pair++) {
#pragma GCC unroll 4
        for (int line = 0; line < LINES; line++, next += 64) __builtin_prefetch(next, 0, 2);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {  // one after the other: both do not fit 16 registers beside the sums
            vfloat widened[WIDTH];
#pragma GCC unroll 8
            for (int v = 0; v < WIDTH; v++) {
                vuint bits;
                memcpy(&bits, from[v / VECTORS] + pair * PANEL + v % VECTORS * LANES, sizeof(bits));
                widened[v] = widen_part<bf16>(bits, part);
            }
#pragma GCC unroll 16
            for (int r = 0; r < ROWS; r++) {
                const float input = rows[r * x_stride + 2 * pair + part];
#pragma GCC unroll 8
                for (int v = 0; v < WIDTH; v++) sums[r][v] += widened[v] * input;
            }
        }
    }
    // Copied out one by one: sums whose address is taken would live in memory instead of registers.
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 4
        for (int p = 0; p < PANELS; p++) {
            float row_sums[PANEL];
#pragma GCC unroll 4
            for (int v = 0; v < VECTORS; v++) store(row_sums + v * LANES, sums[r][p * VECTORS + v]);
            store_row(product, row + r, panel + p, row_sums);
        }
}

struct WidenedRows {
    const Product& product;
    const float* x;
    int64_t x_stride;

#if defined(__AVX512F__)
    static constexpr int MAX = 12;
#else
    static constexpr int MAX = 6;
#endif

    template <int PANELS, int LINES>
    void multiply(int64_t row, int64_t rows, int64_t panel, const char* next) const {
        with_rows<MAX>(rows, [&](auto count) {
            constexpr int ROWS = count();
            if constexpr (PANELS == 1 || LANES == 16 || ROWS <= 2) {
                multiply_widened<ROWS, PANELS, LINES>(product, x, x_stride, row, panel, next);
            } else {  // each panel by itself
                multiply_widened<ROWS, 1, LINES>(product, x, x_stride, row, panel, next);
                multiply_widened<ROWS, 1, 0>(product, x, x_stride, row, panel + 1, nullptr);
            }
        });
    }
};

void block_widened(const Product& product, const float* x, int64_t x_stride, const Block& block) {
    const WidenedRows rows{product, x, x_stride};
    if (block.rows * x_stride * int64_t(sizeof(float)) <= FEW_ROWS_BYTES)
        stream_panels(rows, *product.weight, block);
    else
        pass_rows(rows, block);
}

// ---- bfloat16 dot products (AVX512-BF16) ----

#if KVASIR_DOT

constexpr int64_t DOT_PREFETCH = 64;  // how many pairs ahead few rows fetch the weight, which streams from memory
constexpr int64_t FEW_ROWS = 4;
constexpr int64_t RESIDENT_BYTES = 1024 * 1024;  // of weight that a core finds in its L2 cache from one step to the next

// Every sum takes the inputs in order, whatever ROWS and PANELS are, so that a row's result does not depend on the others.
// In each step, LINES cache lines from `next` on are fetched into the L2 cache.
template <int ROWS, int PANELS, int LINES>
void multiply_dot(const Product& product, int64_t row, int64_t panel, const char* next = nullptr) {
    const PackedWeight& weight = *product.weight;
    const int64_t pairs = weight.depth / 2, panel_stride = pairs * PANEL;
    const uint32_t* from = weight.pairs + panel * panel_stride;
    const bf16* rows = product.x + row * product.x_stride;
    __m512 sums[ROWS][PANELS];
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++) sums[r][p] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair++) {
#pragma GCC unroll 4
        for (int line = 0; line < LINES; line++, next += 64) _mm_prefetch(next, _MM_HINT_T1);
        // Past the end of these panels come the next ones, not the others of these.
        const int64_t ahead = DOT_PREFETCH * PANEL + (pair + DOT_PREFETCH < pairs ? 0 : (PANELS - 1) * panel_stride);
        __m512bh weights[PANELS];
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++) {
            const uint32_t* at = from + p * panel_stride + pair * PANEL;
            weights[p] = (__m512bh)_mm512_loadu_si512(at);
            if (LINES == 0 && ROWS <= FEW_ROWS && PANELS <= 2) _mm_prefetch((const char*)(at + ahead), _MM_HINT_T0);
        }
#pragma GCC unroll 16
        for (int r = 0; r < ROWS; r++) {
            int32_t x_pair;
            memcpy(&x_pair, rows + r * product.x_stride + 2 * pair, 4);
            __m512bh inputs = (__m512bh)_mm512_set1_epi32(x_pair);
#pragma GCC unroll 8
            for (int p = 0; p < PANELS; p++) sums[r][p] = _mm512_dpbf16_ps(sums[r][p], weights[p], inputs);
        }
    }
#pragma GCC unroll 16
    for (int r = 0; r < ROWS; r++)
#pragma GCC unroll 8
        for (int p = 0; p < PANELS; p++) {
            float row_sums[PANEL];
            _mm512_storeu_ps(row_sums, sums[r][p]);
            store_row(product, row + r, panel + p, row_sums);
        }
}

struct DotRows {
    const Product& product;
    static constexpr int MAX = 12;

    template <int PANELS, int LINES>
    void multiply(int64_t row, int64_t rows, int64_t panel, const char* next) const {
        with_rows<MAX>(rows,
                       [&](auto count) { multiply_dot<count(), PANELS, LINES>(product, row, panel, next); });
    }
};

template <int ROWS, int PANELS>
void multiply_panels(const Product& product, int64_t row, int64_t panel, int64_t last) {
    for (; panel + PANELS <= last; panel += PANELS) multiply_dot<ROWS, PANELS, 0>(product, row, panel);
    if constexpr (PANELS > 1) multiply_panels<ROWS, PANELS / 2>(product, row, panel, last);
}

// Few rows by as many panels as hide the instruction's latency where the weight lies in the cache; where it streams from
// memory, two at a time are the most that do so without loss.
void few_dot_rows(const Product& product, const Block& block) {
    const bool is_resident = block.panels * PANEL * product.weight->depth * int64_t(sizeof(bf16)) <= RESIDENT_BYTES;
    const int64_t last = block.panel + block.panels;
    with_rows<FEW_ROWS>(block.rows, [&](auto count) {
        constexpr int ROWS = count();
        if (is_resident)
            multiply_panels<ROWS, ROWS <= 2 ? 8 : 4>(product, block.row, block.panel, last);
        else
            multiply_panels<ROWS, 2>(product, block.row, block.panel, last);
    });
}

void block_dot(const Product& product, const Block& block) {
    if (block.rows <= FEW_ROWS) return few_dot_rows(product, block);
    const DotRows rows{product};
    if (block.rows * product.weight->depth * int64_t(sizeof(bf16)) <= FEW_ROWS_BYTES)
        stream_panels(rows, *product.weight, block);
    else
        pass_rows(rows, block);
}

#endif

// ---- AMX tiles of 16 x 16 sums: 2 x 2 of them for many rows, or one column of up to 4 that reads the weight once ----

#if KVASIR_AMX

struct __attribute__((packed)) TileShapes {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t row_bytes[16] = {};
    uint8_t rows[16] = {};
};

constexpr int TILE_ROWS = 16;
constexpr int64_t TILE_PAIRS = 16 * PANEL;    // 32-bit pairs in a tile of weights
constexpr int64_t TILE_INPUTS = 16 * DEPTH_STEP;
constexpr int PREFETCH_TILES = 8;             // how far ahead weights are fetched while they stream from memory

// Tiles 0-3 hold sums. Those of the last row of tiles, and its inputs, may be short.
//   ROW_TILES x 2: inputs in 4 (and 5, last), weights in 6 and 7.
//   ROW_TILES x 1: weights in 4, inputs in 5, 6 and 7 (last).
template <int ROW_TILES, int COLUMN_TILES>
inline void configure_tiles(int last_rows) {
    TileShapes shapes;
    for (int tile = 0; tile < 8; tile++) {
        shapes.row_bytes[tile] = 64;
        shapes.rows[tile] = TILE_ROWS;
    }
    for (int column = 0; column < COLUMN_TILES; column++)
        shapes.rows[(ROW_TILES - 1) * COLUMN_TILES + column] = uint8_t(last_rows);
    shapes.rows[COLUMN_TILES == 1 ? 7 : ROW_TILES == 1 ? 4 : 5] = uint8_t(last_rows);
    _tile_loadconfig(&shapes);
}

inline void prefetch_tile(const uint32_t* weights) {
    const char* at = (const char*)(weights + PREFETCH_TILES * TILE_PAIRS);
#pragma GCC unroll 16
    for (int line = 0; line < 16; line++) _mm_prefetch(at + line * 64, _MM_HINT_T0);
}

// What a product fetches into the L2 cache for the one after it: `lines` cache lines a step.
struct Prefetch {
    const char* from;
    int64_t lines;
};

// inputs: [steps][ROW_TILES][16][32]; leaves the sums in tiles 0-3, row by row.
template <int ROW_TILES, int COLUMN_TILES>
inline void sum_tiles(const bf16* inputs, const uint32_t* left, const uint32_t* right, int64_t steps, bool streams,
                      Prefetch prefetch = {}) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < steps; step++) {
        if (streams) {
            prefetch_tile(left);
            if (COLUMN_TILES == 2) prefetch_tile(right);
        }
        for (int64_t line = 0; line < prefetch.lines; line++, prefetch.from += 64)
            _mm_prefetch(prefetch.from, _MM_HINT_T1);
        if constexpr (COLUMN_TILES == 2) {
            _tile_loadd(4, inputs, 64);
            _tile_loadd(6, left, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, right, 64);
            _tile_dpbf16ps(1, 4, 7);
            if constexpr (ROW_TILES == 2) {
                _tile_loadd(5, inputs + TILE_INPUTS, 64);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
        } else {
            _tile_loadd(4, left, 64);
            _tile_loadd(5, inputs, 64);
            _tile_dpbf16ps(0, 5, 4);
            _tile_loadd(6, inputs + TILE_INPUTS, 64);
            _tile_dpbf16ps(1, 6, 4);
            if constexpr (ROW_TILES == 4) {
                _tile_loadd(5, inputs + 2 * TILE_INPUTS, 64);
                _tile_dpbf16ps(2, 5, 4);
            }
            _tile_loadd(7, inputs + (ROW_TILES - 1) * TILE_INPUTS, 64);
            if constexpr (ROW_TILES == 4) _tile_dpbf16ps(3, 7, 4);
            if constexpr (ROW_TILES == 3) _tile_dpbf16ps(2, 7, 4);
        }
        inputs += ROW_TILES * TILE_INPUTS;
        left += TILE_PAIRS;
        right += TILE_PAIRS;
    }
}

template <int ROW_TILES, int COLUMN_TILES>
inline void store_tiles(const Product& product, int64_t row, int64_t rows, int64_t panel) {
    alignas(64) float sums[ROW_TILES * TILE_ROWS][COLUMN_TILES * PANEL];
    if constexpr (COLUMN_TILES == 2) {
        _tile_stored(0, &sums[0][0], 128);
        _tile_stored(1, &sums[0][PANEL], 128);
        if constexpr (ROW_TILES == 2) {
            _tile_stored(2, &sums[TILE_ROWS][0], 128);
            _tile_stored(3, &sums[TILE_ROWS][PANEL], 128);
        }
    } else {
        _tile_stored(0, &sums[0][0], 64);
        _tile_stored(1, &sums[TILE_ROWS][0], 64);
        _tile_stored(2, &sums[2 * TILE_ROWS][0], 64);
        if constexpr (ROW_TILES == 4) _tile_stored(3, &sums[3 * TILE_ROWS][0], 64);
    }
    const PackedWeight& weight = *product.weight;
    const int64_t column = panel * PANEL;
    if (COLUMN_TILES == 2 && !weight.bias && column + 2 * PANEL <= weight.outputs) {
        const bool whole_lines = ((uintptr_t)(product.out + column) | product.out_stride * sizeof(bf16)) % 64 == 0;
        for (int64_t r = 0; r < rows; r++) {
            bf16* out = product.out_row(row + r) + column;
            __m512i both = (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(&sums[r][PANEL]), _mm512_load_ps(&sums[r][0]));
            // Past the cache: reading in a line that is about to be overwritten costs as much as multiplying into it.
            if (whole_lines)
                _mm512_stream_si512((__m512i*)out, both);
            else
                _mm512_storeu_si512(out, both);
        }
        return;
    }
    for (int64_t r = 0; r < rows; r++)
        for (int p = 0; p < COLUMN_TILES && panel + p < weight.panels; p++)
            store_row(product, row + r, panel + p, &sums[r][p * PANEL]);
}

// Lays rows of x out as tiles, [steps][ROW_TILES][16][32]: a tile's lines then lie together, whereas rows of x that are
// a multiple of 2 KiB apart would crowd into few sets of the cache.
template <int ROW_TILES>
void pack_tiles(const Product& product, int64_t row, int64_t rows, bf16* tiles) {
    const int64_t whole = product.weight->inputs / DEPTH_STEP, rest = product.weight->inputs % DEPTH_STEP;
    for (int64_t r = 0; r < rows; r++) {
        const bf16* from = product.x_row(row + r);
        bf16* to = tiles + r * DEPTH_STEP;
        for (int64_t step = 0; step < whole; step++, from += DEPTH_STEP, to += ROW_TILES * TILE_INPUTS)
            memcpy(to, from, DEPTH_STEP * sizeof(bf16));
        if (rest) {
            memset((void*)to, 0, DEPTH_STEP * sizeof(bf16));
            memcpy(to, from, rest * sizeof(bf16));
        }
    }
}

// One column of tiles, which reads each panel once.
template <int ROW_TILES>
void multiply_column(const Product& product, const Block& block, bf16* tiles) {
    const PackedWeight& weight = *product.weight;
    const int64_t panel_pairs = weight.depth / 2 * PANEL;
    pack_tiles<ROW_TILES>(product, block.row, block.rows, tiles);
    configure_tiles<ROW_TILES, 1>(int(block.rows - (ROW_TILES - 1) * TILE_ROWS));
    for (int64_t panel = block.panel; panel < block.panel + block.panels; panel++) {
        const uint32_t* pairs = weight.pairs + panel * panel_pairs;
        sum_tiles<ROW_TILES, 1>(tiles, pairs, pairs, weight.depth / DEPTH_STEP, true);
        store_tiles<ROW_TILES, 1>(product, block.row, block.rows, panel);
    }
}

// Squares of 2 x 2 tiles: two panels at a time pass by all rows of the block, which stay in the cache.
void multiply_squares(const Product& product, const Block& block, bf16* tiles) {
    const PackedWeight& weight = *product.weight;
    const int64_t panel_pairs = weight.depth / 2 * PANEL, steps = weight.depth / DEPTH_STEP;
    const int64_t whole = block.rows / 32, rest = block.rows % 32, squares = whole + (rest > 0);
    const int64_t square_inputs = 2 * TILE_ROWS * weight.depth, last_row = block.row + whole * 32;
    for (int64_t square = 0; square < whole; square++)
        pack_tiles<2>(product, block.row + square * 32, 32, tiles + square * square_inputs);
    if (rest > 16) pack_tiles<2>(product, last_row, rest, tiles + whole * square_inputs);
    if (rest > 0 && rest <= 16) pack_tiles<1>(product, last_row, rest, tiles + whole * square_inputs);
    configure_tiles<2, 2>(TILE_ROWS);
    for (int64_t panel = block.panel; panel < block.panel + block.panels; panel += 2) {
        const uint32_t* left = weight.pairs + panel * panel_pairs;
        const uint32_t* right = panel + 1 < weight.panels ? left + panel_pairs : left;
        Prefetch prefetch{(const char*)(left + 2 * panel_pairs), squares > 1 ? (32 + squares - 1) / squares : 0};
        for (int64_t square = 0; square < whole; square++, prefetch.from += steps * prefetch.lines * 64) {
            sum_tiles<2, 2>(tiles + square * square_inputs, left, right, steps, squares == 1, prefetch);
            store_tiles<2, 2>(product, block.row + square * 32, 32, panel);
        }
        if (rest == 0) continue;
        if (rest > 16) {
            configure_tiles<2, 2>(int(rest - TILE_ROWS));
            sum_tiles<2, 2>(tiles + whole * square_inputs, left, right, steps, squares == 1, prefetch);
            store_tiles<2, 2>(product, last_row, rest, panel);
        } else {
            configure_tiles<1, 2>(int(rest));
            sum_tiles<1, 2>(tiles + whole * square_inputs, left, right, steps, squares == 1, prefetch);
            store_tiles<1, 2>(product, last_row, rest, panel);
        }
        configure_tiles<2, 2>(TILE_ROWS);
    }
}

void block_tiles(const Product& product, const Block& block) {
    const int64_t row_bytes = product.weight->depth * sizeof(bf16);
    const int64_t max_rows = std::max<int64_t>(64, ROWS_CACHE_BYTES / row_bytes / 32 * 32);
    const int64_t parts = (block.rows + max_rows - 1) / max_rows;
    const int64_t part_rows = ((block.rows + parts - 1) / parts + 31) / 32 * 32;
    bf16* tiles = (bf16*)thread_scratch(std::max<int64_t>(64, part_rows) * row_bytes);
    for (int64_t done = 0; done < block.rows; done += part_rows) {
        const Block part{block.row + done, std::min(part_rows, block.rows - done), block.panel, block.panels};
        if (block.rows > 32 && block.rows <= 48)
            multiply_column<3>(product, part, tiles);
        else if (block.rows > 48 && block.rows <= 64)
            multiply_column<4>(product, part, tiles);
        else
            multiply_squares(product, part, tiles);
    }
    _mm_sfence();
    _tile_release();
}

// Linux grants the 8 KiB of tile state per process on request (arch_prctl ARCH_REQ_XCOMP_PERM, feature 18).
bool tiles_granted() {
    static const bool granted = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
    return granted;
}

#else

bool tiles_granted() { return false; }

#endif

// ---- dividing the work ----

enum Variant : int { FMA = 0, DOT = 1, AMX = 2 };

// Blocks that cover rows x panels. Every thread gets panels of its own, so that a weight is read once from memory however
// many rows there are; rows are divided too when there are more threads than panels pay for.
struct Division {
    int64_t rows, all_panels;
    int64_t panels, columns;         // of one block, and blocks side by side
    int64_t block_rows, row_blocks;  // of one block, and blocks below each other

    Division(const PackedWeight& weight, int64_t rows, int64_t max_panels, int threads)
        : rows(rows), all_panels(weight.panels) {
        int64_t even_panels = (weight.panels + threads - 1) / threads;
        even_panels = std::max<int64_t>(2, (even_panels + 1) & ~int64_t(1));
        int64_t blocks_each = (even_panels + max_panels - 1) / max_panels;
        panels = ((even_panels + blocks_each - 1) / blocks_each + 1) & ~int64_t(1);
        columns = (weight.panels + panels - 1) / panels;
        row_blocks = 1;
        if (columns < threads && rows >= 64)
            row_blocks = std::min<int64_t>((threads + columns - 1) / columns, rows / 32);
        block_rows = ((rows + row_blocks - 1) / row_blocks + 31) / 32 * 32;
        row_blocks = (rows + block_rows - 1) / block_rows;
    }

    int64_t blocks() const { return columns * row_blocks; }

    Block block(int64_t index) const {
        const int64_t panel = index / row_blocks * panels, row = index % row_blocks * block_rows;
        return {row, std::min(block_rows, rows - row), panel, std::min(panels, all_panels - panel)};
    }
};

// Calls `multiply(block)` for all blocks, on all threads.
template <typename Multiply>
void divide(const PackedWeight& weight, int64_t rows, int64_t max_panels, const Multiply& multiply) {
    const Division division(weight, rows, max_panels, max_threads());
    parallel_for(division.blocks(), rows * weight.panels * weight.depth > 4096,
                 [&](int64_t i) { multiply(division.block(i)); });
}

// The panels of a block that a core keeps in its cache while rows pass by. AMX lets the weight pass by instead.
int64_t cached_panels(const PackedWeight& weight, int variant) {
    if (variant == AMX) return weight.panels + 1;
    return std::max<int64_t>(2, CACHE_BYTES / (weight.depth * PANEL * 2) & ~int64_t(1));
}

template <typename T>
void padded_row(const bf16* from, T* to, int64_t inputs, int64_t depth) {
    for (int64_t i = 0; i < inputs; i += LANES) {
        const int n = int(inputs - i);
        store(to + i, load(from + i, n), n);
    }
    memset((void*)(to + inputs), 0, (depth - inputs) * sizeof(T));
}

template <typename T>
T* padded_copy(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs, int64_t depth) {
    T* copy = (T*)thread_scratch(rows * depth * sizeof(T));
    parallel_for(rows, rows * depth > 65536,
                 [&](int64_t row) { padded_row(x + row * x_stride, copy + row * depth, inputs, depth); });
    return copy;
}

// The inputs of a block of a grouped product, laid end to end.
template <typename T>
T* gathered_copy(const Product& product, const Block& block) {
    const PackedWeight& weight = *product.weight;
    T* copy = (T*)thread_scratch(block.rows * weight.depth * sizeof(T));
    for (int64_t r = 0; r < block.rows; r++)
        padded_row(product.x_row(block.row + r), copy + r * weight.depth, weight.inputs, weight.depth);
    return copy;
}

// One block of a grouped product on the calling thread. That its inputs are copied for every block costs little: each is
// multiplied by all outputs of the block.
void multiply_gathered(const Product& product, int variant, const Block& block) {
#if KVASIR_AMX
    if (variant == AMX && tiles_granted()) return block_tiles(product, block);
#endif
    Product part = product.from(block.row);
    const Block from_zero{0, block.rows, block.panel, block.panels};
    if (variant == FMA) {
        const float* wide = gathered_copy<float>(product, block);
        return block_widened(part, wide, product.weight->depth, from_zero);
    }
#if KVASIR_DOT
    part.x = gathered_copy<bf16>(product, block);
    part.x_stride = product.weight->depth;
    part.x_pairs = nullptr;
    block_dot(part, from_zero);
#endif
}

}  // namespace

extern "C" {

// Whether this build and this CPU can run a variant.
int kvasir_linear_has(int variant) {
    if (variant == AMX) return tiles_granted();
#if KVASIR_DOT
    if (variant == DOT) return 1;
#endif
    return variant == FMA;
}

// Packs a weight [outputs][inputs] into `packed`, whose panels hold `depth` inputs.
void kvasir_linear_pack(const void* weight, int64_t weight_stride, int64_t outputs, int64_t inputs, int64_t depth,
                        void* packed) {
    const uint16_t* from = (const uint16_t*)weight;
    const int64_t panels = (outputs + PANEL - 1) / PANEL;
    parallel_for(panels, true, [&](int64_t panel) {
        uint32_t* to = (uint32_t*)packed + panel * (depth / 2) * PANEL;
        for (int64_t pair = 0; pair < depth / 2; pair++)
            for (int64_t n = 0; n < PANEL; n++) {
                int64_t row = panel * PANEL + n;
                bool is_real = row < outputs;
                uint32_t even = is_real && 2 * pair < inputs ? from[row * weight_stride + 2 * pair] : 0;
                uint32_t odd = is_real && 2 * pair + 1 < inputs ? from[row * weight_stride + 2 * pair + 1] : 0;
                to[pair * PANEL + n] = even | odd << 16;
            }
    });
}

// Copies rows of the weight back out of the packing: the input embedding of a model with tied embeddings.
void kvasir_linear_rows(const PackedWeight* weight, const int64_t* ids, int64_t count, void* out) {
    parallel_for(count, count > 8, [&](int64_t i) {
        const uint32_t* from = weight->pairs + ids[i] / PANEL * (weight->depth / 2) * PANEL + ids[i] % PANEL;
        uint16_t* to = (uint16_t*)out + i * weight->inputs;
        int64_t pairs = weight->inputs / 2;
        for (int64_t pair = 0; pair < pairs; pair++) memcpy(to + 2 * pair, from + pair * PANEL, 4);
        if (weight->inputs % 2) to[2 * pairs] = uint16_t(from[pairs * PANEL]);
    });
}

void kvasir_linear(const PackedWeight* weight, int variant, const void* x, int64_t x_stride, int64_t rows, void* out,
                   int64_t out_stride) {
    Product product{weight, (const bf16*)x, x_stride, (bf16*)out, out_stride};
    const int64_t max_panels = cached_panels(*weight, variant);
    if (variant == FMA) {
        const float* wide = padded_copy<float>(product.x, x_stride, rows, weight->inputs, weight->depth);
        return divide(*weight, rows, max_panels,
                         [&](const Block& block) { block_widened(product, wide, weight->depth, block); });
    }
#if KVASIR_AMX
    if (variant == AMX && tiles_granted())
        return divide(*weight, rows, max_panels, [&](const Block& block) { block_tiles(product, block); });
#endif
#if KVASIR_DOT
    if (weight->inputs != weight->depth) {
        product.x = padded_copy<bf16>(product.x, x_stride, rows, weight->inputs, weight->depth);
        product.x_stride = weight->depth;
    }
    if (variant == DOT)
        return divide(*weight, rows, max_panels, [&](const Block& block) { block_dot(product, block); });
#endif
}

// The products of a mixture of experts, `groups` weights of one shape: the rows of group g are the pairs of a token and an
// expert pairs[ends[g - 1]] to pairs[ends[g]]. With `gathers`, x holds tokens and out the pairs in this order; without, x
// holds the pairs in this order and out in the order of their numbers. Threads wait for each
// other only at the end.
void kvasir_grouped_linear(const PackedWeight* weights, int64_t groups, const int32_t* ends, const int32_t* pairs,
                           int64_t top_k, int gathers, int variant, const void* x, int64_t x_stride, void* out,
                           int64_t out_stride) {
    const bool pays = ends[groups - 1] * weights->panels * weights->depth > 4096;
    on_all_threads(pays, [&](int thread, int threads) {
        for (int64_t group = 0; group < groups; group++) {
            const int64_t start = group > 0 ? ends[group - 1] : 0, rows = ends[group] - start;
            if (rows == 0) continue;
            Product product{weights + group, (const bf16*)x, x_stride, (bf16*)out, out_stride};
            (gathers ? product.x_pairs : product.out_pairs) = pairs;
            product.top_k = top_k;
            product = product.from(start);
            const Division division(weights[group], rows, cached_panels(weights[group], variant), threads);
            // The odd block goes to another thread in each group.
            for (int64_t i = (thread + group) % threads; i < division.blocks(); i += threads)
                multiply_gathered(product, variant, division.block(i));
        }
    });
}

}  // extern "C"

KVASIR_REPLAYABLE(kvasir_linear_rows)
KVASIR_REPLAYABLE(kvasir_linear)
KVASIR_REPLAYABLE(kvasir_grouped_linear)
