"""The data of a comparison: those of the configuration, or their text cut to lengths of a known shape."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from sb_lightning._messages import explain
from sb_lightning.data import TextDataModule
from sb_lightning.data.dataset import CellSamples, TokenDataset
from sb_lightning.data.length_presets import LENGTH_PRESETS, sample_lengths

__all__ = ["PRESETS", "CompareData", "CutDataset", "Preset", "describe_lengths"]

# Shorter sequences predict nothing.
LEAST = 2


@dataclass(frozen=True, kw_only=True)
class Preset:
    """Lengths to cut text to: those of a published data set, its longest scaled to data.max_length."""

    like: str
    """A key of `LENGTH_PRESETS`."""
    description: str

    def lengths(self, tokens: int, longest: int, seed: int) -> np.ndarray[Any, Any]:
        """Return lengths that add up to at most so many tokens.

        Args:
            tokens: Tokens of text that there are.
            longest: data.max_length.
            seed: Seed of the draw.
        """
        scale = longest / LENGTH_PRESETS[self.like].most
        # The shortest that can be drawn are still enough to use all tokens up.
        count = tokens // max(int(LENGTH_PRESETS[self.like].least * scale), LEAST) + 1
        drawn = np.maximum((sample_lengths(self.like, count, seed) * scale).astype(np.int64), LEAST)
        return drawn[: int(np.searchsorted(drawn.cumsum(), tokens, side="right"))]


PRESETS = {
    "longtail": Preset(like="longalign", description="a long tail, the shape of LongAlign-10k"),
    "bimodal": Preset(like="chatqa2", description="two humps, short and long, the shape of ChatQA2-Long-SFT"),
}
"""The presets by name."""


def describe_lengths(lengths: np.ndarray[Any, Any]) -> str:
    """Return the lengths of the sequences to train on in a few words.

    Example:
        >>> describe_lengths(np.array([100, 200, 300]))
        '3 sequences to train on (median 200, p99 298, longest 300)'
    """
    middle, high = (int(value) for value in np.percentile(lengths, (50, 99)))
    return (
        f"{len(lengths):,} sequences to train on (median {middle:,}, p99 {high:,}, longest {lengths.max():,})"
    )


class CutDataset(TokenDataset):
    """Text of a data set, document after document, cut into sequences of given lengths.

    Args:
        source: The documents.
        lengths: Of the sequences; they add up to at most the tokens of the source.
    """

    def __init__(self, source: TokenDataset, lengths: np.ndarray[Any, Any]) -> None:
        super().__init__(source.index, source.sequence_ids)
        self._documents = source.sequence_ids
        self._starts = np.concatenate([[0], source.lengths.cumsum()])
        self._cuts = np.concatenate([[0], lengths.cumsum()])
        self.lengths = lengths
        self.target_tokens = lengths - 1
        self.sequence_ids = np.arange(len(lengths))

    def __getitems__(self, items: list[int]) -> CellSamples:
        """Return the sequences of a cell."""
        ids = [int(item) for item in items]
        cut = getattr(items, "max_length", None)
        return CellSamples(items, [self._tokens(i)[:cut] for i in ids], ids)

    def _tokens(self, sequence: int) -> np.ndarray[Any, Any]:
        start, end = int(self._cuts[sequence]), int(self._cuts[sequence + 1])
        first = int(np.searchsorted(self._starts, start, side="right")) - 1
        last = int(np.searchsorted(self._starts, end, side="left"))
        text = np.concatenate([self.index.tokens(int(i)) for i in self._documents[first:last]])
        offset = start - int(self._starts[first])
        return text[offset : offset + end - start]


class CompareData(TextDataModule):
    """`TextDataModule` whose training text may be cut to the lengths of a preset.

    Attributes:
        preset: The preset, or None for the documents as they are.
    """

    preset: Preset | None = None

    def _open(self) -> None:
        super()._open()
        assert self.train_dataset is not None
        if self.preset is not None:
            source = self.train_dataset
            lengths = self.preset.lengths(int(source.lengths.sum()), self.max_length, self.seed)
            if len(lengths) == 0:
                raise ValueError(
                    explain(
                        f"data.source has {int(source.lengths.sum()):,} tokens and data.max_length is "
                        f"{self.max_length:,}",
                        "not one sequence can be cut from them",
                        "use more text, or lower data.max_length",
                    )
                )
            self.train_dataset = CutDataset(source, lengths)
