"""The planner as one Triton program, so that a plan never leaves the GPU; see `planner.py`.

Every home shares out its tokens at the same time: each step moves one (rank, expert) share of each.

Legend: R ranks, B experts a rank owns, E = R B.
"""

import triton
import triton.language as tl


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
    most = tl.max(balance, 0)
    while most > 0:
        donor = tl.argmax(balance, 0)
        receiver = tl.argmin(balance, 0)
        lack = tl.min(balance, 0)
        donor_of = tl.where(rank == receiver, donor, donor_of)
        amount = tl.where(rank == receiver, -lack, amount)
        balance = tl.where(rank == donor, balance + lack, balance)
        balance = tl.where(rank == receiver, 0, balance)
        most = tl.max(balance, 0)

    quota = tl.where(donor_of[None, :] == rank[:, None], amount[None, :], 0)  # [home, receiver]
    most = tl.max(amount, 0)
    while most > 0:
        receiver = tl.argmax(quota, 1)
        chosen = tl.argmax(left, 1)
        moved = tl.minimum(tl.max(quota, 1), tl.max(left, 1))
        place = receiver * E + rank * B + chosen
        tl.store(alloc + place, moved.to(tl.int64), mask=moved > 0)
        quota -= tl.where(rank[None, :] == receiver[:, None], moved[:, None], 0)
        left -= tl.where(column == chosen[:, None], moved[:, None], 0)
        most = tl.max(tl.max(quota, 1), 0)
    tl.store(alloc + rank[:, None] * E + expert, left.to(tl.int64), mask=mask)
