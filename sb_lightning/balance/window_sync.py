"""One meeting of all ranks per window: what each part wants to share travels in a single gather."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from sb_lightning._messages import explain

__all__ = ["Gathered", "SyncPart", "WindowSync"]

Fill = Callable[[int], tuple[Sequence[float], Sequence[int]]]
Inputs = Callable[[], Mapping[str, Any]]
Stage = Literal["window", "epoch", "end"]
STAGES: tuple[Stage, ...] = ("window", "epoch", "end")
# Words in front of every payload: optimizer steps done, stage, digest of what ranks must agree on.
NUM_HEADER_WORDS = 3
# Where an owner keeps the one that its parts share.
ATTRIBUTE = "_sb_window_sync"


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """What all ranks brought for one part; equal on every rank."""

    floats: NDArray[np.float64]
    """# [ranks, floats]"""
    ints: NDArray[np.int64]
    """# [ranks, ints]"""


class SyncPart:
    """A share in the gather, made by `WindowSync.register`."""

    def __init__(self, sync: WindowSync, name: str, floats: int, ints: int, fill: Fill) -> None:
        self.name = name
        self.num_floats = floats
        self.num_ints = ints
        self._sync = sync
        self._fill = fill

    def collect(self, global_step: int, stage: Stage = "window") -> Gathered:
        """Return what all ranks brought for this part; all ranks must call this.

        The first part that asks for a place in the run makes all parts fill their payloads and brings them
        together, the others get what was gathered. So `fill` must be able to answer before its own callback
        has seen the end of the window's last micro-batch. A part that asks twice for the same place (two
        epochs in which no optimizer has stepped) starts another gather.

        Args:
            global_step: Optimizer steps done. A window ends when this changes.
            stage: "window" after an optimizer step; "epoch" for what an epoch's end leaves over; "end" when
                this rank has no window left.

        Raises:
            RuntimeError: On every rank, if ranks are at different places, disagree about an input, or have
                registered different parts.
        """
        return self._sync.gather(global_step, stage, self.name)[self.name]

    def remove(self) -> None:
        """Leave the gather, on every rank, when the run is over; what was gathered stays for other parts."""
        self._sync.unregister(self)

    def words(self, global_step: int) -> NDArray[np.int64]:
        """Return this rank's payload."""
        floats, ints = self._fill(global_step)
        if len(floats) != self.num_floats or len(ints) != self.num_ints:
            raise ValueError(
                explain(
                    f"part '{self.name}' filled in {len(floats)} floats and {len(ints)} ints",
                    f"it has registered {self.num_floats} and {self.num_ints}, and all ranks must send "
                    "equally much",
                    "pad the payload to the size it was registered with",
                )
            )
        return np.concatenate(
            [np.asarray(floats, dtype=np.float64).view(np.int64), np.asarray(ints, dtype=np.int64)]
        )


