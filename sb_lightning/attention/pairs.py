"""How many (query, key) pairs attention visits, in closed form: the unit in which work is compared."""

from __future__ import annotations

from collections.abc import Sequence

from sb_lightning._messages import explain

__all__ = ["attended_pairs", "causal_pairs"]


def attended_pairs(lengths: Sequence[int], budget: int | Sequence[int], block_size: int) -> int:
    """Count the pairs of MoBA attention over whole sequences, for one query head of one layer.

    A query at position t attends its own block up to itself (t mod B + 1 keys) and min(k - 1, floor(t / B))
    earlier blocks of B keys each. The sum over t has a closed form, so no sequence is walked.

    Args:
        lengths: Tokens of each sequence.
        budget: Blocks k that a query attends, its own included; one for all or one per sequence.
        block_size: Keys per block, B.

    Returns:
        The sum over all sequences.

    Raises:
        ValueError: If a length is negative, a budget or the block size is below 1, or the number of budgets
            differs from the number of lengths.

    Example:
        >>> attended_pairs([5], budget=2, block_size=2)  # 1 + 2 | 3 + 4 | 3
        13
        >>> attended_pairs([5], budget=3, block_size=2) == causal_pairs([5])
        True
    """
    if block_size < 1:
        raise ValueError(
            explain(f"block_size is {block_size}", "a block holds at least one key", "pass block_size >= 1")
        )
    budgets = [budget] * len(lengths) if isinstance(budget, int) else list(budget)
    if len(budgets) != len(lengths):
        raise ValueError(
            explain(
                f"{len(budgets)} budgets for {len(lengths)} lengths",
                "each sequence has exactly one budget",
                "pass one budget for all, or as many budgets as lengths",
            )
        )
    return sum(_pairs(length, k, block_size) for length, k in zip(lengths, budgets, strict=True))


def causal_pairs(lengths: Sequence[int]) -> int:
    """Count the pairs of dense causal attention over whole sequences, for one query head of one layer.

    Args:
        lengths: Tokens of each sequence.

    Raises:
        ValueError: If a length is negative.

    Example:
        >>> causal_pairs([3, 1, 0])
        7
    """
    for length in lengths:
        _check_length(length)
    return sum(length * (length + 1) // 2 for length in lengths)


def _pairs(length: int, budget: int, block_size: int) -> int:
    _check_length(length)
    if budget < 1:
        raise ValueError(
            explain(f"budget is {budget}", "a query always attends its own block", "pass budget >= 1")
        )
    blocks, rest = divmod(length, block_size)
    past = budget - 1
    full = min(past, blocks)
    own = blocks * (block_size * (block_size + 1) // 2) + rest * (rest + 1) // 2
    # Block j contributes min(past, j) earlier blocks to each of its queries.
    earlier_blocks = full * (full - 1) // 2 + past * (blocks - full)
    return own + block_size * (block_size * earlier_blocks + rest * full)


def _check_length(length: int) -> None:
    if length < 0:
        raise ValueError(
            explain(
                f"a length is {length}", "a sequence cannot have fewer than 0 tokens", "pass lengths >= 0"
            )
        )
