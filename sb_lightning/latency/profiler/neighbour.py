"""The program of a neighbour, `python -m sb_lightning.latency.profiler.neighbour`, told over its stdin."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading

__all__ = ["main"]


def main() -> None:
    """Run random steps until standard input closes."""
    # Ctrl-C goes to all processes of a terminal; the one that measures ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    from sb_lightning.latency.profiler.spec import ModelSpec

    spec = ModelSpec.from_json(sys.stdin.readline())
    rank, *lengths = map(int, sys.stdin.readline().split())
    threading.Thread(target=_end_with_stdin, daemon=True).start()

    import torch

    from sb_lightning.latency.profiler.points import Point
    from sb_lightning.latency.profiler.step import StepProbe

    torch.set_num_threads(spec.threads)
    if spec.device.startswith("cuda"):
        torch.cuda.set_device(spec.device)
    probe = StepProbe(
        spec.build(),
        loss_chunk_tokens=spec.loss_chunk_tokens,
        autocast=spec.torch_dtype if spec.mixed else None,
    )
    generator = random.Random(rank)
    block = spec.block_size or 1
    probe.run(Point(min(lengths), 1))
    print("ready", flush=True)
    # Nobody reads the pipe from now on: what warnings and libraries print must not fill it and block.
    os.dup2(2, 1)
    while True:
        length = generator.choice(lengths)
        blocks = -(-length // block)
        probe.run(Point(length, min(blocks, round(blocks ** generator.random()))))
        probe.marks.settle()


def _end_with_stdin() -> None:
    while sys.stdin.read(4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
