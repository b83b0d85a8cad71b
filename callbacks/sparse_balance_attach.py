"""Attaching a tuner to a model, also where the model is compiled: a target is made outside of any graph."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn

from sb_lightning._messages import explain
from sb_lightning.attention.huggingface import TUNER, SequenceBoundsHook

__all__ = ["attach"]

COMPILED_CALL = "_compiled_call_impl"


def attach(root: nn.Module, base: Any, tuner: Any) -> Callable[[], None]:
    """Let a tuner make the target of each training forward of a base model.

    Where the base model, or something around it, is compiled, the outermost compiled module is given the
    target as an argument, and hands it on.

    Args:
        root: The module that is trained.
        base: A base model in it.
        tuner: Has `target`, see `ForwardTuner`.

    Returns:
        What undoes this.

    Raises:
        MisconfigurationException: The LightningModule itself is compiled, or a module that hands nothing on.
    """
    if getattr(root, "_compiler_ctx", None) is not None:
        raise MisconfigurationException(
            explain(
                f"{type(root).__name__} is compiled as a whole",
                "a step's budgets are decided by what is made outside of the graph, and no place is left",
                "compile the model inside it, such as self.model.compile() in configure_model()",
            )
        )
    undo: list[Callable[[], Any]] = []
    outer = next((m for m in root.modules() if _is_compiled(m) and _holds(m, base)), None)
    if outer is not None:
        undo.append(_give(outer, base))
    undo.append(lambda: vars(base).pop(TUNER, None))
    setattr(base, TUNER, tuner)

    def leave() -> None:
        while undo:
            undo.pop()()

    return leave


def _give(outer: nn.Module, base: Any) -> Callable[[], Any]:
    """Add the target to the arguments that a compiled module is called with."""
    inner = getattr(outer, "_orig_mod", outer)
    parameters = inspect.signature(inner.forward).parameters
    if all(p.kind is not p.VAR_KEYWORD and p.name != "sb_target" for p in parameters.values()):
        raise MisconfigurationException(
            explain(
                f"{type(inner).__name__} is compiled, and its forward takes no further keyword arguments",
                "a step's budgets are decided by what is made outside of the graph, and it hands nothing on",
                "compile the Hugging Face model inside it, or let its forward take **kwargs and pass them to "
                "that model",
            )
        )
    hook = SequenceBoundsHook(tuple(parameters))
    if inner is not outer:
        return outer.register_forward_pre_hook(
            lambda _, args, kwargs: hook(base, args, kwargs), with_kwargs=True
        ).remove
    compiled = getattr(outer, COMPILED_CALL)

    def with_target(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = hook(base, args, kwargs)
        return compiled(*args, **kwargs)

    setattr(outer, COMPILED_CALL, with_target)
    return lambda: setattr(outer, COMPILED_CALL, compiled)


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, "_orig_mod") or getattr(module, COMPILED_CALL, None) is not None


def _holds(module: nn.Module, base: Any) -> bool:
    return any(part is base for part in module.modules())
