"""The data module's settings: values that cannot work, and those that a checkpoint was trained with."""

from __future__ import annotations

from typing import Any

from lightning.pytorch.utilities import rank_zero_warn

from sb_lightning._messages import explain

__all__ = ["check_evaluated_settings", "check_settings", "describe_differences"]

LARGEST_SEED = 2**63 - 2**32
"""The epoch is added to the seed, and the sum has to fit in 64 bits."""

_CONTENT = "tokenizer_content"
_SCORE_DEPENDS_ON = ("source", "max_length", "overlong", "validation_share")


def check_settings(*, cache_dir: str, seed: int, validation_share: float, num_workers: int) -> None:
    """Refuse values that cannot work, before anything is read.

    Raises:
        ValueError: Names the setting.
    """
    if not str(cache_dir).strip():
        raise ValueError(
            explain(
                f"data.cache_dir is {cache_dir!r}",
                "it would be the current folder, whatever that is",
                "name a folder for the tokenized data, such as .cache/sb_lightning",
            )
        )
    if seed > LARGEST_SEED:
        raise ValueError(
            explain(
                f"data.seed is {seed}",
                "the epoch is added to it, and the sum has to fit in 64 bits",
                f"pass a number from 0 to {LARGEST_SEED}",
            )
        )
    if not 0 <= validation_share < 1:
        raise ValueError(
            explain(
                f"data.validation_share is {validation_share}",
                "it is the share of the documents that is kept from training",
                "pass a number from 0 to below 1, such as 0.02",
            )
        )
    if num_workers < 0:
        raise ValueError(
            explain(f"data.num_workers is {num_workers}", "it counts processes", "pass a number >= 0")
        )


def describe_differences(saved: dict[str, Any], current: dict[str, Any]) -> list[str]:
    """Return each setting that differs, with both values.

    Example:
        >>> describe_differences({"max_length": 64, "source": "docs"}, {"max_length": 128, "source": "docs"})
        ['data.max_length 64 -> 128']
    """
    different = [
        f"data.{key} {saved[key]!r} -> {current[key]!r}"
        for key in current
        if key in saved and key != _CONTENT and saved[key] != current[key]
    ]
    if saved.get(_CONTENT) != current.get(_CONTENT) and saved.get("tokenizer") == current.get("tokenizer"):
        different.append(f"what data.tokenizer {current.get('tokenizer')!r} gives")
    return different


def check_evaluated_settings(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Compare the settings of a checkpoint that is validated, tested or predicted with.

    Other data are warned about; another tokenizer is refused.

    Args:
        saved: The settings in the checkpoint.
        current: The settings now.

    Raises:
        ValueError: The token ids would mean something else to the model.
    """
    if saved[_CONTENT] != current[_CONTENT]:
        raise ValueError(
            explain(
                f"the checkpoint was trained with data.tokenizer {saved['tokenizer']!r} on data.source "
                f"{saved['source']!r}; {current['tokenizer']!r} on {current['source']!r} gives other tokens",
                "they would mean something else to the model",
                "set data.tokenizer (and data.source, where the tokenizer is trained on it) to those of the "
                "checkpoint",
            )
        )
    different = describe_differences(
        {key: saved[key] for key in _SCORE_DEPENDS_ON}, {key: current[key] for key in _SCORE_DEPENDS_ON}
    )
    if different:
        rank_zero_warn(
            f"the checkpoint was trained with other settings: {', '.join(different)}. Its scores do not "
            "compare with those of its training, and documents it has trained on may be among those held out."
        )
