// Kernels that touch each number once: normalisation, gated activations, rotary embedding, cache writes, argmax.
// Rows are independent and shared out over OpenMP's threads when there is enough work to pay for waking them.

#include <omp.h>

#include <initializer_list>

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
#pragma omp parallel for if (rows.count > 1 && rows.count * width > PARALLEL_FROM)
    for (int64_t row = 0; row < rows.count; row++)
        normalise_row(x + rows.offset(row), weight, out + row * width, width, eps);
}

template <typename T, typename W>
void add_rms_norm(const T* x, int64_t x_stride, T* residual, int64_t residual_stride, const W* weight, T* out,
                  int64_t rows, int64_t width, float eps) {
#pragma omp parallel for if (rows > 1 && rows * width > PARALLEL_FROM)
    for (int64_t row = 0; row < rows; row++) {
        const T* added = x + row * x_stride;
        T* kept = residual + row * residual_stride;
        for (int64_t i = 0; i < width; i += LANES) {
            int n = int(width - i);
            store(kept + i, load(kept + i, n) + load(added + i, n), n);
        }
        normalise_row(kept, weight, out + row * width, width, eps);
    }
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
#pragma omp parallel for collapse(2) if (rows * width > PARALLEL_FROM / 4)
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t p = 0; p < parts; p++) {
            const T* gates = gate_up + row * stride;
            const T* ups = gates + width;
            int64_t end = p + 1 == parts ? width : (p + 1) * part;
            for (int64_t i = p * part; i < end; i += LANES) {
                int n = int(end - i);
                store(out + row * width + i, ACTIVATION(load(gates + i, n)) * load(ups + i, n), n);
            }
        }
    }
}

template <typename T>
inline void turn_head(T* head, const float* cosines, const float* sines, int64_t half) {
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
    int64_t token_stride, head_stride, count;
};

// The tables hold 2 * half columns, of which the second half repeats the first.
template <typename T>
void rotary(Heads query, Heads key, const float* cosines, const float* sines, const int64_t* positions, int64_t tokens,
            int64_t half) {
#pragma omp parallel for if (tokens > 1 && tokens * (query.count + key.count) * half > PARALLEL_FROM / 2)
    for (int64_t token = 0; token < tokens; token++) {
        const float* c = cosines + positions[token] * 2 * half;
        const float* s = sines + positions[token] * 2 * half;
        for (const Heads& heads : {query, key}) {
            T* at = (T*)heads.data + token * heads.token_stride;
            for (int64_t h = 0; h < heads.count; h++) turn_head(at + h * heads.head_stride, c, s, half);
        }
    }
}

template <typename T>
void write_kv(const T* key, int64_t key_stride, const T* value, int64_t value_stride, T* key_cache, T* value_cache,
              const int64_t* slots, int64_t tokens, int64_t block_size, int64_t block_stride, int64_t slot_stride,
              int64_t width) {
#pragma omp parallel for if (tokens > 1 && tokens * width > PARALLEL_FROM)
    for (int64_t token = 0; token < tokens; token++) {
        int64_t slot = slots[token];
        if (slot < 0) continue;
        int64_t offset = slot / block_size * block_stride + slot % block_size * slot_stride;
        memcpy(key_cache + offset, key + token * key_stride, width * sizeof(T));
        memcpy(value_cache + offset, value + token * value_stride, width * sizeof(T));
    }
}

template <typename T>
int64_t index_of_largest(const T* row, int64_t width) {
    vfloat best = splat(-INFINITY);
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) best = maximum(load(row + i), best);
    float most = largest(best);
    for (; i < width; i++) most = widen(row[i]) > most ? widen(row[i]) : most;
    for (i = 0; i < width; i++)
        if (widen(row[i]) == most) return i;
    return 0;
}

template <typename T>
void argmax(const T* logits, int64_t stride, int64_t* out, int64_t rows, int64_t width) {
#pragma omp parallel for if (rows > 1)
    for (int64_t row = 0; row < rows; row++) out[row] = index_of_largest(logits + row * stride, width);
}

}  // namespace

