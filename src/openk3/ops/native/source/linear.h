// Products with weights, norms and AttnRes mixes of all rows of a pass.
#pragma once

#include "products.h"
#include "program.h"

constexpr int64_t CHUNK = 64;  // outputs of a task

inline int64_t chunks(int64_t outs) { return (outs + CHUNK - 1) / CHUNK; }

inline void record_embed(Program& program, const float* table, float* out, int64_t dim) {
    program.add([](const Pass& pass) { return pass.rows; },
                [=](const Pass& pass, int64_t row) {
                    memcpy(out + row * dim, table + pass.ids[row] * dim, dim * sizeof(float));
                });
}

// y [rows, outs] = x [rows, n] w^T, or += it; with `wanted` of the wanted rows only, in their order
inline void record_linear(Program& program, const float* x, const float* w, float* y, int64_t n,
                          int64_t outs, bool add, bool wanted) {
    program.add(
        [=](const Pass& pass) {
            return (wanted ? !pass.wanted.empty() : pass.rows > 0) ? chunks(outs) : 0;
        },
        [=](const Pass& pass, int64_t task) {
            thread_local std::vector<const float*> rows;
            rows.clear();
            if (wanted)
                for (int64_t row : pass.wanted) rows.push_back(x + row * n);
            else
                for (int64_t row = 0; row < pass.rows; ++row) rows.push_back(x + row * n);
            const int64_t first = task * CHUNK;
            const int64_t many = outs - first < CHUNK ? outs - first : CHUNK;
            products(w + first * n, n, many, rows.data(), rows.size(), n,
                     [&](int64_t row, int64_t o, int count, const float* sums) {
                         float* to = y + row * outs + first + o;
                         for (int i = 0; i < count; ++i) to[i] = add ? to[i] + sums[i] : sums[i];
                     });
        });
}

// K3 report eq. 8-10, then the norm of what reads it. One source is normed as it is.
inline void mix_norm(const float* const* sources, int num, const float* query, const float* norm,
                     float eps, const float* out_norm, float out_eps, int64_t dim, float* out) {
    float weight[16], peak = 0, sum = 0;
    for (int s = 0; s < num; ++s) {
        const float* v = sources[s];
        float score = 0;
        if (num > 1) {
#pragma omp simd reduction(+ : score)
            for (int64_t i = 0; i < dim; ++i) score += v[i] * (query[i] * norm[i]);
            score *= 1.0f / std::sqrt(sum_of_squares(v, dim) / dim + eps);
        }
        weight[s] = score;
        peak = s == 0 || score > peak ? score : peak;
    }
    for (int s = 0; s < num; ++s) sum += weight[s] = fast_exp(weight[s] - peak);
    for (int64_t i = 0; i < dim; ++i) out[i] = sources[0][i] * (weight[0] / sum);
    for (int s = 1; s < num; ++s)
        for (int64_t i = 0; i < dim; ++i) out[i] += sources[s][i] * (weight[s] / sum);
    rms_norm(out, out_norm, out_eps, dim, out);
}

inline void record_mix_norm(Program& program, const float* const* sources, int num,
                            const float* query, const float* norm, float eps, const float* out_norm,
                            float out_eps, int64_t dim, float* out) {
    const std::vector<const float*> all(sources, sources + num);
    program.add([](const Pass& pass) { return pass.rows; },
                [=](const Pass&, int64_t row) {
                    const float* own[16];
                    for (int s = 0; s < num; ++s) own[s] = all[s] + row * dim;
                    mix_norm(own, num, query, norm, eps, out_norm, out_eps, dim, out + row * dim);
                });
}

inline void record_norm(Program& program, const float* x, const float* weight, float eps,
                        int64_t dim, float* out) {
    program.add([](const Pass& pass) { return pass.rows; },
                [=](const Pass&, int64_t row) {
                    rms_norm(x + row * dim, weight, eps, dim, out + row * dim);
                });
}

// out may be gate
inline void record_situ(Program& program, const float* gate, const float* up, float* out,
                        int64_t dim, float beta1, float beta2) {
    program.add([](const Pass& pass) { return pass.rows; },
                [=](const Pass&, int64_t row) {
                    situ(gate + row * dim, up + row * dim, out + row * dim, dim, beta1, beta2);
                });
}
