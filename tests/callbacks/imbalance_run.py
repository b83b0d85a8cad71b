"""Trainings whose clock only moves where a test says so, and ones that sleep where a test says so."""

from __future__ import annotations

import io
import json
import time

import torch
from lightning.pytorch import Callback, LightningModule
from packed_run import Clock, packed, trainer
from rich.console import Console
from torch.utils.data import DataLoader, Dataset

from sb_lightning.callbacks import ImbalanceMonitor, TrainingProgress
from sb_lightning.tracking import recorder_of
from sb_lightning.tracking.spans import LANES

DATA, FORWARD, BACKWARD, OPTIMIZER, VALIDATION = 1.0, 10.0, 20.0, 0.5, 100.0
BETWEEN = 3.0


class Moves(torch.autograd.Function):
    """The identity; its backward takes time."""

    @staticmethod
    def forward(ctx, x, clock, seconds):
        ctx.clock, ctx.seconds = clock, seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.clock.now += ctx.seconds
        return grad, None, None


class TimedData(Dataset):
    """Batches of given lengths; loading one takes a second."""

    def __init__(self, clock, lengths, **fields):
        self.clock, self.lengths, self.fields = clock, lengths, fields

    def __len__(self):
        return len(self.lengths)

    def __getitem__(self, index):
        self.clock.now += DATA
        found = {name: value[index] for name, value in self.fields.items()}
        return packed(
            self.lengths[index], sequence_ids=torch.arange(len(self.lengths[index])) + 10 * index, **found
        )


class TimedOptimizer(torch.optim.SGD):
    """A step takes half a second, after that of the base class, whose hooks run too."""

    clock: Clock

    def __init__(self, *args, **options):
        # torch puts the hooks into the step of a class when one of it is made.
        torch.optim.SGD([torch.zeros(1)], lr=0.1)
        super().__init__(*args, **options)

    def step(self, closure=None):
        loss = super().step(closure)
        self.clock.now += OPTIMIZER
        return loss


class TimedModule(LightningModule):
    """Forward takes ten seconds in micro-batch 0, one more in each that follows; backward twenty."""

    def __init__(self, clock, manual=False, raises_at=None, error=RuntimeError):
        super().__init__()
        self.automatic_optimization = not manual
        self.weight = torch.nn.Parameter(torch.ones(1))
        self.clock, self.raises_at, self.error = clock, raises_at, error
        self.runs = 0

    def loss(self):
        self.clock.now += FORWARD + self.runs
        self.runs += 1
        return Moves.apply(self.weight, self.clock, BACKWARD).sum()

    def training_step(self, batch, batch_idx):
        loss = self.loss()
        if batch_idx == self.raises_at:
            raise self.error("broken on purpose")
        if not self.automatic_optimization:
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            self.clock.now += BETWEEN
            for optimizer in self.optimizers():
                optimizer.step()
            self.clock.now += BETWEEN
            return None
        return loss

    def validation_step(self, batch, batch_idx):
        self.clock.now += VALIDATION

    def configure_optimizers(self):
        optimizers = [
            TimedOptimizer(self.parameters(), lr=0.1) for _ in range(1 + (not self.automatic_optimization))
        ]
        for optimizer in optimizers:
            optimizer.clock = self.clock
        return optimizers


class Windows(Callback):
    """Keeps every window that the monitor before it has measured, and what was logged then."""

    def __init__(self, monitor):
        self.monitor, self.windows, self.logged = monitor, [], []

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        window = self.monitor.window
        if window is not None and (not self.windows or self.windows[-1] is not window):
            self.windows.append(window)
            self.logged.append({name: float(value) for name, value in trainer.callback_metrics.items()})


def monitor(clock=None, **settings):
    callback = ImbalanceMonitor(**settings)
    if clock is not None:
        callback.clock = clock
    callback.console = Console(width=110, record=True, file=io.StringIO())
    return callback


