"""Small device functions shared by the Triton KDA kernels.

Slots: unit j (a tile of 16 tokens, a block of 64, a segment) of sequence n lies at slot
cu[n] // unit + n + j. Because floor((a + b) / unit) is at least floor(a / unit) + floor(b / unit),
the slots of different sequences never meet, whatever the lengths, and there are at most
T / unit + N: no prefix sum, no table, no copy to the host.
"""

# Calls between jit functions look to a type checker like calls from Python.
# pyright: reportGeneralTypeIssues=false, reportCallIssue=false, reportArgumentType=false

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
L2_EPS = tl.constexpr(1e-6)
COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def exp2(x):
    """2^x; results below 2^-126 become zero, which saves the hardware path four instructions."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return tl.exp2(x)


@triton.jit
def log2(x):
    """log2 of x to 22 bits; the exact one takes eight times the instructions."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return tl.log2(x)


@triton.jit
def to_bf16(x):
    """Rounds pairs: converted one by one they would queue for the special-function units."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], dtype=tl.bfloat16, is_pure=True, pack=2
        )
    else:  # noqa: RET505
        return x.to(tl.bfloat16)


@triton.jit
def reciprocal(x):
    """1 / x to one unit in the last place, for x at least 1."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return 1.0 / x


@triton.jit
def sigmoid(x):
    """1 / (1 + e^-x); exactly 0 at -inf."""
    return reciprocal(1.0 + exp2(x * -LOG2E))


@triton.jit
def halves(x):
    """float32 -> two bf16 that add up to it to 16 bits; in the interpreter x itself and nothing."""
    if COMPILED:
        high = to_bf16(x)
        return high, to_bf16(x - high.to(tl.float32))
    else:  # noqa: RET505
        return x, x


@triton.jit
def dot_halves(a, a_rest, b, b_rest, c):
    """c + A B of operands split by `halves`, to 16 bits."""
    if COMPILED:
        return tl.dot(a, b, tl.dot(a_rest, b, tl.dot(a, b_rest, c)))
    else:  # noqa: RET505
        return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def plus(a, b):
    """a + b of float32; the compiler does not make it the first term of a product."""
    if COMPILED:
        return tl.inline_asm_elementwise(
            "add.f32 $0, $1, $2;", "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:  # noqa: RET505
        return a + b


@triton.jit
def dot_halves_apart(a, a_rest, b, b_rest, c):
    """As `dot_halves`, its products side by side: a third of the latency where rows are long."""
    if COMPILED:
        return plus(tl.dot(a, b, c), plus(tl.dot(a_rest, b), tl.dot(a, b_rest)))
    else:  # noqa: RET505
        return tl.dot(a, b, c, input_precision="ieee")


@triton.jit
def locate(slot, cu, tokens, num_seqs, unit, PACKED: tl.constexpr):
    """Slot -> (sequence, index of the unit in it, first row of the sequence, its length).

    The last 32 candidates are looked at together: each step of a bisection waits for a load.
    """
    if PACKED:
        low = 0
        high = num_seqs
        while high - low > 32:
            middle = (low + high) // 2
            if tl.load(cu + middle).to(tl.int32) // unit + middle <= slot:
                low = middle
            else:
                high = middle
        at = low + tl.arange(0, 32)
        begin = tl.load(cu + at, at < high, 0).to(tl.int32)
        end = tl.load(cu + at + 1, at < high, 0).to(tl.int32)
        here = (at < high) & (begin // unit + at <= slot)  # n and all before it
        n = tl.max(tl.where(here, at, 0), 0)
        start = tl.max(tl.where(here, begin, 0), 0)
        length = tl.max(tl.where(here, end, 0), 0) - start
        index = slot - (start // unit + n)
    else:
        units = tl.maximum(tl.cdiv(tokens, unit), 1)
        n = slot // units
        index = slot - n * units
        start = n * tokens
        length = tokens
    return n, index, start, length


@triton.jit
def first_slot(n, start, tokens, unit, PACKED: tl.constexpr):
    """The slot of unit 0 of sequence n, which begins at row `start`."""
    if PACKED:
        return start // unit + n
    else:  # noqa: RET505
        return n * tl.maximum(tl.cdiv(tokens, unit), 1)
