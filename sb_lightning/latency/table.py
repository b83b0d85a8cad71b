"""The measured latency table: predictions in nanoseconds, kept in a JSON file."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sb_lightning._files import write_whole
from sb_lightning._messages import explain
from sb_lightning.latency.engine import EngineTable
from sb_lightning.latency.fingerprint import Difference, Fingerprint
from sb_lightning.latency.lattice import Measurements
from sb_lightning.latency.schema import TableParts, check_measurements, decode, encode, parse, unparse

__all__ = ["LatencyModel", "LatencyTable"]


class LatencyModel(EngineTable):
    """What predicts times: `predict`, `attention_ms`, `budget_within`, `micro_batch_ms` and so on.

    The methods are those of `sb_lightning.latency.reference.LatencyTable`, computed in C++ where it is built.
    All times are milliseconds, forward and backward, monotone in the length and in the budget. Objects do not
    change after construction but for the count `extrapolated`; any number of threads may read at once.
    """

    label: str
    """Where the times come from; shown in every output that uses them."""

    def __init__(self, measurements: Measurements, label: str) -> None:
        check_measurements(measurements)
        m = self.measurements = measurements
        self.label = label
        super().__init__(
            m.block_size,
            m.layers,
            m.dense_layers,
            m.fixed_ms,
            m.lengths,
            m.budgets,
            m.sparse,
            m.dense,
            m.rest,
            m.outside,
        )

    def __repr__(self) -> str:
        m = self.measurements
        return (
            f"{type(self).__name__}({self.label}: {len(m.lengths)} lengths of {m.lengths[0]} to "
            f"{m.lengths[-1]} tokens, {m.layers} + {m.dense_layers} layers with and without a budget, "
            f"blocks of {m.block_size} keys)"
        )

    def __reduce__(self) -> tuple[Callable[..., LatencyModel], tuple[Any, ...]]:
        # Copies are built anew, in this process or in a data loader's worker.
        return LatencyModel, (self.measurements, self.label)


class LatencyTable(LatencyModel):
    """Times measured on a machine, for the sequence lengths and budgets of a model.

    The paper's lookup table (arXiv 2604.13847, section on latency prediction), with the whole model's time
    instead of one layer's.

    Args:
        measurements: The measured times.
        fingerprint: What they were measured on.
        profile: What the profiler notes beside them (spreads, hold-out errors); kept, never read here.

    Raises:
        ValueError: A time is not positive and finite, or lengths, budgets and times do not fit each other.

    Example:
        >>> from sb_lightning.latency import AnalyticCost, ModelShape
        >>> shape = ModelShape(layers=2, query_heads=4, kv_heads=2, head_dim=32, hidden_size=128,
        ...                    intermediate_size=384, vocab_size=2048, block_size=64)
        >>> cost = AnalyticCost(shape)
        >>> cost.predict(8192, 8) < cost.predict(8192, 16) < cost.predict(8192, 128)
        True
        >>> cost.budget_within(8192, cost.predict(8192, 16))
        16
    """

    is_compared = False
    """Whether the user has been told what differs between the table and this run: once is enough."""

    def __init__(
        self, measurements: Measurements, fingerprint: Fingerprint, profile: dict[str, Any] | None = None
    ) -> None:
        m, f = measurements, fingerprint
        for name in ("block_size", "layers", "dense_layers"):
            if getattr(m, name) != getattr(f, name):
                raise ValueError(
                    explain(
                        f"measurements.{name} is {getattr(m, name)}, fingerprint.{name} {getattr(f, name)}",
                        "a table describes one model",
                        f"give both the same {name}",
                    )
                )
        # As a file would hold it, so that what is saved can be loaded.
        parts = parse(unparse(TableParts(m, f, profile or {})))
        where = f"{f.processor}, {f.threads} thread{'s' if f.threads != 1 else ''} x {f.ranks}"
        super().__init__(parts.measurements, f"measured ({where}, {f.dtype})")
        self.fingerprint = parts.fingerprint
        self.profile = parts.profile

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> LatencyTable:
        """Read a table.

        Raises:
            FileNotFoundError: There is no such file.
            ValueError: The file is not a whole table of this version; the message names the field.
        """
        content = Path(path).read_bytes()
        try:
            return cls.from_dict(decode(content))
        except ValueError as error:
            raise ValueError(f"{os.fspath(path)}: {error}") from None

    @classmethod
    def from_dict(cls, document: dict[str, Any]) -> LatencyTable:
        """Build a table from what `to_dict` returned.

        Raises:
            ValueError: A field is missing or wrong; the message names it.
        """
        parts = parse(document)
        return cls(parts.measurements, parts.fingerprint, parts.profile)

    def to_dict(self) -> dict[str, Any]:
        """Return the measurements, before any correction, as plain JSON types."""
        return unparse(TableParts(self.measurements, self.fingerprint, self.profile))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the table; the file is replaced whole or not at all."""
        write_whole(Path(path), encode(self.to_dict()))

    def mismatch(self, run: Fingerprint) -> list[Difference]:
        """List what differs between the table and a run: empty where the table holds for it.

        Args:
            run: From `current_fingerprint`.
        """
        return self.fingerprint.differences(run)

    def __reduce__(self) -> tuple[Callable[..., LatencyTable], tuple[dict[str, Any], str]]:
        return _copy, (self.to_dict(), self.label)


def _copy(document: dict[str, Any], label: str) -> LatencyTable:
    table = LatencyTable.from_dict(document)
    table.label = label
    return table
