"""The plan's FLOPs against those that torch counts while the trainer works, phase by phase."""

import pytest
import torch
from peft import LoraConfig
from torch.utils.flop_counter import FlopCounterMode

from tests.tiny import ragged_batch, tiny_gpt2, tiny_gptj, tiny_llama, tiny_neox, tiny_opt, tiny_tokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.models import RewardModel
from trl.plan import Workload, flops_plan, shape_of
from trl.trainer.rollout import Sequences
from trl.trainer.update import Targets

PROMPT, RESPONSE, BATCH, EPOCHS = 20, 12, 8, 2


def counted(lm, *, shared=0, rank=0, value_lm=None, mini_batch=BATCH // 2):
    """FLOPs of generation, passes and update, as torch counts them."""
    for model in (lm, *([] if value_lm is None else [value_lm])):
        model.set_attn_implementation("eager")  # torch does not count the fused kernels of a CPU
    peft_config = LoraConfig(r=rank, task_type="CAUSAL_LM") if rank else None
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(lm, peft_config=peft_config)
    value_model = None if value_lm is None else RewardModel.from_pretrained(value_lm)
    if value_model is not None and shared:
        value_model.freeze_lower_blocks(shared)
    trainer = PPOTrainer(
        PPOConfig(batch_size=BATCH, mini_batch_size=mini_batch, ppo_epochs=EPOCHS),
        policy,
        tokenizer=tiny_tokenizer(),
        num_shared_layers=shared or None,
        value_model=value_model,
    )
    queries, responses = ragged_batch([PROMPT] * BATCH, [RESPONSE] * BATCH)
    with FlopCounterMode(display=False) as generation:
        trainer.generate(queries, max_new_tokens=RESPONSE, min_new_tokens=RESPONSE)
    sequences = Sequences(queries, responses, torch.device("cpu"))
    with FlopCounterMode(display=False) as passes:
        rollout = trainer.passes.run(sequences, trainer.updater.whole_batch())
    advantages = torch.linspace(-1, 1, sequences.exists.numel()).view(sequences.exists.shape)
    targets = Targets(sequences.exists, rollout.logprobs, rollout.values, advantages, advantages)
    with FlopCounterMode(display=False) as update:
        trainer.updater.run(sequences, targets, rollout.trunk, rollout.first_pass)
    return [counter.get_total_flops() for counter in (generation, passes, update)]


def planned(lm, *, shared=0, rank=0, value_lm=None, checkpointing=False, whole_batch=False):
    work = Workload(BATCH, PROMPT, RESPONSE, EPOCHS, shared, rank, checkpointing, whole_batch)
    value_shape = None if value_lm is None else shape_of(value_lm.config, "value model")
    plan = flops_plan(shape_of(lm.config, "policy"), work, value_model=value_shape)
    return [plan.generate, plan.passes, plan.update]


@pytest.mark.parametrize("shared", [0, 2])
def test_a_step_of_the_whole_batch_saves_a_pass(shared):
    expected = counted(tiny_llama(layers=3), shared=shared, mini_batch=BATCH, value_lm=tiny_gpt2(layers=3))
    found = planned(tiny_llama(layers=3), shared=shared, whole_batch=True, value_lm=tiny_gpt2(layers=3))
    assert found == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("shared", [0, 2])
@pytest.mark.parametrize("make", [tiny_gpt2, tiny_gptj, tiny_llama, tiny_neox, tiny_opt])
def test_every_phase_of_every_architecture(make, shared):
    expected = counted(make(layers=3), shared=shared)
    assert planned(make(layers=3), shared=shared) == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize("shared", [0, 1])
def test_a_separate_value_model(shared):
    expected = counted(tiny_llama(layers=3), shared=shared, value_lm=tiny_llama(layers=2, seed=1))
    plan = planned(tiny_llama(layers=3), shared=shared, value_lm=tiny_llama(layers=2, seed=1))
    assert plan == pytest.approx(expected, rel=0.01)


def test_adapters_train_no_base_weight():
    """The adapters' own products are left out, which in so narrow a model is seen."""
    expected = counted(tiny_llama(layers=3), rank=1)
    assert planned(tiny_llama(layers=3), rank=1) == pytest.approx(expected, rel=0.05)


def test_checkpointing_repeats_at_most_the_forward_pass():
    lm = tiny_gpt2(layers=3)
    lm.gradient_checkpointing_enable()
    *_, kept = planned(lm)
    *_, most = planned(lm, checkpointing=True)
    *_, expected = counted(lm)
    assert kept < expected <= most < 1.1 * expected


def test_a_reward_model_reads_every_token():
    shape = shape_of(tiny_llama().config, "model")
    work = Workload(4, PROMPT, RESPONSE)
    lm = tiny_llama()
    lm.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        lm.model(torch.ones(4, PROMPT + RESPONSE, dtype=torch.long), use_cache=False)
    assert flops_plan(shape, work, reward_model=shape).reward == pytest.approx(counter.get_total_flops(), rel=0.01)
    assert flops_plan(shape, work).reward == 0


def test_sharing_all_blocks_is_refused():
    shape = shape_of(tiny_llama().config, "llama")
    with pytest.raises(ValueError, match="2 shared layers of llama: expected 0 to 1"):
        flops_plan(shape, Workload(1, 4, 4, shared_layers=2))
