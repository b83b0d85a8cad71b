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
}


@pytest.mark.parametrize(("changes", "message"), BAD_VALUES.values(), ids=BAD_VALUES.keys())
def test_bad_values(changes, message):
    with pytest.raises(ValueError, match=message) as error:
        moba_attention(**arguments(**changes))
    assert "To fix it, " in str(error.value)


@pytest.mark.parametrize(
    "changes", [{"budget": 2.0}, {"budget": True}, {"q": [1.0]}, {"cu_seqlens": [0, 100]}]
)
def test_wrong_kinds(changes):
    with pytest.raises(TypeError, match="To fix it, "):
        moba_attention(**arguments(**changes))


def test_good_arguments_pass():
    assert moba_attention(**arguments()).shape == (100, 4, 32)
    assert moba_attention(**arguments(max_seqlen=60, max_budget=2)).shape == (100, 4, 32)


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
