"""MoBA in Hugging Face models: the same numbers as dense or reference attention, and nothing leaks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from tiny import gradients, packed, tiny_architecture
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BertConfig,
    BertModel,
    BloomConfig,
    BloomForCausalLM,
    DataCollatorWithFlattening,
    Gemma2Config,
    GPT2Config,
    GPT2LMHeadModel,
    GptOssConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Olmo2Config,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    SmolLM3Config,
)

from sb_lightning.attention import sparsify
from sb_lightning.attention.huggingface import WORKING, sparse_settings

SIZES = {name: value for name, value in tiny_architecture().items() if name != "model_type"}
FAMILIES = {
    "qwen2": Qwen2Config(**SIZES),
    "qwen3": Qwen3Config(**SIZES, head_dim=32),
    "llama": LlamaConfig(**SIZES, attention_bias=True),
    "mistral": MistralConfig(**SIZES, sliding_window=None, head_dim=32),
    "mixtral": MixtralConfig(**SIZES, sliding_window=None, num_local_experts=2),
    "phi3": Phi3Config(**SIZES, pad_token_id=0),
    "granite": GraniteConfig(**SIZES),
    "olmo2": Olmo2Config(**SIZES),
    "smollm3": SmolLM3Config(**SIZES, pad_token_id=0),
}


README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
LIMITS = README.partition("## Limits")[2].partition("\n## ")[0]


def build(config=None, **kwargs):
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config or FAMILIES["qwen2"], dtype=torch.float32, **kwargs)


def logits_and_gradients(model, batch):
    model.zero_grad()
    out = model(**{name: batch[name] for name in batch if name != "labels"}, use_cache=False).logits
    torch.nn.functional.cross_entropy(out[0, :-1], batch["labels"][0, 1:], ignore_index=-100).backward()
    return out.detach(), gradients(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_full_budget_equals_dense_attention(family):
    batch = {k: v for k, v in packed([100]).items() if k not in ("cu_seqlens", "max_seqlen")}
    want, want_grads = logits_and_gradients(build(FAMILIES[family], attn_implementation="sdpa"), batch)
    got, got_grads = logits_and_gradients(sparsify(build(FAMILIES[family]), block_size=16, budget=7), batch)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_budget_equals_the_reference(family):
    batch = packed([90, 1, 37])
    want, want_grads = logits_and_gradients(
        sparsify(build(FAMILIES[family]), block_size=16, budget=2, backend="reference"), batch
    )
    got, got_grads = logits_and_gradients(sparsify(build(FAMILIES[family]), block_size=16, budget=2), batch)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-3, atol=1e-5, msg=name)
    dense, _ = logits_and_gradients(sparsify(build(FAMILIES[family]), block_size=16, budget=9), batch)
    assert (dense - got).abs().max() > 1e-4, "the small budget changed nothing: it was not used"


@pytest.mark.parametrize("use_cache", [False, True])
@pytest.mark.parametrize("bounds", ["cu_seqlens", "flash_names", "position_ids", "position_ids_and_ones"])
def test_no_document_sees_another(bounds, use_cache):
    model = sparsify(build(), block_size=16, budget=2).eval()
    batch = packed([40, 33])
    inputs = {"position_ids": batch["position_ids"], "use_cache": use_cache}
    if bounds == "cu_seqlens":
        inputs |= {"cu_seqlens": batch["cu_seqlens"], "max_seqlen": batch["max_seqlen"]}
    elif bounds == "flash_names":
        inputs |= {"cu_seq_lens_q": batch["cu_seqlens"], "max_length_q": torch.tensor(batch["max_seqlen"])}
    elif bounds == "position_ids_and_ones":
        inputs["attention_mask"] = torch.ones_like(batch["input_ids"])
    changed = batch["input_ids"].clone()
    changed[0, :40] = (changed[0, :40] + 7) % 64
    with torch.no_grad():
        first = model(input_ids=batch["input_ids"], **inputs).logits
        second = model(input_ids=changed, **inputs).logits
        alone = model(input_ids=batch["input_ids"][:, 40:], use_cache=False).logits
    assert torch.equal(first[:, 40:], second[:, 40:])
    assert not torch.equal(first[:, :40], second[:, :40])
    torch.testing.assert_close(first[:, 40:], alone, rtol=1e-4, atol=1e-5)


def test_positions_that_do_not_start_at_zero_still_start_a_sequence():
    model = sparsify(build(), block_size=16, budget=2).eval()
    ids = packed([30, 20])["input_ids"]
    positions = torch.cat([torch.arange(5, 35), torch.arange(9, 29)])[None]
    with torch.no_grad():
        together = model(input_ids=ids, position_ids=positions).logits
        alone = model(input_ids=ids[:, 30:], position_ids=positions[:, 30:]).logits
    torch.testing.assert_close(together[:, 30:], alone, rtol=1e-4, atol=1e-5)


def test_the_collator_of_transformers_works_unchanged():
    documents = [packed([n], seed=n)["input_ids"][0].tolist() for n in (35, 1, 20)]
    batch = DataCollatorWithFlattening(return_flash_attn_kwargs=True)([{"input_ids": d} for d in documents])
    batch.pop("labels")
    model = sparsify(build(), block_size=16, budget=2).eval()
    with torch.no_grad():
        out = model(**batch).logits
        for document, start in zip(documents, (0, 35, 36), strict=True):
            alone = model(input_ids=torch.tensor([document])).logits
            torch.testing.assert_close(out[:, start : start + len(document)], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("positions", [True, False], ids=["with_position_ids", "without"])
def test_padding_is_not_attended(side, positions):
    model = sparsify(build(), block_size=16, budget=2).eval()
    ids = packed([50 + 29], seed=3)["input_ids"]
    rows = [ids[0, :50], ids[0, 50:]]
    batch, mask = torch.zeros(2, 50, dtype=torch.long), torch.zeros(2, 50, dtype=torch.long)
    for row, document in enumerate(rows):
        where = slice(50 - len(document), None) if side == "left" else slice(0, len(document))
        batch[row, where], mask[row, where] = document, 1
    extra = {"position_ids": (mask.cumsum(1) - 1).masked_fill(mask == 0, 1)} if positions else {}
    if positions and side == "right":
        extra = {"position_ids": torch.arange(50).expand(2, 50)}
    with torch.no_grad():
        out = model(input_ids=batch, attention_mask=mask, **extra).logits
        for row, document in enumerate(rows):
            alone = model(input_ids=document[None]).logits
            torch.testing.assert_close(out[row][mask[row].bool()], alone[0], rtol=1e-3, atol=1e-4)
    assert torch.isfinite(out).all()


def test_padding_inside_a_sequence_is_refused():
    model = sparsify(build(), block_size=16, budget=2)
    mask = torch.ones(1, 40, dtype=torch.long)
    mask[0, 10:12] = 0
    with pytest.raises(ValueError, match="padding inside row 0, before token 12"):
        model(input_ids=packed([40])["input_ids"], attention_mask=mask)


def test_padding_between_packed_documents_is_fine():
    model = sparsify(build(), block_size=16, budget=2).eval()
    ids = packed([40])["input_ids"]
    mask, positions = torch.ones(1, 40, dtype=torch.long), torch.arange(40)[None].clone()
    mask[0, 18:20] = 0
    positions[0, 20:] = torch.arange(20)
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
        alone = model(input_ids=ids[:, 20:]).logits
    torch.testing.assert_close(out[:, 20:], alone, rtol=1e-4, atol=1e-5)


def test_a_four_dimensional_mask_is_refused():
    with pytest.raises(ValueError, match=r"attention_mask is a shape \(1, 1, 40, 40\)"):
        sparsify(build(), block_size=16, budget=2)(
            input_ids=packed([40])["input_ids"], attention_mask=torch.ones(1, 1, 40, 40)
        )


def test_generate_with_a_cache_equals_generate_without():
    ids = packed([21])["input_ids"]
    model = sparsify(build(), block_size=16, budget=8).eval()
    options = {
        "max_new_tokens": 12,
        "do_sample": False,
        "pad_token_id": 0,
        "attention_mask": torch.ones_like(ids),
    }
    cached = model.generate(ids, use_cache=True, **options)
    plain = model.generate(ids, use_cache=False, **options)
    dense = build(attn_implementation="sdpa").eval().generate(ids, **options)
    assert cached.shape == (1, 33)
    assert torch.equal(cached, plain)
    assert torch.equal(cached, dense)


def test_generate_runs_the_prompt_sparse():
    ids = packed([70])["input_ids"]
    model = sparsify(build(), block_size=16, budget=2).eval()
    with torch.no_grad():
        first = model(input_ids=ids).logits[0, -1].argmax()
    mask = torch.ones_like(ids)
    out = model.generate(ids, attention_mask=mask, max_new_tokens=3, do_sample=False, pad_token_id=0)
    assert out[0, 70] == first


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generate_from_left_padded_prompts(cache):
    model = sparsify(build(), block_size=16, budget=8).eval()
    prompts = [packed([n], seed=n)["input_ids"][0] for n in (20, 13)]
    batch, mask = torch.zeros(2, 20, dtype=torch.long), torch.zeros(2, 20, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        batch[row, 20 - len(prompt) :], mask[row, 20 - len(prompt) :] = prompt, 1
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "disable_compile": True}
    together = model.generate(batch, attention_mask=mask, cache_implementation=cache, **options)
    for row, prompt in enumerate(prompts):
        alone = model.generate(prompt[None], attention_mask=torch.ones_like(prompt[None]), **options)
        assert torch.equal(together[row, 20:], alone[0, len(prompt) :])


def test_activation_checkpointing_changes_no_bit():
    batch = packed([90, 20])
    model = sparsify(build(), block_size=16, budget=2).train()
    want, want_grads = logits_and_gradients(model, batch)
    newer = getattr(model, "activation_checkpointing_enable", None)
    (newer or model.gradient_checkpointing_enable)({"use_reentrant": False})
    got, got_grads = logits_and_gradients(model, batch)
    assert torch.equal(got, want)
    assert all(torch.equal(got_grads[name], grad) for name, grad in want_grads.items())


def test_the_backbone_compiles_without_a_graph_break():
    batch = packed([90, 20])
    model = sparsify(build(), block_size=16, budget=2).train()
    want, want_grads = logits_and_gradients(model, batch)
    model.model.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    got, got_grads = logits_and_gradients(model, batch)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    for name, grad in want_grads.items():
        torch.testing.assert_close(got_grads[name], grad, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize("order", ["wrapped_then_sparse", "sparse_then_wrapped"])
def test_lora(order):
    import peft

    settings = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    batch = packed([90, 20])
    torch.manual_seed(0)
    if order == "wrapped_then_sparse":
        model = sparsify(peft.get_peft_model(build(), settings), block_size=16, budget=2)
    else:
        model = peft.get_peft_model(sparsify(build(), block_size=16, budget=2), settings)
    _, got = logits_and_gradients(model, batch)
    assert got
    assert all("lora" in name for name in got)
    assert all(grad.abs().max() > 0 for grad in got.values())
    with torch.no_grad():
        inputs = {k: batch[k] for k in ("input_ids", "position_ids", "cu_seqlens", "max_seqlen")}
        adapted = model(**inputs).logits
        merged = model.merge_and_unload()(**inputs).logits
    torch.testing.assert_close(adapted, merged, rtol=1e-3, atol=1e-4)


def test_a_second_call_changes_the_settings_and_adds_no_hook():
    model = sparsify(build(), block_size=16, budget=2)
    hooks = len(model.model._forward_pre_hooks)
    sparsify(model, block_size=32, budget=3, dense_layers=[1])
    assert len(model.model._forward_pre_hooks) == hooks == 1
    assert sparse_settings(model) == sparse_settings(model.model)
    settings = sparse_settings(model)
    assert settings is not None
    assert (settings.block_size, settings.budget, settings.dense_layers) == (32, 3, (1,))


def test_dense_layers_attend_everything():
    batch = packed([120])
    want, _ = logits_and_gradients(
        build(attn_implementation="sdpa"), {k: batch[k] for k in ("input_ids", "labels")}
    )
    all_dense, _ = logits_and_gradients(
        sparsify(build(), block_size=16, budget=1, dense_layers=[0, 1]), batch
    )
    one_dense, _ = logits_and_gradients(sparsify(build(), block_size=16, budget=1, dense_layers=[1]), batch)
    torch.testing.assert_close(all_dense, want, rtol=1e-4, atol=1e-5)
    assert (one_dense - want).abs().max() > 1e-4


REFUSED = [
    ("window", MistralConfig(**SIZES, sliding_window=32, head_dim=32), "a sliding window .sliding_window=32"),
    (
        "layer_types",
        Qwen2Config(**SIZES, use_sliding_window=True, sliding_window=32, max_window_layers=1),
        "sliding",
    ),
    ("dropout", Qwen2Config(**SIZES, attention_dropout=0.1), "attention_dropout=0.1"),
    ("head_dim", Qwen2Config(**{**SIZES, "num_attention_heads": 4}), "head_dim=16"),
    (
        "softcap",
        Gemma2Config(**SIZES, head_dim=32, sliding_window=None, layer_types=["full_attention"] * 2),
        "capped",
    ),
    (
        "sinks",
        GptOssConfig(
            **SIZES, head_dim=32, num_local_experts=2, layer_types=["full_attention"] * 2, sliding_window=None
        ),
        "attention sinks",
    ),
]


@pytest.mark.parametrize(
    ("config", "reason"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED]
)
def test_attention_that_moba_does_not_define_is_refused(config, reason):
    with pytest.raises(ValueError, match=reason):
        sparsify(build(config), block_size=16, budget=2)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"block_size": 24, "budget": 2}, "block_size"),
        ({"block_size": 0, "budget": 2}, "block_size"),
        ({"block_size": 16, "budget": 0}, "budget"),
        ({"block_size": 16, "budget": 2, "dense_layers": [2]}, "dense_layers contains"),
    ],
)
def test_bad_arguments(arguments, reason):
    with pytest.raises(ValueError, match=reason):
        sparsify(build(), **arguments)


def test_other_modules_are_refused():
    with pytest.raises(TypeError, match=r"Linear holds no transformers model: .* such as Llama, Qwen2,"):
        sparsify(torch.nn.Linear(2, 2), block_size=16, budget=2)


@pytest.mark.parametrize(
    ("kind", "config"),
    [
        (BertModel, BertConfig(num_hidden_layers=1)),
        (GPT2LMHeadModel, GPT2Config(n_embd=64, n_layer=1, n_head=2, vocab_size=64)),
        (BloomForCausalLM, BloomConfig(hidden_size=64, n_layer=1, n_head=2, vocab_size=64)),
    ],
)
def test_other_architectures_are_refused_by_name(kind, config):
    with pytest.raises(TypeError, match=f"the attention of {kind.__name__} cannot be replaced"):
        sparsify(torch.nn.Sequential(kind(config)), block_size=16, budget=2)


def test_the_architectures_that_are_named_are_those_tested_here():
    for text in (WORKING, LIMITS):
        named = re.sub(r"[ -]", "", " ".join(text.split())).lower()
        assert all(family in named for family in FAMILIES), text


def test_a_layer_called_without_bounds_says_so():
    model = sparsify(build(), block_size=16, budget=2)
    hidden = torch.randn(1, 20, 64)
    positions = model.model.rotary_emb(hidden, torch.arange(20)[None])
    with pytest.raises(RuntimeError, match="no cu_seqlens and max_seqlen"):
        model.model.layers[0](hidden, position_embeddings=positions)


def test_the_implementation_without_sparsify_says_so():
    sparsify(build(), block_size=16, budget=2)
    other = AutoModelForCausalLM.from_config(AutoConfig.for_model(**tiny_architecture()))
    other.set_attn_implementation("sb_moba")
    with pytest.raises(RuntimeError, match="without settings"):
        other(input_ids=packed([20])["input_ids"])


def test_switched_back_to_sdpa_it_takes_any_mask_again():
    model = sparsify(build(), block_size=16, budget=2).eval()
    model.set_attn_implementation("sdpa")
    ids, mask = packed([40])["input_ids"], torch.ones(1, 40, dtype=torch.long)
    mask[0, 10:12] = 0
    with torch.no_grad():
        out = model(input_ids=ids, attention_mask=mask).logits
        plain = build(attn_implementation="sdpa").eval()(input_ids=ids, attention_mask=mask).logits
    assert torch.equal(out, plain)


def test_bounds_that_are_no_integers_are_refused():
    model = sparsify(build(), block_size=16, budget=2)
    with pytest.raises(TypeError, match=r"cu_seqlens is torch.float32"):
        model(input_ids=packed([40])["input_ids"], cu_seqlens=torch.tensor([0.0, 20.5, 40.0]), max_seqlen=20)


@pytest.mark.parametrize("layers", [1, ["1"]])
def test_dense_layers_that_are_no_list_of_numbers(layers):
    with pytest.raises(TypeError, match="dense_layers is"):
        sparsify(build(), block_size=16, budget=2, dense_layers=layers)
