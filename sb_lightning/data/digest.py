"""Short names of contents."""

from __future__ import annotations

import json
from hashlib import blake2b
from typing import Any

__all__ = ["digest"]


def digest(stamp: dict[str, Any]) -> str:
    """Return a short name for a stamp, the same on every machine."""
    return blake2b(json.dumps(stamp, sort_keys=True).encode(), digest_size=12).hexdigest()
