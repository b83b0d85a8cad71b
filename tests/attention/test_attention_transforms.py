"""torch.func and forward mode: gradients as in reverse mode, and never a tangent that is silently zero."""

from __future__ import annotations

import pytest
import torch
from moba_cases import Case, make_inputs
from torch.autograd import forward_ad

from sb_lightning.attention import moba_attention

CASE = Case((70, 0, 35), (2, 1), 32, 32, budgets=(2, 1, 2))
X = make_inputs(CASE, requires_grad=False)
REFUSED = r"forward-mode derivative \(jvp\) of moba_attention .*backend='reference'"

pytestmark = pytest.mark.filterwarnings("ignore:There is a performance drop")


def attention(q, k=X.k, v=X.v, backend=None):
    return moba_attention(
        q, k, v, X.cu_seqlens, X.budget, block_size=32, max_seqlen=70, max_budget=2, backend=backend
    )


def loss(q, k=X.k, v=X.v, backend=None):
    return (attention(q, k, v, backend) * X.dout).sum()


@pytest.mark.parametrize("place", [0, 1, 2])
def test_jvp_is_refused(place):
    inputs = [X.q, X.k, X.v]

    def of_one(x):
        return attention(*inputs[:place], x, *inputs[place + 1 :])

    with pytest.raises(RuntimeError, match=REFUSED):
        torch.func.jvp(of_one, (inputs[place],), (inputs[place],))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=REFUSED):
        of_one(forward_ad.make_dual(inputs[place], inputs[place]))
    with forward_ad.dual_level(), pytest.raises(RuntimeError, match=REFUSED):
        of_one(forward_ad.make_dual(inputs[place].clone().requires_grad_(), inputs[place]))


def test_jacfwd_and_hessian_are_refused():
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.func.jacfwd(attention)(X.q)
    with pytest.raises(RuntimeError, match=REFUSED):
        torch.func.hessian(loss)(X.q)


def test_jvp_of_the_reference_and_of_other_ops_runs():
    _, tangent = torch.func.jvp(lambda q: attention(q, backend="reference"), (X.q,), (X.dout,))
    assert float(tangent.abs().sum()) > 0
    out = attention(X.q)
    _, tangent = torch.func.jvp(lambda x: attention(X.q) * x, (X.q,), (X.dout,))
    assert torch.equal(tangent, out * X.dout)
    with forward_ad.dual_level():
        assert torch.equal(attention(X.q), out)


def test_jvp_under_compile_is_refused():
    torch._dynamo.reset()
    compiled = torch.compile(attention, backend="aot_eager")
    compiled(X.q)  # a graph that exists already must not run on dual tensors
    with forward_ad.dual_level(), pytest.raises(Exception, match=REFUSED):
        compiled(forward_ad.make_dual(X.q, X.dout))
    with pytest.raises(Exception, match=REFUSED):
        torch.func.jvp(compiled, (X.q,), (X.dout,))
    with pytest.raises(Exception, match=REFUSED):
        torch.compile(lambda q: torch.func.jvp(attention, (q,), (X.dout,)), backend="aot_eager")(X.q)


def test_grad_and_vjp_are_those_of_autograd():
    leaves = [x.clone().requires_grad_() for x in (X.q, X.k, X.v)]
    want = torch.autograd.grad(loss(*leaves), leaves)
    _, pull = torch.func.vjp(attention, X.q, X.k, X.v)
    for got in (torch.func.grad(loss, argnums=(0, 1, 2))(X.q, X.k, X.v), pull(X.dout)):
        for ours, wanted in zip(got, want, strict=True):
            assert torch.equal(ours, wanted)


def test_grad_under_autocast():
    def mixed(q):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return (attention(q).float() * X.dout).sum()

    leaf = X.q.clone().requires_grad_()
    (want,) = torch.autograd.grad(mixed(leaf), leaf)
    assert torch.equal(torch.func.grad(mixed)(X.q), want)


def test_jacrev():
    def of_heads(q, backend=None):
        return attention(q, backend=backend).mean((0, 2))

    got = torch.func.jacrev(of_heads)(X.q)
    torch.testing.assert_close(got, torch.func.jacrev(lambda q: of_heads(q, "reference"))(X.q))


def test_vmap_and_vmap_of_grad():
    stack = torch.stack([X.q, 2 * X.q])
    assert torch.equal(torch.func.vmap(attention)(stack), torch.stack([attention(q) for q in stack]))
    got = torch.func.vmap(torch.func.grad(loss))(stack)
    assert torch.equal(got, torch.stack([torch.func.grad(loss)(q) for q in stack]))
    k = X.k.clone().requires_grad_()
    (got,) = torch.autograd.grad(torch.func.vmap(lambda q: loss(q, k))(stack).sum(), k)
    (want,) = torch.autograd.grad(sum(loss(q, k) for q in stack), k)
    torch.testing.assert_close(got, want)


def test_grad_of_grad_is_refused():
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.func.grad(lambda q: torch.func.grad(loss)(q).sum())(X.q)
