"""The memory plan of loaded models: shared storage once, gradients and moments of what is trained."""

import torch

from tests.tiny import tiny_llama
from trl import AutoModelForCausalLMWithValueHead, create_reference_model
from trl.models import RewardModel
from trl.plan import memory_plan, memory_table


def test_shared_storage_counts_once():
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama(layers=3))
    reference = create_reference_model(policy, 2)
    first, second = memory_plan({"policy": policy, "reference": reference})
    total = sum(p.numel() for p in policy.parameters())
    own = sum(p.numel() for p in policy.parameters() if p.requires_grad)
    assert (first.parameters, first.shared, first.trained) == (total, 0, own)
    assert first.weight_bytes == 4 * total
    assert first.training_bytes == 12 * own
    assert (second.parameters, second.shared, second.trained) == (total, total - own, 0)
    assert second.weight_bytes == 4 * own
    assert second.training_bytes == 0


def test_tied_weights_and_half_precision():
    lm = tiny_llama(tied=True).to(torch.bfloat16)
    (row,) = memory_plan({"policy": lm})
    assert row.parameters == sum(p.numel() for p in lm.parameters())  # torch lists a tied weight once
    assert row.dtype == "bfloat16"
    assert row.weight_bytes == 2 * row.parameters


def test_the_table_names_every_model_and_the_total():
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama())
    value_model = RewardModel.from_pretrained(tiny_llama(seed=1))
    table = memory_table({"policy": policy, "value model": value_model})
    assert [line.split("  ")[0] for line in table.splitlines()[1:3]] == ["policy", "value model"]
    trained = sum(p.numel() for model in (policy, value_model) for p in model.parameters())
    assert f"total {16 * trained / 1e6:,.0f} MB" in table
