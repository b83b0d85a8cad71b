"""The real step of a small model: its parts, with a clock that counts moments, and what is left behind."""

from __future__ import annotations

import itertools
import sys
from functools import partial

import pytest
import torch
from tiny import tiny_architecture
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from sb_lightning.attention import sparsify
from sb_lightning.attention.huggingface import sparse_settings
from sb_lightning.latency import LatencyTable, ModelShape, current_fingerprint, profile
from sb_lightning.latency import marks as marks_module
from sb_lightning.latency.marks import CudaMarks, WallMarks, marks_for
from sb_lightning.latency.profiler import Conditions
from sb_lightning.latency.profiler import run as run_module
from sb_lightning.latency.profiler.neighbours import Neighbours
from sb_lightning.latency.profiler.points import Point
from sb_lightning.latency.profiler.spec import ModelSpec
from sb_lightning.latency.profiler.step import StepProbe


@pytest.fixture(autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Counting:
    """Each moment is one later than the last."""

    def __init__(self):
        self.count = itertools.count()

    def now(self):
        return next(self.count)

    def settle(self):
        pass

    def between_ms(self, start, end):
        return float(end - start)


def build(**changes):
    spec = {"config": tiny_architecture(layer_types=None), "block_size": 16, "dense_layers": (1,)}
    return ModelSpec(**{**spec, **changes}).build()


def measured(model, point, **arguments):
    probe = StepProbe(model, marks=Counting(), **arguments)
    with probe.attached():
        probe.measure(point)
        return probe.measure(point), probe


@pytest.mark.parametrize("checkpointing", [False, True])
def test_the_moments_of_a_step_lie_in_their_order(checkpointing):
    sample, probe = measured(build(activation_checkpointing=checkpointing), Point(50, 2))
    assert probe.num_layers == (1, 1)
    # start, layers entered, attention of two layers (two moments each), layers done, middle.
    assert (sample.forward, sample.layers_forward) == (7, 5)
    assert (sample.sparse_forward, sample.dense_forward) == (1, 1)
    # The backward pass sees them in the opposite order; recomputing a layer adds its attention's forward.
    again = 2 if checkpointing else 0
    assert (sample.sparse_backward, sample.dense_backward) == (1 + again / 2, 1 + again / 2)
    assert sample.layers_backward == 5 + 2 * again
    assert sample.backward == 7 + 2 * again


def test_several_layers_count_with_their_mean():
    sample, probe = measured(build(dense_layers=()), Point(50, 2))
    assert probe.num_layers == (2, 0)
    assert (sample.sparse_forward, sample.dense_forward, sample.dense_backward) == (1, 0, 0)


def test_a_dense_model_has_no_budget():
    sample, probe = measured(build(block_size=None, dense_layers=()), Point(50, 4))
    assert probe.num_layers == (0, 2)
    assert (sample.sparse_forward, sample.dense_forward) == (0, 1)


def test_a_model_with_frozen_embeddings_can_be_measured():
    model = build()
    model.get_input_embeddings().weight.requires_grad_(False)
    sample, _ = measured(model, Point(50, 2))
    assert 0 < sample.layers_backward <= sample.backward


def test_only_the_head_of_a_frozen_backbone_has_a_backward_pass():
    model = build()
    model.model.requires_grad_(False)
    sample, _ = measured(model, Point(50, 2))
    assert (sample.layers_backward, sample.sparse_backward, sample.dense_backward) == (0, 0, 0)
    assert sample.backward > 0
    table = profile(model, max_length=64, budget_seconds=0.1, threads=1)
    assert table.predict(64, 4) > 0


def test_a_model_that_trains_nothing_is_refused():
    with pytest.raises(ValueError, match=r"no parameter .* requires a gradient.*To fix it, unfreeze"):
        measured(build().requires_grad_(False), Point(50, 2))


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable")
def test_layers_that_hide_their_gradients_are_refused():
    model = build()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match=r"without recording gradients.*To fix it, pass use_reentrant=False"):
        measured(model, Point(50, 2))


def test_other_devices_are_refused():
    for kind in ("mps", "xpu", "meta"):
        with pytest.raises(ValueError, match=rf"the device is {kind}.*only steps on cpu and cuda.*To fix it"):
            marks_for(torch.device(kind))
    with pytest.raises(ValueError, match="the device is meta"):
        StepProbe(build().to("meta"))


def test_the_mode_of_each_module_and_the_random_state_stay():
    fields = tiny_architecture(attention_dropout=0.5)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    layers = model.model.layers
    layers[0].mlp = torch.nn.Sequential(layers[0].mlp, torch.nn.Dropout(0.5))
    seen = []
    layers[0].register_forward_hook(lambda module, args, output: seen.append(module.training))
    layers[1].register_forward_hook(lambda module, args, output: seen.append(module.training))
    for whole in (True, False):
        model.train(whole)
        layers[1].eval()
        modes = [module.training for module in model.modules()]
        random_state = torch.get_rng_state()
        seen.clear()
        profile(model, max_length=128, budget_seconds=0.1, threads=1)
        assert [module.training for module in model.modules()] == modes
        assert torch.equal(torch.get_rng_state(), random_state)
        # What is kept in eval while the model trains is measured so.
        assert seen[:2] == [True, not whole]


def test_gpus_keep_their_random_state(monkeypatch):
    seeded = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    build()
    assert seeded == []
    assert run_module._gpus(torch.device("cuda", 1)) == [torch.device("cuda", 1)]
    assert run_module._gpus(torch.device("cpu")) == []


