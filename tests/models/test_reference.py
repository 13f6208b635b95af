"""The frozen reference model and its shared blocks."""

from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from tests.tiny import perturb_weights, tiny_gpt2, tiny_gptj, tiny_llama, tiny_neox, tiny_opt
from trl import AutoModelForCausalLMWithValueHead, create_reference_model

LAYERS = 4
BUILDERS = {
    "gpt2": tiny_gpt2,
    "llama": tiny_llama,
    "gptj": tiny_gptj,
    "neox": tiny_neox,
    "opt": tiny_opt,
    "opt_projected": partial(tiny_opt, projected=True),
}
BLOCK_PREFIX = {
    "gpt2": "transformer.h.",
    "gptj": "transformer.h.",
    "llama": "model.layers.",
    "neox": "gpt_neox.layers.",
    "opt": "model.decoder.layers.",
    "opt_projected": "model.decoder.layers.",
}
EMBEDDINGS = ("wte", "wpe", "embed_tokens", "embed_in", "embed_positions", "project_in")
IDS = torch.tensor([[5, 6, 7, 300], [0, 9, 10, 11]])


def policy_of(builder: str) -> AutoModelForCausalLMWithValueHead:
    return AutoModelForCausalLMWithValueHead.from_pretrained(BUILDERS[builder](layers=LAYERS))


def is_below(builder: str, name: str, shared: int) -> bool:
    """Whether a causal LM parameter belongs to the embeddings or one of the first ``shared`` blocks."""
    if name.startswith(BLOCK_PREFIX[builder]):
        return int(name.removeprefix(BLOCK_PREFIX[builder]).split(".")[0]) < shared
    return any(word in name for word in EMBEDDINGS)


def train_one_step(model: AutoModelForCausalLMWithValueHead) -> None:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
    logits, _, values = model(IDS)
    (logits.log_softmax(-1)[..., 5].sum() + values.sum()).backward()
    optimizer.step()


@pytest.mark.parametrize("builder", BUILDERS)
def test_reference_without_sharing_is_a_frozen_equal_copy(builder: str) -> None:
    policy = policy_of(builder)
    trainable = {n for n, p in policy.named_parameters() if p.requires_grad}
    reference = create_reference_model(policy)
    with torch.no_grad():
        before = reference(IDS)[0]
        assert torch.equal(before, policy(IDS)[0])
    assert not any(p.requires_grad for p in reference.parameters())
    pointers = {p.data_ptr() for p in policy.parameters()}
    assert not any(p.data_ptr() in pointers for p in reference.parameters())
    assert {n for n, p in policy.named_parameters() if p.requires_grad} == trainable
    train_one_step(policy)
    with torch.no_grad():
        assert torch.equal(reference(IDS)[0], before)
        assert not torch.equal(policy(IDS)[0], before)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("shared", [1, LAYERS - 1])
def test_shared_blocks_are_one_frozen_storage(builder: str, shared: int) -> None:
    policy = policy_of(builder)
    reference = create_reference_model(policy, num_shared_layers=shared)
    others = dict(reference.pretrained_model.named_parameters())
    below = set()
    for name, parameter in policy.pretrained_model.named_parameters():
        if is_below(builder, name, shared):
            below.add(name)
            assert parameter.data_ptr() == others[name].data_ptr(), name
            assert not parameter.requires_grad, name
        else:
            assert parameter.data_ptr() != others[name].data_ptr(), name
            assert parameter.requires_grad, name
        assert not others[name].requires_grad, name
    assert len({n for n in below if n.startswith(BLOCK_PREFIX[builder])}) > shared
    assert any(not n.startswith(BLOCK_PREFIX[builder]) for n in below)
    assert all(p.requires_grad for p in policy.v_head.parameters())


@pytest.mark.parametrize("builder", BUILDERS)
def test_training_the_policy_leaves_the_reference_as_it_was(builder: str) -> None:
    policy = policy_of(builder)
    reference = create_reference_model(policy, num_shared_layers=2)
    with torch.no_grad():
        before = reference(IDS)[0]
    assert torch.equal(policy(IDS)[0], before)
    train_one_step(policy)
    with torch.no_grad():
        assert torch.equal(reference(IDS)[0], before)
        assert not torch.equal(policy(IDS)[0], before)


def test_tied_embeddings_freeze_the_lm_head() -> None:
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama(layers=3, tied=True))
    reference = create_reference_model(policy, num_shared_layers=1)
    head, other = (m.pretrained_model.get_output_embeddings().weight for m in (policy, reference))
    assert not head.requires_grad
    assert head.data_ptr() == policy.pretrained_model.get_input_embeddings().weight.data_ptr()
    assert head.data_ptr() == other.data_ptr()