class WindowSync:
    """Brings the payloads of several parts together, once per window, in one `all_gather`.

    Works with any strategy: it talks to `torch.distributed` where that is initialised, and there is one rank
    where it is not, and where the Trainer has one, whatever process group lives around it. Payloads travel as
    64-bit words on the CPU, so that nothing waits for a device; where the default process group has no CPU
    backend (NCCL alone), a gloo group is made for it.

    The ranks find out together, and every one of them raises, when

    - their parts differ in name or size (looked at before the first gather);
    - they are at different windows: one has fewer than another;
    - something they must agree on differs (`watch`): the message names the first input that does.

    A rank that runs out of windows must say so with the stage "end". If another is in the middle of a window
    that needs it (an all-reduce of gradients, Lightning's own broadcast before each micro-batch), neither can
    go on, and both raise when the process group's timeout has passed; no code outside the strategy can
    shorten that.

    Example::

        sync = WindowSync.of(trainer)
        part = sync.register("budgets", floats=0, ints=2, fill=lambda step: ([], [budget, tokens]))
        gathered = part.collect(trainer.global_step)  # gathered.ints: [ranks, 2]
        part.remove()  # when the training is over

    Args:
        is_alone: This rank meets nobody, even where a process group is initialised.
    """

    def __init__(self, *, is_alone: bool = False) -> None:
        self._is_alone = is_alone
        self._parts: dict[str, SyncPart] = {}
        self._watched: dict[str, Inputs] = {}
        self._last: tuple[tuple[int, Stage], dict[str, Gathered]] | None = None
        # Parts that have got what was gathered last.
        self._served: set[str] = set()
        self._is_checked = False
        self._group: Any = None
        self.num_gathers = 0
        """Gathers of payloads so far."""
        self.gather_s = 0.0
        """Seconds spent in them, most of it until the slowest rank is there."""

    @classmethod
    def of(cls, owner: Any) -> WindowSync:
        """Return the one that the parts of a run share.

        Args:
            owner: The Trainer, or whatever else they have in common. It holds what is returned, so that both
                go together, although parts refer to the Trainer. With a `world_size` of 1, nobody else is
                met.
        """
        shared: WindowSync | None = vars(owner).get(ATTRIBUTE)
        if shared is None:
            shared = cls(is_alone=getattr(owner, "world_size", None) == 1)
            setattr(owner, ATTRIBUTE, shared)
        return shared

    @property
    def ranks(self) -> int:
        """Ranks that meet."""
        return dist.get_world_size() if self._meets else 1

    @property
    def rank(self) -> int:
        """This process among them."""
        return dist.get_rank() if self._meets else 0

    @property
    def _meets(self) -> bool:
        return not self._is_alone and dist.is_available() and dist.is_initialized()

    def register(self, name: str, *, floats: int = 0, ints: int = 0, fill: Fill) -> SyncPart:
        """Add a part, in the same order on every rank, before the first window; it replaces its namesake.

        Args:
            name: Name of the part.
            floats: Number of float64 that `fill` returns.
            ints: Number of int64 that `fill` returns.
            fill: Given the optimizer steps done, returns this rank's payload of the window that has just
                ended.

        Returns:
            What to ask for the gathered payloads.
        """
        part = SyncPart(self, name, floats, ints, fill)
        self._parts[name] = part
        self._restart()
        return part

    def watch(self, name: str, inputs: Inputs) -> None:
        """Check at every gather that some values are the same on all ranks, such as those a plan is made of.

        Args:
            name: Name of what is made of them, for the message, such as "plan".
            inputs: Returns the values by name; whatever JSON can write.
        """
        self._watched[name] = inputs
        self._restart()

    def unregister(self, part: SyncPart) -> None:
        """Take a part out, unless another has taken its name."""
        if self._parts.get(part.name) is part:
            del self._parts[part.name]
            self._is_checked = False
        if not self._parts:
            # The next run may have another process group.
            self._group = None

    def unwatch(self, name: str) -> None:
        """Stop checking what was watched under a name."""
        self._watched.pop(name, None)

    def _restart(self) -> None:
        self._last, self._is_checked = None, False

    def gather(self, global_step: int, stage: Stage, name: str) -> dict[str, Gathered]:
        """Return the payloads of all parts by name; see `SyncPart.collect`.

        Args:
            global_step: Optimizer steps done.
            stage: See `SyncPart.collect`.
            name: The part that asks.
        """
        place = (global_step, stage)
        if self._last is not None and self._last[0] == place and name not in self._served:
            self._served.add(name)
            return self._last[1]
        if not self._is_checked:
            self.sync_parts()
            self._is_checked = True
        header = np.array([global_step, STAGES.index(stage), self._digest()], dtype=np.int64)
        payload = np.concatenate([header, *(part.words(global_step) for part in self._parts.values())])
        start = time.perf_counter()
        rows = self.gather_words(payload)
        self.gather_s += time.perf_counter() - start
        self.num_gathers += 1
        self._check(rows[:, :NUM_HEADER_WORDS])
        found: dict[str, Gathered] = {}
        at = NUM_HEADER_WORDS
        for other, part in self._parts.items():
            middle, end = at + part.num_floats, at + part.num_floats + part.num_ints
            floats = np.ascontiguousarray(rows[:, at:middle]).view(np.float64)
            found[other] = Gathered(floats=floats, ints=rows[:, middle:end].copy())
            at = end
        self._last, self._served = (place, found), {name}
        return found

    def sync_parts(self) -> None:
        """Check that all ranks have registered the same parts.

        Raises:
            RuntimeError: They have not; raised on every rank.
        """
        parts = {part.name: [part.num_floats, part.num_ints] for part in self._parts.values()}
        text = json.dumps(parts)
        if len(set(self.gather_words(np.array([_digest(text)]))[:, 0].tolist())) > 1:
            texts = self.gather_texts(text)
            other = next(rank for rank, theirs in enumerate(texts) if theirs != texts[0])
            raise RuntimeError(
                explain(
                    f"rank 0 shares {texts[0]} (floats, ints) and rank {other} shares {texts[other]}",
                    "all ranks must run the same callbacks with the same settings",
                    "give every rank the same configuration",
                )
            )

    def sync_inputs(self) -> None:
        """Check now, beside any window, that what is watched is the same on all ranks.

        Raises:
            RuntimeError: It is not; raised on every rank.
        """
        if len(set(self.gather_words(np.array([self._digest()]))[:, 0].tolist())) > 1:
            self._raise_disagreement(self.gather_texts(self._inputs()))

    def sync_start(self, rounds: int = 3) -> None:
        """Let all ranks pass one point together, to within a fraction of a millisecond on one machine.

        Args:
            rounds: Meetings; the first ones make the connections.
        """
        for _ in range(rounds):
            self.gather_words(np.zeros(1, dtype=np.int64))

    def gather_words(self, words: NDArray[np.int64]) -> NDArray[np.int64]:
        """Gather equally many words from every rank.

        Args:
            words: This rank's words # [n].

        Returns:
            Every rank's words # [ranks, n].
        """
        ranks = self.ranks
        if ranks == 1:
            return words[None].copy()
        mine = torch.from_numpy(np.ascontiguousarray(words))
        rows = torch.empty((ranks, len(words)), dtype=torch.int64)
        dist.all_gather(list(rows.unbind(0)), mine, group=self._cpu_group())
        return rows.numpy()

    def gather_texts(self, text: str) -> list[str]:
        """Gather a text from every rank."""
        raw = text.encode()
        sizes = self.gather_words(np.array([len(raw)], dtype=np.int64))[:, 0].tolist()
        num_words = -(-max(sizes) // 8)
        words = np.frombuffer(raw.ljust(8 * num_words, b"\0"), dtype=np.int64).copy()
        rows = self.gather_words(words)
        return [row.tobytes()[:size].decode() for row, size in zip(rows, sizes, strict=True)]

    def _cpu_group(self) -> Any:
        if self._group is None:
            backend = str(dist.get_backend())
            reaches_cpu = any(name in backend for name in ("gloo", "mpi", "cpu:"))
            self._group = dist.group.WORLD if reaches_cpu else _gloo_group(backend)
        return self._group

    def _digest(self) -> int:
        return _digest(self._inputs()) if self._watched and self.ranks > 1 else 0

    def _inputs(self) -> str:
        values = {
            f"{name}.{key}": value for name, get in self._watched.items() for key, value in get().items()
        }
        return json.dumps(values, default=str)

    def _check(self, headers: NDArray[np.int64]) -> None:
        places = [(int(step), STAGES[int(stage)]) for step, stage, _ in headers]
        if len(set(places)) > 1:
            raise RuntimeError(
                explain(
                    "the ranks are at different windows: "
                    + ", ".join(f"rank {rank} {_place(*place)}" for rank, place in enumerate(places)),
                    "every rank must run equally many micro-batches and optimizer steps",
                    "use a sampler that gives all ranks equally many batches, such as "
                    "sb_lightning.balance.SparsityAwareBatchSampler",
                )
            )
        if len(set(headers[:, 2].tolist())) > 1:
            self._raise_disagreement(self.gather_texts(self._inputs()))

    def _raise_disagreement(self, texts: list[str]) -> None:
        inputs = [json.loads(text) for text in texts]
        for name in dict.fromkeys(name for rank in inputs for name in rank):
            values = [rank.get(name) for rank in inputs]
            other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
            if other is not None:
                raise RuntimeError(
                    explain(
                        f"{name} is {values[0]!r} on rank 0 and {values[other]!r} on rank {other}",
                        "the ranks would no longer plan alike, and some sequences would be trained on twice "
                        "and others never",
                        "give every rank the same configuration and the same data",
                    )
                )
        raise RuntimeError(
            explain(
                "the ranks list their inputs in different orders",
                "their digests differ",
                "return the inputs of a watch in one order",
            )
        )


def _gloo_group(backend: str) -> Any:
    try:
        return dist.new_group(backend="gloo")
    except (RuntimeError, ValueError) as error:
        raise RuntimeError(
            explain(
                f"no gloo group could be made beside the {backend} group ({error})",
                "the ranks bring their windows together on the CPU, where gloo must find a network interface "
                "that reaches the other ranks",
                "name it in the environment of every rank, such as GLOO_SOCKET_IFNAME=eth0",
            )
        ) from error


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)


def _place(step: int, stage: Stage) -> str:
    where = f"{step} optimizer step{'s' if step != 1 else ''}"
    return {"window": f"has done {where}", "epoch": f"ended an epoch after {where}"}.get(
        stage, f"ended after {where}"
    )
