"""Planned bytes against those of real models: storage exactly, kept activations within a third."""

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, GPTNeoXConfig, GPTNeoXForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.tiny import tiny_gpt2, tiny_llama
from trl import AutoModelForCausalLMWithValueHead, create_reference_model
from trl.models.trunk import body_of
from trl.plan import Setting, Workload, memory_plan, process_memory, shape_of, trained_parameters

NORMS_AND_HEAD = 200
"""Parameters of the final norm and the value head, which the plan leaves out."""


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama])
def test_storage_is_that_of_the_loaded_models(make, shared):
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(make(layers=3))
    loaded, reference = memory_plan({"policy": policy, "reference": create_reference_model(policy, shared or None)})
    plan = process_memory(
        shape_of(policy.base_lm.config, "policy"), Workload(8, 10, 10, shared_layers=shared), Setting(8, 8)
    )
    near = {"abs": 12 * NORMS_AND_HEAD}
    assert plan.weights == pytest.approx(loaded.weight_bytes, **near)
    assert plan.gradients + plan.optimizer == pytest.approx(loaded.training_bytes, **near)
    assert plan.frozen_models == pytest.approx(reference.weight_bytes, **near)


def gpt2(layers):
    config = GPT2Config(n_embd=128, n_layer=layers, n_head=4, vocab_size=99, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
    return GPT2LMHeadModel(config)


def llama(layers):
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_attention_heads": 4, "vocab_size": 99}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, **sizes))


def neox(layers):
    sizes = {"hidden_size": 128, "intermediate_size": 512, "num_attention_heads": 4, "vocab_size": 99}
    return GPTNeoXForCausalLM(GPTNeoXConfig(num_hidden_layers=layers, **sizes))


def kept_bytes(lm, samples, tokens, bf16):
    """Bytes that a forward pass keeps for the backward pass, each storage once, without the weights."""
    weights = {p.data_ptr() for p in lm.parameters()}
    kept = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    ids = torch.ones(samples, tokens, dtype=torch.long)
    with (
        torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor),
        torch.autocast("cpu", torch.bfloat16, enabled=bf16),
    ):
        body_of(lm)(inputs_embeds=lm.get_input_embeddings()(ids), use_cache=False)
    return sum(size for size, _ in kept.values())


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("make", [gpt2, llama, neox])
def test_kept_activations_are_within_a_third(make, bf16):
    samples, tokens = 4, 256
    measured = kept_bytes(make(4), samples, tokens, bf16) - kept_bytes(make(2), samples, tokens, bf16)
    shapes = [shape_of(make(layers).config, "model") for layers in (2, 4)]
    work = Workload(samples, tokens - 1, 2)
    less, more = (process_memory(shape, work, Setting(samples, samples, bf16=bf16)) for shape in shapes)
    # the bf16 copies that autocast keeps (2 of the 8 bytes per parameter) are planned as weights
    copies = (more.weights - less.weights) / 4 if bf16 else 0
    assert more.update - less.update == pytest.approx(measured - copies, rel=0.34)


SHAPE = shape_of(tiny_llama(layers=3).config, "llama")
WORK = Workload(8, 10, 10)


def test_zero_divides_optimizer_then_gradients_then_weights():
    plain, one, two, three = (process_memory(SHAPE, WORK, Setting(8, 8, 4, zero=stage)) for stage in (0, 1, 2, 3))
    assert one.optimizer == two.optimizer == three.optimizer == plain.optimizer / 4
    assert one.gradients == plain.gradients / 2  # plain data parallelism keeps a copy to send
    assert two.gradients == three.gradients == one.gradients / 4
    assert one.weights == two.weights == plain.weights
    assert three.weights == plain.weights / 4
    assert three.frozen_models == plain.frozen_models / 4
    assert three.generation == plain.generation + SHAPE.parameters * 4  # gathered


def test_deepspeed_in_bf16_takes_16_bytes_per_parameter():
    """2 + 2 + 12, Rajbhandari et al. 2020, section 3.1."""
    plan = process_memory(SHAPE, WORK, Setting(8, 8, zero=1, bf16=True))
    assert plan.weights + plan.gradients + plan.optimizer == 16 * SHAPE.parameters


def test_adapters_are_what_is_trained():
    work = Workload(8, 10, 10, lora_rank=2)
    plan = process_memory(SHAPE, work, Setting(8, 8))
    assert trained_parameters(SHAPE, work) == 3 * 2 * (32 + 32 + 32 + 16)  # query 32 to 32, value 32 to 16, per block
    assert plan.frozen_models == 0
    assert plan.optimizer == 8 * trained_parameters(SHAPE, work)


def test_value_and_reward_model_add_their_bodies():
    alone = process_memory(SHAPE, WORK, Setting(8, 8))
    both = process_memory(SHAPE, WORK, Setting(8, 8), value_model=SHAPE, reward_model=SHAPE)
    body = SHAPE.parameters - SHAPE.head_weights
    assert both.optimizer - alone.optimizer == 8 * body
    assert both.frozen_models - alone.frozen_models == 4 * body


@pytest.mark.parametrize(
    ("work", "setting", "said"),
    [
        (Workload(8, 10, 10, shared_layers=1), Setting(8, 8, 2, zero=3), "ZeRO-3"),
        (Workload(8, 10, 10, shared_layers=1, lora_rank=2), Setting(8, 8), "LoRA"),
    ],
)
def test_what_the_trainer_cannot_do_is_refused(work, setting, said):
    with pytest.raises(ValueError, match=said):
        process_memory(SHAPE, work, setting)


def test_sizes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="mini-batch within the batch"):
        Setting(4, 8)
