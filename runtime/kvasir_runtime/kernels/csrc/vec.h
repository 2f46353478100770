// Portable vectors of float32 over GCC's vector extension, so one source serves AVX-512, AVX2 and NEON.
// Loads widen numbers of 16 bits, stores round to nearest even; `n` arguments handle the ragged end of a row.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace kvasir {

#if defined(__AVX512F__)
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float vfloat __attribute__((vector_size(LANES * 4)));
typedef int32_t vint __attribute__((vector_size(LANES * 4)));
typedef uint32_t vuint __attribute__((vector_size(LANES * 4)));
typedef uint16_t vhalf __attribute__((vector_size(LANES * 2)));

struct bf16 {
    uint16_t bits;
};

struct fp16 {
    uint16_t bits;
};

enum DType : int { FLOAT32 = 0, BFLOAT16 = 1, FLOAT16 = 2 };

// Calls `function` with a number of the type.
template <typename F>
void with_type(int dtype, const F& function) {
    switch (dtype) {
        case FLOAT32: return function(float{});
        case BFLOAT16: return function(bf16{});
        case FLOAT16: return function(fp16{});
    }
}

inline vfloat splat(float value) { return vfloat{} + value; }

inline float widen(float value) { return value; }

inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

template <typename T>
vfloat widen(vhalf bits);

template <>
inline vfloat widen<bf16>(vhalf bits) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)bits), 16);
#elif defined(__AVX2__)
    return (vfloat)_mm256_slli_epi32(_mm256_cvtepu16_epi32((__m128i)bits), 16);
#else
    return (vfloat)(__builtin_convertvector(bits, vuint) << 16);
#endif
}

template <>
inline vfloat widen<fp16>(vhalf bits) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
    return (vfloat)_mm256_cvtph_ps((__m128i)bits);
#else
    vuint half = __builtin_convertvector(bits, vuint);
    vuint special = (vuint)((half & 0x7c00u) == 0x7c00u) & 0x7f800000u;  // infinity or NaN
    vfloat magnitude = (vfloat)((half & 0x7fffu) << 13) * 0x1p112f;
    return (vfloat)((vuint)magnitude | special | (half & 0x8000u) << 16);
#endif
}

inline float widen(fp16 value) { return widen<fp16>(vhalf{value.bits})[0]; }

// The first or second of the two 16-bit numbers in each word; a float32 is the whole word.
template <typename T>
inline vfloat widen_part(vuint words, int part) {
    return widen<T>(__builtin_convertvector(part ? words >> 16 : words & 0xffffu, vhalf));
}

template <>
inline vfloat widen_part<bf16>(vuint words, int part) {
    return (vfloat)(part ? words & 0xffff0000u : words << 16);
}

template <>
inline vfloat widen_part<float>(vuint words, int) {
    return (vfloat)words;
}

template <typename T>
vhalf narrow(vfloat value);

template <>
inline vhalf narrow<fp16>(vfloat value) {
#if defined(__AVX512F__)
    return (vhalf)_mm512_cvtps_ph((__m512)value, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__F16C__)
    return (vhalf)_mm256_cvtps_ph((__m256)value, _MM_FROUND_TO_NEAREST_INT);
#else
    vuint bits = (vuint)value & 0x7fffffffu;
    vuint normal = (bits - (112u << 23) + 0xfffu + ((bits >> 13) & 1u)) >> 13;
    // Adding 0.5 moves a subnormal's digits to where they belong and rounds them.
    vuint subnormal = (vuint)((vfloat)bits + 0.5f) - 0x3f000000u;
    vuint is_small = (vuint)(bits < (113u << 23)), is_large = (vuint)(bits >= 0x477ff000u);
    vuint is_nan = (vuint)(value != value);
    vuint half = (is_small & subnormal) | (~is_small & normal);
    half = (is_large & 0x7c00u) | (~is_large & half) | (is_nan & 0x0200u);
    return __builtin_convertvector(half | (((vuint)value >> 16) & 0x8000u), vhalf);
#endif
}

