"""Bad input: an error that names the argument, says why, and says what to change."""

from __future__ import annotations

import pytest
import torch
from moba_cases import bounds

from sb_lightning.attention import moba_attention, moba_select
from sb_lightning.attention.checks import SUPPORTED_HEAD_DIMS, check_block_size, check_budget


def arguments(**changes):
    torch.manual_seed(0)
    good = {
        "q": torch.randn(100, 4, 32),
        "k": torch.randn(100, 2, 32),
        "v": torch.randn(100, 2, 32),
        "cu_seqlens": bounds([60, 40]),
        "budget": 2,
        "block_size": 32,
    }
    return {**good, **changes}


def int32(*values):
    return torch.tensor(values, dtype=torch.int32)


BAD_VALUES = {
    "budget 0": ({"budget": 0}, "budget is 0"),
    "budget negative": ({"budget": -3}, "budget is -3"),
    "budget tensor with 0": ({"budget": int32(2, 0)[:, None]}, "budget of sequence 1 is 0"),
    "budget of another shape": ({"budget": int32(1, 2, 3)}, r"budget has shape \(3,\)"),
    "budget with three dimensions": ({"budget": int32(1)[None, None]}, "budget has shape"),
    "budget int64": ({"budget": torch.tensor([[2], [2]])}, "budget is torch.int64"),
    "budget float tensor": ({"budget": torch.ones(2, 4)}, "budget is torch.float32"),
    "block_size 0": ({"block_size": 0}, "block_size is 0"),
    "block_size 40": ({"block_size": 40}, "block_size is 40"),
    "block_size negative": ({"block_size": -16}, "block_size is -16"),
    "heads": ({"q": torch.randn(100, 3, 32)}, "q has 3 heads and k has 2"),
    "no heads": ({"k": torch.randn(100, 0, 32), "v": torch.randn(100, 0, 32)}, "k has 0"),
    "v heads": ({"v": torch.randn(100, 1, 32)}, "v has 1 heads and k has 2"),
    "head_dim": ({name: torch.randn(100, 2, 48) for name in "qkv"}, "head_dim is 48"),
    "head_dim of v": ({"v": torch.randn(100, 2, 64)}, "v has head_dim 64"),
    "cu_seqlens starts": ({"cu_seqlens": int32(1, 60, 100)}, "cu_seqlens starts at 1"),
    "cu_seqlens ends": ({"cu_seqlens": int32(0, 60, 99)}, "cu_seqlens ends at 99 and q has 100"),
    "cu_seqlens decreases": ({"cu_seqlens": int32(0, 60, 50, 100)}, "cu_seqlens decreases at position 2"),
    "cu_seqlens int64": ({"cu_seqlens": torch.tensor([0, 100])}, "cu_seqlens is torch.int64"),
    "cu_seqlens empty": ({"cu_seqlens": int32()}, "cu_seqlens is torch.int32 of shape"),
    "cu_seqlens 2-D": ({"cu_seqlens": int32(0, 100)[None]}, "cu_seqlens is torch.int32 of shape"),
    "mixed dtypes": ({"v": torch.randn(100, 2, 32).bfloat16()}, "v is torch.bfloat16 and q is torch.float32"),
    "float64": ({n: torch.randn(100, 2, 32).double() for n in "qkv"}, "q is torch.float64"),
    "q_len": ({"q": torch.randn(1, 4, 32)}, "k has 100 tokens and q has 1"),
    "four dimensions": ({"q": torch.randn(1, 100, 4, 32)}, "q has shape"),
    "max_seqlen": ({"max_seqlen": 59}, "max_seqlen is 59 and a sequence has 60"),
    "max_budget": ({"max_budget": 1}, "budget of sequence 0 is 2 and max_budget is 1"),
    "max_budget 0": ({"max_budget": 0}, "max_budget is 0"),
    "scale": ({"scale": float("nan")}, "scale is nan"),
    "backend": ({"backend": "gpu"}, "backend is 'gpu'"),
    "block_size beyond 32 bits": ({"block_size": 2**63 - 16}, "block_size is 9223372036854775792"),
}


