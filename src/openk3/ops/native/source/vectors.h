// Vectors of floats as wide as the CPU has them, the exponentials, and norms of one row.
//
// Loops over the functions of this file become vector code; NaN stays NaN in all of them.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif
typedef float vec __attribute__((vector_size(LANES * sizeof(float))));
typedef float loose __attribute__((vector_size(LANES * sizeof(float)), aligned(4), may_alias));

inline vec load(const float* x) { return *reinterpret_cast<const loose*>(x); }

inline void store(float* x, vec v) { memcpy(x, &v, sizeof(v)); }

inline vec load(const float* x, int64_t n) {
    vec v = {};
    memcpy(&v, x, n * sizeof(float));
    return v;
}

typedef float vec4 __attribute__((vector_size(16)));
#define PICK __builtin_shufflevector

inline vec4 fold(vec v) {
#if defined(__AVX512F__)
    const auto half = PICK(v, v, 0, 1, 2, 3, 4, 5, 6, 7) + PICK(v, v, 8, 9, 10, 11, 12, 13, 14, 15);
    return PICK(half, half, 0, 1, 2, 3) + PICK(half, half, 4, 5, 6, 7);
#elif defined(__AVX__)
    return PICK(v, v, 0, 1, 2, 3) + PICK(v, v, 4, 5, 6, 7);
#else
    return v;
#endif
}

// The sums of the lanes of four vectors.
inline vec4 totals(vec a, vec b, vec c, vec d) {
    const vec4 p = fold(a), q = fold(b), r = fold(c), s = fold(d);
    const vec4 pq = PICK(p, q, 0, 4, 1, 5) + PICK(p, q, 2, 6, 3, 7);
    const vec4 rs = PICK(r, s, 0, 4, 1, 5) + PICK(r, s, 2, 6, 3, 7);
    return PICK(pq, rs, 0, 1, 4, 5) + PICK(pq, rs, 2, 3, 6, 7);
}

// exp(x) - 1 = scale (exp(r) - 1) + (scale - 1) with x = n ln 2 + r and scale = 2^n; both factors
// without a branch, so that loops over these functions become vector code. NaN stays NaN.
struct Split {
    float scale, rest;
};

inline Split split_exp(float x) {
    x = x > 88.0f ? 88.0f : x;
    x = x < -87.0f ? -87.0f : x;
    const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const float rounded = x * 1.44269504f + shift;
    const float n = rounded - shift;
    const float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;  // ln 2 in two parts
    int32_t bits;
    memcpy(&bits, &rounded, sizeof(bits));
    bits = static_cast<int32_t>((static_cast<uint32_t>(bits) << 23) + 0x3F800000u);
    float scale;
    memcpy(&scale, &bits, sizeof(scale));
    float p = 1.0f / 5040;
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    return {scale, r + r * r * p};
}

inline float fast_exp(float x) {
    const Split s = split_exp(x);
    return s.scale + s.scale * s.rest;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

inline float fast_tanh(float x) {
    const float twice = 2.0f * x;
    const Split s = split_exp(twice > 40.0f ? 40.0f : twice);
    const float less = s.scale * s.rest + (s.scale - 1.0f);  // exp(2 x) - 1, exact near zero
    return less / (less + 2.0f);
}

// beta1 tanh(gate / beta1) sigmoid(gate) * beta2 tanh(up / beta2); beta2 <= 0 leaves `up` as it is
inline void situ(const float* gate, const float* up, float* out, int64_t n, float beta1,
                 float beta2) {
    if (beta2 > 0) {
        for (int64_t i = 0; i < n; ++i)
            out[i] = beta1 * beta2 * fast_tanh(gate[i] / beta1) * sigmoid(gate[i]) *
                     fast_tanh(up[i] / beta2);
    } else {
        for (int64_t i = 0; i < n; ++i)
            out[i] = beta1 * fast_tanh(gate[i] / beta1) * sigmoid(gate[i]) * up[i];
    }
}

inline float sum_of_squares(const float* x, int64_t n) {
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < n; ++i) sum += x[i] * x[i];
    return sum;
}

// out = x / rms(x) * weight; out may be x
inline void rms_norm(const float* x, const float* weight, float eps, int64_t n, float* out) {
    const float scale = 1.0f / std::sqrt(sum_of_squares(x, n) / n + eps);
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * scale * weight[i];
}
