// Sums of products over a few rows at once.
//
// `products` has three ways, by the number of rows: few read each weight once, in order, straight
// from memory; some lie side by side in the lanes of a vector; many make up for turning the weights
// first. Each way takes a row's sums in an order of its own, which is the same at every call.
#pragma once

#include <vector>

#include "vectors.h"

constexpr int OUTS = 4;                     // outputs whose sums are taken together
constexpr int ROWS = 4;                     // rows that share a reading of the weights
constexpr int MANY = 64;                    // rows from which on the weights are turned first
constexpr int PANEL = 2 * LANES;            // outputs, and
constexpr int STRIP = LANES == 16 ? 8 : 4;  // rows, whose sums fit the registers
constexpr int LINE = 16;                    // floats of a cache line

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

// Rows side by side for each i: out[i * W + r] = x[r][i], zero from `rows` on.
template <int W>
inline void turn(const float* const* x, int rows, int64_t n, float* out) {
    for (int r = 0; r < W; r += 4) {
        float* to = out + r;
        int64_t i = 0;
        for (; r + 4 <= rows && i + 4 <= n; i += 4) {
            vec4 a, b, c, d;
            memcpy(&a, x[r] + i, sizeof(a)), memcpy(&b, x[r + 1] + i, sizeof(b));
            memcpy(&c, x[r + 2] + i, sizeof(c)), memcpy(&d, x[r + 3] + i, sizeof(d));
            const vec4 ab = PICK(a, b, 0, 4, 1, 5), cd = PICK(c, d, 0, 4, 1, 5);
            const vec4 AB = PICK(a, b, 2, 6, 3, 7), CD = PICK(c, d, 2, 6, 3, 7);
            const vec4 columns[4] = {PICK(ab, cd, 0, 1, 4, 5), PICK(ab, cd, 2, 3, 6, 7),
                                     PICK(AB, CD, 0, 1, 4, 5), PICK(AB, CD, 2, 3, 6, 7)};
            for (int j = 0; j < 4; ++j) memcpy(to + (i + j) * W, &columns[j], sizeof(vec4));
        }
        for (; i < n; ++i)
            for (int j = 0; j < 4; ++j) to[i * W + j] = r + j < rows ? x[r + j][i] : 0;
    }
}

// sums[o], a row in each lane, = sum_i w[o * stride + i] turned[i]; meanwhile `next` comes, the
// weights that are read after these, line by line: asked for at once they would be waited for.
template <int O>
inline void beside(const float* w, int64_t stride, const float* turned, int64_t n,
                   const float* next, vec* sums) {
    vec acc[O][2] = {};
    int64_t i = 0;
    for (; i + 2 <= n; i += 2)
        for (int c = 0; c < 2; ++c) {
            if ((i + c) % (LINE / O) == 0) __builtin_prefetch(next + (i + c) * O);
            const vec x = load(turned + (i + c) * LANES);
            for (int o = 0; o < O; ++o) acc[o][c] += x * w[o * stride + i + c];
        }
    for (int o = 0; o < O; ++o) sums[o] = acc[o][0] + acc[o][1];
    for (; i < n; ++i)
        for (int o = 0; o < O; ++o) sums[o] += load(turned + i * LANES) * w[o * stride + i];
}

// `products` for some rows, of which each takes a lane.
template <class Take>
inline void lane_products(const float* w, int64_t stride, int64_t outs, const float* const* x,
                          int64_t rows, int64_t n, Take take) {
    thread_local std::vector<float> turned;
    turned.resize((rows + LANES - 1) / LANES * n * LANES);
    for (int64_t r = 0; r < rows; r += LANES)
        turn<LANES>(x + r, static_cast<int>(rows - r < LANES ? rows - r : LANES), n, &turned[r * n]);
    vec lanes[OUTS] = {};
    for (int64_t o = 0; o < outs; o += OUTS) {
        const int many = static_cast<int>(outs - o < OUTS ? outs - o : OUTS);
        const float* own = w + o * stride;
        for (int64_t r = 0; r < rows; r += LANES) {
            const float* next = own + (r == 0 ? OUTS * stride : 0);
            if (many == OUTS)
                beside<OUTS>(own, stride, &turned[r * n], n, next, lanes);
            else
                for (int i = 0; i < many; ++i)
                    beside<1>(own + i * stride, stride, &turned[r * n], n, next, lanes + i);
            const float* own_rows[OUTS];
            float sums[LANES][OUTS];
            for (int i = 0; i < OUTS; ++i) own_rows[i] = reinterpret_cast<const float*>(lanes + i);
            turn<OUTS>(own_rows, OUTS, LANES, sums[0]);
            for (int64_t j = 0; j < LANES && r + j < rows; ++j) take(r + j, o, many, sums[j]);
        }
    }
}