extern "C" {

void kvasir_rms_norm(int dtype, int weight_dtype, const void* x, int64_t count, int64_t group, int64_t group_stride,
                     int64_t row_stride, const void* weight, void* out, int64_t width, float eps) {
    Rows rows{count, group, group_stride, row_stride};
    if (dtype == FLOAT32)
        rms_norm((const float*)x, rows, (const float*)weight, (float*)out, width, eps);
    else if (weight_dtype == FLOAT32)
        rms_norm((const bf16*)x, rows, (const float*)weight, (bf16*)out, width, eps);
    else
        rms_norm((const bf16*)x, rows, (const bf16*)weight, (bf16*)out, width, eps);
}

void kvasir_add_rms_norm(int dtype, int weight_dtype, const void* x, int64_t x_stride, void* residual,
                         int64_t residual_stride, const void* weight, void* out, int64_t rows, int64_t width,
                         float eps) {
    if (dtype == FLOAT32)
        add_rms_norm((const float*)x, x_stride, (float*)residual, residual_stride, (const float*)weight, (float*)out,
                     rows, width, eps);
    else if (weight_dtype == FLOAT32)
        add_rms_norm((const bf16*)x, x_stride, (bf16*)residual, residual_stride, (const float*)weight, (bf16*)out,
                     rows, width, eps);
    else
        add_rms_norm((const bf16*)x, x_stride, (bf16*)residual, residual_stride, (const bf16*)weight, (bf16*)out, rows,
                     width, eps);
}

void kvasir_silu_and_mul(int dtype, const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t width) {
    if (dtype == FLOAT32)
        gate<float, silu>((const float*)gate_up, stride, (float*)out, rows, width);
    else
        gate<bf16, silu>((const bf16*)gate_up, stride, (bf16*)out, rows, width);
}

void kvasir_gelu_tanh_and_mul(int dtype, const void* gate_up, int64_t stride, void* out, int64_t rows, int64_t width) {
    if (dtype == FLOAT32)
        gate<float, gelu_tanh>((const float*)gate_up, stride, (float*)out, rows, width);
    else
        gate<bf16, gelu_tanh>((const bf16*)gate_up, stride, (bf16*)out, rows, width);
}

void kvasir_rotary(int dtype, void* query, int64_t query_token_stride, int64_t query_head_stride, int64_t num_heads,
                   void* key, int64_t key_token_stride, int64_t key_head_stride, int64_t num_kv_heads,
                   const float* cosines, const float* sines, const int64_t* positions, int64_t tokens, int64_t half) {
    Heads q{query, query_token_stride, query_head_stride, num_heads};
    Heads k{key, key_token_stride, key_head_stride, num_kv_heads};
    if (dtype == FLOAT32)
        rotary<float>(q, k, cosines, sines, positions, tokens, half);
    else
        rotary<bf16>(q, k, cosines, sines, positions, tokens, half);
}

void kvasir_write_kv(int dtype, const void* key, int64_t key_stride, const void* value, int64_t value_stride,
                     void* key_cache, void* value_cache, const int64_t* slots, int64_t tokens, int64_t block_size,
                     int64_t block_stride, int64_t slot_stride, int64_t width) {
    if (dtype == FLOAT32)
        write_kv((const float*)key, key_stride, (const float*)value, value_stride, (float*)key_cache,
                 (float*)value_cache, slots, tokens, block_size, block_stride, slot_stride, width);
    else
        write_kv((const bf16*)key, key_stride, (const bf16*)value, value_stride, (bf16*)key_cache, (bf16*)value_cache,
                 slots, tokens, block_size, block_stride, slot_stride, width);
}

void kvasir_argmax(int dtype, const void* logits, int64_t stride, int64_t* out, int64_t rows, int64_t width) {
    if (dtype == FLOAT32)
        argmax((const float*)logits, stride, out, rows, width);
    else
        argmax((const bf16*)logits, stride, out, rows, width);
}

}  // extern "C"
