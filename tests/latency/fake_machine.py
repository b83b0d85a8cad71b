"""A machine whose times are a formula with noise, and whose seconds pass only when it measures."""

from __future__ import annotations

import io
import json
import random
from collections import Counter

from rich.console import Console

from sb_lightning.attention.pairs import attended_pairs, causal_pairs
from sb_lightning.latency.profiler import Conditions, ModelSpec, run_profile
from sb_lightning.latency.profiler.samples import Sample

BLOCK = 64
LAYERS = 2
# What a micro-batch pays once, forward: of a layer's attention, of the rest of a layer, outside.
ONCE = {"attention": 0.05, "rest": 0.2, "outside": 0.5}
CONFIG = {
    "model_type": "qwen2", "vocab_size": 2048, "hidden_size": 128, "intermediate_size": 384,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "layer_types": ["full_attention"] * LAYERS,
}  # fmt: skip


class Machine:
    """Forward times by the formulas below; backward takes twice as long."""

    def __init__(self, noise: float = 0.0, stop_at: int | None = None):
        self.noise, self.stop_at = noise, stop_at
        self.now = 1000.0
        self.steps = 0
        self.times_at = Counter()

    def clock(self):
        return self.now

    def __call__(self, point):
        self.steps += 1
        if self.steps == self.stop_at:
            raise KeyboardInterrupt
        self.times_at[point] += 1
        factor = 1 + self.noise * random.Random(f"{point} {self.times_at[point]}").gauss(0, 1)
        attention, rest, outside = (
            scale * factor
            for scale in (
                ONCE["attention"] + point.copies * attention_ms(point.length, point.budget),
                ONCE["rest"] + point.copies * rest_ms(point.length),
                ONCE["outside"] + point.copies * outside_ms(point.length),
            )
        )
        layers = LAYERS * (attention + rest)
        sample = Sample(
            forward=layers + outside, backward=2 * (layers + outside), layers_forward=layers,
            layers_backward=2 * layers, sparse_forward=attention, sparse_backward=2 * attention,
        )  # fmt: skip
        self.now += sample.whole / 1000
        return sample


def attention_ms(length, budget):
    """Sparse pairs are dearer than dense ones, and the more so the sparser: no count of FLOPs says that."""
    dense = 1e-5 * causal_pairs([length])
    if budget * BLOCK >= length:
        return dense
    share = budget * BLOCK / length
    return min(dense, 1e-5 * attended_pairs([length], budget, BLOCK) * (1 + 2 * (1 - share)) + 1e-3 * length)


def rest_ms(length):
    return 2e-3 * length


def outside_ms(length):
    return 4e-3 * length


def step_ms(length, budget):
    """Forward and backward of one sequence, all included."""
    layer = sum(ONCE[part] for part in ("attention", "rest")) + attention_ms(length, budget) + rest_ms(length)
    return 3 * (LAYERS * layer + ONCE["outside"] + outside_ms(length))


def conditions(max_length=8192, ranks=1, **spec):
    given = {"config": CONFIG, "block_size": BLOCK, "threads": 1}
    return Conditions.of(ModelSpec(**{**given, **spec}), max_length=max_length, ranks=ranks)


def profiled(machine, *, budget_seconds, given=None, **arguments):
    return run_profile(
        given or conditions(), budget_seconds=budget_seconds, measure=machine, clock=machine.clock,
        console=arguments.pop("console", None) or Console(file=io.StringIO(), width=120), **arguments,
    )  # fmt: skip


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))