// sums[r][o] = sum_i panel[i][o] x[r][i]; meanwhile `lines` cache lines from `next` on come
template <int R>
inline void panel_dots(const float* panel, const float* const* x, int64_t n, const float* next,
                       int64_t lines, float (*sums)[PANEL]) {
    const int64_t pause = n / (lines + 1);
    int64_t wait = pause;
    vec acc[R][2] = {};
    for (int64_t i = 0; i < n; ++i) {
        if (--wait < 0) {
            __builtin_prefetch(next);
            next += LINE, wait = pause;
        }
        const vec a = load(panel + i * PANEL), b = load(panel + i * PANEL + LANES);
        for (int r = 0; r < R; ++r) {
            acc[r][0] += a * x[r][i];
            acc[r][1] += b * x[r][i];
        }
    }
    for (int r = 0; r < R; ++r) memcpy(sums[r], acc[r], sizeof(acc[r]));
}

// `products` for many rows, which make up for turning the weights.
template <class Take>
inline void panel_products(const float* w, int64_t stride, int64_t outs, const float* const* x,
                           int64_t rows, int64_t n, Take take) {
    thread_local std::vector<float> panel;
    panel.resize(n * PANEL);
    const float* weights[PANEL];
    float sums[STRIP][PANEL];
    const int64_t lines = PANEL * n * STRIP / (rows * LINE);
    for (int64_t o = 0; o < outs; o += PANEL) {
        const int many = static_cast<int>(outs - o < PANEL ? outs - o : PANEL);
        for (int i = 0; i < many; ++i) weights[i] = w + (o + i) * stride;
        turn<PANEL>(weights, many, n, panel.data());
        const float* next = w + (o + PANEL) * stride;
        for (int64_t r = 0; r < rows;) {
            const int few = r + STRIP <= rows ? STRIP : 1;
            if (few == STRIP)
                panel_dots<STRIP>(panel.data(), x + r, n, next + r / STRIP * lines * LINE, lines, sums);
            else
                panel_dots<1>(panel.data(), x + r, n, next, 0, sums);
            for (int j = 0; j < few; ++j) take(r + j, o, many, sums[j]);
            r += few;
        }
    }
}

// take(row, first output, outputs, sums) for `outs` outputs of any number of rows x[0..rows)
template <class Take>
inline void products(const float* w, int64_t stride, int64_t outs, const float* const* x,
                     int64_t rows, int64_t n, Take take) {
    if (rows >= MANY) return panel_products(w, stride, outs, x, rows, n, take);
    int64_t begin = 0;  // of the rows that are too few for lanes of their own
    if (rows > LANES / 2) {
        begin = rows % LANES > LANES / 2 ? rows : rows - rows % LANES;
        lane_products(w, stride, outs, x, begin, n, take);
        if (begin == rows) return;
    }
    float sums[ROWS][OUTS];
    for (int64_t o = 0; o < outs; o += OUTS) {
        const int many = static_cast<int>(outs - o < OUTS ? outs - o : OUTS);
        const float* own = w + o * stride;
        for (int64_t r = begin; r < rows; r += ROWS) {
            const int few = static_cast<int>(rows - r < ROWS ? rows - r : ROWS);
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
    for (int few; rows > 0; rows -= few, p += few * p_apart, out += few * out_apart) {
        few = rows >= STRIP ? STRIP : rows >= 4 ? 4 : rows;
        switch (few) {
            case 1: weighted<1>(w, stride, count, p, p_apart, n, out, out_apart); break;
            case 2: weighted<2>(w, stride, count, p, p_apart, n, out, out_apart); break;
            case 3: weighted<3>(w, stride, count, p, p_apart, n, out, out_apart); break;
            case 4: weighted<4>(w, stride, count, p, p_apart, n, out, out_apart); break;
            default: weighted<STRIP>(w, stride, count, p, p_apart, n, out, out_apart);
        }
    }
}