@pytest.mark.parametrize(("changes", "message"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_bad_values(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        moba_attention(**arguments(**changes))
    assert "To fix it, " in str(error.value)


@pytest.mark.parametrize(
    "changes",
    [
        {"budget": 2.0},
        {"budget": True},
        {"q": [1.0]},
        {"cu_seqlens": [0, 100]},
        {"block_size": 32.0},
        {"block_size": "32"},
        {"block_size": True},
        {"max_seqlen": 60.0},
        {"max_seqlen": torch.tensor(60.0)},
        {"max_budget": "3"},
        {"max_budget": 2.0},
    ],
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_wrong_kinds(changes, backend):
    with pytest.raises(TypeError, match=f"^{next(iter(changes))} is a .* To fix it, "):
        moba_attention(**arguments(**changes), backend=backend)


@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.int32])
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_what_autocast_does_not_cast_is_named(name, dtype, backend):
    given = arguments()
    given[name] = given[name].to(dtype)
    with (
        torch.autocast("cpu", dtype=torch.bfloat16),
        pytest.raises(ValueError, match=f"^{name} is {dtype}: .*not supported under torch.autocast"),
    ):
        moba_attention(**given, backend=backend)


def test_float64_under_autocast_is_refused_by_the_kernels():
    given = {n: x.double() if n in ("q", "k", "v") else x for n, x in arguments().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match=r"q is torch\.float64"):
        moba_attention(**given)


def test_good_arguments_pass():
    assert moba_attention(**arguments()).shape == (100, 4, 32)
    assert moba_attention(**arguments(max_seqlen=60, max_budget=2)).shape == (100, 4, 32)
    numbers = {"block_size": torch.tensor(32), "max_seqlen": torch.tensor(60)}  # as collators make them
    assert torch.equal(moba_attention(**arguments(**numbers)), moba_attention(**arguments()))


def test_select_checks_too():
    given = arguments(budget=0)
    del given["v"]
    with pytest.raises(ValueError, match="budget is 0"):
        moba_select(**given)


def test_more_blocks_than_int16_can_name():
    q = torch.zeros(16 * 32768, 1, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"block_size is 16 .* pass block_size >= 32"):
        moba_attention(q, q, q, bounds([16 * 32768]), 1, block_size=16)


@pytest.mark.parametrize(
    ("cu_seqlens", "budget", "max_seqlen", "max_budget", "message"),
    [
        (int32(1, 100), 2, 100, 2, "cu_seqlens starts at 1"),
        (int32(0, 99), 2, 100, 2, "cu_seqlens ends at 99"),
        (int32(0, 60, 50, 100), 2, 100, 2, "cu_seqlens decreases"),
        (int32(0, 100), 0, 100, 2, r"budget\[0, 0\] is 0"),
        (int32(0, 100), 3, 100, 2, "max_budget is 2"),
        (int32(0, 100), 2, 99, 2, "max_seqlen is 99"),
    ],
)
def test_the_op_itself_refuses_values(cu_seqlens, budget, max_seqlen, max_budget, message):
    # This is what a compiled graph calls, without the checks of the Python function.
    given = arguments()
    tensor = torch.full((cu_seqlens.shape[0] - 1, 4), budget, dtype=torch.int32)
    with pytest.raises(ValueError, match=message):
        torch.ops.sb.moba_attention(
            given["q"], given["k"], given["v"], cu_seqlens, tensor, 32, max_seqlen, max_budget, 1.0, False
        )


def test_the_ops_refuse_shapes_that_would_leave_the_memory():
    given = arguments()
    q, k, cu_seqlens = given["q"], given["k"], bounds([100])
    budget = torch.full((1, 4), 2, dtype=torch.int32)
    selection = torch.ops.sb.moba_select(q, k, cu_seqlens, budget, 32, 100, 2)
    lists, rows = torch.ops.sb.moba_index(selection, cu_seqlens, budget, 32, 2)

    def forward(lists, rows, selection=selection, v=k):
        return torch.ops.sb.moba_forward(q, k, v, selection, lists, rows, cu_seqlens, budget, 32, 100, 1.0)

    forward(lists, rows)
    for bad in (lists[:-1], lists + 1000, lists.flip(0)):
        with pytest.raises(RuntimeError, match="list_ptr"):
            forward(bad, rows)
    with pytest.raises(RuntimeError, match="selection has shape"):
        forward(lists, rows, selection[:, :50])
    with pytest.raises(RuntimeError, match="v has shape"):
        forward(lists, rows, v=k[:50])
    wrong = selection.clone()
    wrong[0, 99, 0] = 7
    with pytest.raises(ValueError, match="selection has entries"):
        torch.ops.sb.moba_index(wrong, cu_seqlens, budget, 32, 2)


@pytest.mark.parametrize("max_budget", [0, 32768, 2**40, 2**62])
def test_the_ops_refuse_a_selection_of_any_width(max_budget):
    given = arguments()
    q, k, cu_seqlens = given["q"], given["k"], given["cu_seqlens"]
    budget = torch.full((2, 4), 2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=f"max_budget is {max_budget}: .* To fix it, "):
        torch.ops.sb.moba_select(q, k, cu_seqlens, budget, 32, 60, max_budget)
    with pytest.raises(RuntimeError, match=f"max_budget is {max_budget}: .* To fix it, "):
        torch.ops.sb.moba_attention(q, k, k, cu_seqlens, budget, 32, 60, max_budget, 1.0, False)


def test_the_ops_refuse_a_block_size_beyond_32_bits():
    given = arguments()
    budget = torch.full((2, 4), 2, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="block_size is 9223372036854775792"):
        torch.ops.sb.moba_select(given["q"], given["k"], given["cu_seqlens"], budget, 2**63 - 16, 60, 2)


def break_list(rows, begin, end, how):
    rows = rows.clone()
    if how == "unsorted":
        rows[begin : begin + 2] = rows[begin : begin + 2].flip(0)
    elif how == "twice":
        rows[begin + 1] = rows[begin]
    elif how == "far in the middle":
        rows[(begin + end) // 2] = 2**31 - 5
    elif how == "past the sequence":
        rows[end - 1] = 2 * 130
    elif how == "negative":
        rows[begin] = -1
    elif how == "of its own block":
        rows[begin] = 0
    return rows


@pytest.mark.parametrize(
    "how", ["unsorted", "twice", "far in the middle", "past the sequence", "negative", "of its own block"]
)
def test_the_ops_refuse_rows_that_would_leave_the_memory(how):
    torch.manual_seed(0)
    q, k, cu_seqlens = torch.randn(230, 4, 32), torch.randn(230, 2, 32), bounds([100, 130])
    integers = (cu_seqlens, torch.full((2, 4), 2, dtype=torch.int32))
    selection = torch.ops.sb.moba_select(q, k, *integers, 16, 130, 2)
    lists, rows = torch.ops.sb.moba_index(selection, *integers, 16, 2)
    out, lse = torch.ops.sb.moba_forward(q, k, k, selection, lists, rows, *integers, 16, 130, 1.0)
    long = [(a, b) for a, b in zip(lists.tolist(), lists.tolist()[1:], strict=False) if b - a >= 3]
    for begin, end in (long[0], long[-1]):
        bad = break_list(rows, begin, end, how)
        if how == "past the sequence" and begin == long[0][0]:
            bad[end - 1] = 2 * 100
        index = (selection, lists, bad, *integers, 16, 130, 1.0)
        with pytest.raises(ValueError, match="list_rows holds a list"):
            torch.ops.sb.moba_forward(q, k, k, *index)
        with pytest.raises(ValueError, match="list_rows holds a list"):
            torch.ops.sb.moba_backward(out, None, q, k, k, out, lse, *index, False)


def test_other_devices_are_refused_with_the_reason():
    given = {n: x.to("meta") if isinstance(x, torch.Tensor) else x for n, x in arguments().items()}
    with pytest.raises(RuntimeError, match="q is on device 'meta'"):
        moba_attention(**given)
    with pytest.raises(ValueError, match="k is on meta and q on cpu"):
        moba_attention(**{**given, "q": torch.randn(100, 4, 32)})


def test_single_checks():
    for head_dim in SUPPORTED_HEAD_DIMS:
        x = torch.randn(20, 1, head_dim)
        assert moba_attention(x, x, x, bounds([20]), 1, block_size=16).shape == x.shape
    check_block_size(16)
    check_budget(1)
    with pytest.raises(ValueError, match="block_size is 8"):
        check_block_size(8)
    with pytest.raises(TypeError, match="budget is a float"):
        check_budget(1.5)
