"""Error and warning texts in three parts: what was found, why it cannot work, what to change."""

from __future__ import annotations

__all__ = ["explain"]


def explain(found: str, why: str, change: str) -> str:
    """Join the three parts of a message.

    Args:
        found: What was found, with the offending value.
        why: Why this cannot work.
        change: What to change, naming the exact key or argument.

    Example:
        >>> explain("budget is 0", "a query always attends its own block", "pass budget >= 1")
        'budget is 0: a query always attends its own block. To fix it, pass budget >= 1.'
    """
    return f"{found}: {why}. To fix it, {change}."
