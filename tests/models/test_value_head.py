"""The value-head model: every checkpoint format, precision, dropout, padding."""

import json
import logging
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import LoraConfig
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.tiny import (
    HIDDEN_SIZE,
    ragged_batch,
    save_legacy_checkpoint,
    stable_normal,
    tiny_gpt2,
    tiny_gptj,
    tiny_llama,
    tiny_neox,
    tiny_opt,
    value_head_weights,
)
from trl import AutoModelForCausalLMWithValueHead

BUILDERS = {
    "gpt2": tiny_gpt2,
    "gptj": tiny_gptj,
    "llama": tiny_llama,
    "neox": tiny_neox,
    "opt": tiny_opt,
    "opt_projected": partial(tiny_opt, projected=True),
}
WIDTHS = {"opt_projected": HIDDEN_SIZE // 2}
"""Width of what the LM head reads, where it is not the model's own."""


def with_head(builder: str = "gpt2", seed: int = 3) -> AutoModelForCausalLMWithValueHead:
    """A wrapped tiny model whose value head holds known numbers."""
    model = AutoModelForCausalLMWithValueHead.from_pretrained(BUILDERS[builder]())
    head = value_head_weights(seed, WIDTHS.get(builder, HIDDEN_SIZE))
    model.v_head.load_state_dict({k.removeprefix("v_head."): v for k, v in head.items()})
    return model


def assert_same_head(model: AutoModelForCausalLMWithValueHead, seed: int = 3, width: int = HIDDEN_SIZE) -> None:
    state = model.v_head.state_dict()
    for name, expected in value_head_weights(seed, width).items():
        assert torch.equal(state[name.removeprefix("v_head.")], expected)


def assert_same_outputs(model: AutoModelForCausalLMWithValueHead, other: AutoModelForCausalLMWithValueHead) -> None:
    ids = torch.tensor([[5, 0, 300, 7, 12]])
    with torch.no_grad():
        logits, _, values = model(ids)
        other_logits, _, other_values = other(ids)
    assert torch.equal(logits, other_logits)
    assert torch.equal(values, other_values)


# --- forward ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("builder", BUILDERS)
def test_forward_gives_logits_loss_and_fp32_values(builder: str) -> None:
    model = with_head(builder)
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    logits, loss, values = model(ids)
    assert logits.shape == (2, 3, 320)
    assert loss is None
    assert values.shape == (2, 3)
    assert values.dtype == torch.float32
    expected = model.pretrained_model(ids, output_hidden_states=True)
    torch.testing.assert_close(logits, expected.logits, atol=1e-6, rtol=0)
    head = value_head_weights(3, WIDTHS.get(builder, HIDDEN_SIZE))
    by_hand = expected.hidden_states[-1] @ head["v_head.summary.weight"][0] + head["v_head.summary.bias"]
    torch.testing.assert_close(values, by_hand, atol=1e-5, rtol=1e-5)


def test_forward_with_labels_gives_the_loss() -> None:
    model, ids = with_head(), torch.tensor([[5, 6, 7, 8]])
    _, loss, _ = model(ids, labels=ids)
    logprobs = model(ids)[0].log_softmax(-1)
    by_hand = -torch.stack([logprobs[0, t, ids[0, t + 1]] for t in range(3)]).mean()
    torch.testing.assert_close(loss, by_hand)


def padded(rows: list[Tensor], side: str, pad: int) -> tuple[Tensor, Tensor]:
    width = max(len(row) for row in rows) + 2
    ids, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, at], mask[i, at] = row, 1
    return ids, mask


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("pad", [0, 17])
def test_padding_never_changes_forward(builder: str, side: str, pad: int) -> None:
    """pad 0 is EOS, which also stands inside the rows; 17 is an ordinary token."""
    model = with_head(builder)
    queries, responses = ragged_batch([3, 1, 4, 5], [4, 2, 3, 1])
    rows = [torch.cat(pair) for pair in zip(queries, responses, strict=True)]
    ids, mask = padded(rows, side, pad)
    with torch.no_grad():
        logits, _, values = model(ids, attention_mask=mask)
        for i, row in enumerate(rows):
            alone_logits, _, alone_values = model(row[None])
            keep = mask[i].bool()
            torch.testing.assert_close(logits[i, keep], alone_logits[0], atol=1e-5, rtol=0)
            torch.testing.assert_close(values[i, keep], alone_values[0], atol=1e-5, rtol=0)


