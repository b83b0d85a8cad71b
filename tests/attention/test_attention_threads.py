"""Results do not depend on the number of threads, nor on who else computes at the same time."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from moba_cases import Case, Inputs, make_inputs, run, select
from torch import Tensor

CASES = [
    Case((2100,), (4, 2), 64, 64, budgets=(5,)),
    Case((1500, 300, 1, 0, 700), (14, 2), 32, 32, "bf16"),  # budgets differ by sequence and head
    Case(tuple([40, 70] * 40), (4, 2), 32, 32, budgets=tuple([1, 2] * 40)),
    Case((640, 900), (4, 1), 128, 128, "fp16", (3, 50)),  # sparse and dense in one pack
]


@pytest.fixture(autouse=True)
def _same_number_of_threads_after() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def all_steps(case: Case, x: Inputs) -> list[Tensor]:
    """Return the selection, the index, out, lse and the gradients."""
    selection = select(case, x)
    group = case.heads[0] // case.heads[1]
    index = torch.ops.sb.moba_index(selection, x.cu_seqlens, x.budget, case.block_size, group)
    return [selection, *index, *run(case, x)]


def assert_same(got: list[Tensor], want: list[Tensor], what: str) -> None:
    names = ("selection", "list_ptr", "list_rows", "out", "lse", "dq", "dk", "dv")
    for name, ours, wanted in zip(names[-len(want) :], got, want, strict=True):
        assert torch.equal(ours, wanted), f"{name}: {what}"


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_step_gives_the_same_bits_for_any_number_of_threads(case):
    x = make_inputs(case)
    torch.set_num_threads(1)
    want = all_steps(case, x)
    for threads in (1, 2, 4):
        torch.set_num_threads(threads)
        assert_same(all_steps(case, x), want, f"{threads} threads")


def test_two_python_threads_with_inputs_of_their_own():
    cases = [Case((900, 300), (4, 2), 32, 32, budgets=(3, 4)), Case((1100,), (14, 2), 64, 64, "bf16", seed=1)]
    torch.set_num_threads(2)
    want = [run(case, make_inputs(case)) for case in cases]
    got: list[list[list[Tensor]]] = [[], []]
    start = threading.Barrier(2, timeout=60)

    def work(i: int) -> None:
        torch.set_num_threads(2)
        x = make_inputs(cases[i])
        start.wait()
        got[i].extend(run(cases[i], x) for _ in range(4))

    workers = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    for i in range(2):
        assert len(got[i]) == 4
        for result in got[i]:
            assert_same(result, want[i], f"case {i}")
