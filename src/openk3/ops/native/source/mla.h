// Gated MLA's attention over paged latents (K3 report §2.1.2), absorbed: per head the query is
// brought into the latent space, attends there, and the result is brought back. The softmax runs
// over the positions in blocks, in order, so that a row's result depends on its position alone.
#pragma once

#include "products.h"
#include "program.h"

constexpr int64_t BLOCK = 128;  // positions at a time

struct Mla {
    const float *q, *kv_a, *gate;  // rows of heads * (nope + rope), latent + rope, heads * value
    const float *norm, *kv_b;      // [latent], [heads * (nope + value), latent]
    float* out;
    char* pool;
    int64_t page_bytes, page_tokens, heads, nope, rope, value, latent;
    float eps, scale;
};

// Each row's normed latent and rope part, to the place of its position.
inline void record_latents(Program& program, const Mla& a) {
    program.add(
        [](const Pass& pass) { return int64_t(pass.segments.size()); },
        [=](const Pass& pass, int64_t task) {
            const Segment& s = pass.segments[task];
            const int64_t width = a.latent + a.rope;
            for (int64_t t = 0; t < s.count; ++t) {
                const int64_t at = s.start + t;
                float* to = reinterpret_cast<float*>(
                                a.pool + s.pages[at / a.page_tokens] * a.page_bytes) +
                            at % a.page_tokens * width;
                const float* from = a.kv_a + (s.first + t) * width;
                rms_norm(from, a.norm, a.eps, a.latent, to);
                memcpy(to + a.latent, from + a.latent, a.rope * sizeof(float));
            }
        });
}

// The running softmax of a few rows.
struct Attention {
    std::vector<float> query, sums, weights;
    float peak[TILE], total[TILE];

    // Take `count` positions of keys, the first at `position`; row r sees up to `last` + r.
    void take(const float* keys, int64_t width, int64_t latent, int64_t count, int64_t position,
              int64_t last, int rows, float scale) {
        const float* queries[TILE];
        for (int r = 0; r < rows; ++r) queries[r] = &query[r * width];
        float* p = weights.data();
        products(keys, width, count, queries, rows, width,
                 [&](int64_t row, int64_t o, int many, const float* found) {
                     for (int i = 0; i < many; ++i) p[row * BLOCK + o + i] = found[i] * scale;
                 });
        for (int r = 0; r < rows; ++r) {
            float* own = p + r * BLOCK;
            const int64_t seen = last + r + 1 - position < count ? last + r + 1 - position : count;
            for (int64_t i = seen < 0 ? 0 : seen; i < count; ++i) own[i] = 0;
            if (seen <= 0) continue;
            float top = peak[r];
            for (int64_t i = 0; i < seen; ++i) top = own[i] > top ? own[i] : top;
            const float shrink = fast_exp(peak[r] - top);
            float sum = 0;
            for (int64_t i = 0; i < seen; ++i) own[i] = fast_exp(own[i] - top);
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < seen; ++i) sum += own[i];
            total[r] = total[r] * shrink + sum;
            peak[r] = top;
            for (int64_t i = 0; i < latent; ++i) sums[r * latent + i] *= shrink;
        }
        weighted_rows(keys, width, count, p, BLOCK, latent, sums.data(), latent, rows);
    }
};

inline void attend(const Mla& a, const Pass& pass, const Tile& tile, int64_t h) {
    thread_local Attention own;
    const Segment& s = pass.segments[tile.segment];
    const int64_t width = a.latent + a.rope, key = a.nope + a.rope, row = s.first + tile.first;
    const int rows = static_cast<int>(tile.count);
    own.query.assign(TILE * width, 0.0f);
    own.sums.assign(TILE * a.latent, 0.0f);
    own.weights.resize(TILE * BLOCK);
    const float* up = a.kv_b + h * (a.nope + a.value) * a.latent;
    const float* q = a.q + (row * a.heads + h) * key;
    weighted_rows(up, a.latent, a.nope, q, a.heads * key, a.latent, own.query.data(), width, rows);
    for (int r = 0; r < rows; ++r) {
        memcpy(&own.query[r * width + a.latent], q + r * a.heads * key + a.nope,
               a.rope * sizeof(float));
        own.peak[r] = -INFINITY, own.total[r] = 0;
    }
    const int64_t last = s.start + tile.first, end = last + rows;
    for (int64_t at = 0; at < end;) {
        const int64_t inside = at % a.page_tokens;
        int64_t count = a.page_tokens - inside < BLOCK ? a.page_tokens - inside : BLOCK;
        count = end - at < count ? end - at : count;
        const char* page = a.pool + s.pages[at / a.page_tokens] * a.page_bytes;
        own.take(reinterpret_cast<const float*>(page) + inside * width, width, a.latent, count, at,
                 last, rows, a.scale);
        at += count;
    }
    const float* found[TILE];
    for (int r = 0; r < rows; ++r) found[r] = &own.sums[r * a.latent];
    products(up + a.nope * a.latent, a.latent, a.value, found, rows, a.latent,
             [&](int64_t r, int64_t o, int many, const float* sums) {
                 const int64_t at = ((row + r) * a.heads + h) * a.value + o;
                 for (int i = 0; i < many; ++i)
                     a.out[at + i] = sums[i] / own.total[r] * sigmoid(a.gate[at + i]);
             });
}

inline void record_attend(Program& program, const Mla& a) {
    program.add([=](const Pass& pass) { return int64_t(pass.tiles.size()) * a.heads; },
                [=](const Pass& pass, int64_t task) {
                    attend(a, pass, pass.tiles[task / a.heads], task % a.heads);
                });
}