template <>
inline vhalf narrow<bf16>(vfloat value) {
#if defined(__AVX512BF16__) && defined(__AVX512F__)
    return (vhalf)_mm512_cvtneps_pbh((__m512)value);
#else
    vuint bits = (vuint)value;
    vuint rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    vuint is_nan = (vuint)(value != value);
    rounded = (is_nan & 0x7fc0u) | (~is_nan & rounded);
    return __builtin_convertvector(rounded, vhalf);
#endif
}

inline vfloat load(const float* from) {
    vfloat value;
    memcpy(&value, from, sizeof(value));
    return value;
}

template <typename T>
inline vfloat load(const T* from) {
    vhalf bits;
    memcpy(&bits, from, sizeof(bits));
    return widen<T>(bits);
}

inline void store(float* to, vfloat value) { memcpy(to, &value, sizeof(value)); }

template <typename T>
inline void store(T* to, vfloat value) {
    vhalf bits = narrow<T>(value);
    memcpy(to, &bits, sizeof(bits));
}

template <typename T>
inline vfloat load(const T* from, int n) {
    if (n >= LANES) return load(from);
    T padded[LANES] = {};
    memcpy(padded, from, n * sizeof(T));
    return load(padded);
}

template <typename T>
inline void store(T* to, vfloat value, int n) {
    if (n >= LANES) return store(to, value);
    T padded[LANES];
    store(padded, value);
    memcpy(to, padded, n * sizeof(T));
}

inline float sum(vfloat value) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)value);
#else
    float total = 0;
    for (int i = 0; i < LANES; i++) total += value[i];
    return total;
#endif
}

inline vfloat maximum(vfloat a, vfloat b) {
#if defined(__AVX512F__)
    return (vfloat)_mm512_max_ps((__m512)a, (__m512)b);
#else
    return a > b ? a : b;
#endif
}

inline float largest(vfloat value) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)value);
#else
    float result = value[0];
    for (int i = 1; i < LANES; i++) result = value[i] > result ? value[i] : result;
    return result;
#endif
}

constexpr float LOG2_E = 1.44269504088896341f;

inline vfloat exponential_series(vfloat rest) {
    vfloat series = splat(1.9875691500e-4f);
    series = series * rest + 1.3981999507e-3f;
    series = series * rest + 8.3334519073e-3f;
    series = series * rest + 4.1665795894e-2f;
    series = series * rest + 1.6666665459e-1f;
    series = series * rest + 5.0000001201e-1f;
    return series * rest * rest + rest + 1.0f;
}

// e^x with relative error below 2e-7, exactly 0 below -87 (a masked score of -inf must weigh nothing).
// Range reduction by multiples of ln 2 and the minimax polynomial of degree 6 for the rest.
inline vfloat exponential(vfloat x) {
#if defined(__AVX512F__)
    const __m512 clamped = _mm512_min_ps((__m512)splat(88.0f), (__m512)x);  // in this order NaN stays NaN
    const __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(clamped, (__m512)splat(LOG2_E)),
                                              _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const vfloat rest = (vfloat)_mm512_fmadd_ps(
        whole, (__m512)splat(2.12194440e-4f), _mm512_fmadd_ps(whole, (__m512)splat(-0.693359375f), clamped));
    const __mmask16 is_seen = _mm512_cmp_ps_mask(clamped, (__m512)splat(-87.0f), _CMP_NLT_UQ);
    return (vfloat)_mm512_maskz_scalef_ps(is_seen, (__m512)exponential_series(rest), whole);
#else
    vfloat clamped = x > splat(88.0f) ? splat(88.0f) : x;
    vint vanishes = clamped < splat(-87.0f);
    clamped = vanishes ? splat(-87.0f) : clamped;
    const float to_integer = 12582912.0f;  // 1.5 * 2^23: adding it rounds to the nearest integer
    vfloat shifted = clamped * LOG2_E + to_integer;
    vint power = (vint)shifted - (vint)splat(to_integer);
    vfloat whole = shifted - to_integer;
    vfloat rest = clamped - whole * 0.693359375f + whole * 2.12194440e-4f;
    vfloat result = (vfloat)((vint)exponential_series(rest) + (power << 23));
    return vanishes ? vfloat{} : result;
#endif
}

inline vfloat hyperbolic_tangent(vfloat x) { return 1.0f - 2.0f / (exponential(x * 2.0f) + 1.0f); }

}  // namespace kvasir
