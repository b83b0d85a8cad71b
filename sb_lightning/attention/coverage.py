"""Coverage of the routing score, and the choice of budgets from it, inside the forward."""

from __future__ import annotations

import math
import operator

import torch
from torch import Tensor

from sb_lightning._messages import explain
from sb_lightning.attention import coverage_reference
from sb_lightning.attention.autocast import cast_as_autocast
from sb_lightning.attention.backends import choose_backend
from sb_lightning.attention.checks import INT32_MAX, check_bound
from sb_lightning.attention.functional import prepare
from sb_lightning.tuning.coverage import ROW_STRIDE

__all__ = ["moba_budget", "moba_coverage"]


def moba_coverage(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    *,
    block_size: int,
    max_rank: int | None = None,
    max_seqlen: int | None = None,
    row_stride: int = ROW_STRIDE,
    backend: str | None = None,
) -> Tensor:
    """Return how a query's routing score is spread over its earlier blocks: mass by rank, before selection.

    For a row with earlier blocks, the softmax over them of D^-0.5 * q . mean(k), sorted descending; the mean
    over sampled rows. The sum of the first k - 1 ranks, averaged over heads, is the coverage C(k) of budget
    k: what the paper calls cumulative score coverage (SparseBalance, arXiv 2604.13847, figure 4). Sampled are
    every `row_stride`-th row of a sequence and each block's last. A sequence of one block has no such row,
    and no mass. No gradient; the same bits for any number of threads.

    Args:
        q: # [T, Hq, D], as for `moba_attention`
        k: # [T, Hkv, D]
        cu_seqlens: Where sequences start, and the end # [N + 1] int32
        block_size: Keys per block, a multiple of 16.
        max_rank: Ranks to return: the largest budget of interest less 1. As `max_seqlen` has if None.
        max_seqlen: Bound of the lengths. Read from `cu_seqlens` if None, except under `torch.compile`. On a
            GPU, where it is given, nothing in `cu_seqlens` is read or checked.
        row_stride: Distance of the sampled rows.
        backend: "cpu", "cuda", "reference" or None for the best available.

    Returns:
        # [N, Hq, max_rank] fp32; a row never falls from right to left and sums to at most 1.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: A shape, dtype or value cannot work; the message names the argument.
        RuntimeError: The backend does not run here.

    Example:
        >>> q, k = torch.randn(100, 4, 64), torch.randn(100, 2, 64)
        >>> cu_seqlens = torch.tensor([0, 70, 100], dtype=torch.int32)
        >>> moba_coverage(q, k, cu_seqlens, block_size=32).shape
        torch.Size([2, 4, 2])
    """
    chosen, _, block_size, max_seqlen, _, _, cu_seqlens = prepare(
        q, k, None, cu_seqlens, 1, block_size, max_seqlen, 1, backend
    )
    check_bound("max_rank", max_rank)
    if max_rank is None:
        blocks = (max_seqlen + block_size - 1) // block_size
        max_rank = torch.sym_max(0, blocks - 1)  # type: ignore[no-untyped-call]
    elif not torch.compiler.is_compiling() and operator.index(max_rank) < 0:
        raise ValueError(
            explain(f"max_rank is {max_rank}", "it counts ranks", "pass the largest budget less 1")
        )
    if row_stride < 1:
        raise ValueError(
            explain(
                f"row_stride is {row_stride}", "rows are sampled at that distance", "pass 64, or 1 for all"
            )
        )
    q, k = cast_as_autocast(q, k)
    if chosen == "reference":
        return coverage_reference.moba_coverage(
            q,
            k,
            cu_seqlens,
            block_size=block_size,
            max_rank=max_rank,
            max_seqlen=max_seqlen,
            row_stride=row_stride,
        )
    with torch.no_grad():
        mass: Tensor = torch.ops.sb.moba_coverage(
            q, k, cu_seqlens, block_size, max_seqlen, max_rank, row_stride
        )
    return mass


