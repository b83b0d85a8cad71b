"""What torch's profiler and FLOP counter show of the attention."""

from __future__ import annotations

import torch
from moba_cases import Case, make_inputs, select
from torch.profiler import ProfilerActivity, profile
from torch.utils.flop_counter import FlopCounterMode

from sb_lightning.attention import moba_attention
from sb_lightning.attention.pairs import attended_pairs

CASE = Case((330,), (4, 2), 64, 32, budgets=(3,))


def test_the_profiler_names_the_ops_of_forward_and_backward():
    x = make_inputs(CASE)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        out = moba_attention(x.q, x.k, x.v, x.cu_seqlens, x.budget, block_size=32)
    forward = {event.key: event for event in seen.key_averages()}
    assert forward["sb::moba_attention"].count == 1
    assert forward["sb::moba_attention"].cpu_time_total > 0
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        out.sum().backward()
    backward = {event.key: event for event in seen.key_averages()}
    for name in ("sb::moba_index", "sb::moba_backward"):
        assert backward[name].count == 1
        assert backward[name].cpu_time_total > 0


def test_the_profiler_names_the_steps_called_alone():
    x = make_inputs(CASE, requires_grad=False)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        selection = select(CASE, x)
        index = torch.ops.sb.moba_index(selection, x.cu_seqlens, x.budget, 32, 2)
        torch.ops.sb.moba_forward(x.q, x.k, x.v, selection, *index, x.cu_seqlens, x.budget, 32, 330, 0.1)
    count = {event.key: event.count for event in seen.key_averages()}
    assert [count.get(f"sb::moba_{name}") for name in ("select", "index", "forward")] == [1, 1, 1]


def test_flops_of_forward_and_backward_apart():
    x = make_inputs(CASE)
    with FlopCounterMode(display=False) as counter:
        moba_attention(x.q, x.k, x.v, x.cu_seqlens, x.budget, block_size=32).sum().backward()
    product = 2 * 4 * 64 * attended_pairs([330], 3, 32)  # of all heads
    counts = {str(op): flops for op, flops in counter.get_flop_counts()["Global"].items()}
    assert counts == {"sb.moba_attention": 2 * product, "sb.moba_backward": 5 * product}