def test_generate_is_that_of_transformers() -> None:
    model, ids = with_head(), torch.tensor([[5, 6, 7]])
    arguments = {"max_new_tokens": 5, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    assert torch.equal(model.generate(ids, **arguments), tiny_gpt2().generate(ids, **arguments))


def test_gradients_reach_head_and_backbone() -> None:
    model = with_head()
    model(torch.tensor([[5, 6, 7]]))[2].sum().backward()
    assert model.v_head.summary.weight.grad.abs().sum() > 0
    assert model.pretrained_model.transformer.h[0].mlp.c_fc.weight.grad.abs().sum() > 0


# --- formats ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("builder", BUILDERS)
def test_save_and_load_is_bit_identical(builder: str, tmp_path: Path) -> None:
    model = with_head(builder)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert_same_head(loaded, width=WIDTHS.get(builder, HIDDEN_SIZE))
    assert_same_outputs(loaded, model)
    assert not list(tmp_path.glob("*.bin"))


def test_loading_with_a_head_does_not_warn(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with_head().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert "newly initiali" not in caplog.text


def test_plain_transformers_loads_the_folder(tmp_path: Path) -> None:
    model = with_head("llama")
    model.save_pretrained(tmp_path)
    plain, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(plain(ids).logits, model(ids)[0])


def test_sharded_checkpoint(tmp_path: Path) -> None:
    model = with_head("llama")
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert_same_head(loaded)
    assert_same_outputs(loaded, model)
    assert torch.equal(
        AutoModelForCausalLM.from_pretrained(tmp_path)(torch.tensor([[4, 5]])).logits,
        model(torch.tensor([[4, 5]]))[0],
    )


def randomise_lora(model: AutoModelForCausalLMWithValueHead) -> None:
    """Give both LoRA factors weights: B starts at zero, which would hide an adapter that is not loaded."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(stable_normal(name, parameter.shape, 5))


def test_peft_checkpoint(tmp_path: Path) -> None:
    base_folder, folder = tmp_path / "base", tmp_path / "adapter"
    tiny_gpt2().save_pretrained(base_folder)
    lora = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base_folder, peft_config=lora)
    model.v_head.load_state_dict({k.removeprefix("v_head."): v for k, v in value_head_weights(3).items()})
    randomise_lora(model)
    model.save_pretrained(folder)
    assert (folder / "adapter_config.json").exists()
    assert not list(folder.glob("model*.safetensors"))
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(folder)
    assert_same_head(loaded)
    assert_same_outputs(loaded, model)
    assert any("lora_" in n and p.requires_grad for n, p in loaded.named_parameters())
    ids = torch.tensor([[5, 6, 7]])
    assert not torch.equal(loaded(ids)[0], tiny_gpt2()(ids).logits)


def test_an_adapters_files_do_not_depend_on_the_process(tmp_path: Path) -> None:
    """Sets of strings have an order of their own in every process."""
    names = ["c_attn", "c_fc", "c_proj"]
    lora = LoraConfig(r=2, target_modules=list(reversed(names)), task_type="CAUSAL_LM", fan_in_fan_out=True)
    AutoModelForCausalLMWithValueHead.from_pretrained(tiny_gpt2(), peft_config=lora).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "adapter_config.json").read_text())["target_modules"] == names


def test_peft_trains_adapter_and_head_only(tmp_path: Path) -> None:
    lora = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_gpt2(), peft_config=lora)
    trainable = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable
    assert all("lora_" in name or name.startswith("v_head.") for name in trainable)
    assert any(name.startswith("v_head.") for name in trainable)


@pytest.mark.parametrize("builder", ["gpt2", "llama"])
def test_legacy_checkpoint(builder: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save_legacy_checkpoint(BUILDERS[builder](), value_head_weights(3), tmp_path)
    with caplog.at_level(logging.WARNING):
        loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert "newly initiali" not in caplog.text
    assert_same_head(loaded)
    assert_same_outputs(loaded, with_head(builder))


def test_legacy_checkpoint_in_the_old_file_format(tmp_path: Path) -> None:
    """torch before 1.6 wrote no zip file; such checkpoints are still on the hub."""
    save_legacy_checkpoint(tiny_gpt2(), {}, tmp_path)
    weights = {**tiny_gpt2().state_dict(), **value_head_weights(3)}
    torch.save(weights, tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert_same_head(loaded)
    assert_same_outputs(loaded, with_head())


def test_legacy_peft_checkpoint(tmp_path: Path) -> None:
    """The classic library put an adapter's value head alone into ``pytorch_model.bin`` beside it."""
    base_folder, folder = tmp_path / "base", tmp_path / "adapter"
    tiny_gpt2().save_pretrained(base_folder)
    lora = LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(base_folder, peft_config=lora)
    randomise_lora(model)
    model.pretrained_model.save_pretrained(folder)
    torch.save(value_head_weights(3), folder / "pytorch_model.bin")
    assert_same_head(AutoModelForCausalLMWithValueHead.from_pretrained(folder))


def test_value_head_inside_sharded_safetensors(tmp_path: Path) -> None:
    """Shards that hold ``v_head.*`` keys, as later versions of the classic library wrote them."""
    model = tiny_llama()
    for name, value in value_head_weights(3).items():
        module = model if "v_head" in model._modules else _with_container(model)
        module.v_head.summary.register_parameter(name.rsplit(".", 1)[1], torch.nn.Parameter(value))
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert_same_head(loaded)


def _with_container(model: torch.nn.Module) -> torch.nn.Module:
    model.v_head = torch.nn.Module()
    model.v_head.summary = torch.nn.Module()
    return model


def test_subfolder_holds_its_own_head(tmp_path: Path) -> None:
    with_head(seed=3).save_pretrained(tmp_path / "policy")
    with_head(seed=4).save_pretrained(tmp_path)
    assert_same_head(AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, subfolder="policy"))


def test_saving_twice_keeps_the_last_head(tmp_path: Path) -> None:
    with_head(seed=4).save_pretrained(tmp_path)
    with_head(seed=3).save_pretrained(tmp_path)
    assert_same_head(AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path))


