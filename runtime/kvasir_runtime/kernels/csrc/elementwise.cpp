// Kernels that touch each number once: normalisation, gated activations, rotary embedding, cache writes, argmax.
// Rows are independent and shared out over the threads when there is enough work to pay for waking them.

#include <algorithm>
#include <initializer_list>

#include "replay.h"
#include "team.h"
#include "vec.h"

using namespace kvasir;

namespace {

constexpr int64_t PARALLEL_FROM = 32 * 1024;  // numbers; below, waking a thread costs more than it saves

template <typename T, typename W>
inline void normalise_row(const T* x, const W* weight, T* out, int64_t width, float eps) {
    vfloat squares[2] = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        vfloat a = load(x + i), b = load(x + i + LANES);
        squares[0] += a * a;
        squares[1] += b * b;
    }
    for (; i < width; i += LANES) {
        vfloat a = load(x + i, int(width - i));
        squares[0] += a * a;
    }
    float scale = 1.0f / std::sqrt(sum(squares[0] + squares[1]) / float(width) + eps);
    for (i = 0; i + LANES <= width; i += LANES) store(out + i, load(x + i) * scale * load(weight + i));
    if (i < width) {
        int n = int(width - i);
        store(out + i, load(x + i, n) * scale * load(weight + i, n), n);
    }
}

// Rows lie in groups, as the heads of a token do: row r begins at (r / group) * group_stride + (r % group) * row_stride.
struct Rows {
    int64_t count, group, group_stride, row_stride;
    int64_t offset(int64_t row) const { return row / group * group_stride + row % group * row_stride; }
};

template <typename T, typename W>
void rms_norm(const T* x, Rows rows, const W* weight, T* out, int64_t width, float eps) {
    parallel_for(rows.count, rows.count * width > PARALLEL_FROM, [&](int64_t row) {
        normalise_row(x + rows.offset(row), weight, out + row * width, width, eps);
    });
}

template <typename T, typename W>
void add_rms_norm(const T* x, int64_t x_stride, T* residual, int64_t residual_stride, const W* weight, T* out,
                  int64_t rows, int64_t width, float eps) {
    parallel_for(rows, rows * width > PARALLEL_FROM, [&](int64_t row) {
        const T* added = x + row * x_stride;
        T* kept = residual + row * residual_stride;
        for (int64_t i = 0; i < width; i += LANES) {
            int n = int(width - i);
            store(kept + i, load(kept + i, n) + load(added + i, n), n);
        }
        normalise_row(kept, weight, out + row * width, width, eps);
    });
}

inline vfloat silu(vfloat x) { return x / (exponential(-x) + 1.0f); }

inline vfloat gelu_tanh(vfloat x) {
    vfloat inner = 0.7978845608028654f * (x + 0.044715f * x * x * x);
    return 0.5f * x * (hyperbolic_tangent(inner) + 1.0f);
}

template <typename T, vfloat (*ACTIVATION)(vfloat)>
void gate(const T* gate_up, int64_t stride, T* out, int64_t rows, int64_t width) {
    // Parts of a row are tasks of their own, so that one wide row (a decode of one stream) still uses every core.
    const int64_t part = 1024, parts = (width + part - 1) / part;
    parallel_for(rows * parts, rows * width > PARALLEL_FROM / 4, [&](int64_t task) {
        const int64_t row = task / parts, begin = task % parts * part, end = std::min(width, begin + part);
        const T* gates = gate_up + row * stride;
        const T* ups = gates + width;
        for (int64_t i = begin; i < end; i += LANES) {
            int n = int(end - i);
            store(out + row * width + i, ACTIVATION(load(gates + i, n)) * load(ups + i, n), n);
        }
    });
}

template <typename T>
inline void rotate_head(T* head, const float* cosines, const float* sines, int64_t half) {
    for (int64_t i = 0; i < half; i += LANES) {
        int n = int(half - i);
        vfloat first = load(head + i, n), second = load(head + half + i, n);
        vfloat c = load(cosines + i, n), s = load(sines + i, n);
        store(head + i, first * c - second * s, n);
        store(head + half + i, second * c + first * s, n);
    }
}

struct Heads {
    void* data;
    int64_t token_stride, count;
    const void* weight;  // of the norm, or null
};

struct Rotation {
    int64_t head_dim, half;
    float eps;
    const float *cosines, *sines;  // [positions][2 * half], the second half of the columns as the first
    const int64_t* positions;
};

struct Cache {
    void *keys, *values;
    int64_t block_size, block_stride, slot_stride;
    const int64_t* slots;  // -1: not written
};

// Normalises and rotates one token's heads where they lie.
template <typename T, typename W>
inline void rotate_token(const Heads& heads, const Rotation& rotation, int64_t token) {
    const float* cosines = rotation.cosines + rotation.positions[token] * 2 * rotation.half;
    const float* sines = rotation.sines + rotation.positions[token] * 2 * rotation.half;
    T* head = (T*)heads.data + token * heads.token_stride;
    for (int64_t h = 0; h < heads.count; h++, head += rotation.head_dim) {
        if (heads.weight) normalise_row(head, (const W*)heads.weight, head, rotation.head_dim, rotation.eps);
        rotate_head(head, cosines, sines, rotation.half);
    }
}

