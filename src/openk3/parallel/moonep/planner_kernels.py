"""The planner as one Triton program, so that a plan never leaves the GPU; see `planner.py`.

Every home shares out its tokens at the same time: each step moves one (rank, expert) share of each.
A maximum and its place come from one reduction of value * PAD + (PAD - 1 - index): ties go to the
smaller index, and argmax inside `while` is more than Triton 3.6's compiler can take.

Legend: R ranks, B experts a rank owns, E = R B.
"""

import triton
import triton.language as tl


@triton.jit
def _key(value, index, PAD: tl.constexpr):
    return value.to(tl.int64) * PAD + (PAD - 1 - index)


@triton.jit
def plan_ranks(
    counts, alloc, R: tl.constexpr, B: tl.constexpr, R_PAD: tl.constexpr, B_PAD: tl.constexpr
):  # fmt: skip
    """counts [R, E] int64 -> alloc [R, E] int64."""
    E: tl.constexpr = R * B
    rank = tl.arange(0, R_PAD)
    column = tl.arange(0, B_PAD)[None, :]
    expert = rank[:, None] * B + column
    mask = (rank < R)[:, None] & (column < B)
    left = tl.zeros([R_PAD, B_PAD], tl.int32)
    for source in tl.range(0, R):
        left += tl.load(counts + source * E + expert, mask=mask, other=0).to(tl.int32)
        tl.store(alloc + source * E + expert, tl.zeros([R_PAD, B_PAD], tl.int64), mask=mask)
    tl.debug_barrier()  # shares are written below by other threads than these zeros

    load = tl.sum(left, 1)
    total = tl.sum(load, 0)
    share = total // R + (rank < total % R).to(tl.int32)
    balance = tl.where(rank < R, load - share, 0)
    donor_of = tl.full([R_PAD], -1, tl.int32)
    amount = tl.zeros([R_PAD], tl.int32)
    most = tl.max(_key(balance, rank, R_PAD), 0)
    while most >= R_PAD:  # the fullest rank has at least one token too many
        donor = (R_PAD - 1 - most % R_PAD).to(tl.int32)
        least = tl.max(_key(-balance, rank, R_PAD), 0)
        receiver = (R_PAD - 1 - least % R_PAD).to(tl.int32)
        lack = (least // R_PAD).to(tl.int32)
        donor_of = tl.where(rank == receiver, donor, donor_of)
        amount = tl.where(rank == receiver, lack, amount)
        balance = tl.where(rank == donor, balance - lack, balance)
        balance = tl.where(rank == receiver, 0, balance)
        most = tl.max(_key(balance, rank, R_PAD), 0)

    quota = tl.where(donor_of[None, :] == rank[:, None], amount[None, :], 0)  # [home, receiver]
    open_quotas = tl.max(amount, 0)
    while open_quotas > 0:
        widest = tl.max(_key(quota, rank[None, :], R_PAD), 1)
        fullest = tl.max(_key(left, column, B_PAD), 1)
        receiver = (R_PAD - 1 - widest % R_PAD).to(tl.int32)
        chosen = (B_PAD - 1 - fullest % B_PAD).to(tl.int32)
        moved = tl.minimum(widest // R_PAD, fullest // B_PAD).to(tl.int32)
        place = receiver * E + rank * B + chosen
        tl.store(alloc + place, moved.to(tl.int64), mask=moved > 0)
        quota -= tl.where(rank[None, :] == receiver[:, None], moved[:, None], 0)
        left -= tl.where(column == chosen[:, None], moved[:, None], 0)
        open_quotas = tl.max(tl.max(quota, 1), 0)
    tl.store(alloc + rank[:, None] * E + expert, left.to(tl.int64), mask=mask)
