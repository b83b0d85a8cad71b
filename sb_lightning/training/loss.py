"""Cross-entropy that never holds all logits, and the scale that makes a window's loss a token mean."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sb_lightning._messages import explain

__all__ = ["IGNORED", "head_losses", "linear_cross_entropy", "next_token_targets", "window_loss_scale"]

IGNORED = -100


def window_loss_scale(target_tokens: int, *, accumulate: int, ranks: int) -> float:
    """Return the factor that turns a micro-batch's sum of token losses into the loss to call backward on.

    Lightning divides a loss by `accumulate` and DDP averages gradients over `ranks`; this factor cancels
    both and divides by the target tokens of the whole window, so the gradient is that of the token mean over
    the window, however its sequences are spread over ranks and micro-batches.

    Args:
        target_tokens: Target tokens of all micro-batches of this window that run, over all ranks.
        accumulate: The Trainer's `accumulate_grad_batches`, also in a window with fewer micro-batches.
        ranks: Data-parallel size.

    Returns:
        The factor; 0 where the window has no target token.

    Raises:
        ValueError: An argument is out of range.

    Example:
        >>> window_loss_scale(1000, accumulate=4, ranks=2)
        0.008
    """
    if target_tokens < 0 or accumulate < 1 or ranks < 1:
        raise ValueError(
            explain(
                f"target_tokens={target_tokens}, accumulate={accumulate}, ranks={ranks}",
                "a window has at least one micro-batch on at least one rank",
                "pass target_tokens >= 0, accumulate >= 1 and ranks >= 1",
            )
        )
    return accumulate * ranks / target_tokens if target_tokens else 0.0


def next_token_targets(labels: Tensor) -> Tensor:
    """Shift labels # [..., T] so that position t holds the token after it; the last is ignored."""
    return F.pad(labels[..., 1:], (0, 1), value=IGNORED)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of token losses of a linear head, chunk by chunk; the gradients are made in the forward pass.

    So a chunk's logits are computed once and never kept. Source of the idea: Liger Kernel's fused linear
    cross-entropy (arXiv 2410.10989).
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, chunk_tokens: int
    ) -> Tensor:
        device = hidden.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden.dtype
        exact = torch.promote_types(torch.float32, hidden.dtype)
        rows = (targets != IGNORED).nonzero().flatten()
        need_hidden, need_weight, need_bias = ctx.needs_input_grad[:3]
        grad_hidden = torch.zeros_like(hidden) if need_hidden else None
        grad_weight = torch.zeros_like(weight, dtype=exact) if need_weight else None
        grad_bias = torch.zeros_like(bias, dtype=exact) if bias is not None and need_bias else None
        total = torch.zeros((), dtype=exact, device=hidden.device)
        with torch.autocast(device, enabled=False):
            head = weight.to(dtype)
            for part in torch.split(rows, chunk_tokens):
                inputs = hidden[part].to(dtype)
                scores = (inputs @ head.T).to(exact)
                if bias is not None:
                    scores = scores + bias
                wanted = targets[part].unsqueeze(1)
                normalizer = scores.logsumexp(1, keepdim=True)
                total += (normalizer - scores.gather(1, wanted)).sum()
                if not any((need_hidden, need_weight, need_bias)):
                    continue
                slope = scores.sub_(normalizer).exp_()
                slope.scatter_add_(1, wanted, slope.new_full(wanted.shape, -1.0))
                rounded = slope.to(dtype)
                if grad_hidden is not None:
                    grad_hidden[part] = (rounded @ head).to(hidden.dtype)
                if grad_weight is not None:
                    grad_weight += (rounded.T @ inputs).to(exact)
                if grad_bias is not None:
                    grad_bias += slope.sum(0)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        ctx.dtypes = (weight.dtype, bias.dtype if bias is not None else None)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = grads
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        weight_dtype, bias_dtype = ctx.dtypes
        return (
            None if grad_hidden is None else grad_hidden * grad.to(grad_hidden.dtype),
            None if grad_weight is None else (grad_weight * grad).to(weight_dtype),
            None if grad_bias is None else (grad_bias * grad).to(bias_dtype),
            None,
            None,
        )


def linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, *, bias: Tensor | None = None, chunk_tokens: int = 1024
) -> Tensor:
    """Return the sum over tokens of the cross-entropy of `hidden @ weight.T + bias`.

    At most `chunk_tokens` x vocabulary logits exist at a time: at 32K tokens and 152K words, all of them in
    fp32 are 20 GB. Ignored positions cost nothing.

    Args:
        hidden: Last hidden states # [T, E].
        weight: The head's weight # [V, E].
        targets: Wanted token per position, -100 where there is none # [T] int64.
        bias: The head's bias # [V], or None.
        chunk_tokens: Tokens per chunk.

    Returns:
        The sum, in fp32 (fp64 for fp64 inputs) # [].

    Raises:
        ValueError: The shapes do not match, or `chunk_tokens` is below 1.
    """
    if hidden.ndim != 2 or weight.ndim != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(
            explain(
                f"hidden has shape {tuple(hidden.shape)} and weight {tuple(weight.shape)}",
                "they are [tokens, width] and [vocabulary, width]",
                "flatten the batch of hidden and pass the head's weight",
            )
        )
    if targets.shape != hidden.shape[:1]:
        raise ValueError(
            explain(
                f"targets has shape {tuple(targets.shape)} for {hidden.shape[0]} tokens",
                "there is one target per token",
                "pass targets of shape [tokens], -100 where there is none",
            )
        )
    if chunk_tokens < 1:
        raise ValueError(
            explain(
                f"chunk_tokens is {chunk_tokens}",
                "a chunk holds at least one token",
                "pass chunk_tokens >= 1",
            )
        )
    loss: Tensor = _LinearCrossEntropy.apply(hidden, weight, bias, targets, chunk_tokens)  # type: ignore[no-untyped-call]
    return loss


def head_losses(head: nn.Module, hidden: Tensor, targets: Tensor, chunk_tokens: int) -> Tensor:
    """Return the sum of token losses for any head module.

    A plain `nn.Linear` takes `linear_cross_entropy`; another one (an adapter around the head, say) is called
    chunk by chunk under activation checkpointing.
    """
    if type(head) is nn.Linear:
        return linear_cross_entropy(hidden, head.weight, targets, bias=head.bias, chunk_tokens=chunk_tokens)

    def chunk_loss(part: Tensor, wanted: Tensor) -> Tensor:
        scores = head(part)
        return F.cross_entropy(
            scores.to(torch.promote_types(torch.float32, scores.dtype)),
            wanted,
            ignore_index=IGNORED,
            reduction="sum",
        )

    total = hidden.new_zeros((), dtype=torch.promote_types(torch.float32, hidden.dtype))
    chunks = zip(torch.split(hidden, chunk_tokens), torch.split(targets, chunk_tokens), strict=True)
    for part, wanted in chunks:
        total = total + checkpoint(chunk_loss, part, wanted, use_reentrant=False)
    return total
