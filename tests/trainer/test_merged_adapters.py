"""Sampling with LoRA merged into the weights: the same distribution, and afterwards the same bits."""

import pytest
import torch
from peft import LoraConfig

from tests.tiny import perturb_weights, tiny_gpt2, tiny_llama
from trl.models import AutoModelForCausalLMWithValueHead
from trl.trainer.generation import merged_adapters

TARGETS = {tiny_gpt2: ["c_attn"], tiny_llama: ["q_proj", "v_proj"]}


@pytest.fixture(params=TARGETS, ids=lambda make: make.__name__)
def policy(request):
    config = LoraConfig(r=4, target_modules=TARGETS[request.param], task_type="CAUSAL_LM", init_lora_weights=False)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(request.param(), peft_config=config)
    perturb_weights(model, 5)
    return model.eval()


def logits(policy) -> torch.Tensor:
    with torch.no_grad():
        return policy(torch.tensor([[5, 0, 300, 7, 9]]))[0]


def test_merged_weights_say_the_same_and_come_back_bit_for_bit(policy):
    before, separate = {k: v.clone() for k, v in policy.state_dict().items()}, logits(policy)
    with pytest.raises(KeyboardInterrupt), merged_adapters(policy.base_lm):
        torch.testing.assert_close(logits(policy), separate, atol=1e-5, rtol=0)
        changed = [k for k, v in policy.state_dict().items() if not torch.equal(v, before[k])]
        assert changed and all("base_layer" in name for name in changed)
        raise KeyboardInterrupt
    for name, tensor in policy.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert torch.equal(logits(policy), separate)


def test_switched_off_adapters_stay_off(policy):
    with policy.pretrained_model.disable_adapter():
        plain = logits(policy)
        with merged_adapters(policy.base_lm):
            assert torch.equal(logits(policy), plain)
    assert not torch.equal(logits(policy), plain)


def test_quantised_weights_are_left_alone(policy):
    layer = next(m for name, m in policy.named_modules() if name.endswith(("c_attn", "q_proj")))
    weight = layer.base_layer.weight
    weight.requires_grad_(False).data = weight.data.to(torch.int8)
    before = weight.clone()
    with merged_adapters(policy.base_lm):
        assert torch.equal(layer.base_layer.weight, before) and not layer.merged
