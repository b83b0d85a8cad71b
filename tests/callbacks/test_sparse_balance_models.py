"""DST under what people wrap models in: the same budgets and the same gradients as without."""

from __future__ import annotations

import itertools

import pytest
import pytorch_lightning
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from sparse_run import (
    BLOCK,
    BUDGET,
    LENGTHS,
    Module,
    Training,
    build,
    fit,
    make_trainer,
    records,
    token_loss,
    tuning,
    weights,
)
from tiny import packed
from torch.utils.data import DataLoader

from sb_lightning.attention import sparsify


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return fit(tmp_path_factory.mktemp("plain"), tuning())


def assert_same(module, plain, exact=True, layers=(0, 1)):
    assert len(module.gradients) == len(plain.gradients) > 0
    for got, want in zip(records(module, layers), records(plain, layers), strict=True):
        assert torch.equal(got[..., 0], want[..., 0])
    for got, want in zip(module.gradients, plain.gradients, strict=True):
        if exact:
            assert torch.equal(got, want)
        else:
            torch.testing.assert_close(got, want, rtol=1e-3, atol=1e-4)


class MovesTheTime(Callback):
    """Says between forward and backward that there is no time: a layer that decided anew would cut."""

    def on_before_backward(self, trainer, pl_module, loss):
        tuner = pl_module.model.model.sb_tuner
        tuner.forwards[-1].target.tau_us.zero_()
        tuner.goal = None


