"""A separate value network: its values, its update, what it shares with the policy's, saving; and the PPO-ptx mix."""

import copy

import pytest
import torch

from tests.tiny import perturb_weights, ragged_batch, tiny_llama, tiny_tokenizer
from tests.trainer.test_ppo import BATCH, RESPONSE_LENGTHS, SCORES, assert_same, weights
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer, create_reference_model, set_seed
from trl.core import gae, logprobs_from_logits, masked_whiten, ppo_loss
from trl.models import RewardModel
from trl.trainer.pretraining import PretrainingMix


def make_trainer(*, shared=None, value_seed=3, value_lr=0.05, pretraining=None, **overrides) -> PPOTrainer:
    set_seed(0)
    settings = {"batch_size": 8, "mini_batch_size": 8, "ppo_epochs": 1, "adap_kl_ctrl": False} | overrides
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama(layers=3))
    reference = create_reference_model(policy, shared)
    if shared is None:
        perturb_weights(reference.pretrained_model, seed=9)
    value_model = RewardModel.from_pretrained(tiny_llama(seed=value_seed))
    perturb_weights(value_model.head, seed=4, scale=0.1)
    return PPOTrainer(
        PPOConfig(**settings),
        policy,
        reference,
        tokenizer=tiny_tokenizer(),
        optimizer=torch.optim.SGD([p for p in policy.parameters() if p.requires_grad], lr=0.05),
        value_model=value_model,
        value_optimizer=torch.optim.SGD(value_model.parameters(), lr=value_lr),
        pretraining=pretraining,
    )


def value_weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in trainer.value_model.state_dict().items()}


def plain_values(model: RewardModel, query: torch.Tensor, response: torch.Tensor) -> torch.Tensor:
    """V at the positions before each response token, one sample at a time."""
    values = model(torch.cat([query, response]).unsqueeze(0))[0]
    return values[len(query) - 1 : -1]


def test_values_are_the_value_models_own():
    trainer = make_trainer()
    before = copy.deepcopy(trainer.value_model)
    trainer.step(*BATCH, SCORES)
    for query, response, row in zip(*BATCH, trainer.last_rollout, strict=True):
        assert torch.allclose(row["value"], plain_values(before, query, response), atol=1e-5)


@pytest.mark.parametrize("shared", [None, 2])
def test_the_update_is_that_of_a_plain_loop(shared):
    """Policy and value network after one epoch, against one sample at a time with torch's own tools."""
    trainer = make_trainer(shared=shared)
    policy, value_model, reference = (
        copy.deepcopy(m) for m in (trainer.policy, trainer.value_model, trainer.ref_model)
    )
    trainer.step(*BATCH, SCORES)

    def logprobs(model, query, response):
        logits, _, _ = model(torch.cat([query, response]).unsqueeze(0))
        return logprobs_from_logits(logits[0, len(query) - 1 : -1], response)

    width, pairs = max(RESPONSE_LENGTHS), list(zip(*BATCH, strict=True))
    mask, rewards, values = torch.zeros(8, width), torch.zeros(8, width), torch.zeros(8, width)
    for i, (query, response) in enumerate(pairs):
        n = len(response)
        with torch.no_grad():
            kl = logprobs(policy, query, response) - logprobs(reference, query, response)
            values[i, :n] = plain_values(value_model, query, response)
        mask[i, :n] = 1
        rewards[i, :n] = -0.2 * kl
        rewards[i, n - 1] += SCORES[i]
    advantages, returns = gae(rewards, values, mask)
    advantages = masked_whiten(advantages, mask)
    total = torch.zeros(())
    for i, (query, response) in enumerate(pairs):
        n, new = len(response), logprobs(policy, query, response)
        loss, _ = ppo_loss(
            new,
            new.detach(),
            plain_values(value_model, query, response),
            values[i, :n],
            advantages[i, :n],
            returns[i, :n],
            torch.ones(n),
            vf_coef=1.0,
            num_tokens=sum(RESPONSE_LENGTHS),
        )
        total = total + loss
    total.backward()
    for model, trained in ((policy, trainer.policy), (value_model, trainer.value_model)):
        for (name, parameter), after in zip(model.named_parameters(), trained.parameters(), strict=True):
            expected = parameter - 0.05 * parameter.grad if parameter.grad is not None else parameter
            assert torch.allclose(after, expected, rtol=0, atol=1e-5), name
    assert torch.equal(trainer.policy.v_head.summary.weight, policy.v_head.summary.weight)


def test_any_split_of_the_batch_gives_the_same_update():
    whole, split = make_trainer(), make_trainer(mini_batch_size=2, gradient_accumulation_steps=4)
    whole.step(*BATCH, SCORES)
    split.step(*BATCH, SCORES)
    assert_same(weights(whole), weights(split), 1e-6)
    assert_same(value_weights(whole), value_weights(split), 1e-6)