def timed_fit(
    folder, *, lengths=((5,), (9, 2), (20,), (1, 1), (33,)), fields=None, module=None, watch=None, **settings
):
    """Fit with a clock of its own; returns the module, the trainer, the monitor and the windows."""
    clock = Clock()
    callback = monitor(clock, **(watch or {}))
    windows = Windows(callback)
    extra = settings.pop("callbacks", ())
    made = trainer(folder, callback, windows, *extra, **settings)
    built = TimedModule(clock, **(module or {}))
    data = TimedData(clock, [list(item) for item in lengths], **(fields or {}))
    loaders = [DataLoader(data, batch_size=None)]
    if settings.get("val_check_interval"):
        loaders.append(DataLoader([0, 0], batch_size=None))
    made.fit(built, *loaders)
    return built, made, callback, windows


def lines(folder, rank=0):
    path = folder / "spans" / f"rank_{rank:04d}.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


# Two ranks that sleep.

SLEEP_S = 0.3
# How far apart the ranks may leave the barrier where their clocks start.
CLOCKS_S = 0.1


class Sleeps(torch.autograd.Function):
    """The identity; its backward sleeps."""

    @staticmethod
    def forward(ctx, x, seconds):
        ctx.seconds = seconds
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        time.sleep(ctx.seconds)
        return grad, None


class PlantedData(Dataset):
    def __init__(self, plants, rank, count):
        self.plants, self.rank, self.count = plants, rank, count

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        if self.plants.get(index) == ("data", self.rank):
            time.sleep(SLEEP_S)
        return packed([4 + index, 2], x=torch.ones(4, 8), sequence_ids=torch.tensor([index, 100 + index]))


class PlantedModule(LightningModule):
    """Sleeps in the lane, at the micro-batch and on the rank of a plant; has a buffer, which DDP syncs."""

    def __init__(self, plants, manual=False):
        super().__init__()
        self.automatic_optimization = not manual
        self.plants = plants
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.register_buffer("buffer", torch.zeros(2))

    def training_step(self, batch, batch_idx):
        lane, rank = self.plants.get(batch_idx, ("", -1))
        asleep = SLEEP_S if rank == self.global_rank else 0.0
        if lane == "forward":
            time.sleep(asleep)
        # The sleep lies between the gradients of the two layers.
        hidden = Sleeps.apply(self.first(batch["x"]), asleep if lane == "backward" else 0.0)
        loss = self.second(hidden).sum()
        if self.automatic_optimization:
            return loss
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()
        return None

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


def planted_fit(folder, plants, count, accumulate=2, manual=False):
    """Fit on this rank of two; returns what it measured, in plain numbers."""
    import torch.distributed as dist

    from sb_lightning.balance import WindowSync

    callback = monitor()
    windows = Windows(callback)
    # It asks for the window's gather before the monitor does.
    bar = TrainingProgress(refresh_every=1)
    bar.console = Console(width=110, record=True, file=io.StringIO())
    made = trainer(
        folder, bar, callback, windows, devices=2, strategy="ddp", use_distributed_sampler=False,
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    made.fit(
        PlantedModule(plants, manual),
        DataLoader(PlantedData(plants, dist.get_rank(), count), batch_size=None),
    )
    return {
        "windows": windows.windows,
        "logged": windows.logged,
        "summary": callback.summary,
        "text": callback.console.export_text(),
        "bar": (bar.console.export_text(), [tokens for tokens, _ in bar._recent]),
        "gathers": WindowSync.of(made).num_gathers,
        "hooks_left": ["start" in vars(made.profiler), len(made.lightning_module._forward_pre_hooks)],
    }


AT = {lane: at for at, lane in enumerate(LANES)}


def lane(cell, name):
    return cell.lanes_ms[AT[name]] / 1e3


def is_as_found(made):
    """Nothing of the monitor is left on the Trainer."""
    loop = made.fit_loop.epoch_loop
    hooks = [
        hooks
        for optimizer in made.optimizers
        for hooks in (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    ]
    return (
        not {"start", "stop"} & set(vars(made.profiler))
        and "_broadcast_sigterm_tensor" not in vars(loop)
        and not any(hooks)
        and recorder_of(made) is None
    )
