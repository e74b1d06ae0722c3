// Kimi Delta Attention between its projections (K3 report §2.1.1), token by token: convolution,
// gate, recurrence, head norm and output gate, in place on the states' pages. The windows of drafts
// are replayed as `openk3.ops.kda.decode` says (§5.4.2).
#pragma once

#include "program.h"
#include "vectors.h"

constexpr int TAPS = 4;

// Projections of tokens, rows of heads * width (beta: heads).
struct Tokens {
    const float *q, *k, *v, *g, *beta;
};

struct Kda {
    Tokens x;
    const float* gate;
    const float* taps[3];  // of q, k, v: [heads * width, 1, TAPS]
    const float *A_log, *dt_bias, *norm;
    float* out;
    char* pool;
    Tokens pending;  // [windows, capacity, ...], or null
    int64_t page_bytes, conv_offset, group, heads, width, capacity;
    float lower_bound, scale, eps;
};

// One head of one layer: where its memory lies, and room for a token.
struct Head {
    float *S, *conv[3];  // S [width, width]; the last TAPS inputs of each convolution, `apart` apart
    int64_t apart;
    float rate;
    std::vector<float> q, k, v, decay, o, copy;

    // Its memory in a page.
    void place(const Kda& a, int64_t page, int64_t h) {
        char* base = a.pool + page * a.page_bytes;
        S = reinterpret_cast<float*>(base) + h * a.width * a.width;
        apart = a.heads * a.width;
        for (int c = 0; c < 3; ++c)
            conv[c] = reinterpret_cast<float*>(base + a.conv_offset) + c * TAPS * apart + h * a.width;
    }

    void save(const Kda& a, int64_t page, int64_t h) const {
        Head to;
        to.place(a, page, h);
        memcpy(to.S, S, a.width * a.width * sizeof(float));
        for (int c = 0; c < 3; ++c)
            for (int j = 0; j < TAPS; ++j)
                memcpy(to.conv[c] + j * to.apart, conv[c] + j * apart, a.width * sizeof(float));
    }

    // Go on with a copy: what the page holds stays.
    void leave(int64_t width) {
        copy.resize(width * width + 3 * TAPS * width);
        memcpy(copy.data(), S, width * width * sizeof(float));
        S = copy.data();
        for (int c = 0; c < 3; ++c) {
            float* to = S + width * width + c * TAPS * width;
            for (int j = 0; j < TAPS; ++j)
                memcpy(to + j * width, conv[c] + j * apart, width * sizeof(float));
            conv[c] = to;
        }
        apart = width;
    }
};

inline void convolve(float* last, int64_t apart, const float* taps, const float* x, int64_t width,
                     float* __restrict y) {
    const float *a = last + apart, *b = last + 2 * apart, *c = last + 3 * apart;
    for (int64_t i = 0; i < width; ++i) {
        const float* w = taps + i * TAPS;
        const float sum = a[i] * w[0] + b[i] * w[1] + c[i] * w[2] + x[i] * w[3];
        y[i] = sum * sigmoid(sum);
    }
    for (int j = 0; j + 1 < TAPS; ++j)
        memcpy(last + j * apart, last + (j + 1) * apart, width * sizeof(float));
    memcpy(last + (TAPS - 1) * apart, x, width * sizeof(float));
}

inline void unit(float* x, int64_t width, float scale) {
    const float by = scale / std::sqrt(sum_of_squares(x, width) + 1e-6f);
    for (int64_t i = 0; i < width; ++i) x[i] *= by;
}

// S <- Diag(decay) S;  S <- S + beta k (v - S^T k)^T;  o = S^T q    (eq. 1), for C vectors of
// columns: no column looks at another.
template <int C>
inline void recur(const Head& head, int64_t width, int64_t column, float beta, float* o) {
    vec error[C], out[C] = {};
    for (int c = 0; c < C; ++c) error[c] = load(&head.v[column + c * LANES]);
    for (int64_t i = 0; i < width; ++i) {
        const float* row = head.S + i * width + column;
        const float k = head.decay[i] * head.k[i];
        for (int c = 0; c < C; ++c) error[c] -= load(row + c * LANES) * k;
    }
    for (int64_t i = 0; i < width; ++i) {
        float* row = head.S + i * width + column;
        const float k = head.k[i] * beta, q = head.q[i], decay = head.decay[i];
        for (int c = 0; c < C; ++c) {
            const vec s = load(row + c * LANES) * decay + error[c] * k;
            store(row + c * LANES, s);
            out[c] += s * q;
        }
    }
    for (int c = 0; c < C; ++c) store(o + column + c * LANES, out[c]);
}

