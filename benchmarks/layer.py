"""One K3 layer at real width with 1/8 of the experts: time, share of the dense rate, memory.

    python benchmarks/layer.py [--tokens 8192] [--repeats 7]

112 experts, top-16, two shared experts. First the LatentMoE alone, then a whole decoder layer (KDA
with AttnRes over 9 sources). FLOP are those of the products; KDA's chunk arithmetic is left out.
"""

import argparse
from dataclasses import replace

import torch

from gpu import Clock, attempt, header
from openk3.config import preset
from openk3.model.block import K3Layer
from openk3.model.moe import LatentMoE
from openk3.model.ports import Context


def build(kind, config, index):
    with torch.device("cuda"):
        module = kind(config, index)
    for name, p in module.named_parameters():
        if p.ndim > 1:
            torch.nn.init.normal_(p, std=p.shape[-1] ** -0.5)
        elif "norm" in name:
            torch.nn.init.ones_(p)
        else:
            torch.nn.init.normal_(p, std=0.1)
    return cast(module).train()


def cast(module):
    """bfloat16 but for what the model keeps in float32."""
    kept = ("A_log", "dt_bias", "conv", "o_norm", "e_score_correction_bias")
    for name, p in [*module.named_parameters(), *module.named_buffers()]:
        if p.is_floating_point() and not any(k in name for k in kept):
            p.data = p.data.bfloat16()
    return module


def moe_flop(config, tokens):
    d, latent = config.hidden_size, config.routed_expert_hidden_size
    inner, k = config.moe_intermediate_size, config.num_experts_per_token
    per_token = d * config.num_experts + 2 * d * latent
    per_token += 3 * k * latent * inner + 3 * d * config.num_shared_experts * inner
    return 2 * per_token * tokens


def kda_flop(module, tokens):
    matrices = [p.numel() for n, p in module.self_attn.named_parameters() if n.endswith("weight")
                and p.ndim == 2]  # fmt: skip
    return 2 * sum(matrices) * tokens


def kept_bytes(config, tokens):
    """Activations of a LatentMoE kept for the backward pass, bf16 [T, ...] unless said.

    x d; the latent L; gate and up of every routed row 2 k F and of the shared experts 2 s F; the
    shared activation s F; the mix L and its norm L; routing 16 k bytes and tables 8 k.
    """
    d, latent = config.hidden_size, config.routed_expert_hidden_size
    inner, k = config.moe_intermediate_size, config.num_experts_per_token
    shared = config.num_shared_experts * inner
    return tokens * (2 * (d + 3 * latent + 2 * k * inner + 3 * shared) + 24 * k)


def measure(clock, dense, title, run, parameters, flop, x):
    out = run(x)
    d_out = torch.randn_like(out)

    def both():
        torch.autograd.grad(run(x), [x, *parameters], d_out, allow_unused=True)

    forward = torch.no_grad()(lambda: run(x))
    times = clock.compare({"forward": forward, "both": both})
    a, b = times["forward"], times["both"]
    print(
        f"{title}: forward {a:.2f} ms {flop / a / 1e9:.0f} TFLOP/s {flop / a / dense:.0%} of dense"
        f" | forward+backward {b:.2f} ms {3 * flop / b / 1e9:.0f} TFLOP/s "
        f"{3 * flop / b / dense:.0%}", flush=True,
    )  # fmt: skip


def memory(run, parameters, x, expected):
    def step():
        out = run(x)
        kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
        ones = torch.ones_like(out)
        grads = torch.autograd.grad(out, [x, *parameters], ones, allow_unused=True)
        del out
        made = sum(g.numel() * g.element_size() for g in grads if g is not None)
        return kept, torch.cuda.max_memory_allocated() - before - made

    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    kept, peak = step()
    print(
        f"  kept for backward {kept / 2**30:.3f} GiB, formula {expected / 2**30:.3f} GiB "
        f"({kept / expected - 1:+.1%}); peak beyond gradients {peak / 2**30:.3f} GiB"
    )


def latent_moe(clock, dense, config, tokens):
    module = build(LatentMoE, config, 1)
    x = torch.randn(1, tokens, config.hidden_size, device="cuda").bfloat16().requires_grad_()
    parameters = list(module.parameters())

    def run(x):
        return module(x, Context())

    flop = moe_flop(config, tokens)
    for beside in (False, True):
        module.overlap = beside
        title = f"LatentMoE, shared experts {'beside' if beside else 'in turn'}"
        measure(clock, dense, title, run, parameters, flop, x)
    memory(run, parameters, x, kept_bytes(config, tokens) - x.numel() * 2)


def whole(clock, dense, config, tokens):
    index = 1
    layer = build(K3Layer, config, index)
    shape = (1, tokens, config.hidden_size)
    bank = [torch.randn(shape, device="cuda").bfloat16() for _ in range(8)]
    x = torch.randn(shape, device="cuda").bfloat16().requires_grad_()

    def run(x):
        return layer(bank, x, Context())[1]

    flop = moe_flop(config, tokens) + kda_flop(layer, tokens)
    measure(clock, dense, "K3 layer (KDA)", run, list(layer.parameters()), flop, x)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    clock = Clock(args.repeats)
    _, dense = header(clock)
    config = replace(preset("k3"), num_experts=112, vision=None)
    attempt("LatentMoE", lambda: latent_moe(clock, dense, config, args.tokens))
    attempt("K3 layer", lambda: whole(clock, dense, config, args.tokens))


if __name__ == "__main__":
    main()
