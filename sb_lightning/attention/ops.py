"""What torch needs to know of the ops besides their kernels: shapes, gradient, autocast rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from sb_lightning._messages import explain
from sb_lightning.attention.autocast import cast_as_autocast
from sb_lightning.attention.extension import EXTENSION
from sb_lightning.attention.flops import register_flops

__all__ = ["register_ops", "run_attention"]


def _select_shape(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    budget: Tensor,
    block_size: int,
    max_seqlen: int,
    max_budget: int,
) -> Tensor:
    return q.new_empty((q.shape[1], q.shape[0], max_budget - 1), dtype=torch.int16)


def _index_shapes(
    selection: Tensor, cu_seqlens: Tensor, budget: Tensor, block_size: int, group: int
) -> tuple[Tensor, Tensor]:
    num_heads, tokens, width = selection.shape
    num_lists = num_heads // group * (tokens // block_size + cu_seqlens.shape[0] - 1)
    lists = selection.new_empty(num_lists + 1, dtype=torch.int64)
    return lists, selection.new_empty(tokens * num_heads * width, dtype=torch.int32)


def _forward_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    selection: Tensor,
    list_ptr: Tensor,
    list_rows: Tensor,
    cu_seqlens: Tensor,
    budget: Tensor,
    block_size: int,
    max_seqlen: int,
    scale: float,
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


def _backward_shapes(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    selection: Tensor,
    list_ptr: Tensor,
    list_rows: Tensor,
    cu_seqlens: Tensor,
    budget: Tensor,
    block_size: int,
    max_seqlen: int,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _attention_shapes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    budget: Tensor,
    block_size: int,
    max_seqlen: int,
    max_budget: int,
    scale: float,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    lse = q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)
    selection = q.new_empty((q.shape[1], q.shape[0], max_budget - 1), dtype=torch.int16)
    return q.new_empty(q.shape), lse, selection


def _coverage_shape(
    q: Tensor,
    k: Tensor,
    cu_seqlens: Tensor,
    block_size: int,
    max_seqlen: int,
    max_rank: int,
    row_stride: int = 64,
) -> Tensor:
    return q.new_empty((cu_seqlens.shape[0] - 1, q.shape[1], max_rank), dtype=torch.float32)


def _budget_shape(
    mass: Tensor,
    cost_us: Tensor,
    tau_us: Tensor,
    tolerance: Tensor,
    k0: Tensor,
    min_budget: int,
    cu_seqlens: Tensor | None = None,
    block_size: int = 0,
    row_stride: int = 64,
    tune_short: bool = False,
) -> Tensor:
    return mass.new_empty(mass.shape[0], dtype=torch.int32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, budget, block_size, max_seqlen, _max_budget, scale, deterministic = inputs
    out, lse, selection = output
    # Not the index: a counting sort makes it again, and it is larger than all of these at high budgets.
    ctx.save_for_backward(q, k, v, out, lse, selection, cu_seqlens, budget)
    ctx.block_size, ctx.max_seqlen = block_size, max_seqlen
    ctx.scale, ctx.deterministic = scale, deterministic
    ctx.set_materialize_grads(False)


def _gradient(
    ctx: Any,
    dout: Tensor | None,
    dlse: Tensor | None,
    _dselection: Tensor | None,
    backward: Callable[..., Any] | None = None,
) -> tuple[Tensor | None, ...]:
    q, k, v, out, lse, selection, cu_seqlens, budget = ctx.saved_tensors
    none = (None,) * 7
    if dout is None and dlse is None:
        return (None, None, None, *none)
    if dout is None:
        dout = torch.zeros_like(out)
    group = q.shape[1] // k.shape[1]
    list_ptr, list_rows = torch.ops.sb.moba_index(selection, cu_seqlens, budget, ctx.block_size, group)
    dq, dk, dv = (backward or torch.ops.sb.moba_backward)(
        dout,
        dlse,
        q,
        k,
        v,
        out,
        lse,
        selection,
        list_ptr,
        list_rows,
        cu_seqlens,
        budget,
        ctx.block_size,
        ctx.max_seqlen,
        ctx.scale,
        ctx.deterministic,
    )
    return (dq, dk, dv, *none)


def _no_second_gradient(ctx: Any, *grads: Tensor | None) -> tuple[None, ...]:
    raise RuntimeError(
        explain(
            "a gradient of moba_attention's gradient was asked for",
            "the kernels have first derivatives only",
            "drop create_graph=True, or pass backend='reference' (plain torch, slow)",
        )
    )


def _no_forward_mode(ctx: Any = None, *grad_inputs: Any) -> Any:
    raise RuntimeError(
        explain(
            "a forward-mode derivative (jvp) of moba_attention was asked for",
            "the kernels have reverse-mode derivatives only",
            "use torch.func.vjp, grad or jacrev, or pass backend='reference' (plain torch, slow)",
        )
    )


class _Gradient(torch.autograd.Function):
    """The op moba_backward for `torch.func`."""

    generate_vmap_rule = True
    forward = staticmethod(lambda *args: torch.ops.sb.moba_backward(*args))
    setup_context = staticmethod(lambda ctx, inputs, output: None)
    backward = staticmethod(_no_second_gradient)
    jvp = staticmethod(_no_forward_mode)


class _Attention(torch.autograd.Function):
    """The op moba_attention for `torch.func`, whose transforms refuse the gradient of a registered op."""

    generate_vmap_rule = True
    forward = staticmethod(lambda *args: torch.ops.sb.moba_attention(*args))
    setup_context = staticmethod(_save)
    backward = staticmethod(
        lambda ctx, dout, dlse, dselection: _gradient(ctx, dout, dlse, dselection, _Gradient.apply)
    )
    jvp = staticmethod(_no_forward_mode)


def run_attention(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """Call the op and return out and lse; `torch.func` transforms get a gradient they can take apart.

    Raises:
        RuntimeError: Forward-mode differentiation is on; the op would drop its tangents silently.
    """
    if torch.compiler.is_compiling():
        if forward_ad._current_level >= 0:
            _no_forward_mode()
    elif torch._C._functorch.peek_interpreter_stack() is not None:
        out, lse, _ = _Attention.apply(*cast_as_autocast(q, k, v), *rest)  # type: ignore[no-untyped-call]
        return out, lse
    elif forward_ad._current_level >= 0 and any(
        forward_ad.unpack_dual(x).tangent is not None  # type: ignore[no-untyped-call]
        for x in (q, k, v)
    ):
        _no_forward_mode()
    out, lse, _ = torch.ops.sb.moba_attention(q, k, v, *rest)
    return out, lse


_FRAGMENT: list[torch.library.Library] = []  # a Library unregisters its kernels when it is collected


def _register_autocast(device: str) -> None:
    """Cast q, k and v to the autocast dtype, whichever it is; `torch.library.register_autocast` fixes one."""
    attention = torch.ops.sb.moba_attention.default
    key_name = "Autocast" + torch._C._dispatch_key_for_device(device)
    key = getattr(torch._C.DispatchKey, key_name)

    def cast_and_run(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Any:
        q, k, v = cast_as_autocast(q, k, v)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(key)):
            return attention(q, k, v, *rest)

    attention.py_impl(key)(cast_and_run)
    library = torch.library.Library("sb", "FRAGMENT")  # type: ignore[no-untyped-call]
    kernel = lambda _keys, *args: cast_and_run(*args)  # noqa: E731
    library.impl("moba_attention", kernel, key_name, with_keyset=True)  # type: ignore[no-untyped-call]
    _FRAGMENT.append(library)


def register_ops() -> None:
    """Register everything once the extension has defined the ops."""
    fakes: dict[str, Callable[..., Any]] = {
        "moba_select": _select_shape,
        "moba_index": _index_shapes,
        "moba_forward": _forward_shapes,
        "moba_backward": _backward_shapes,
        "moba_attention": _attention_shapes,
        "moba_coverage": _coverage_shape,
        "moba_budget": _budget_shape,
    }
    for name, shapes in fakes.items():
        torch.library.register_fake(f"sb::{name}", shapes)
    torch.library.register_autograd("sb::moba_attention", _gradient, setup_context=_save)
    torch.library.register_autograd("sb::moba_backward", _no_second_gradient)
    _register_autocast("cpu")
    _register_autocast("cuda")
    register_flops()


if EXTENSION.available:
    register_ops()
