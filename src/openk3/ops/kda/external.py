"""Other projects' KDA kernels behind our signature: optional, detected, used only when asked for.

flash-linear-attention (`fla`), FlashKDA (`flash_kda`, inference only) and attention-gym
(`attn_gym`, whose gate and norms are outside the kernel). None is a dependency.
"""

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from openk3.ops.kda import reference
from openk3.ops.kda.call import KdaCall


@cache
def installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def usable(
    module: str, *, device: torch.device, dtype: torch.dtype, with_states: bool
) -> tuple[bool, str]:
    """What all three need."""
    if not installed(module):
        return False, f"the package {module} is not installed"
    if device.type != "cuda":
        return False, f"{module} needs a CUDA device; the tensors are on {device.type}"
    if dtype != torch.bfloat16:
        return False, f"{module} is driven with bfloat16 only, not {dtype}"
    if with_states:
        return False, f"{module} does not give states at requested positions"
    return True, f"{module} is installed"


def fla_usable(
    *, device: torch.device, dtype: torch.dtype, with_states: bool, **_: Any
) -> tuple[bool, str]:
    return usable("fla", device=device, dtype=dtype, with_states=with_states)


def flash_kda_usable(
    *,
    device: torch.device,
    dtype: torch.dtype,
    with_states: bool,
    width: int,
    value_width: int,
    needs_grad: bool,
    **_: Any,
) -> tuple[bool, str]:
    if (width, value_width) != (128, 128):
        return False, f"flash_kda takes head widths of 128, not {width} and {value_width}"
    if needs_grad:
        return False, "flash_kda has no backward; run it under torch.no_grad()"
    return usable("flash_kda", device=device, dtype=dtype, with_states=with_states)


def attn_gym_usable(
    *, device: torch.device, dtype: torch.dtype, with_states: bool, **_: Any
) -> tuple[bool, str]:
    if not installed("cutlass"):
        return False, "attn_gym's fused kernels need the package nvidia-cutlass-dsl"
    return usable("attn_gym", device=device, dtype=dtype, with_states=with_states)


def kda_fla(call: KdaCall) -> Any:
    """fla.ops.kda.chunk_kda with norms, gate and sigmoid in the kernels."""
    from fla.ops.kda import chunk_kda

    return chunk_kda(
        q=call.q,
        k=call.k,
        v=call.v,
        g=call.g,
        beta=call.beta,
        A_log=call.A_log.float(),
        dt_bias=None if call.dt_bias is None else call.dt_bias.float(),
        scale=call.scale,
        initial_state=call.initial_state,
        output_final_state=call.output_final_state,
        use_qk_l2norm_in_kernel=True,
        use_gate_in_kernel=True,
        use_beta_sigmoid_in_kernel=True,
        safe_gate=True,
        lower_bound=call.lower_bound,
        cu_seqlens=_offsets(call, torch.int64),
    )


def kda_flash_kda(call: KdaCall) -> Any:
    """flash_kda.fwd; its states are [V, K]."""
    import flash_kda

    q, bias = call.q, call.dt_bias
    heads, width = q.shape[2:]
    bias = q.new_zeros(heads, width, dtype=torch.float32) if bias is None else bias.float()
    final = q.new_empty(call.state_shape, dtype=torch.float32)
    o = torch.empty_like(call.v)
    flash_kda.fwd(
        *(x.contiguous() for x in (q, call.k, call.v, call.g, call.beta)),
        call.scale,
        o,
        A_log=call.A_log.float(),
        dt_bias=bias.view(heads, width),
        lower_bound=call.lower_bound,
        initial_state=_transposed_state(call),
        final_state=final if call.output_final_state else None,
        cu_seqlens=_offsets(call, torch.int64),
    )
    return o, final.mT.contiguous() if call.output_final_state else None


def kda_attn_gym(call: KdaCall) -> Any:
    """attn_gym's chunk_kda on activated inputs; its states are [V, K]."""
    from attn_gym.linear.kda import chunk_kda

    q, k, v = call.q, call.k, call.v
    qn, kn, _, decay, b = reference.activate(
        *(q, k, v, call.g, call.beta, call.A_log, call.dt_bias, call.lower_bound), scale=1.0
    )
    o, final = chunk_kda(
        qn.to(q.dtype),
        kn.to(q.dtype),
        v,
        decay,
        b,
        _transposed_state(call),
        cu_seqlens=_offsets(call, torch.int32),
        scale=call.scale,
        output_final_state=call.output_final_state,
    )
    return o, final.mT.contiguous() if call.output_final_state else None


def _offsets(call: KdaCall, dtype: torch.dtype) -> Tensor | None:
    return None if call.cu_seqlens is None else call.cu_seqlens.to(call.q.device, dtype)


def _transposed_state(call: KdaCall) -> Tensor | None:
    return None if call.initial_state is None else call.initial_state.mT.contiguous()
