"""Sum the parts of all ranks, add the sum to the residual, and write its norm, in one kernel: each rank reads the
others' rows from their memory (kernels/common/peers.py says how they meet)."""

from __future__ import annotations

import torch
from torch import Tensor

import triton
import triton.language as tl
from alignedserve.kernels.common.decoder import Norm
from alignedserve.kernels.common.peers import HALF, MOST_POLLS, Peers
from alignedserve.kernels.triton.launch import interpreting, pdl, power_of_2, wait_for_kernels_before
from alignedserve.kernels.triton.tokens import kind_of, norm_of, vectors_of

_NO_NORM = Norm(None, None, 0.0, centred=False)
_NARROW = 2048


@triton.jit
def _say(flag, turn, INTERPRETED: tl.constexpr):
    """Write the turn into a flag of any rank's memory. Who reads it there sees all that this program wrote before.

    A plain store is enough, as each flag has one writer; GPUs without NVLink have no atomics on each other's memory.
    """
    if INTERPRETED:
        tl.atomic_xchg(flag, turn, sem="release", scope="sys")
    else:
        tl.inline_asm_elementwise(
            """{
            .reg .pred %first;
            .reg .u32 %thread;
            mov.u32 %thread, %tid.x;
            setp.eq.u32 %first, %thread, 0;
            @%first st.release.sys.global.u64 [$1], $2;
            mov.u32 $0, 0;
            }""",
            "=r,l,l",
            [flag, turn],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


# One kernel for all numbers of rows: no rank compiles while others wait.
@triton.jit(do_not_specialize=["rows", "counts"])
def _sum_add_norm(
    part,
    part_stride,
    x,
    row_stride,
    after,
    after_bias,
    after_eps,
    weight,
    bias,
    eps,
    out,
    addresses,
    rows,
    counts,
    RANK: tl.constexpr,
    RANKS: tl.constexpr,
    FLAGS: tl.constexpr,
    HALF: tl.constexpr,
    MOST_POLLS: tl.constexpr,
    SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    CENTRED: tl.constexpr,
    WEIGHS: tl.constexpr,
    SHIFTS: tl.constexpr,
    WIDE: tl.constexpr,
    AFTER: tl.constexpr,
    NORMS: tl.constexpr,
    INTERPRETED: tl.constexpr,
    PDL: tl.constexpr = False,
):
    """Add the sum of all ranks' rows, or the norm AFTER of it, to rows of x, and write the norm of these."""
    wait_for_kernels_before(PDL)
    channel, step = tl.program_id(0), tl.num_programs(0)
    at = tl.arange(0, WIDTH)
    there = at < SIZE
    own = tl.load(addresses + RANK)
    flags = own.to(tl.pointer_type(tl.int64)) + channel * RANKS
    turn = tl.load(flags + RANK) + 1
    half = FLAGS + (channel * 2 + turn % 2) * HALF
    to = tl.multiple_of((own + half).to(tl.pointer_type(part.dtype.element_ty)), 16)
    for number in range(tl.cdiv(rows - channel, step)):
        row = (channel + number * step).to(tl.int64)
        value = tl.load(part + row * part_stride + at, mask=there, other=0.0)
        tl.store(to + number * SIZE + at, value, mask=there)
    tl.debug_barrier()  # all threads have written their numbers, and read the turn
    for other in tl.static_range(RANKS):
        its_flags = tl.load(addresses + other).to(tl.pointer_type(tl.int64)) + channel * RANKS
        _say(its_flags + RANK, turn, INTERPRETED)
    for other in tl.static_range(RANKS):
        polls = 0
        while (tl.atomic_add(flags + other, 0, sem="acquire", scope="sys") < turn) & (polls < MOST_POLLS):
            polls += counts
    for number in range(tl.cdiv(rows - channel, step)):
        row = (channel + number * step).to(tl.int64)
        total = tl.zeros((WIDTH,), tl.float32)
        for other in tl.static_range(RANKS):
            its = (tl.load(addresses + other) + half).to(tl.pointer_type(part.dtype.element_ty))
            its = tl.multiple_of(its, 16) + number * SIZE
            total += tl.load(its + at, mask=there, other=0.0).to(tl.float32)
        added = total.to(part.dtype.element_ty)
        if AFTER:
            added = norm_of(added, after, after_bias, after_eps, at, there, SIZE, CENTRED, WEIGHS, SHIFTS, WIDE)
        kept = x + row * row_stride + at
        value = tl.load(kept, mask=there, other=0.0)
        value = (value.to(tl.float32) + added.to(tl.float32)).to(value.dtype)
        tl.store(kept, value, mask=there)
        if NORMS:
            normed = norm_of(value, weight, bias, eps, at, there, SIZE, CENTRED, WEIGHS, SHIFTS, WIDE)
            tl.store(out + row * SIZE + at, normed, mask=there)


def sum_over(peers: Peers, part: Tensor, x: Tensor, norm: Norm | None, after: Norm | None) -> Tensor:
    """Add to x, in place, the sum of all ranks' parts, or the norm `after` of it; return the norm of x, or x.

    All are [rows, hidden], and the norms are of one kind. Each rank must call this for as many rows of the same kind.
    """
    if x.shape != part.shape or x.dtype is not part.dtype or x.stride(1) != 1 or part.stride(1) != 1:
        raise ValueError(f"{tuple(part.shape)} {part.dtype} cannot be added to {tuple(x.shape)} {x.dtype}")
    first, last = after or norm or _NO_NORM, norm or after or _NO_NORM
    if not peers.takes(part) or kind_of(first) != kind_of(last):
        raise ValueError("a sum of other rows, or of other norms, than the ranks' memory and the kernel are for")
    rows, size = x.shape
    out = x if norm is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _sum_add_norm[(min(rows, peers.channels),)](
        *(part, part.stride(0), x, x.stride(0), *vectors_of(first, x), first.eps),
        *(*vectors_of(last, x), last.eps, out, peers.addresses, rows, int(peers.gives_up)),
        RANK=peers.rank,
        RANKS=peers.size,
        FLAGS=peers.flags,
        HALF=HALF,
        MOST_POLLS=MOST_POLLS,
        SIZE=size,
        WIDTH=power_of_2(size),
        AFTER=after is not None,
        NORMS=norm is not None,
        INTERPRETED=interpreting(),
        **kind_of(last),
        **pdl(x.device),
        num_warps=warps(size),
        num_stages=1,  # no row of another rank is read before that rank has said the turn
    )
    return out


def warps(size: int) -> int:
    """Return the warps for rows of this size, which a thread has in registers."""
    return 4 if size <= _NARROW else 8