def test_a_dropped_step_leaves_both_networks_as_they_were():
    trainer = make_trainer(ratio_threshold=0.5)
    before = weights(trainer), value_weights(trainer)
    stats = trainer.step(*BATCH, SCORES)
    assert stats["ppo/skipped_minibatches"] == 1
    assert_same(weights(trainer), before[0])
    assert_same(value_weights(trainer), before[1])


def test_the_value_model_learns_the_returns():
    trainer = make_trainer(ppo_epochs=4, init_kl_coef=0.0, value_lr=0.02, cliprange_value=10.0)
    errors = [trainer.step(*BATCH, SCORES)["ppo/val/error"] for _ in range(6)]
    assert errors[-1] < 0.5 * errors[0]


def test_it_is_saved_beside_the_policy(tmp_path):
    trainer = make_trainer()
    trainer.step(*BATCH, SCORES)
    trainer.save_pretrained(tmp_path)
    loaded = RewardModel.from_pretrained(tmp_path / "value_model")
    query, response = BATCH[0][0], BATCH[1][0]
    assert torch.equal(plain_values(loaded, query, response), plain_values(trainer.value_model, query, response))


def test_the_default_optimizer_is_adam_at_the_policys_rate():
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama())
    value_model = RewardModel.from_pretrained(tiny_llama(seed=1))
    before = {name: value.clone() for name, value in value_model.state_dict().items()}
    config = PPOConfig(batch_size=8, mini_batch_size=8, learning_rate=1e-3, ppo_epochs=1)
    trainer = PPOTrainer(config, policy, tokenizer=tiny_tokenizer(), value_model=value_model)
    trainer.step(*BATCH, SCORES)
    moved = {name: (value - before[name]).abs().max() for name, value in value_model.state_dict().items()}
    assert max(moved.values()) == pytest.approx(1e-3, rel=0.05)  # Adam's first step is the rate itself


def test_another_tokenizers_value_model_is_refused():
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama())
    with pytest.raises(ValueError, match="knows 100 token ids and the policy 320"):
        PPOTrainer(
            PPOConfig(),
            policy,
            tokenizer=tiny_tokenizer(),
            value_model=RewardModel.from_pretrained(tiny_llama(vocab_size=100)),
        )


def test_a_value_model_with_fewer_positions_limits_the_batch():
    lm = tiny_llama(seed=1)
    lm.config.max_position_embeddings = 10
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama())
    trainer = PPOTrainer(
        PPOConfig(batch_size=1, mini_batch_size=1),
        policy,
        tokenizer=tiny_tokenizer(),
        value_model=RewardModel.from_pretrained(lm),
    )
    with pytest.raises(ValueError, match="the model has 10 positions"):
        trainer.step(*ragged_batch([8], [4]), [1.0])


# ---------------------------------------------------------------------- PPO-ptx

TEXTS = ["The film was a quiet wonder. " * 30, "Nothing in this movie works. " * 30]


def ptx_trainer(coef: float, **overrides) -> PPOTrainer:
    mix = PretrainingMix(TEXTS, tiny_tokenizer(), coef, block_length=16, batch_size=3)
    return make_trainer(pretraining=mix, **overrides)


def test_the_mix_adds_its_own_gradient_to_the_policys():
    """SGD is linear in the gradient: the mixed update is PPO's plus the language model loss's."""
    mixed, plain = ptx_trainer(0.5), make_trainer()
    set_seed(5)
    rows = torch.randint(len(mixed.updater.pretraining.blocks), (3,))  # one epoch: drawn after the mini-batch order
    policy = copy.deepcopy(plain.policy)
    for trainer in (mixed, plain):
        set_seed(5)
        torch.manual_seed(5)
        trainer.updater._optimizer_steps = lambda n: iter([[list(range(n))]])  # no shuffle: no draw before the mix's
        stats = trainer.step(*BATCH, SCORES)
    ids = mixed.updater.pretraining.blocks[rows]
    logits, _, _ = policy(ids)
    logprobs_from_logits(logits[:, :-1], ids[:, 1:]).mean().neg().backward()
    gradients = {name: p.grad for name, p in policy.named_parameters()}
    for name, value in mixed.policy.named_parameters():
        expected = plain.policy.get_parameter(name)
        if gradients[name] is not None:
            expected = expected - 0.05 * 0.5 * gradients[name]
        assert torch.allclose(value, expected, rtol=0, atol=1e-6), name
    assert "ppo/loss/pretraining" not in stats  # the plain one


def test_the_mix_lowers_the_loss_on_its_text():
    trainer = ptx_trainer(1.0, init_kl_coef=0.0)
    losses = [trainer.step(*BATCH, [0.0] * 8)["ppo/loss/pretraining"] for _ in range(40)]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])


def test_the_mix_wants_text():
    with pytest.raises(ValueError, match="has 2 tokens; expected at least 128"):
        PretrainingMix(["a"], tiny_tokenizer(), 1.0)
    with pytest.raises(ValueError, match="coef is 0"):
        PretrainingMix(TEXTS, tiny_tokenizer(), 0)
