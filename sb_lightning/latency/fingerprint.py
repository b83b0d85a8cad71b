"""What a latency table was measured on, to be compared with what a run uses."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from sb_lightning import __version__

__all__ = ["Difference", "Fingerprint", "ModelShape", "current_fingerprint", "processor_name"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model that its times depend on."""

    layers: int
    """Decoder layers with a budget."""
    dense_layers: int = 0
    """Decoder layers with full attention."""
    query_heads: int
    """Query heads of a layer."""
    kv_heads: int
    """Key-value heads of a layer."""
    head_dim: int
    """Size of a head."""
    hidden_size: int
    """Size of a token's vector between layers."""
    intermediate_size: int
    """Inner size of the MLP."""
    vocab_size: int
    """Rows of embedding and head."""
    block_size: int
    """Keys per block of the sparse attention."""

    @classmethod
    def from_config(cls, config: Any, *, block_size: int, dense_layers: Sequence[int] = ()) -> ModelShape:
        """Read the sizes off a transformers configuration.

        Args:
            config: A configuration of a decoder with `hidden_size`, `num_attention_heads` and so on.
            block_size: Keys per block.
            dense_layers: Layers that keep full attention.
        """
        heads = int(config.num_attention_heads)
        return cls(
            layers=int(config.num_hidden_layers) - len(set(dense_layers)),
            dense_layers=len(set(dense_layers)),
            query_heads=heads,
            kv_heads=int(getattr(config, "num_key_value_heads", None) or heads),
            head_dim=int(getattr(config, "head_dim", None) or config.hidden_size // heads),
            hidden_size=int(config.hidden_size),
            intermediate_size=int(config.intermediate_size),
            vocab_size=int(config.vocab_size),
            block_size=block_size,
        )


class Difference(NamedTuple):
    """A field in which a table and a run differ."""

    field: str
    table: object
    run: object

    def __str__(self) -> str:
        return f"{self.field} ({self.table} in the table, {self.run} here)"


@dataclass(frozen=True, kw_only=True)
class Fingerprint(ModelShape):
    """Model, machine and software of a measurement."""

    device: str
    """Kind of device: `cpu` or `cuda`."""
    processor: str
    """Name of the processor or GPU."""
    threads: int
    """CPU threads of each rank."""
    ranks: int
    """Ranks that share the machine."""
    dtype: str
    """Element type of the activations, as torch names it without `torch.`."""
    backend: str
    """Attention backend."""
    torch: str
    """Version of torch."""
    build: str
    """Version of this package and the instruction set of its kernels."""

    def differences(self, run: Fingerprint) -> list[Difference]:
        """List the fields in which a run differs from this fingerprint."""
        mine, other = asdict(self), asdict(run)
        return [
            Difference(entry.name, mine[entry.name], other[entry.name])
            for entry in fields(self)
            if mine[entry.name] != other[entry.name]
        ]


def current_fingerprint(
    shape: ModelShape,
    *,
    device: str = "cpu",
    dtype: str = "float32",
    threads: int | None = None,
    ranks: int = 1,
    backend: str | None = None,
) -> Fingerprint:
    """Describe this machine and a run on it.

    Args:
        shape: The model's sizes.
        device: Where it runs, as torch names it: `cpu`, `cuda:1`.
        dtype: Element type of the activations; a leading `torch.` is dropped.
        threads: CPU threads of each rank; None asks torch.
        ranks: Ranks that share the machine.
        backend: Attention backend; None takes what runs by itself on that device in that dtype.
    """
    import torch

    from sb_lightning.attention.backends import best_backend
    from sb_lightning.attention.extension import EXTENSION

    dtype = str(dtype).removeprefix("torch.")
    where = torch.device(device)
    # Under autocast ("-mixed") the attention runs in the dtype that the weights are cast to.
    in_kernel = getattr(torch, dtype.removesuffix("-mixed"), None)
    chosen = backend or best_backend(where, in_kernel)[0]
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = str(torch.__version__)
    name = torch.cuda.get_device_name(device) if where.type == "cuda" else processor_name()
    return Fingerprint(
        **asdict(shape),
        device=where.type,
        processor=name,
        threads=torch.get_num_threads() if threads is None else threads,
        ranks=ranks,
        dtype=dtype,
        backend=chosen,
        torch=torch_version,
        build=f"{__version__}+{EXTENSION.isa or 'python'}" if chosen == "cpu" else __version__,
    )


def processor_name() -> str:
    """Return the name of this machine's processor."""
    try:
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