@pytest.mark.parametrize("reentrant", [False, True], ids=["saved_tensors", "reentrant"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_activation_checkpointing_uses_the_budgets_of_the_first_forward(tmp_path, reentrant, accumulate):
    unchecked = fit(tmp_path, tuning(), accumulate_grad_batches=accumulate)
    module = fit(
        tmp_path, tuning(), MovesTheTime(), module={"model": build(checkpointing=reentrant)},
        accumulate_grad_batches=accumulate,
    )  # fmt: skip
    assert_same(module, unchecked)
    assert torch.equal(weights(module), weights(unchecked))


@pytest.mark.parametrize("how", ["base_checkpointed", "module", "layers"])
def test_a_compiled_model_is_tuned_and_no_budget_compiles_anew(tmp_path, how):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    # The first one goes all the way to what a graph keeps for its backward pass.
    is_checkpointed = how == "base_checkpointed"
    counter = CompileCounterWithBackend("aot_eager_decomp_partition" if is_checkpointed else "eager")
    model = inner = build(checkpointing=False if is_checkpointed else None, num_layers=1)
    if how == "module":
        model = torch.compile(model, backend=counter, dynamic=True)
    for part in {"base_checkpointed": [inner.model], "layers": inner.model.layers}.get(how, []):
        part.compile(backend=counter, dynamic=True)
    counts = []

    class Counts(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            counts.append(counter.frame_count)

    # A few lengths, again and again, with other goals: all that differs later on is the budgets.
    options = {"lengths": [200, 90, 150, 40] * 3, "sampler": {"policy": "random", "seed": 1}}
    before = [(part._compiled_call_impl, len(part._forward_pre_hooks)) for part in model.modules()]
    module = fit(tmp_path, tuning(), Counts(), module={"model": model, **options})
    after = [(part._compiled_call_impl, len(part._forward_pre_hooks)) for part in model.modules()]
    assert after == before, "the model was not left as it was"
    eager = fit(tmp_path, tuning(), module={"model": build(num_layers=1), **options})
    torch._dynamo.reset()
    assert_same(module, eager, exact=False, layers=[0])
    budgets = {int(b) for record in records(module, [0])[6:] for b in record[..., 0].flatten()}
    assert len(budgets) >= 3, budgets
    assert counts[-1] == counts[5] > 0, counts


def test_a_compiled_lightning_module_is_refused(tmp_path):
    module = Module()
    module._compiler_ctx = {"compiler": "dynamo"}
    trainer = make_trainer(tmp_path, tuning())
    with pytest.raises(MisconfigurationException, match="compile the model inside it"):
        trainer.fit(module)


@pytest.mark.parametrize("accumulate", [1, 2, 5])
def test_manual_optimization(tmp_path, accumulate):
    """Every micro-batch steps: the sampler plans windows of so many steps; of 5, the last is short."""
    module = fit(
        tmp_path, tuning(), module={"manual": True, "sampler": {"accumulate": accumulate}},
        accumulate_grad_batches=1,
    )  # fmt: skip
    assert len(module.windows) == len(LENGTHS)
    assert any((record[..., 0] != BUDGET).any() for record in records(module)) == (accumulate > 1)
    assert module.sampler.store.version == -(-len(LENGTHS) // accumulate)
    # The store has learnt of every sequence, not only of those before a planned window's first step.
    store, used = module.sampler.store, [record[..., 0].mean(0).tolist() for record in records(module)]
    for ids, budgets in zip(module.seen, used, strict=True):
        assert store.expected(store.version, ids=ids, lengths=[1], base=[99]).tolist() == pytest.approx(
            budgets
        )


class StepsEarly(Module):
    """Steps after the first micro-batch of each planned window, not after its last."""

    def training_step(self, batch, batch_idx):
        optimizer = self.optimizers()
        self.manual_backward(token_loss(self.model, batch))
        if batch_idx % 2 == 0:
            optimizer.step()
            optimizer.zero_grad()


def test_a_planned_window_whose_end_is_no_step_is_taken_in_by_the_next_one(tmp_path):
    module = StepsEarly(manual=True, sampler={"accumulate": 2})
    fit(tmp_path, tuning(), module=module, accumulate_grad_batches=1)
    assert module.sampler.store.version == len(LENGTHS) // 2 - 1


def test_a_window_that_the_trainer_cuts_short_by_a_step_is_learnt_from(tmp_path):
    """The sampler was not told of the limit."""
    assert fit(tmp_path, tuning(), limit_train_batches=3).sampler.store.version == 2


def test_a_sampler_that_is_kept_may_train_twice(tmp_path):
    """The first windows have the numbers of those that its store knows."""

    class Keeps(Module):
        def train_dataloader(self):
            if not hasattr(self, "loader"):
                self.loader = super().train_dataloader()
            return self.loader

    module = Keeps()
    for _ in range(2):
        fit(tmp_path, tuning(), module=module)
    assert module.sampler.store.version == len(LENGTHS) // 2


def test_pytorch_lightning(tmp_path, plain):
    class Other(Training, pytorch_lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.make()

    module = fit(tmp_path, tuning(), module=Other(), trainer=pytorch_lightning.Trainer)
    assert_same(module, plain)
    assert torch.equal(weights(module), weights(plain))
    for got, want in zip(module.logged, plain.logged, strict=True):
        assert {**got, "time/tune_ms": 0} == {**want, "time/tune_ms": 0}


def test_lora(tmp_path):
    peft = pytest.importorskip("peft")

    def lora(checkpointing=None):
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        torch.manual_seed(1)
        model = build()
        wrapped = peft.get_peft_model(model, config)
        if checkpointing is not None:
            wrapped.enable_input_require_grads()
            wrapped.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        return wrapped

    unchecked = fit(tmp_path, tuning(), module={"model": lora()})
    assert any((record[..., 0] != BUDGET).any() for record in records(unchecked))
    for reentrant in (False, True):
        assert_same(fit(tmp_path, tuning(), module={"model": lora(reentrant)}), unchecked, exact=False)


class Padded(Training, LightningModule):
    """Somebody's project: padded batches of two, a plain loader, no sampler of ours."""

    def __init__(self, side):
        super().__init__()
        self.make()
        self.side = side

    def train_dataloader(self):
        batches = []
        for first, second in itertools.pairwise(LENGTHS):
            longest = max(first, second)
            ids, mask = torch.zeros(2, longest, dtype=torch.long), torch.zeros(2, longest, dtype=torch.long)
            for row, length in enumerate((first, second)):
                start = longest - length if self.side == "left" else 0
                ids[row, start : start + length] = packed([length], seed=length)["input_ids"][0]
                mask[row, start : start + length] = 1
            batches.append(
                {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
            )
        return DataLoader(batches, batch_size=None)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch, use_cache=False).loss
        self.note()
        self.losses.append(loss.item())
        self.seen.append(tuple(batch["attention_mask"].sum(1).tolist()))
        return loss


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_padded_batches_of_a_plain_loader(tmp_path, side):
    from sparse_run import COST

    with pytest.warns(UserWarning, match="no latency table"):
        fit(tmp_path, tuning(), module=Padded(side), limit_train_batches=1)
    module = fit(tmp_path, tuning(table=COST), module=Padded(side))
    assert any((record[..., 0] != BUDGET).any() for record in records(module)[2:])
    window = module.windows[-1]
    assert window.lengths == [length for pair in module.seen[-len(window.lengths) // 2 :] for length in pair]
    assert window.metrics()["balance/work_ratio"] != 1.0
    for target in module.targets[2:]:
        is_padding = target.k0 == 1
        assert (target.record[:, is_padding, 0] == 1).all()
    assert any((target.k0 == 1).any() for target in module.targets[2:])
    plain = fit(tmp_path, None, module=Padded(side))
    assert fit(tmp_path, tuning(table=COST, tolerance=0.0), module=Padded(side)).losses == plain.losses


class TwoForwards(Module):
    """Calls the model twice in a step, as preference training does."""

    def training_step(self, batch, batch_idx):
        first = super().training_step(batch, batch_idx)
        return first + super().training_step(batch, batch_idx)


def test_every_forward_has_a_target_of_its_own(tmp_path):
    module = fit(tmp_path, tuning(), module=TwoForwards())
    assert len({id(target) for target in module.targets}) == len(module.targets) == 2 * len(LENGTHS)
    for one, two in zip(module.targets[::2], module.targets[1::2], strict=True):
        assert torch.equal(one.record, two.record)
    assert module.windows[-1].cells == 4


def test_a_model_that_runs_dense_attention_meanwhile_is_left_alone(tmp_path):
    model = sparsify(build(), block_size=BLOCK, budget=BUDGET)
    model.set_attn_implementation("sdpa")
    module = fit(tmp_path, tuning(), module={"model": model})
    assert module.targets == [None] * len(LENGTHS)
    assert module.windows == []
