"""`profile`: measure a model on this machine and return its latency table."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich import get_console

from sb_lightning._messages import explain
from sb_lightning.latency.analytic import AnalyticCost
from sb_lightning.latency.fingerprint import Fingerprint
from sb_lightning.latency.profiler.conditions import Conditions, shape_of
from sb_lightning.latency.profiler.neighbours import Neighbours
from sb_lightning.latency.profiler.partial import load_partial, partial_path, save_partial
from sb_lightning.latency.profiler.points import Grid, Point
from sb_lightning.latency.profiler.report import progress_bar, say_plan
from sb_lightning.latency.profiler.result import check_output, publish, table_from
from sb_lightning.latency.profiler.samples import Sample
from sb_lightning.latency.profiler.schedule import Schedule
from sb_lightning.latency.profiler.spec import ModelSpec
from sb_lightning.latency.table import LatencyTable

if TYPE_CHECKING:
    from rich.console import Console
    from transformers import PretrainedConfig, PreTrainedModel

__all__ = ["profile", "run_profile"]

SAVE_EVERY_S = 2.0


def profile(
    model: PreTrainedModel | PretrainedConfig,
    *,
    block_size: int | None = None,
    dense_layers: Sequence[int] = (),
    backend: str | None = None,
    max_length: int = 8192,
    dtype: str | torch.dtype = "float32",
    mixed: bool = False,
    device: str | torch.device = "cpu",
    ranks: int = 1,
    threads: int | None = None,
    budget_seconds: float = 60.0,
    activation_checkpointing: bool = False,
    loss_chunk_tokens: int = 1024,
    output: str | Path | None = None,
    console: Console | None = None,
) -> LatencyTable:
    """Measure training steps of a model on this machine, and return the table of their times.

    Whole steps of one sequence (forward, loss, backward) are run at points of a grid over length and budget,
    and are cut into attention, the rest of a layer, and embedding, head and loss. Points take turns; the grid
    is coarse first and refined while time is left; medians count. `ranks - 1` other processes run the same
    kind of steps meanwhile. A fifth of the points is held out to tell the table's error beside that of a fit
    to the length and of one to the FLOPs, which `LatencyTable.profile` keeps.

    A configuration is measured with random weights and at most four layers, since layers are alike; a model
    as it is, adapters included. Its gradients, its budget, the mode of each of its modules and the random
    state of the CPU and of its GPU are left as they were.

    Args:
        model: A model, sparsified already if it is to have a budget, or a configuration.
        block_size: Keys per block, for a configuration; None is full attention.
        dense_layers: Layers of a configuration that keep full attention.
        backend: Attention backend, for a configuration; None takes the best available.
        max_length: Longest sequence in tokens.
        dtype: Element type of the activations.
        mixed: Whether weights stay in fp32 and `dtype` is autocast's, as with `bf16-mixed`.
        device: Where a configuration is measured; a model stays where it is. Other ranks take the GPUs after
            this one.
        ranks: Ranks that share this machine.
        threads: CPU threads of each rank; None asks torch.
        budget_seconds: Seconds of measuring; starting the processes comes on top.
        activation_checkpointing: Whether layers of a configuration are recomputed in the backward pass.
        loss_chunk_tokens: Tokens whose logits exist at a time.
        output: File of the table; a picture goes beside it. An interrupted profile goes on from
            `<output>.partial.json`. None writes nothing.
        console: Where the plan and the errors are printed; rich's global console if None.

    Raises:
        ValueError: An argument is out of range, the device has no clock, nothing in the model is trained, or
            `<output>.partial.json` was measured otherwise.
        RuntimeError: A process of another rank ended.

    Example::

        from transformers import AutoConfig
        from sb_lightning.latency import profile
        table = profile(AutoConfig.from_pretrained("Qwen/Qwen2.5-0.5B"), block_size=256, ranks=2)
        table.predict(8192, 32)
    """
    from sb_lightning.attention.huggingface import sparse_settings

    is_model = isinstance(model, torch.nn.Module)
    config: Any = getattr(model, "config", None) if is_model else model
    if not hasattr(config, "to_json_string"):
        raise TypeError(
            explain(
                f"the model is a {type(model).__name__}",
                "decoder layers, heads and vocabulary are read from a transformers configuration",
                "pass a causal language model of transformers, or its configuration",
            )
        )
    parameters = None
    if is_model:
        assert isinstance(model, torch.nn.Module)
        counts = [(p.numel(), p.requires_grad) for p in model.parameters()]
        parameters = sum(n for n, _ in counts), sum(n for n, is_trained in counts if is_trained)
        settings = sparse_settings(model)
        block_size = settings.block_size if settings else None
        dense_layers = settings.dense_layers if settings else ()
        backend = settings.backend if settings else None
        device = next(model.parameters()).device
    spec = ModelSpec(
        config=json.loads(config.to_json_string(use_diff=False)),
        block_size=block_size,
        dense_layers=tuple(sorted(set(dense_layers))) if block_size else (),
        backend=backend,
        dtype=str(dtype).removeprefix("torch."),
        mixed=mixed,
        device=str(device),
        threads=torch.get_num_threads() if threads is None else threads,
        activation_checkpointing=activation_checkpointing,
        loss_chunk_tokens=loss_chunk_tokens,
    )
    conditions = Conditions.of(spec, max_length=max_length, ranks=ranks, parameters=parameters)
    return run_profile(
        conditions,
        model=model if is_model else None,
        budget_seconds=budget_seconds,
        output=None if output is None else Path(output),
        console=console,
    )


def run_profile(
    conditions: Conditions,
    *,
    model: Any = None,
    budget_seconds: float = 60.0,
    output: Path | None = None,
    console: Console | None = None,
    measure: Callable[[Point], Sample] | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> LatencyTable:
    """Measure under given conditions; the arguments that `profile` does not have serve the tests.

    Args:
        conditions: What to measure.
        model: The model to measure; built with few layers if None.
        budget_seconds: Seconds of measuring.
        output: File of the table.
        console: Where to print.
        measure: Runs a step, in place of the model.
        clock: Returns seconds.

    Raises:
        ValueError: As for `profile`.
        RuntimeError: Likewise.
    """
    if output:
        check_output(output)
    if not budget_seconds > 0:
        raise ValueError(
            explain(f"budget_seconds is {budget_seconds}", "measuring takes time", "pass a positive number")
        )
    console = console or get_console()
    fingerprint, settings = conditions.fingerprint, conditions.settings
    spec = conditions.spec if model is not None else conditions.spec.with_few_layers()
    grid = Grid(
        block_size=fingerprint.block_size,
        max_length=conditions.max_length,
        has_budget=spec.layers[0] > 0,
    )
    partial = partial_path(output) if output else None
    if output:
        output.parent.mkdir(parents=True, exist_ok=True)
    progress = load_partial(partial, fingerprint, settings) if partial else None
    analytic = AnalyticCost(shape_of(fingerprint, spec.layers))
    schedule = Schedule(
        grid,
        lambda point: analytic.micro_batch_ms([point.length] * point.copies, point.budget),
        budget_s=budget_seconds,
        progress=progress,
        clock=clock,
    )
    where = (
        f"{fingerprint.processor}, {fingerprint.ranks} rank{'s' if fingerprint.ranks != 1 else ''} x "
        f"{fingerprint.threads} thread{'s' if fingerprint.threads != 1 else ''}, {fingerprint.dtype}, "
        f"attention {fingerprint.backend}"
    )
    with _measuring(conditions, spec, model, measure, grid) as run_step:
        _first_estimate(schedule, run_step)
        say_plan(console, schedule, where)
        _collect(schedule, run_step, console, partial, fingerprint, settings, clock)
    table = table_from(schedule.progress, conditions, spec, grid)
    publish(table, grid.max_length, where, output, console)
    return table


@contextlib.contextmanager
def _measuring(
    conditions: Conditions, spec: ModelSpec, model: Any, measure: Callable[[Point], Sample] | None, grid: Grid
) -> Iterator[Callable[[Point], Sample]]:
    """Make this process a rank of the run, its neighbours at work, and yield what runs a step."""
    if measure is not None:
        yield measure
        return
    from sb_lightning.latency.profiler.step import StepProbe

    lengths = sorted({point.length for point in grid.levels[0]})
    threads = torch.get_num_threads()
    network = spec.build() if model is None else model
    modes = [(module, module.training) for module in network.modules()]
    device = next(network.parameters()).device
    torch.set_num_threads(spec.threads)
    try:
        # In a model in train mode, modules that are kept in eval are so in the training too.
        if not network.training:
            network.train()
        autocast = spec.torch_dtype if spec.mixed else None
        probe = StepProbe(
            network,
            loss_chunk_tokens=spec.loss_chunk_tokens,
            autocast=autocast,
            watches_core=spec.device == "cpu"
            and spec.threads == 1
            and conditions.fingerprint.ranks <= _cores(),
        )
        others = Neighbours(
            conditions.fingerprint.ranks - 1, spec.with_few_layers(), lengths, devices=conditions.devices
        )
        # Dropout draws numbers.
        with _current(device), torch.random.fork_rng(_gpus(device)), probe.attached(), others as neighbours:
            # The first steps of a process find nothing in place.
            for _ in range(2):
                probe.measure(grid.pair)

            def run_step(point: Point) -> Sample:
                neighbours.check()
                return probe.measure(point)

            yield run_step
    finally:
        for module, mode in modes:
            module.training = mode
        torch.set_num_threads(threads)


def _gpus(device: torch.device) -> list[torch.device]:
    """Return the GPU whose random state the steps change, if there is one."""
    return [device] if device.type == "cuda" else []


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _cores() -> int:
    """Return the cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _first_estimate(schedule: Schedule, run_step: Callable[[Point], Sample]) -> None:
    """Run the middle length once, so that the plan says seconds of this machine; the sample is not kept."""
    if schedule.progress.records:
        return
    points = [p for p in schedule.grid.levels[0] if p.copies == 1 and not p.is_held_out]
    middle = sorted({p.length for p in points})
    point = max(p for p in points if p.length == middle[len(middle) // 2])
    schedule.calibrate(point, run_step(point).whole)


def _collect(
    schedule: Schedule,
    run_step: Callable[[Point], Sample],
    console: Console,
    partial: Path | None,
    fingerprint: Fingerprint,
    settings: dict[str, Any],
    clock: Callable[[], float],
) -> None:
    progress = schedule.progress
    saved = clock()

    def save() -> None:
        if partial:
            save_partial(partial, progress, fingerprint, settings)

    with progress_bar(console, schedule) as show:

        def after_visit(_: Point) -> None:
            nonlocal saved
            show()
            if clock() - saved >= SAVE_EVERY_S:
                save()
                saved = clock()

        try:
            schedule.run(run_step, after_visit)
        except BaseException:
            if progress.records:
                save()
            raise
