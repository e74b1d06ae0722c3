// The C interface: record a pass operation by operation, then run it as often as wanted.
#include "kda.h"
#include "linear.h"
#include "mla.h"
#include "moe.h"

extern "C" {

Program* k3_new() { return new Program; }

void k3_free(Program* program) { delete program; }

// What is recorded from here on waits for everything before it.
void k3_phase(Program* program) { program->phases.emplace_back(); }

void k3_run(const Program* program, const int64_t* numbers, int threads) {
    program->run(numbers, threads);
}

void k3_embed(Program* program, const float* table, float* out, int64_t dim) {
    record_embed(*program, table, out, dim);
}

void k3_linear(Program* program, const float* x, const float* w, float* y, int64_t n, int64_t outs,
               int add, int wanted) {
    record_linear(*program, x, w, y, n, outs, add, wanted);
}

void k3_mix_norm(Program* program, const float* const* sources, int num, const float* query,
                 const float* norm, float eps, const float* out_norm, float out_eps, int64_t dim,
                 float* out) {
    record_mix_norm(*program, sources, num, query, norm, eps, out_norm, out_eps, dim, out);
}

void k3_norm(Program* program, const float* x, const float* weight, float eps, int64_t dim,
             float* out) {
    record_norm(*program, x, weight, eps, dim, out);
}

void k3_situ(Program* program, const float* gate, const float* up, float* out, int64_t dim,
             float beta1, float beta2) {
    record_situ(*program, gate, up, out, dim, beta1, beta2);
}

void k3_kda(Program* program, const Kda* args) { record_kda(*program, *args); }

void k3_latents(Program* program, const Mla* args) { record_latents(*program, *args); }

void k3_attend(Program* program, const Mla* args) { record_attend(*program, *args); }

void k3_experts(Program* program, const Moe* args) { record_experts(*program, *args); }
}
