"""A small corpus of random letters."""

from __future__ import annotations

import json
from pathlib import Path

import torch


def write_corpus(path: Path, documents: int = 13, seed: int = 0) -> str:
    """Write a .jsonl whose documents have from 2 to some 150 letters, one in five of them long."""
    generator = torch.Generator().manual_seed(seed)
    with open(path, "w", encoding="utf-8") as file:
        for index in range(documents):
            length = int(torch.randint(2, 40, (1,), generator=generator)) * (1 + 3 * (index % 5 == 0))
            letters = torch.randint(97, 123, (length,), generator=generator).tolist()
            file.write(json.dumps({"text": "".join(map(chr, letters))}) + "\n")
    return str(path)
