"""KDA in Triton, step 2 for few heads: folding the segments that were scanned side by side.

A segment is an affine map of the state, S_end = M S_start + S_local (K3 report §5.1.2). Going over
a sequence's segments in order turns each S_local into the state after that segment; the gradient
goes backwards with M^T. All of it is float32: M's error would grow with the number of segments.

Legend: H heads, D = K = V head width; states and M are stored transposed, [V, K] and
[K_in, K_out].
"""

# Calls between jit functions look to a type checker like calls from Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl

from openk3.ops.kda.triton_math import first_slot


@triton.jit(do_not_specialize=["tokens", "segment"])
def fold_kernel(
    carry,  # [segments, H, V, K] float32, in place
    transition,  # [segments, H, K, K] float32: M^T
    cu,
    tokens,
    H,
    segment,
    D: tl.constexpr,
    V_ROWS: tl.constexpr,
    PACKED: tl.constexpr,
    REVERSE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    program = tl.program_id(0)
    part = program % (D // V_ROWS)
    h = (program // (D // V_ROWS)) % H
    n = program // (D // V_ROWS * H)
    if PACKED:
        start = tl.load(cu + n).to(tl.int32)
        length = tl.load(cu + n + 1).to(tl.int32) - start
    else:
        start = n * tokens
        length = tokens
    num_segments = tl.cdiv(length, segment)
    d = tl.arange(0, D)
    column = part * V_ROWS + tl.arange(0, V_ROWS)
    state = column[:, None] * D + d[None, :]
    square = d[:, None] * D + d[None, :]
    slot0 = first_slot(n, start, tokens, segment, PACKED)
    # forward: segments 1 .. last-1 receive the state after segment 0; backward: last-1 .. 1
    # receive the gradient at the start of segment `last`
    first = num_segments - 1 if REVERSE else 0
    here = ((slot0 + first).to(tl.int64) * H + h) * (D * D)
    S = tl.zeros([V_ROWS, D], tl.float32)
    if num_segments > 1:
        S = tl.load(carry + here + state)
    for step in tl.range(1, num_segments - 1):
        index = first - step if REVERSE else step
        here = ((slot0 + index).to(tl.int64) * H + h) * (D * D)
        M = tl.load(transition + here + square)
        if REVERSE:
            M = tl.trans(M)
        local = tl.load(carry + here + state)
        S = tl.dot(S, M, local, input_precision=PRECISION)
        tl.store(carry + here + state, S)