inline void recur_one(const Head& head, int64_t width, int64_t column, float beta, float* o) {
    float error = head.v[column], out = 0, *S = head.S + column;
    for (int64_t i = 0; i < width; ++i) error -= S[i * width] * (head.decay[i] * head.k[i]);
    for (int64_t i = 0; i < width; ++i) {
        S[i * width] = S[i * width] * head.decay[i] + error * (head.k[i] * beta);
        out += S[i * width] * head.q[i];
    }
    o[column] = out;
}

inline void advance(const Kda& a, Head& head, int64_t h, const Tokens& x, int64_t row) {
    const int64_t width = a.width, at = (row * a.heads + h) * width, own = h * width;
    const float* in[3] = {x.q + at, x.k + at, x.v + at};
    float* made[3] = {head.q.data(), head.k.data(), head.v.data()};
    for (int c = 0; c < 3; ++c)
        convolve(head.conv[c], head.apart, a.taps[c] + own * TAPS, in[c], width, made[c]);
    unit(head.q.data(), width, a.scale);
    unit(head.k.data(), width, 1.0f);
    const float *g = x.g + at, *bias = a.dt_bias + own;
    float* decay = head.decay.data();
    for (int64_t i = 0; i < width; ++i)
        decay[i] = fast_exp(a.lower_bound * sigmoid(head.rate * (g[i] + bias[i])));
    const float beta = sigmoid(x.beta[row * a.heads + h]);
    int64_t column = 0;
    for (; column + 4 * LANES <= width; column += 4 * LANES)
        recur<4>(head, width, column, beta, head.o.data());
    for (; column + 2 * LANES <= width; column += 2 * LANES)
        recur<2>(head, width, column, beta, head.o.data());
    for (; column + LANES <= width; column += LANES)
        recur<1>(head, width, column, beta, head.o.data());
    for (; column < width; ++column) recur_one(head, width, column, beta, head.o.data());
}

inline void keep_window(const Kda& a, const Segment& s, int64_t h) {
    const int64_t width = a.width;
    for (int64_t t = 0; t < s.count; ++t) {
        const int64_t from = (s.first + t) * a.heads + h;
        const int64_t to = (s.window * a.capacity + t) * a.heads + h;
        const float* in[4] = {a.x.q, a.x.k, a.x.v, a.x.g};
        const float* out[4] = {a.pending.q, a.pending.k, a.pending.v, a.pending.g};
        for (int i = 0; i < 4; ++i)
            memcpy(const_cast<float*>(out[i]) + to * width, in[i] + from * width,
                   width * sizeof(float));
        const_cast<float*>(a.pending.beta)[to] = a.x.beta[from];
    }
}

inline void kda_head(const Kda& a, const Pass& pass, const Segment& s, int64_t h) {
    thread_local Head head;
    for (auto* x : {&head.q, &head.k, &head.v, &head.decay, &head.o}) x->resize(a.width);
    head.rate = fast_exp(a.A_log[h]);
    const int64_t live = s.states[a.group];
    head.place(a, live, h);
    const bool windowed = s.window >= 0;
    if (windowed) {
        for (int64_t t = 0; t < s.accepted; ++t)
            advance(a, head, h, a.pending, s.window * a.capacity + t);
        keep_window(a, s, h);
        head.leave(a.width);
    }
    const int64_t* save = s.saves;
    for (int64_t t = 0; t < s.count; ++t) {
        const int64_t row = s.first + t, at = (row * a.heads + h) * a.width;
        advance(a, head, h, a.x, row);
        float* out = a.out + at;
        rms_norm(head.o.data(), a.norm, a.eps, a.width, out);
        for (int64_t i = 0; i < a.width; ++i) out[i] *= sigmoid(a.gate[at + i]);
        if (windowed && t + 1 == s.advance) head.save(a, live, h);
        for (; save < s.saves + s.num_saves * (1 + pass.groups) && *save == t + 1;
             save += 1 + pass.groups)
            head.save(a, save[1 + a.group], h);
    }
}

inline void record_kda(Program& program, const Kda& a) {
    program.add([=](const Pass& pass) { return int64_t(pass.segments.size()) * a.heads; },
                [=](const Pass& pass, int64_t task) {
                    kda_head(a, pass, pass.segments[task / a.heads], task % a.heads);
                });
}
