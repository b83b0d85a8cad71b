"""The planted bugs still fit the kernels; `make lab-mutations` sees that each is caught."""

from __future__ import annotations

import shutil
import subprocess

import mutations
import pytest

PATCHES = sorted(mutations.PATCHES.glob("*.patch"))


@pytest.mark.skipif(not (mutations.ROOT / "csrc").is_dir(), reason="the kernels' sources are not here")
@pytest.mark.skipif(shutil.which("patch") is None, reason="the program 'patch' is not installed")
@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_the_bug_can_be_planted(path):
    mutation = mutations.read(path)
    assert mutation.program
    command = ["patch", "-p1", "-s", "-F0", "--dry-run"]
    with path.open() as text:
        done = subprocess.run(command, stdin=text, cwd=mutations.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, "the kernels have changed: plant the bug anew"


def test_there_are_bugs_for_every_kernel():
    planted = "".join(path.read_text() for path in PATCHES)
    for name in (
        "common",
        "forward",
        "sweep",
        "backward",
        "query_gradient",
        "index",
        "select",
        "coverage",
        "budget",
    ):
        assert f"/{name}.cuh" in planted
