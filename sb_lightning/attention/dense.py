"""The dense path on a GPU: where all queries attend all earlier keys, torch's own fused attention runs."""

from __future__ import annotations

import inspect
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

from sb_lightning.attention.autocast import cast_as_autocast

__all__ = ["covers_all", "dense_attention", "dense_paths", "takes_dense"]


def covers_all(budget: int, block_size: int, max_seqlen: int) -> bool:
    """Return whether a budget attends all blocks of any sequence; False where a compiler cannot know.

    Example:
        >>> covers_all(4, 64, 256), covers_all(4, 64, 257)
        (True, False)
    """
    return _is_known(budget * block_size >= max_seqlen)


def _is_known(condition: Any) -> bool:
    if not torch.compiler.is_compiling():
        return bool(condition)
    from torch.fx.experimental.symbolic_shapes import guard_or_false

    return guard_or_false(condition)


def _flash_refusal() -> str:
    """Return why torch's flash attention does not run here; empty where it does."""
    if not torch.backends.cuda.is_flash_attention_available():
        return f"torch {torch.__version__} is built without flash attention"
    if not torch.backends.cuda.flash_sdp_enabled():  # type: ignore[no-untyped-call]
        return "torch.backends.cuda.enable_flash_sdp(False) was called"
    return ""


def _packed_refusal() -> str:
    """Return why torch's attention over packed sequences does not run here; empty where it does."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return f"torch {torch.__version__} has no varlen_attn"
    known = inspect.signature(varlen_attn).parameters
    missing = [name for name in ("scale", "window_size") if name not in known]
    return f"varlen_attn of torch {torch.__version__} has no {missing[0]}" if missing else ""


def _packed_takes_groups() -> bool:
    """Return whether varlen_attn takes fewer KV heads than query heads: from torch 2.12 on."""
    from torch.nn.attention.varlen import varlen_attn

    return "enable_gqa" in inspect.signature(varlen_attn).parameters


# Constants to the compiler, as in backends.py.
_flash_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]
_packed_refusal._dynamo_marked_constant = True  # type: ignore[attr-defined]
_packed_takes_groups._dynamo_marked_constant = True  # type: ignore[attr-defined]


def dense_paths() -> str:
    """Say for `sb doctor` what runs where all queries attend all earlier keys."""
    if refusal := _flash_refusal():
        return f"the kernels of this package; {refusal}"
    one = "scaled_dot_product_attention for one sequence"
    if refusal := _packed_refusal():
        return f"{one}, for several the kernels of this package; {refusal}"
    if not _packed_takes_groups():
        less = "with fewer KV heads than query heads the kernels of this package"
        return f"{one}, varlen_attn for several; {less} (varlen_attn takes none before torch 2.12)"
    return f"{one}, varlen_attn for several"


def takes_dense(q: Tensor, k: Tensor, cu_seqlens: Tensor, scale: float) -> bool:
    """Return whether `dense_attention` can run; what it is asked of tensors, a compiler guards.

    A transform of `torch.func` or a forward-mode derivative takes the kernels' own way, which knows them.
    """
    transformed = forward_ad._current_level >= 0
    if not torch.compiler.is_compiling():
        transformed = transformed or torch._C._functorch.peek_interpreter_stack() is not None
    # Flash attention takes the maximum before it scales.
    if transformed or not (_is_known(scale > 0) and _is_known(q.shape[0] > 0)) or _flash_refusal():
        return False
    if _is_known(cu_seqlens.shape[0] == 2):
        return True
    return not _packed_refusal() and (_is_known(q.shape[1] == k.shape[1]) or _packed_takes_groups())


def dense_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, max_seqlen: int, scale: float
) -> Tensor:
    """Attend all earlier keys of each sequence, with gradients, by torch's fused kernels.

    Args:
        q: # [T, Hq, D], T > 0
        k: # [T, Hkv, D]
        v: # [T, Hkv, D]
        cu_seqlens: # [N + 1] int32
        max_seqlen: Bound of the lengths.
        scale: Factor of the logits, above 0.

    Returns:
        # [T, Hq, D], contiguous
    """
    q, k, v = (_readable(x) for x in cast_as_autocast(q, k, v))
    has_groups = not _is_known(q.shape[1] == k.shape[1])
    if _is_known(cu_seqlens.shape[0] == 2):
        query, key, value = (x.transpose(0, 1)[None] for x in (q, k, v))
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scale, enable_gqa=has_groups
        )
        return out[0].transpose(0, 1).contiguous()
    from torch.nn.attention.varlen import varlen_attn

    cu_seqlens = cu_seqlens.contiguous()
    options: dict[str, Any] = {"scale": scale, "window_size": (-1, 0)}  # causal
    if has_groups:
        options["enable_gqa"] = True
    packed = varlen_attn(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, **options)
    assert isinstance(packed, Tensor)
    return packed.contiguous()


def _readable(x: Tensor) -> Tensor:
    """Copy what cannot be read 16 bytes at a time: torch's kernels take it for granted."""
    # A compiler does not know where a view starts; the tensors that it hands on start where torch allocates.
    start = 0 if torch.compiler.is_compiling() else x.storage_offset()
    whole = x.stride(2) == 1 and all(n % 8 == 0 for n in (x.stride(0), x.stride(1), start))
    return x if whole else x.clone(memory_format=torch.contiguous_format)