def test_untied_lm_head_keeps_training() -> None:
    policy = policy_of("llama")
    reference = create_reference_model(policy, num_shared_layers=1)
    head, other = (m.pretrained_model.get_output_embeddings().weight for m in (policy, reference))
    assert head.requires_grad
    assert head.data_ptr() != other.data_ptr()


def test_sharing_survives_a_saved_and_loaded_policy(tmp_path: Path) -> None:
    policy = policy_of("gpt2")
    create_reference_model(policy, num_shared_layers=2)
    policy.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(IDS)[0], policy(IDS)[0])


def test_reference_is_a_copy_of_now_not_of_the_checkpoint() -> None:
    policy = policy_of("gpt2")
    perturb_weights(policy.pretrained_model, seed=9)
    reference = create_reference_model(policy, num_shared_layers=2)
    with torch.no_grad():
        assert torch.equal(reference(IDS)[0], policy(IDS)[0])


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("shared", [0, -1, LAYERS, LAYERS + 3])
def test_a_number_out_of_range_names_class_and_blocks(builder: str, shared: int) -> None:
    policy = policy_of(builder)
    with pytest.raises(ValueError) as error:
        create_reference_model(policy, num_shared_layers=shared)
    text = str(error.value)
    assert type(policy.pretrained_model).__name__ in text
    assert str(shared) in text
    assert f"{LAYERS} blocks" in text
    assert all(p.requires_grad for p in policy.parameters())  # a refused call changes nothing


def test_an_architecture_we_cannot_split_names_class_and_blocks() -> None:
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=3, n_head=4)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(BloomForCausalLM(config))
    with pytest.raises(ValueError) as error:
        create_reference_model(policy, num_shared_layers=1)
    assert "BloomForCausalLM" in str(error.value)
    assert "3 blocks" in str(error.value)


def test_an_architecture_we_cannot_split_has_a_full_reference() -> None:
    config = BloomConfig(vocab_size=64, hidden_size=32, n_layer=3, n_head=4)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(BloomForCausalLM(config))
    reference = create_reference_model(policy)
    ids = torch.tensor([[5, 6, 7]])
    assert torch.equal(reference(ids)[0], policy(ids)[0])


@pytest.mark.parametrize("builder", BUILDERS)
def test_reference_and_policy_have_dropout_off(builder: str) -> None:
    policy = policy_of(builder)
    reference = create_reference_model(policy, num_shared_layers=1).train()
    assert torch.equal(reference(IDS)[0], reference(IDS)[0])


def train_upper_half(policy: AutoModelForCausalLMWithValueHead) -> None:
    """Make policy and reference differ above the shared blocks."""
    with torch.no_grad():
        for parameter in policy.parameters():
            if parameter.requires_grad:
                parameter.mul_(1.1)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("shared", [1, LAYERS - 1])
def test_trunk_states_and_selected_positions_equal_the_full_pass(builder: str, shared: int) -> None:
    """Fast paths against their slow twin: trunk once, then top blocks and heads at the wanted positions."""
    policy = policy_of(builder)
    reference = create_reference_model(policy, num_shared_layers=shared)
    train_upper_half(policy)
    wanted = torch.tensor([[0, 1, 0, 1], [1, 0, 1, 0]]).bool()
    states = policy.trunk(IDS)
    assert torch.equal(states, reference.trunk(IDS))
    for model in (policy, reference):
        logits, _, values = model(IDS)
        for inputs in ({"input_ids": IDS}, {"trunk_states": states}):
            few_logits, _, few_values = model(positions=wanted, **inputs)
            torch.testing.assert_close(few_logits, logits[wanted], atol=1e-5, rtol=0)
            torch.testing.assert_close(few_values, values[wanted], atol=1e-5, rtol=0)


@pytest.mark.parametrize("builder", BUILDERS)
def test_trunk_states_give_the_full_pass_gradients(builder: str) -> None:
    policy = policy_of(builder)
    create_reference_model(policy, num_shared_layers=2)
    everywhere = torch.ones_like(IDS, dtype=torch.bool)
    gradients = []
    for inputs in ({"input_ids": IDS}, {"trunk_states": policy.trunk(IDS), "positions": everywhere}):
        policy.zero_grad()
        logits, _, values = policy(**inputs)
        (logits.reshape(-1, logits.shape[-1]).log_softmax(-1)[:, 5].sum() + values.sum()).backward()
        gradients.append({n: p.grad.clone() for n, p in policy.named_parameters() if p.grad is not None})
    assert gradients[0].keys() == gradients[1].keys()
    assert gradients[0]
    torch.testing.assert_close(gradients[0], gradients[1], atol=1e-4, rtol=1e-4)