template <typename T, typename W>
void rotate_and_write(const Heads& query, const Heads& key, const Heads& value, const Rotation& rotation,
                      const Cache& cache, int64_t tokens) {
    const int64_t width = key.count * rotation.head_dim;
    const bool pays = tokens * (query.count * rotation.head_dim + 2 * width) > PARALLEL_FROM;
    parallel_for(tokens, pays, [&](int64_t token) {
        rotate_token<T, W>(query, rotation, token);
        rotate_token<T, W>(key, rotation, token);
        const int64_t slot = cache.slots[token];
        if (slot < 0) return;
        const int64_t block = slot / cache.block_size, in_block = slot % cache.block_size;
        const int64_t offset = block * cache.block_stride + in_block * cache.slot_stride;
        memcpy((T*)cache.keys + offset, (const T*)key.data + token * key.token_stride, width * sizeof(T));
        memcpy((T*)cache.values + offset, (const T*)value.data + token * value.token_stride, width * sizeof(T));
    });
}

template <typename T>
int64_t index_of_largest(const T* row, int64_t width) {
    constexpr int64_t CHUNK = 32 * LANES;
    float best = -INFINITY;
    int64_t first = 0;  // of the chunk that holds it
    for (int64_t begin = 0; begin < width; begin += CHUNK) {
        const int64_t end = std::min(width, begin + CHUNK);
        vfloat highest[2] = {splat(-INFINITY), splat(-INFINITY)};
        int64_t i = begin;
        for (; i + 2 * LANES <= end; i += 2 * LANES) {
            highest[0] = maximum(load(row + i), highest[0]);
            highest[1] = maximum(load(row + i + LANES), highest[1]);
        }
        float of_chunk = largest(maximum(highest[0], highest[1]));
        for (; i < end; i++) of_chunk = widen(row[i]) > of_chunk ? widen(row[i]) : of_chunk;
        if (of_chunk > best) best = of_chunk, first = begin;
    }
    for (int64_t i = first; i < width; i++)
        if (widen(row[i]) == best) return i;
    return 0;
}

template <typename T>
void argmax(const T* logits, int64_t stride, int64_t* out, int64_t rows, int64_t width) {
    parallel_for(rows, true, [&](int64_t row) { out[row] = index_of_largest(logits + row * stride, width); });
}

// Calls `function` with numbers of the activations' type and of the weight's, which is the same or float32.
template <typename F>
void with_types(int dtype, int weight_dtype, const F& function) {
    with_type(dtype, [&](auto type) {
        if (weight_dtype == FLOAT32)
            function(type, float{});
        else
            function(type, type);
    });
}

}  // namespace

extern "C" {

void kvasir_rms_norm(int dtype, int weight_dtype, const void* x, int64_t count, int64_t group, int64_t group_stride,
                     int64_t row_stride, const void* weight, void* out, int64_t width, float eps) {
    const Rows rows{count, group, group_stride, row_stride};
    with_types(dtype, weight_dtype, [&](auto type, auto weight_type) {
        using T = decltype(type);
        rms_norm((const T*)x, rows, (const decltype(weight_type)*)weight, (T*)out, width, eps);
    });
}

void kvasir_add_rms_norm(int dtype, int weight_dtype, const void* x, int64_t x_stride, void* residual,
                         int64_t residual_stride, const void* weight, void* out, int64_t rows, int64_t width,
                         float eps) {
    with_types(dtype, weight_dtype, [&](auto type, auto weight_type) {
        using T = decltype(type);
        add_rms_norm((const T*)x, x_stride, (T*)residual, residual_stride, (const decltype(weight_type)*)weight,
                     (T*)out, rows, width, eps);
    });
}

void kvasir_silu_and_mul(int dtype, const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t width) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        gate<T, silu>((const T*)gate_up, stride, (T*)out, rows, width);
    });
}

void kvasir_gelu_tanh_and_mul(int dtype, const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t width) {
    with_type(dtype, [&](auto type) {
        using T = decltype(type);
        gate<T, gelu_tanh>((const T*)gate_up, stride, (T*)out, rows, width);
    });
}

// Strides are counted in numbers; a token's heads are adjacent. The weights may be null, both together.
void kvasir_rotate_and_write(int dtype, int weight_dtype, void* query, int64_t query_stride, int64_t num_heads,
                             void* key, int64_t key_stride, void* value, int64_t value_stride, int64_t num_kv_heads,
                             int64_t head_dim, const void* query_weight, const void* key_weight, float eps,
                             const float* cosines, const float* sines, const int64_t* positions, int64_t half,
                             void* key_cache, void* value_cache, int64_t block_size, int64_t block_stride,
                             int64_t slot_stride, const int64_t* slots, int64_t tokens) {
    const Rotation rotation{head_dim, half, eps, cosines, sines, positions};
    const Cache cache{key_cache, value_cache, block_size, block_stride, slot_stride, slots};
    with_types(dtype, weight_dtype, [&](auto type, auto weight_type) {
        rotate_and_write<decltype(type), decltype(weight_type)>(
            {query, query_stride, num_heads, query_weight}, {key, key_stride, num_kv_heads, key_weight},
            {value, value_stride, num_kv_heads, nullptr}, rotation, cache, tokens);
    });
}

void kvasir_argmax(int dtype, const void* logits, int64_t stride, int64_t* out, int64_t rows, int64_t width) {
    with_type(dtype, [&](auto type) { argmax((const decltype(type)*)logits, stride, out, rows, width); });
}

}  // extern "C"

KVASIR_REPLAYABLE(kvasir_rms_norm)
KVASIR_REPLAYABLE(kvasir_add_rms_norm)
KVASIR_REPLAYABLE(kvasir_silu_and_mul)
KVASIR_REPLAYABLE(kvasir_gelu_tanh_and_mul)
KVASIR_REPLAYABLE(kvasir_rotate_and_write)
