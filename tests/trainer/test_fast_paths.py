"""The update's fast paths against their slow twins: one pass for rollout and first epoch, groups of similar length."""

import pytest
import torch

from tests.tiny import tiny_gpt2, tiny_llama, tiny_neox, tiny_opt
from tests.trainer.test_ppo import BATCH, SCORES, make_trainer
from tests.trainer.test_value_model import make_trainer as make_value_trainer
from trl import PPOTrainer
from trl.trainer.rollout import Sequences

MASKS = [torch.ones(len(r)) for r in BATCH[1]]
MASKS[2][:1] = 0
SIZES = {"batch_size": 8, "mini_batch_size": 8}


def after_two_steps(trainer: PPOTrainer, fast: bool) -> tuple[dict[str, float], list[torch.Tensor]]:
    if not fast:
        trainer.updater._may_group = False  # what DeepSpeed gets: no grouped passes, no pass with two uses
    for _ in range(2):
        stats = trainer.step(*BATCH, SCORES, MASKS)
    networks = [trainer.policy, *([trainer.value_model] if trainer.value_model is not None else [])]
    weights = [p.detach().clone() for n in networks for p in n.parameters() if p.requires_grad]
    return {k: v for k, v in stats.items() if not k.startswith("time/")}, weights


def compare(fast: PPOTrainer, slow: PPOTrainer) -> None:
    assert fast.updater.whole_batch() and fast.updater._may_group
    got, weights = after_two_steps(fast, True)
    expected, slow_weights = after_two_steps(slow, False)
    assert got == pytest.approx(expected, abs=1e-5)
    for one, other in zip(weights, slow_weights, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama, tiny_neox, tiny_opt])
@pytest.mark.parametrize("shared", [None, 2])
def test_whole_batch_steps_need_no_pass_of_their_own(make, shared):
    fast, slow = (make_trainer(make(layers=4), shared=shared, sgd=True, **SIZES) for _ in range(2))
    compare(fast, slow)


@pytest.mark.parametrize("kl_penalty", ["abs", "full"])
def test_whole_batch_steps_with_other_penalties(kl_penalty):
    compare(*(make_trainer(kl_penalty=kl_penalty, sgd=True, **SIZES) for _ in range(2)))


def test_whole_batch_steps_with_gradient_checkpointing():
    trainers = [make_trainer(tiny_llama(layers=4), shared=2, sgd=True, **SIZES) for _ in range(2)]
    for trainer in trainers:
        trainer.policy.pretrained_model.gradient_checkpointing_enable()
    compare(*trainers)


def test_whole_batch_steps_with_a_value_model():
    compare(*(make_value_trainer(**SIZES) for _ in range(2)))


def test_smaller_mini_batches_take_passes_of_their_own():
    assert make_trainer(batch_size=8, mini_batch_size=4).updater.whole_batch() == []


def test_groups_hold_every_row_once_and_save_padding():
    lengths = [3, 40, 4, 41, 5, 39, 3, 42]
    sequences = Sequences([torch.ones(n) for n in lengths], [torch.ones(2)] * 8, torch.device("cpu"))
    groups = sequences.groups([7, 2, 0, 1, 3, 4, 5, 6])
    assert sorted(row for group in groups for row in group) == list(range(8))
    assert sum(len(g) * max(lengths[i] for i in g) for g in groups) < 0.8 * 8 * 42
    alike = Sequences([torch.ones(9)] * 8, [torch.ones(2)] * 8, torch.device("cpu"))
    assert len(alike.groups(range(8))) == 1
    assert alike.groups([5]) == [[5]]


def learning_curve(caches_trunk: bool, steps: int = 12) -> list[tuple[float, float]]:
    """Reward and KL of a policy that is paid for tokens of half the vocabulary, with generation, from one seed."""
    trainer = make_trainer(tiny_llama(layers=4), shared=2, learning_rate=1e-2, init_kl_coef=0.02, **SIZES)
    trainer.passes.caches_trunk = caches_trunk  # otherwise every pass runs the frozen blocks too
    curve = []
    for step in range(steps):
        torch.manual_seed(step)
        responses = trainer.generate(BATCH[0], max_new_tokens=8, return_prompt=False)
        rewards = [(r < 160).float() for r in responses]
        stats = trainer.step(BATCH[0], responses, rewards)
        curve.append((float(torch.cat(rewards).mean()), stats["objective/kl"]))
    return curve


def test_learning_curves_with_and_without_the_trunk_cache_coincide():
    cached, plain = learning_curve(True), learning_curve(False)
    assert cached[-1][0] > cached[0][0] + 0.2  # something was learned
    for one, other in zip(cached, plain, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