def test_the_gpu_that_is_measured_is_named(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"GPU {device}")
    fields = {"layers": 1, "query_heads": 1, "kv_heads": 1, "head_dim": 32, "hidden_size": 32}
    shape = ModelShape(**fields, intermediate_size=32, vocab_size=8, block_size=16)
    found = current_fingerprint(shape, device="cuda:2", backend="reference")
    assert (found.device, found.processor) == ("cuda", "GPU cuda:2")
    spec = ModelSpec(config=tiny_architecture(), block_size=16, device="cuda:1", backend="reference")
    assert Conditions.of(spec, max_length=64, ranks=1).fingerprint.processor == "GPU cuda:1"


@pytest.mark.parametrize("budget", [1, 3])
def test_the_budget_of_the_point_is_used(budget, monkeypatch):
    from sb_lightning.attention import huggingface

    seen = []
    original = huggingface.moba_attention

    def note(q, k, v, cu_seqlens, budget, **arguments):
        seen.append((budget, cu_seqlens.tolist()))
        return original(q, k, v, cu_seqlens, budget, **arguments)

    monkeypatch.setattr(huggingface, "moba_attention", note)
    measured(build(), Point(50, budget, copies=2))
    assert seen[:2] == [(budget, [0, 50, 100]), (4, [0, 50, 100])]


def test_everything_is_left_as_it_was():
    model = build()
    sparsify(model, block_size=16, budget=3, dense_layers=(1,))
    model.eval()
    function = ALL_ATTENTION_FUNCTIONS["sb_moba"]
    weight = next(model.parameters())
    weight.grad = torch.ones_like(weight)
    random_state = torch.get_rng_state()
    profile(model, max_length=128, budget_seconds=0.2, threads=1)
    assert ALL_ATTENTION_FUNCTIONS["sb_moba"] is function
    assert torch.equal(weight.grad, torch.ones_like(weight))
    assert all(p.grad is None for p in list(model.parameters())[1:])
    assert sparse_settings(model).budget == 3
    assert {m.sb_settings.budget for m in model.modules() if hasattr(m, "sb_settings")} == {3}
    assert torch.equal(torch.get_rng_state(), random_state)
    assert not model.training
    assert not any(m._forward_hooks or m._backward_hooks for m in model.modules())


def test_a_configuration_is_measured():
    random_state = torch.get_rng_state()
    fields = tiny_architecture()
    config = AutoConfig.for_model(fields.pop("model_type"), **{**fields, "num_hidden_layers": 7})
    table = profile(
        config, block_size=32, dense_layers=[6], max_length=200, budget_seconds=0.5, dtype=torch.bfloat16,
        mixed=True, threads=1,
    )  # fmt: skip
    assert isinstance(table, LatencyTable)
    assert (table.layers, table.dense_layers, table.profile["measured_layers"]) == (6, 1, 4)
    assert (table.fingerprint.dtype, table.fingerprint.backend) == ("bfloat16-mixed", "cpu")
    assert table.measurements.lengths[0] == 32
    assert 0 < table.predict(100, 1) <= table.predict(200, 7)
    assert torch.equal(torch.get_rng_state(), random_state)


def test_a_dense_model_is_measured_by_length_alone():
    fields = tiny_architecture()
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(fields.pop("model_type"), **fields))
    table = profile(model, max_length=256, budget_seconds=0.3, threads=1)
    assert (table.layers, table.dense_layers) == (0, 2)
    assert all(len(row) == 0 for row in table.measurements.budgets)
    assert table.predict(200, 1) == table.predict(200, 4)


def test_a_rank_that_ends_ends_the_profile(tmp_path, monkeypatch):
    program = "import sys; print('ready', flush=True); sys.stdin.readline(); sys.exit('out of memory')"
    command = [sys.executable, "-S", "-c", program]
    monkeypatch.setattr(run_module, "Neighbours", partial(Neighbours, command=command))
    fields = tiny_architecture()
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with pytest.raises(
        RuntimeError, match=r"a neighbour process .* ended with exit code 1 \(out of memory\)"
    ):
        profile(config, block_size=16, max_length=300, ranks=2, threads=1, output=tmp_path / "t.json")
    assert not (tmp_path / "t.json").exists()


def test_another_kind_of_model_is_refused():
    config = AutoConfig.for_model(
        "gpt2", vocab_size=64, n_embd=32, n_layer=1, n_head=1, n_positions=256, attn_implementation="eager"
    )
    with pytest.raises((TypeError, ValueError, AttributeError)) as error:
        profile(AutoModelForCausalLM.from_config(config), max_length=128, budget_seconds=0.2, threads=1)
    assert "To fix it" in str(error.value)


def test_wall_moments():
    now = iter([1.0, 1.25])
    marks = WallMarks(lambda: next(now))
    assert marks.between_ms(marks.now(), marks.now()) == 250.0


def test_moments_of_a_gpu_are_events_on_its_stream(monkeypatch):
    log = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing
            self.moment = None

        def record(self, stream):
            self.moment = len(log)
            log.append(stream)

        def elapsed_time(self, end):
            assert log[-1] == "waited", "read before the GPU got there"
            return 2.0 * (end.moment - self.moment)

    cuda = marks_module.torch.cuda
    monkeypatch.setattr(cuda, "Event", Event)
    monkeypatch.setattr(cuda, "current_stream", lambda device: f"stream of {device}")
    monkeypatch.setattr(cuda, "synchronize", lambda device: log.append("waited"))
    marks = CudaMarks(torch.device("cuda", 1))
    first, second = marks.now(), marks.now()
    marks.settle()
    assert marks.between_ms(first, second) == 2.0
    assert log == ["stream of cuda:1", "stream of cuda:1", "waited"]
