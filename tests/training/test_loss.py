"""The chunked cross-entropy against the plain one, and the window's scale."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from sb_lightning.training.loss import (
    head_losses,
    linear_cross_entropy,
    next_token_targets,
    window_loss_scale,
)


def inputs(dtype=torch.float64, tokens=37, width=8, words=11, masked=5):
    torch.manual_seed(0)
    hidden = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weight = torch.randn(words, width, dtype=dtype, requires_grad=True)
    bias = torch.randn(words, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, words, (tokens,))
    targets[::masked] = -100
    return hidden, weight, bias, targets


def plain(hidden, weight, bias, targets):
    return F.cross_entropy(F.linear(hidden, weight, bias), targets, ignore_index=-100, reduction="sum")


@pytest.mark.parametrize("chunk", [1, 7, 37, 1000])
@pytest.mark.parametrize("with_bias", [True, False])
def test_value_and_gradients(chunk, with_bias):
    hidden, weight, bias, targets = inputs()
    bias = bias if with_bias else None
    leaves = [hidden, weight, *([bias] if bias is not None else [])]
    got = linear_cross_entropy(hidden, weight, targets, bias=bias, chunk_tokens=chunk)
    want = plain(hidden, weight, bias, targets)
    torch.testing.assert_close(got, want)
    for ours, theirs in zip(
        torch.autograd.grad(got * 0.3, leaves), torch.autograd.grad(want * 0.3, leaves), strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_gradcheck():
    hidden, weight, bias, targets = inputs(tokens=9, width=3, words=4)
    assert torch.autograd.gradcheck(
        lambda h, w, b: linear_cross_entropy(h, w, targets, bias=b, chunk_tokens=4), (hidden, weight, bias)
    )


def test_only_masked_tokens_give_zero_and_zero_gradients():
    hidden, weight, _, targets = inputs()
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert loss.item() == 0
    assert all(torch.equal(grad, torch.zeros_like(grad)) for grad in grads)


def test_a_frozen_head_gets_no_gradient():
    hidden, weight, _, targets = inputs()
    weight = weight.detach()
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    torch.testing.assert_close(
        hidden.grad, torch.autograd.grad(plain(hidden, weight, None, targets), hidden)[0]
    )


def test_under_autocast_it_is_as_exact_as_the_plain_one():
    hidden, weight, _, targets = inputs(torch.float32, tokens=300, width=64, words=50)
    exact = plain(hidden.double(), weight.double(), None, targets)
    exact_grad = torch.autograd.grad(exact, hidden)[0]
    with torch.autocast("cpu", torch.bfloat16):
        got = linear_cross_entropy(hidden, weight, targets)
        rounded = F.cross_entropy(
            F.linear(hidden, weight).float(), targets, ignore_index=-100, reduction="sum"
        )
    assert got.dtype == torch.float32
    got_grad, rounded_grad = (torch.autograd.grad(x, hidden)[0] for x in (got, rounded))
    assert (got - exact).abs() <= 2 * (rounded - exact).abs() + 1e-3 * exact
    assert (got_grad - exact_grad).abs().max() <= 2 * (rounded_grad - exact_grad).abs().max()


def test_a_bf16_model_sums_in_fp32():
    hidden, weight, _, targets = inputs(torch.bfloat16, tokens=3000)
    got = linear_cross_entropy(hidden, weight, targets, chunk_tokens=100)
    assert got.dtype == torch.float32
    want = plain(hidden.double(), weight.double(), None, targets)
    torch.testing.assert_close(got.double(), want, rtol=1e-2, atol=0)
    assert torch.autograd.grad(got, hidden)[0].dtype == torch.bfloat16


def test_all_logits_never_exist_at_once(monkeypatch):
    seen = []
    original = torch.Tensor.logsumexp
    monkeypatch.setattr(
        torch.Tensor, "logsumexp", lambda self, *a, **k: seen.append(self.shape[0]) or original(self, *a, **k)
    )
    hidden, weight, _, targets = inputs(tokens=100)
    linear_cross_entropy(hidden, weight, targets, chunk_tokens=16).backward()
    assert max(seen) == 16
    assert sum(seen) == int((targets != -100).sum())


class Doubled(nn.Module):
    """A head that is not a plain linear layer."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight.detach().clone())

    def forward(self, x):
        return 2 * (x @ self.weight.T)


def test_other_heads_run_chunk_by_chunk():
    hidden, weight, _, targets = inputs()
    head = Doubled(weight)
    got = head_losses(head, hidden, targets, chunk_tokens=10)
    want = plain(hidden, 2 * head.weight, None, targets)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(torch.autograd.grad(got, hidden)[0], torch.autograd.grad(want, hidden)[0])


def test_shifted_targets():
    labels = torch.tensor([[-100, 5, 6, -100, 7]])
    assert next_token_targets(labels).tolist() == [[5, 6, -100, 7, -100]]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"hidden": torch.zeros(2, 3, 8)}, "hidden has shape"),
        ({"weight": torch.zeros(11, 9)}, "weight"),
        ({"targets": torch.zeros(36, dtype=torch.long)}, "targets has shape"),
        ({"chunk_tokens": 0}, "chunk_tokens is 0"),
    ],
)
def test_bad_shapes(change, reason):
    hidden, weight, _, targets = inputs()
    arguments = {"hidden": hidden, "weight": weight, "targets": targets, **change}
    with pytest.raises(ValueError, match=reason):
        linear_cross_entropy(**arguments)


def test_the_scale_undoes_both_averages():
    sums, accumulate, ranks = [3.0, 4.0, 5.0, 6.0], 2, 2
    scale = window_loss_scale(50, accumulate=accumulate, ranks=ranks)
    # Lightning divides by accumulate, DDP by ranks.
    assert sum(total * scale / accumulate / ranks for total in sums) == pytest.approx(sum(sums) / 50)
    assert window_loss_scale(0, accumulate=1, ranks=1) == 0


@pytest.mark.parametrize("bad", [{"target_tokens": -1}, {"accumulate": 0}, {"ranks": 0}])
def test_the_scale_refuses_nonsense(bad):
    with pytest.raises(ValueError, match="target_tokens"):
        window_loss_scale(**{"target_tokens": 10, "accumulate": 1, "ranks": 1, **bad})