def moba_budget(
    mass: Tensor,
    cost_us: Tensor,
    tau_us: int | Tensor,
    tolerance: float | Tensor,
    k0: int | Tensor,
    min_budget: int = 1,
    *,
    cu_seqlens: Tensor | None = None,
    block_size: int = 0,
    row_stride: int = ROW_STRIDE,
    tune_short: bool = False,
    backend: str | None = None,
) -> Tensor:
    """Choose the budget of each sequence of a micro-batch for one layer; the rule is `tuning.choose_budgets`.

    Mass is rounded once, to 2^-30; then whole numbers are compared, so that every device chooses alike.
    Numbers that change from step to step are tensors, and none of them compiles anything anew.

    Args:
        mass: Share of routing score by rank, at least max_budget - 1 ranks # [N, Hq, max_rank] fp32
        cost_us: Time of each sequence at budgets 1 to max_budget, never falling # [N, max_budget] int32
        tau_us: What all sequences together may take, in microseconds.
        tolerance: Largest change of coverage, in [0, 1]; 0 tunes nothing.
        k0: Budget when nothing is tuned; one, or one per sequence # [N]
        min_budget: No budget is lowered below it.
        cu_seqlens: Where sequences start, and the end # [N + 1] int32. It tells how much a sequence's
            coverage weighs and which `k0` covers whole; without it all weigh the same and none is short.
        block_size: Keys per block, with `cu_seqlens`.
        row_stride: That of `moba_coverage`.
        tune_short: Also cut sequences that `k0` covers whole.
        backend: "cpu", "cuda", "reference" or None for the best available.

    Returns:
        # [N] int32

    Raises:
        ValueError: A shape, dtype or value cannot work; the message names the argument.
        RuntimeError: The backend does not run here.

    Example:
        >>> mass = torch.tensor([[[0.6, 0.3, 0.1]]])
        >>> times = torch.tensor([[10, 20, 30, 40]], dtype=torch.int32)
        >>> moba_budget(mass, times, tau_us=25, tolerance=0.35, k0=3)
        tensor([2], dtype=torch.int32)
    """
    chosen = choose_backend(backend, mass.device.type)
    fits = mass.dim() == 3 and cost_us.dim() == 2 and mass.shape[0] == cost_us.shape[0]
    if not fits or mass.shape[1] < 1 or cost_us.shape[1] < 1 or mass.shape[2] < cost_us.shape[1] - 1:
        raise ValueError(
            explain(
                f"mass has shape {tuple(mass.shape)} and cost_us {tuple(cost_us.shape)}",
                "a cost for each budget needs the mass of one rank less",
                "pass mass [sequences, heads, >= max_budget - 1] and cost_us [sequences, max_budget]",
            )
        )
    if mass.dtype != torch.float32 or cost_us.dtype != torch.int32:
        raise ValueError(
            explain(
                f"mass is {mass.dtype} and cost_us {cost_us.dtype}",
                "the choice reads float32 and int32",
                "pass what moba_coverage returns, and times from LatencyTable.cost_us",
            )
        )
    if cost_us.device != mass.device or (cu_seqlens is not None and cu_seqlens.device != mass.device):
        where = "" if cu_seqlens is None else f" and cu_seqlens on {cu_seqlens.device}"
        raise ValueError(
            explain(
                f"mass is on {mass.device}, cost_us on {cost_us.device}{where}",
                "the choice is made on one device",
                "move them to that of mass",
            )
        )
    if cu_seqlens is not None and cu_seqlens.dtype != torch.int32:
        raise ValueError(
            explain(
                f"cu_seqlens is {cu_seqlens.dtype}", "the choice reads int32", "pass that of the attention"
            )
        )
    if cu_seqlens is not None and (block_size < 1 or cu_seqlens.shape != (mass.shape[0] + 1,)):
        raise ValueError(
            explain(
                f"cu_seqlens has shape {tuple(cu_seqlens.shape)} and block_size is {block_size}",
                "together they give the blocks of each sequence",
                "pass those of the attention",
            )
        )
    numbers = (
        _tensor("tau_us", tau_us, torch.int64, mass),
        _tensor("tolerance", tolerance, torch.float32, mass),
        _tensor("k0", k0, torch.int32, mass),
    )
    for name, number, sizes in zip(
        ("tau_us", "tolerance", "k0"), numbers, (1, 1, mass.shape[0]), strict=True
    ):
        if number.dim() > 1 or number.numel() not in (1, sizes):
            raise ValueError(
                explain(
                    f"{name} has shape {tuple(number.shape)}",
                    "tau_us and tolerance are one number, k0 is one or one per sequence",
                    f"pass {name} of that shape",
                )
            )
    if chosen == "reference":
        return coverage_reference.moba_budget(
            mass,
            cost_us,
            *numbers,
            min_budget,
            cu_seqlens=cu_seqlens,
            block_size=block_size,
            row_stride=row_stride,
            tune_short=tune_short,
        )
    with torch.no_grad():
        budgets: Tensor = torch.ops.sb.moba_budget(
            mass, cost_us, *numbers, min_budget, cu_seqlens, block_size, row_stride, tune_short
        )
    return budgets


def _tensor(name: str, value: float | Tensor, dtype: torch.dtype, like: Tensor) -> Tensor:
    """Return a number as a tensor of the dtype that the op reads."""
    if isinstance(value, Tensor):
        whole = not value.is_floating_point() and value.dtype != torch.bool
        if whole != (dtype != torch.float32) or value.device != like.device:
            raise ValueError(
                explain(
                    f"{name} is {value.dtype} on {value.device}",
                    "tolerance is a share, and tau_us and k0 count; the choice is made where mass is",
                    f"pass {name} as {dtype} on {like.device}",
                )
            )
        # What int32 does not hold must not wrap around; its largest stands for a length that is not known.
        return value.clamp(max=INT32_MAX - 1).to(dtype) if dtype == torch.int32 else value.to(dtype)
    if not torch.compiler.is_compiling():
        if dtype != torch.float32:
            value = operator.index(value)  # type: ignore[arg-type]
            if name == "k0" and not 1 <= value < INT32_MAX:
                raise ValueError(
                    explain(f"k0 is {value}", "it counts blocks", "pass 1 or more, below 2^31 - 1")
                )
        elif not 0 <= value < math.inf:
            raise ValueError(explain(f"{name} is {value}", "it is a share", f"pass {name} between 0 and 1"))
    return torch.full((), value, dtype=dtype, device=like.device)
