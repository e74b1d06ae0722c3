"""SiTU-GLU inside Triton kernels (K3 report eq. 12): value, derivatives, elementwise passes.

tanh and sigmoid come from exponentials of negative numbers, which cannot overflow.

Legend: R rows, F columns of gate and of up.
"""

import triton
import triton.language as tl


@triton.jit
def fast_exp2(x, ASM: tl.constexpr):
    """2^x for x <= 0; results below 2^-126 become zero."""
    if ASM:
        y = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = tl.exp2(x)
    return y


@triton.jit
def fast_reciprocal(x, ASM: tl.constexpr):
    """1 / x to one unit in the last place, x in [1, 8]."""
    if ASM:
        y = tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        y = 1.0 / x
    return y


@triton.jit
def _decay(x, rate, ASM: tl.constexpr):
    """(y = rate |x|, exp(-y))."""
    return tl.abs(x) * rate, fast_exp2(tl.abs(x) * (rate * -1.4426950408889634), ASM)


@triton.jit
def _rise(y, decay, SMALL: tl.constexpr):
    """1 - exp(-y). SMALL: also to float32's last bits where the subtraction cancels, which results
    in 16 bits cannot show."""
    rise = 1.0 - decay
    if SMALL:
        series = y * (1.0 - y * (0.5 - y * (0.16666667 - y * 0.041666667)))
        rise = tl.where(y < 0.05, series, rise)
    return rise


@triton.jit
def situ(gate, up, beta1, beta2, CAP: tl.constexpr, SMALL: tl.constexpr, ASM: tl.constexpr):
    """beta1 tanh(g / beta1) sigmoid(g) * beta2 tanh(u / beta2), float32, with one division."""
    y, e = _decay(gate, 2.0 / beta1, ASM)
    _, s = _decay(gate, 1.0, ASM)
    top = beta1 * _rise(y, e, SMALL)
    top = tl.where(gate < 0, -top * s, top)
    bottom = (1 + e) * (1 + s)
    if CAP:
        z, v = _decay(up, 2.0 / beta2, ASM)
        cap = beta2 * _rise(z, v, SMALL)
        top = top * tl.where(up < 0, -cap, cap)
        bottom = bottom * (1 + v)
    else:
        top = top * up
    return top * fast_reciprocal(bottom, ASM)


@triton.jit
def situ_backward(
    gate, up, d_act, beta1, beta2, CAP: tl.constexpr, SMALL: tl.constexpr, ASM: tl.constexpr
):
    """(act, d_gate, d_up), float32."""
    y, e = _decay(gate, 2.0 / beta1, ASM)
    _, s = _decay(gate, 1.0, ASM)
    t = _rise(y, e, SMALL) * fast_reciprocal(1 + e, ASM)
    t = tl.where(gate < 0, -t, t)
    sigmoid = tl.where(gate < 0, s, 1.0) * fast_reciprocal(1 + s, ASM)
    value = up
    slope = 1.0
    if CAP:
        z, v = _decay(up, 2.0 / beta2, ASM)
        w = _rise(z, v, SMALL) * fast_reciprocal(1 + v, ASM)
        value = beta2 * tl.where(up < 0, -w, w)
        slope = 1 - w * w
    activated = beta1 * t * sigmoid
    d_gate = d_act * value * ((1 - t * t) * sigmoid + activated * (1 - sigmoid))
    return activated * value, d_gate, d_act * activated * slope


@triton.jit(do_not_specialize=["R"])
def situ_rows(
    gate_ptr, up_ptr, act, last_row, R, beta1, beta2,
    PITCH: tl.constexpr, F: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    CAP: tl.constexpr, LIMIT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """act [R, F] of gate and up, whose rows lie PITCH apart; LIMIT: only last_row[0] rows."""
    SMALL: tl.constexpr = act.dtype.element_ty == tl.float32
    num_rows = R
    if LIMIT:
        num_rows = tl.load(last_row)
    for first in tl.range(tl.program_id(0) * BR, num_rows, tl.num_programs(0) * BR):
        row = (first + tl.arange(0, BR)).to(tl.int64)[:, None]
        for start in tl.static_range(0, F, BC):
            col = start + tl.arange(0, BC)[None, :]
            mask = (row < num_rows) & (col < F)
            gate = tl.load(gate_ptr + row * PITCH + col, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(up_ptr + row * PITCH + col, mask=mask, other=0.0).to(tl.float32)
            value = situ(gate, up, beta1, beta2, CAP, SMALL, ASM)
            tl.store(act + row * F + col, value.to(act.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["R"])
def situ_rows_backward(
    gate_ptr, up_ptr, d_act, row_weight, d_gate_ptr, d_up_ptr, scaled_act, d_weight, last_row, R,
    beta1, beta2,
    PITCH: tl.constexpr, F: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
    CAP: tl.constexpr, WEIGHTED: tl.constexpr, LIMIT: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Gradients of gate and up from d_act [R, F]; gate, up and theirs have rows PITCH apart.

    WEIGHTED: d_act is the gradient before the row's router weight p; then both gradients and
    scaled_act [R, F] = p act carry p, and d_weight [R] float32 = <d_act, act>: the router's
    gradient without the expert's output ever being stored. scaled_act may be d_act itself.
    """
    num_rows = R
    if LIMIT:
        num_rows = tl.load(last_row)
    dtype: tl.constexpr = d_act.dtype.element_ty
    SMALL: tl.constexpr = dtype == tl.float32
    for first in tl.range(tl.program_id(0) * BR, num_rows, tl.num_programs(0) * BR):
        row = (first + tl.arange(0, BR)).to(tl.int64)[:, None]
        used = row < num_rows
        p = tl.full([BR, 1], 1.0, tl.float32)
        if WEIGHTED:
            p = tl.load(row_weight + row, mask=used, other=0.0)
        dot = tl.zeros([BR, BC], tl.float32)
        for start in tl.static_range(0, F, BC):
            col = start + tl.arange(0, BC)[None, :]
            mask = used & (col < F)
            gate = tl.load(gate_ptr + row * PITCH + col, mask=mask, other=0.0).to(tl.float32)
            up = tl.load(up_ptr + row * PITCH + col, mask=mask, other=0.0).to(tl.float32)
            d = tl.load(d_act + row * F + col, mask=mask, other=0.0).to(tl.float32)
            value, d_gate, d_up = situ_backward(gate, up, d, beta1, beta2, CAP, SMALL, ASM)
            tl.store(d_gate_ptr + row * PITCH + col, (d_gate * p).to(dtype), mask=mask)
            tl.store(d_up_ptr + row * PITCH + col, (d_up * p).to(dtype), mask=mask)
            if WEIGHTED:
                tl.store(scaled_act + row * F + col, (value * p).to(dtype), mask=mask)
                dot += value * d
        if WEIGHTED:
            tl.store(d_weight + row, tl.sum(dot, 1)[:, None], mask=used)
