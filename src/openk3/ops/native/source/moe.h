// Stable LatentMoE's routed experts (K3 report §2.3): each chosen expert's weights are read once,
// for all rows that chose it.
#pragma once

#include <algorithm>

#include "linear.h"
#include "products.h"
#include "program.h"

struct Moe {
    const float *scores, *bias;  // router logits [rows, experts], [experts]
    const float* latent;         // [rows, width]
    const float *w1, *w3, *w2;   // [experts, inner, width] twice, [experts, width, inner]
    const float* norm;           // [width], of the sum
    float *gate, *up, *mixed;    // [rows * top_k, inner] twice, [rows * top_k, width]
    float* out;                  // [rows, width]
    int64_t experts, top_k, width, inner;
    float scaling, beta1, beta2, eps;
};

// What the router decided: choices [rows, top_k], and their order by expert.
struct Routes {
    std::vector<float> weights, probability, biased;
    std::vector<int64_t> ids, order, active, begin;  // begin[i]: first place in order of active[i]
};

// The top_k experts by probability + bias, the best first, weighed by probability alone (eq. 11).
inline void choose(const Moe& a, Routes& routes, int64_t row) {
    const float* logits = a.scores + row * a.experts;
    float *p = routes.probability.data(), *biased = routes.biased.data();
    for (int64_t e = 0; e < a.experts; ++e) p[e] = sigmoid(logits[e]);
    for (int64_t e = 0; e < a.experts; ++e) biased[e] = p[e] + a.bias[e];
    float* weights = &routes.weights[row * a.top_k];
    float sum = 0;
    for (int64_t j = 0; j < a.top_k; ++j) {
        const int64_t best = std::max_element(biased, biased + a.experts) - biased;
        routes.ids[row * a.top_k + j] = best;
        sum += weights[j] = p[best];
        biased[best] = -INFINITY;
    }
    for (int64_t j = 0; j < a.top_k; ++j) weights[j] = weights[j] / (sum + 1e-20f) * a.scaling;
}

inline void route(const Moe& a, Routes& routes, int64_t rows) {
    const int64_t pairs = rows * a.top_k;
    routes.probability.resize(a.experts), routes.biased.resize(a.experts);
    routes.weights.resize(pairs), routes.ids.resize(pairs), routes.order.resize(pairs);
    for (int64_t row = 0; row < rows; ++row) choose(a, routes, row);
    for (int64_t i = 0; i < pairs; ++i) routes.order[i] = i;
    std::stable_sort(routes.order.begin(), routes.order.end(),
                     [&](int64_t x, int64_t y) { return routes.ids[x] < routes.ids[y]; });
    routes.active.clear(), routes.begin.clear();
    for (int64_t i = 0; i < pairs; ++i) {
        const int64_t expert = routes.ids[routes.order[i]];
        if (routes.active.empty() || routes.active.back() != expert) {
            routes.active.push_back(expert);
            routes.begin.push_back(i);
        }
    }
    routes.begin.push_back(pairs);
}

// The choices of one active expert: their inputs' rows, and which they are.
struct Group {
    std::vector<const float*> rows;
    const int64_t* pairs;
    int64_t expert;

    Group(const Routes& routes, int64_t index, const float* x, int64_t width, int64_t share) {
        pairs = &routes.order[routes.begin[index]];
        expert = routes.active[index];
        for (int64_t i = routes.begin[index]; i < routes.begin[index + 1]; ++i)
            rows.push_back(x + routes.order[i] / share * width);
    }
};

inline void experts_in(const Moe& a, const Routes& routes, int64_t index, int64_t first) {
    const Group group(routes, index, a.latent, a.width, a.top_k);
    const int64_t many = std::min(CHUNK, a.inner - first);
    const int64_t skip = (group.expert * a.inner + first) * a.width;
    const auto into = [&](float* out) {
        return [&, out](int64_t row, int64_t o, int count, const float* sums) {
            memcpy(out + group.pairs[row] * a.inner + first + o, sums, count * sizeof(float));
        };
    };
    const int64_t rows = group.rows.size();
    products(a.w1 + skip, a.width, many, group.rows.data(), rows, a.width, into(a.gate));
    products(a.w3 + skip, a.width, many, group.rows.data(), rows, a.width, into(a.up));
    for (int64_t r = 0; r < rows; ++r) {
        const int64_t at = group.pairs[r] * a.inner + first;
        situ(a.gate + at, a.up + at, a.gate + at, many, a.beta1, a.beta2);
    }
}

inline void experts_out(const Moe& a, const Routes& routes, int64_t index, int64_t first) {
    const Group group(routes, index, a.gate, a.inner, 1);
    const int64_t many = std::min(CHUNK, a.width - first);
    products(a.w2 + (group.expert * a.width + first) * a.inner, a.inner, many, group.rows.data(),
             group.rows.size(), a.inner, [&](int64_t row, int64_t o, int count, const float* sums) {
                 memcpy(a.mixed + group.pairs[row] * a.width + first + o, sums,
                        count * sizeof(float));
             });
}

inline void combine(const Moe& a, const Routes& routes, int64_t row) {
    float* out = a.out + row * a.width;
    for (int64_t j = 0; j < a.top_k; ++j) {
        const float* x = a.mixed + (row * a.top_k + j) * a.width;
        const float weight = routes.weights[row * a.top_k + j];
        for (int64_t i = 0; i < a.width; ++i) out[i] = j ? out[i] + weight * x[i] : weight * x[i];
    }
    rms_norm(out, a.norm, a.eps, a.width, out);
}

// Four phases: choices, first products, second ones, the sum of each row.
inline void record_experts(Program& program, const Moe& a) {
    const auto routes = std::make_shared<Routes>();
    const auto per_expert = [=, &program](int64_t outs, auto products_of) {
        program.phases.emplace_back();
        program.add(
            [=](const Pass& pass) {
                return std::min(a.experts, pass.rows * a.top_k) * chunks(outs);
            },
            [=](const Pass&, int64_t task) {
                const int64_t index = task / chunks(outs);
                if (index < int64_t(routes->active.size()))
                    products_of(a, *routes, index, task % chunks(outs) * CHUNK);
            });
    };
    program.add([](const Pass& pass) { return int64_t(pass.rows > 0); },
                [=](const Pass& pass, int64_t) { route(a, *routes, pass.rows); });
    per_expert(a.inner, experts_in);
    per_expert(a.width, experts_out);
    program.phases.emplace_back();
    program.add([](const Pass& pass) { return pass.rows; },
                [=](const Pass&, int64_t row) { combine(a, *routes, row); });
}
