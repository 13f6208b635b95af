"""The reward model: values, end scores under either padding, every checkpoint layout, frozen lower blocks."""

import io
import json
import logging
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModel, AutoModelForCausalLM, GPTJForCausalLM

from tests.models.test_value_head import BUILDERS, WIDTHS
from tests.tiny import HIDDEN_SIZE, VOCAB_SIZE, stable_normal, tiny_gpt2, tiny_gptj, tiny_llama
from trl.models import RewardModel


def reward_model(builder: str = "gpt2", seed: int = 3) -> RewardModel:
    model = RewardModel.from_pretrained(BUILDERS[builder]())
    with torch.no_grad():
        model.head.weight.copy_(stable_normal("head", model.head.weight.shape, seed))
    return model.eval()


def padded(rows: list[list[int]], side: str, pad: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, rows)) + 1
    ids, mask = torch.full((len(rows), width), pad), torch.zeros(len(rows), width, dtype=torch.long)
    for i, row in enumerate(rows):
        at = slice(0, len(row)) if side == "right" else slice(width - len(row), width)
        ids[i, at], mask[i, at] = torch.tensor(row), 1
    return ids, mask


ROWS = [[5, 6, 7, 8, 0], [9], [0, 11, 12], [13, 14, 15, 16, 17, 18, 0]]


