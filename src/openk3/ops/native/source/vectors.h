// Sums of products over a few rows at once, and the exponentials, for whatever the CPU has.
//
// Every sum is taken in one fixed order that depends on its own length alone: a row's results are
// the same to the last bit whichever rows share the call.
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
constexpr int OUTS = 4;  // outputs whose sums are taken together
constexpr int LINE = 16;  // floats of a cache line
constexpr int ROWS = 4;  // rows that share a reading of the weights

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

// part[r], summed over its lanes, = sum_i w[i] x[r][i]. One output at a time: weights read from
// two places at once defeat the processors' prefetching.
template <int R>
inline void lanes(const float* w, const float* const* x, int64_t n, vec* part) {
    vec acc[R][2] = {};
    int64_t i = 0;
    for (; i + 2 * LANES <= n; i += 2 * LANES)
        for (int c = 0; c < 2; ++c) {
            const vec own = load(w + i + c * LANES);
            for (int r = 0; r < R; ++r) acc[r][c] += own * load(x[r] + i + c * LANES);
        }
    for (; i < n; i += LANES) {
        const int64_t rest = n - i < LANES ? n - i : LANES;
        for (int r = 0; r < R; ++r) acc[r][0] += load(w + i, rest) * load(x[r] + i, rest);
    }
    for (int r = 0; r < R; ++r) part[r] = acc[r][0] + acc[r][1];
}

// sums[r][o] = sum_i w[o * stride + i] x[r][i] of `outs` <= OUTS outputs
template <int R>
inline void dots(const float* w, int64_t stride, int outs, const float* const* x, int64_t n,
                 float (*sums)[OUTS]) {
    vec part[OUTS][R] = {};
    for (int o = 0; o < outs; ++o) lanes<R>(w + o * stride, x, n, part[o]);
    for (int r = 0; r < R; ++r) {
        const vec4 found = totals(part[0][r], part[1][r], part[2][r], part[3][r]);
        memcpy(sums[r], &found, sizeof(found));
    }
}

// take(row, first output, outputs, sums) for `outs` outputs of any number of rows x[0..rows)
template <class Take>
inline void products(const float* w, int64_t stride, int64_t outs, const float* const* x,
                     int64_t rows, int64_t n, Take take) {
    float sums[ROWS][OUTS];
    for (int64_t o = 0; o < outs; o += OUTS) {
        const int many = static_cast<int>(outs - o < OUTS ? outs - o : OUTS);
        const float* own = w + o * stride;
        int64_t next = 0;
        for (int64_t r = 0; r < rows; r += ROWS) {
            const int few = static_cast<int>(rows - r < ROWS ? rows - r : ROWS);
            // while a block of weights is used by many rows, the next one comes
            if (rows > ROWS)
                for (const int64_t end = OUTS * n * (r + few) / rows; next < end; next += LINE)
                    __builtin_prefetch(own + OUTS * stride + next);
            switch (few) {
                case 1: dots<1>(own, stride, many, x + r, n, sums); break;
                case 2: dots<2>(own, stride, many, x + r, n, sums); break;
                case 3: dots<3>(own, stride, many, x + r, n, sums); break;
                default: dots<4>(own, stride, many, x + r, n, sums);
            }
            for (int j = 0; j < few; ++j) take(r + j, o, many, sums[j]);
        }
    }
}

// out[r][i] += sum_j p[r][j] w[j * stride + i], for i < n and j < count; rows lie `apart` in p, out
template <int R>
inline void weighted(const float* w, int64_t stride, int64_t count, const float* p, int64_t p_apart,
                     int64_t n, float* out, int64_t out_apart) {
    constexpr int WIDE = 2;
    int64_t i = 0;
    for (; i + WIDE * LANES <= n; i += WIDE * LANES) {
        vec acc[R][WIDE];
        for (int r = 0; r < R; ++r)
            for (int k = 0; k < WIDE; ++k) acc[r][k] = load(out + r * out_apart + i + k * LANES);
        for (int64_t j = 0; j < count; ++j) {
            vec own[WIDE];
            for (int k = 0; k < WIDE; ++k) own[k] = load(w + j * stride + i + k * LANES);
            for (int r = 0; r < R; ++r)
                for (int k = 0; k < WIDE; ++k) acc[r][k] += own[k] * p[r * p_apart + j];
        }
        for (int r = 0; r < R; ++r) memcpy(out + r * out_apart + i, acc[r], sizeof(acc[r]));
    }
    for (; i < n; ++i)
        for (int r = 0; r < R; ++r) {
            float sum = out[r * out_apart + i];
            for (int64_t j = 0; j < count; ++j)
                sum = std::fma(w[j * stride + i], p[r * p_apart + j], sum);
            out[r * out_apart + i] = sum;
        }
}

inline void weighted_rows(const float* w, int64_t stride, int64_t count, const float* p,
                          int64_t p_apart, int64_t n, float* out, int64_t out_apart, int rows) {
    switch (rows) {
        case 1: return weighted<1>(w, stride, count, p, p_apart, n, out, out_apart);
        case 2: return weighted<2>(w, stride, count, p, p_apart, n, out, out_apart);
        case 3: return weighted<3>(w, stride, count, p, p_apart, n, out, out_apart);
        default: return weighted<4>(w, stride, count, p, p_apart, n, out, out_apart);
    }
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