def test_value_head_is_stored_in_safetensors(tmp_path: Path) -> None:
    with_head().save_pretrained(tmp_path)
    stored = [tensors for path in tmp_path.glob("*.safetensors") for tensors in load_file(path).values()]
    expected = value_head_weights(3)["v_head.summary.weight"]
    assert any(tensor.shape == expected.shape and torch.equal(tensor, expected) for tensor in stored)


def test_no_head_warns_that_it_is_newly_initialised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    tiny_gpt2().save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert "newly initiali" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, expects_value_head=False)
    assert "newly initiali" not in caplog.text
    assert model.v_head.summary.weight.shape == (1, HIDDEN_SIZE)
    assert torch.isfinite(model(torch.tensor([[5, 6]]))[2]).all()


# --- precision and dropout --------------------------------------------------------------------------------


def test_a_bf16_checkpoint_loads_in_fp32(tmp_path: Path) -> None:
    tiny_gpt2().bfloat16().save_pretrained(tmp_path)
    assert AutoModelForCausalLM.from_pretrained(tmp_path).dtype == torch.bfloat16  # what makes this a trap
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_dtype_is_honoured_and_values_stay_fp32(tmp_path: Path) -> None:
    with_head().save_pretrained(tmp_path)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert model.pretrained_model.dtype == torch.bfloat16
    assert model(torch.tensor([[5, 6, 7]]))[2].dtype == torch.float32
    assert_same_head(model)


def test_autocast_leaves_values_in_fp32() -> None:
    model, ids = with_head(), torch.tensor([[5, 6, 7]])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        values = model(ids)[2]
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, model(ids)[2], atol=0.1, rtol=0)


def dropout_checkpoint(builder: str, folder: Path) -> Path:
    """A checkpoint whose config asks for dropout everywhere."""
    model = BUILDERS[builder]()
    for name, value in model.config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(model.config, name, 0.5)
    assert any(v == 0.5 for k, v in model.config.to_dict().items() if "drop" in k)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("builder", BUILDERS)
def test_dropout_is_off_and_modules_stay_in_train_mode(builder: str, tmp_path: Path) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9, 10]])
    plain = AutoModelForCausalLM.from_pretrained(dropout_checkpoint(builder, tmp_path)).train()
    torch.manual_seed(0)  # else two passes that drop every layer are now and then the same
    passes = [plain(ids).logits for _ in range(8)]
    assert not all(torch.equal(passes[0], other) for other in passes[1:])  # the checkpoint does have dropout
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path).train()
    assert model.pretrained_model.training
    first, second = model(ids), model(ids)
    assert torch.equal(first[0], second[0])
    assert torch.equal(first[2], second[2])


def test_lora_dropout_acts_in_train_mode_only_when_asked() -> None:
    ids = torch.tensor([[5, 6, 7, 8]])
    for dropout in (0.0, 0.5):
        lora = LoraConfig(
            r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", lora_dropout=dropout, fan_in_fan_out=True
        )
        model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_gpt2(), peft_config=lora).train()
        randomise_lora(model)
        with torch.no_grad():
            same = torch.equal(model(ids)[0], model(ids)[0])
        assert same == (dropout == 0.0)
