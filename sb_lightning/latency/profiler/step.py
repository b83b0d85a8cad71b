"""One training step of the real model, timed where its parts begin and end."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sb_lightning._messages import explain
from sb_lightning.attention.huggingface import SparseSettings, sparse_settings
from sb_lightning.latency.marks import Marks, marks_for
from sb_lightning.latency.profiler.points import Point
from sb_lightning.latency.profiler.samples import Sample
from sb_lightning.training.loss import head_losses, next_token_targets
from sb_lightning.training.model import backbone_and_head

__all__ = ["StepProbe"]

Span = tuple[Any, Any]


class StepProbe:
    """Runs training steps of a model and notes the moments between its parts.

    Attention is not timed alone: in the running model it finds other caches, other memory and another
    allocator state than in a loop of its own, and what is left of the layer would be a difference of two
    measurements. Here one step gives all parts, and they add up to the step: at hooks on the first and the
    last decoder layer, around the attention function, and at the same tensors when their gradients arrive.
    A recomputed (checkpointed) forward counts as backward.

    Token ids are random and weights are whatever the model holds, so the routing is that of an untrained
    model. Gradients accumulate, as in all micro-batches of a window but its first.

    Args:
        model: A causal language model on its device, in train mode; sparsified if it is to have a budget.
        loss_chunk_tokens: Tokens whose logits exist at a time.
        autocast: Element type of autocast, or None for none.
        marks: The clock; that of the model's device if None.
        watches_core: Whether to note how long the process had its core, for one thread on a core of its own.

    Raises:
        TypeError: The model has no list of decoder layers with one attention each.
        ValueError: The device has no clock.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_chunk_tokens: int = 1024,
        autocast: torch.dtype | None = None,
        marks: Marks | None = None,
        watches_core: bool = False,
    ) -> None:
        self.model = model
        self.watches_core = watches_core
        self.backbone, self.head = backbone_and_head(model)
        self.layers, self.attentions = _decoder_layers(self.backbone)
        self.settings = sparse_settings(model)
        self.loss_chunk_tokens = loss_chunk_tokens
        self.autocast = autocast
        self.device = next(model.parameters()).device
        self.marks = marks or marks_for(self.device)
        self.vocab_size = int(self.backbone.config.vocab_size)  # type: ignore[union-attr, arg-type]
        self._is_trainable = any(p.requires_grad for p in self.layers.parameters())
        self._warm: set[Point] = set()
        self._step = _Step(self.marks)

    @property
    def num_layers(self) -> tuple[int, int]:
        """Layers with a budget, layers with full attention."""
        num_dense = sum(self._is_dense(attention) for attention in self.attentions)
        return len(self.attentions) - num_dense, num_dense

    @contextlib.contextmanager
    def attached(self) -> Iterator[StepProbe]:
        """Hook the model and its attention function for as long as the context lasts."""
        name = self.backbone.config._attn_implementation  # type: ignore[union-attr]
        if name not in ALL_ATTENTION_FUNCTIONS:
            raise ValueError(
                explain(
                    f"the model's attention is '{name}'",
                    "only attention functions that transformers has registered can be timed",
                    "load the model with attn_implementation='sdpa', or sparsify it",
                )
            )
        original = ALL_ATTENTION_FUNCTIONS[name]
        requires_grad = [p for p in self.model.parameters() if p.requires_grad]
        gradients = [p.grad for p in requires_grad]
        handles = [
            self.layers[0].register_forward_pre_hook(self._before_layers, with_kwargs=True),
            self.layers[-1].register_forward_hook(self._after_layers),
        ]
        for parameter in requires_grad:
            parameter.grad = None
        AttentionInterface.register(name, self._timed(original))
        try:
            yield self
        finally:
            AttentionInterface.register(name, original)
            for handle in handles:
                handle.remove()
            for parameter, gradient in zip(requires_grad, gradients, strict=True):
                parameter.grad = gradient
            self._set_budget(self.settings.budget if self.settings else 1)

    def measure(self, point: Point) -> Sample:
        """Run one step at a point; on a GPU the first one there only warms up."""
        if self.device.type == "cuda" and point not in self._warm:
            self.run(point)
            self.marks.settle()
            self._warm.add(point)
        step = self.run(point)
        self.marks.settle()
        return step.sample(self.num_layers)

    def run(self, point: Point) -> _Step:
        """Run one step without waiting for the device."""
        self._set_budget(point.budget)
        batch = self._batch(point)
        targets = next_token_targets(batch.pop("labels")).flatten()
        if self.settings is None:
            batch.pop("cu_seqlens")
            batch.pop("max_seqlen")
        step = self._step = _Step(self.marks)
        start, start_busy = time.perf_counter(), time.process_time()
        step.start = self.marks.now()
        with torch.autocast(self.device.type, self.autocast, enabled=self.autocast is not None):
            hidden = self.backbone(**batch, use_cache=False).last_hidden_state.flatten(0, 1)
            loss = head_losses(self.head, hidden, targets, self.loss_chunk_tokens) / targets.numel()
        step.middle = self.marks.now()
        step.is_backward = True
        self._check_gradients(loss, step)
        loss.backward()  # type: ignore[no-untyped-call]
        step.end = self.marks.now()
        if self.watches_core:
            step.busy = min(1.0, (time.process_time() - start_busy) / (time.perf_counter() - start))
        return step

    def _batch(self, point: Point) -> dict[str, Any]:
        generator = torch.Generator().manual_seed(point.length)
        total = point.length * point.copies
        ids = torch.randint(0, self.vocab_size, (1, total), generator=generator)
        starts = torch.arange(0, total + 1, point.length)
        labels = ids.clone()
        labels[0, starts[:-1]] = -100
        batch = {
            "input_ids": ids,
            "position_ids": torch.arange(point.length).repeat(point.copies)[None],
            "labels": labels,
            "cu_seqlens": starts.to(torch.int32),
        }
        return {**{name: t.to(self.device) for name, t in batch.items()}, "max_seqlen": point.length}

    def _set_budget(self, budget: int) -> None:
        if self.settings is not None:
            settings = replace(self.settings, budget=budget)
            for attention in self.attentions:
                attention.sb_settings = settings  # type: ignore[assignment]

    def _is_dense(self, attention: nn.Module) -> bool:
        settings: SparseSettings | None = self.settings
        return settings is None or attention.layer_idx in settings.dense_layers

    def _before_layers(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        step = self._step
        if step.is_backward:
            return
        hidden = args[0] if args else kwargs["hidden_states"]
        if hidden.requires_grad:
            hidden.register_hook(lambda _: step.note("layers_left"))  # type: ignore[no-untyped-call]
        step.note("layers_entered")

    def _after_layers(self, layer: nn.Module, args: Any, output: Any) -> None:
        step = self._step
        if step.is_backward:
            return
        step.note("layers_done")
        hidden = output[0] if isinstance(output, tuple) else output
        step.has_layers = hidden.requires_grad
        if step.has_layers:
            hidden.register_hook(lambda _: step.note("layers_reached"))  # type: ignore[no-untyped-call]

    def _check_gradients(self, loss: Tensor, step: _Step) -> None:
        if not loss.requires_grad:
            raise ValueError(
                explain(
                    "no parameter of the model requires a gradient",
                    "a training step has a backward pass",
                    "unfreeze what is trained before the profile",
                )
            )
        if step.hides_gradients and (self._is_trainable or step.has_layers):
            raise ValueError(
                explain(
                    "the decoder layers ran without recording gradients",
                    "their backward pass cannot be told from the rest, as under reentrant checkpointing",
                    "pass use_reentrant=False to gradient_checkpointing_enable",
                )
            )

    def _timed(self, original: Callable[..., tuple[Tensor, Any]]) -> Callable[..., tuple[Tensor, Any]]:
        def attention(
            module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
        ) -> tuple[Tensor, Any]:
            step, is_dense = self._step, self._is_dense(module)
            if step.is_backward:
                start = self.marks.now()
                result = original(module, query, key, value, *args, **kwargs)
                step.backward[is_dense].append((start, self.marks.now()))
                return result
            step.hides_gradients |= not torch.is_grad_enabled()
            reached: list[Any] = []
            # Views of their own, so that the hooks are those of this function alone.
            inputs = [tensor.view_as(tensor) for tensor in (query, key, value)]

            def close(_: Tensor) -> None:
                # The first of the three gradients: the others are made by the same operation.
                if reached:
                    step.backward[is_dense].append((reached.pop(), self.marks.now()))

            for tensor in inputs:
                if tensor.requires_grad:
                    tensor.register_hook(close)  # type: ignore[no-untyped-call]
            start = self.marks.now()
            out, weights = original(module, *inputs, *args, **kwargs)
            step.forward[is_dense].append((start, self.marks.now()))
            if out.requires_grad:
                out.register_hook(lambda _: reached.append(self.marks.now()))  # type: ignore[no-untyped-call]
            return out, weights

        return attention


class _Step:
    """The moments of one step."""

    def __init__(self, marks: Marks) -> None:
        self.marks = marks
        self.start = self.middle = self.end = None
        self.is_backward = False
        self.hides_gradients = False
        """Whether attention ran forward without a graph, to be run again in the backward pass."""
        self.has_layers = False
        """Whether the backward pass goes through the decoder layers."""
        self.busy = 1.0
        self.moments: dict[str, Any] = {}
        self.forward: tuple[list[Span], list[Span]] = ([], [])
        """By whether the layer is dense."""
        self.backward: tuple[list[Span], list[Span]] = ([], [])

    def note(self, name: str) -> None:
        self.moments[name] = self.marks.now()

    def sample(self, num_layers: tuple[int, int]) -> Sample:
        """Return the times; called when all moments have passed."""
        between = self.marks.between_ms

        def mean(spans: list[Span], count: int) -> float:
            return sum(between(*span) for span in spans) / count if count else 0.0

        # With frozen embeddings nothing asks for the gradient of the first layer's input.
        left = self.moments.get("layers_left", self.end)
        # A frozen backbone has no backward pass: only the head is trained.
        reached = self.moments["layers_reached"] if self.has_layers else left
        return Sample(
            forward=between(self.start, self.middle),
            backward=between(self.middle, self.end),
            layers_forward=between(self.moments["layers_entered"], self.moments["layers_done"]),
            layers_backward=between(reached, left),
            sparse_forward=mean(self.forward[0], num_layers[0]),
            sparse_backward=mean(self.backward[0], num_layers[0]),
            dense_forward=mean(self.forward[1], num_layers[1]),
            dense_backward=mean(self.backward[1], num_layers[1]),
            busy=self.busy,
        )


def _decoder_layers(backbone: nn.Module) -> tuple[nn.ModuleList, list[nn.Module]]:
    """Return the decoder layers and the attention of each."""

    def attentions_of(module: nn.Module) -> list[nn.Module]:
        return [m for m in module.modules() if hasattr(m, "layer_idx") and hasattr(m, "num_key_value_groups")]

    for module in backbone.modules():
        if isinstance(module, nn.ModuleList) and len(module):
            found = [attentions_of(layer) for layer in module]
            if all(len(attentions) == 1 for attentions in found):
                return module, [attentions[0] for attentions in found]
    raise TypeError(
        explain(
            f"{type(backbone).__name__} has no list of decoder layers with one attention each",
            "the profile times them apart",
            "pass a decoder-only model such as Qwen2ForCausalLM or LlamaForCausalLM",
        )
    )