# --- forward ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("builder", BUILDERS)
def test_values_are_the_head_on_the_last_hidden_state(builder):
    lm = BUILDERS[builder]().eval()
    model = RewardModel.from_pretrained(lm)
    assert model.head.weight.shape == (1, WIDTHS.get(builder, HIDDEN_SIZE))
    assert model.head.bias is None
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    with torch.no_grad():
        values = model(ids)
        hidden = lm(ids, output_hidden_states=True).hidden_states[-1]
    assert values.shape == (2, 3)
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, hidden @ model.head.weight[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("builder", BUILDERS)
@torch.no_grad()
def test_left_and_right_padding_give_the_end_scores_of_no_padding(builder):
    model = reward_model(builder)
    alone = torch.cat([model(torch.tensor([row]))[:, -1] for row in ROWS])
    for side in ("left", "right"):
        scores = model.end_scores(*padded(ROWS, side))
        assert scores.shape == (4,)
        torch.testing.assert_close(scores, alone, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("builder", BUILDERS)
@torch.no_grad()
def test_selected_positions_equal_the_full_pass(builder):
    model = reward_model(builder)
    ids, mask = padded(ROWS, "right")
    positions = torch.rand(ids.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    positions &= mask.bool()
    picked = model(ids, positions=positions)
    assert picked.shape == (int(positions.sum()),)
    torch.testing.assert_close(picked, model(ids, mask)[positions], atol=1e-5, rtol=1e-5)


def test_a_row_without_tokens_is_an_error():
    ids, mask = padded(ROWS, "right")
    mask[2] = 0
    with pytest.raises(ValueError, match=r"rows \[2\] hold no token"):
        reward_model().end_scores(ids, mask)


def test_head_computes_in_fp32_under_half_precision():
    model = reward_model("llama")
    body = model.backbone.to(torch.bfloat16)
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        values = model(ids)
        hidden = body(ids).last_hidden_state
    with torch.no_grad():
        expected = hidden.float() @ model.head.weight[0].float()
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, expected, atol=1e-6, rtol=1e-6)


def test_dropout_is_off_in_train_mode():
    lm = tiny_gpt2()
    for module in lm.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.5
    model = RewardModel.from_pretrained(lm).train()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        assert torch.equal(model(ids), model(ids))


# --- our own layout ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("builder", BUILDERS)
def test_save_and_load_are_bit_identical(builder, tmp_path, caplog):
    model = reward_model(builder)
    model.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        again = RewardModel.from_pretrained(tmp_path)
    assert "newly initialised" not in caplog.text
    assert again.state_dict().keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, again.state_dict()[name]), name
    ids = torch.tensor([[5, 0, 300, 7]])
    with torch.no_grad():
        assert torch.equal(model(ids), again(ids))
        plain = AutoModel.from_pretrained(tmp_path).eval()(ids).last_hidden_state
        torch.testing.assert_close(
            plain, model.backbone(ids).last_hidden_state, atol=1e-5, rtol=0
        )  # one operator's rounding
    assert load_file(tmp_path / "reward_head.safetensors").keys() == {"weight"}


def test_saving_a_given_state_dict(tmp_path):
    model = reward_model()
    state = {name: tensor + 1 for name, tensor in model.state_dict().items()}
    model.save_pretrained(tmp_path, state_dict=state)
    again = RewardModel.from_pretrained(tmp_path)
    for name, tensor in again.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_a_plain_causal_lm_gets_a_new_head_with_a_warning(tmp_path, caplog):
    lm = tiny_llama()
    lm.save_pretrained(tmp_path)
    with caplog.at_level(logging.WARNING):
        model = RewardModel.from_pretrained(tmp_path)
    assert "no reward head: it is newly initialised" in caplog.text
    assert torch.equal(model.backbone.embed_tokens.weight, lm.model.embed_tokens.weight)
    assert 0.05 < float(model.head.weight.detach().std()) < 0.5  # 1/sqrt(33) = .17


def test_a_lora_adapter_is_merged(tmp_path):
    tiny_gpt2().save_pretrained(tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    adapted = get_peft_model(base, LoraConfig(r=2, target_modules=["c_attn"], init_lora_weights=False))
    adapted.save_pretrained(tmp_path / "adapter")
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = adapted.eval()(ids, output_hidden_states=True).hidden_states[-1]
        hidden = RewardModel.from_pretrained(tmp_path / "adapter").backbone(ids).last_hidden_state
    torch.testing.assert_close(hidden, expected, atol=1e-5, rtol=1e-5)


def test_dtype_and_device():
    model = RewardModel.from_pretrained(tiny_gpt2(), device="cpu")
    assert model.head.weight.dtype == torch.float32


def test_a_loaded_body_has_the_asked_dtype_and_fp32_by_default(tmp_path):
    model = reward_model()
    model.backbone.to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    assert RewardModel.from_pretrained(tmp_path).backbone.dtype == torch.float32
    half = RewardModel.from_pretrained(tmp_path, dtype=torch.bfloat16, device="cpu")
    assert half.backbone.dtype == torch.bfloat16
    assert half.head.weight.dtype == torch.float32
    assert torch.equal(half.head.weight, model.head.weight)


def test_wrong_things_to_load(tmp_path):
    with pytest.raises(OSError):
        RewardModel.from_pretrained(tmp_path / "nothing")
    with pytest.raises(TypeError, match="base_model"):
        RewardModel(tiny_gpt2())


# --- the public layout of the 6B TL;DR model --------------------------------------------------------------


def public_state(lm: GPTJForCausalLM, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """GPT-J without its LM head, the buffers that older transformers saved, and the scalar head."""
    state = {k: v.to(dtype) for k, v in lm.state_dict().items() if not k.startswith("lm_head.")}
    for block in range(lm.config.n_layer):
        state[f"transformer.h.{block}.attn.bias"] = torch.ones(1, 1, 64, 64).tril().bool()
        state[f"transformer.h.{block}.attn.masked_bias"] = torch.tensor(-1e9)
    state["v_head.weight"] = stable_normal("v_head.weight", (1, HIDDEN_SIZE), 7).to(dtype)
    return state


@pytest.fixture
def public(tmp_path) -> dict[str, Path]:
    """The public layout's two parts: the folder of weights and the model whose configuration it has."""
    lm = tiny_gptj(layers=4)
    lm.save_pretrained(tmp_path / "sft")
    (tmp_path / "rm").mkdir()
    torch.save(public_state(lm), tmp_path / "rm" / "pytorch_model.bin")
    return {"sft": tmp_path / "sft", "rm": tmp_path / "rm"}


@pytest.mark.parametrize("source", ["folder", "file"])
def test_public_layout_loads_with_the_config_of_another_model(public, source, caplog):
    path = public["rm"] if source == "folder" else public["rm"] / "pytorch_model.bin"
    with caplog.at_level(logging.WARNING, logger="trl"):
        model = RewardModel.from_pretrained(path, config_name=str(public["sft"]))
    assert caplog.text == ""  # the old buffers are no surprise
    lm = AutoModelForCausalLM.from_pretrained(public["sft"]).eval()
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        hidden = lm.transformer(ids).last_hidden_state
        expected = hidden @ stable_normal("v_head.weight", (1, HIDDEN_SIZE), 7)[0]
        torch.testing.assert_close(model(ids), expected, atol=1e-6, rtol=1e-6)


def test_public_layout_in_bf16_on_a_device(public):
    model = RewardModel.from_pretrained(
        public["rm"], config_name=str(public["sft"]), dtype=torch.bfloat16, device="cpu"
    )
    assert {p.dtype for p in model.backbone.parameters()} == {torch.bfloat16}
    assert {p.device.type for p in model.parameters()} == {"cpu"}
    whole = RewardModel.from_pretrained(public["rm"], config_name=str(public["sft"]))
    ids = torch.tensor([[5, 6, 7, 8]])
    with torch.no_grad():
        torch.testing.assert_close(model(ids), whole(ids), atol=0.1, rtol=0.1)


def test_public_layout_with_a_config_of_its_own_and_in_the_old_file_format(public):
    state = torch.load(public["rm"] / "pytorch_model.bin", weights_only=True)
    torch.save(state, public["rm"] / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    (public["rm"] / "config.json").write_text((public["sft"] / "config.json").read_text())
    model = RewardModel.from_pretrained(public["rm"])
    assert torch.equal(model.head.weight, state["v_head.weight"])


def test_public_layout_in_shards(public):
    state = torch.load(public["rm"] / "pytorch_model.bin", weights_only=True)
    names = list(state)
    files = {"pytorch_model-00001-of-00002.bin": names[::2], "pytorch_model-00002-of-00002.bin": names[1::2]}
    for file, keys in files.items():
        torch.save({key: state[key] for key in keys}, public["rm"] / file)
    (public["rm"] / "pytorch_model.bin").unlink()
    index = {"weight_map": {key: file for file, keys in files.items() for key in keys}}
    (public["rm"] / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    model = RewardModel.from_pretrained(public["rm"], config_name=str(public["sft"]))
    assert torch.equal(model.backbone.h[3].mlp.fc_in.weight, state["transformer.h.3.mlp.fc_in.weight"])


def test_public_layout_without_a_configuration_says_what_to_give(public):
    with pytest.raises(OSError, match="config_name"):
        RewardModel.from_pretrained(public["rm"])


def test_public_layout_lists_missing_and_unexpected_keys(public, caplog):
    state = torch.load(public["rm"] / "pytorch_model.bin", weights_only=True)
    del state["transformer.h.1.mlp.fc_in.bias"]
    state["transformer.surprise"] = torch.zeros(2)
    torch.save(state, public["rm"] / "pytorch_model.bin")
    with caplog.at_level(logging.WARNING, logger="trl"):
        RewardModel.from_pretrained(public["rm"], config_name=str(public["sft"]))
    assert "1 of the model's" in caplog.text
    assert "h.1.mlp.fc_in.bias" in caplog.text
    assert "transformer.surprise" in caplog.text


def test_public_layout_with_many_missing_keys_or_wrong_shapes_is_refused(public):
    state = torch.load(public["rm"] / "pytorch_model.bin", weights_only=True)
    kept = {key: tensor for key, tensor in state.items() if ".h.2." not in key}
    torch.save(kept, public["rm"] / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"missing .*h\.2\.attn"):
        RewardModel.from_pretrained(public["rm"], config_name=str(public["sft"]))
    state["transformer.wte.weight"] = torch.zeros(VOCAB_SIZE + 8, HIDDEN_SIZE)
    torch.save(state, public["rm"] / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"wte.weight is \(328, 32\), expected \(320, 32\)"):
        RewardModel.from_pretrained(public["rm"], config_name=str(public["sft"]))


class _Bomb:
    def __reduce__(self):
        return (print, ("the pickle ran",))


def test_a_pickle_with_code_in_it_is_refused(public, capsys):
    torch.save({"v_head.weight": torch.ones(1, 32), "x": _Bomb()}, public["rm"] / "pytorch_model.bin")
    with pytest.raises(OSError, match=r"^\S+pytorch_model\.bin holds more than tensors.*weights_only.*$"):
        RewardModel.from_pretrained(public["rm"], config_name=str(public["sft"]))
    assert "the pickle ran" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: b"", "no whole file of weights"),
        (lambda content: content[: len(content) // 2], "no whole file of weights|holds more than tensors"),
        (lambda content: b"<html>not found</html>" * 10, "holds more than tensors"),
        (lambda content: _saved([torch.ones(1)]), "holds a list; expected a dict"),
    ],
)
def test_a_file_that_is_no_whole_state_dict_is_one_line(public, damage, message):
    file = public["rm"] / "pytorch_model.bin"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(OSError, match=message) as caught:
        RewardModel.from_pretrained(public["rm"], config_name=str(public["sft"]))
    assert "\n" not in str(caught.value)


def _saved(content) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def test_a_shard_that_the_index_names_must_be_there(public):
    state = torch.load(public["rm"] / "pytorch_model.bin", weights_only=True)
    last = list(state)[-2:]
    torch.save({key: state[key] for key in state if key not in last[:1]}, public["rm"] / "pytorch_model-1-of-2.bin")
    weight_map = dict.fromkeys(state, "pytorch_model-1-of-2.bin") | {last[0]: "pytorch_model-2-of-2.bin"}
    (public["rm"] / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(OSError, match=r"lacks pytorch_model-2-of-2\.bin, which its index names"):
        RewardModel.from_pretrained(public["rm"], config_name=str(public["sft"]))


# --- training ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("builder", BUILDERS)
def test_frozen_lower_blocks_get_no_gradient(builder):
    model = reward_model(builder)
    model.freeze_lower_blocks(1)
    model(torch.tensor([[5, 6, 7]])).sum().backward()
    frozen = [name for name, p in model.named_parameters() if not p.requires_grad]
    assert any("embed" in name or "wte" in name for name in frozen)
    trained = [name for name, p in model.named_parameters() if p.grad is not None]
    assert "head.weight" in trained
    assert all(".0." not in name for name in trained)
    assert any(".1." in name for name in trained)


def test_freezing_all_blocks_is_refused():
    with pytest.raises(ValueError, match="expected 1 to 1"):
        reward_model().freeze_lower_blocks(2)
