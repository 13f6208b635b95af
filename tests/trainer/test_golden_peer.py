"""Our PPOTrainer against statistics recorded from the classic one (benchmarks/peer/step_statistics.py).

Same weights, ids and scores, two consecutive steps, tolerance 1e-4. What the two define differently is
compared through the quantity that both determine; `peer_view` names each of these.
"""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.tiny import (
    perturb_weights,
    ragged_batch,
    tiny_gpt2,
    tiny_llama,
    tiny_tokenizer,
    value_head_weights,
)
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "peer_step.json").read_text())
CASES = GOLDEN["cases"]
TOLERANCE = {"rel": 1e-4, "abs": 1e-4}

SAME_NAME = [
    "objective/kl",
    "objective/kl_coef",
    "ppo/loss/policy",
    "ppo/loss/value",
    "ppo/loss/total",
    "ppo/policy/ratio",
    "ppo/policy/clipfrac",
    "ppo/policy/approxkl",
    "ppo/policy/policykl",
    "ppo/returns/mean",
    "ppo/val/mean",
    "ppo/val/error",
    "ppo/val/clipfrac",
]
VARIANCES = ["ppo/returns/var", "ppo/val/var"]
"""The peer averages them over mini-batches, so they are comparable with one mini-batch only."""

PER_TOKEN = {
    "logprob": "logprob",
    "ref_logprob": "ref_logprob",
    "kl": "kl",
    "value": "value",
    "reward": "token_reward",
    "advantage": "advantage",
}
"""The peer's name -> the key in ``last_rollout``."""


def trainer_for(case: dict[str, Any], **changed: Any) -> PPOTrainer:
    """Policy, reference and trainer of a recorded case."""
    recipe = GOLDEN["recipe"]
    base = {"gpt2": tiny_gpt2, "llama": tiny_llama}[case["model"]](recipe["model_seed"])
    reference_base = copy.deepcopy(base)
    perturb_weights(reference_base, recipe["reference_seed"])
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(base)
    head = value_head_weights(recipe["head_seed"])
    policy.v_head.load_state_dict({k.removeprefix("v_head."): v for k, v in head.items()})
    reference = AutoModelForCausalLMWithValueHead.from_pretrained(reference_base)
    config = PPOConfig(**{**case["config"], **changed})
    return PPOTrainer(config, policy, reference, tokenizer=tiny_tokenizer())


def batch_of(case: dict[str, Any], step: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], list[Tensor] | None]:
    """Queries, responses and response masks of a recorded step."""
    queries, responses = ragged_batch(case["query_lengths"], case["response_lengths"], step["batch_seed"])
    if case["masked_prefix"] is None:
        return queries, responses, None
    masks = [(torch.arange(len(r)) >= n).long() for r, n in zip(responses, case["masked_prefix"], strict=True)]
    return queries, responses, masks


def peer_view(stats: dict[str, float], rollout: list[dict[str, Tensor]], masks: list[Tensor]) -> dict[str, float]:
    """Statistics in the peer's definition, from ours and from the per-token values.

    Its objective/entropy is the summed negative log-prob per sample; its mean_non_score_reward is per token;
    its var_explained divides the squared error during the update by the variance of the returns.
    """
    kept = [(row, mask.bool()) for row, mask in zip(rollout, masks, strict=True)]
    surprise = torch.stack([-row["logprob"][mask].sum() for row, mask in kept])
    kl = torch.cat([row["kl"][mask] for row, mask in kept])
    return {
        "objective/entropy": surprise.mean().item(),
        "ppo/mean_non_score_reward": -stats["objective/kl_coef"] * kl.mean().item(),
        "ppo/val/var_explained": 1 - stats["ppo/val/error"] / stats["ppo/returns/var"],
    }


def assert_agrees(name: str, case: dict[str, Any], trainer: PPOTrainer) -> None:
    """Run both recorded steps and compare everything comparable, naming all differences at once."""
    several_slices = case["config"]["gradient_accumulation_steps"] > 1
    for number, step in enumerate(case["steps"]):
        queries, responses, masks = batch_of(case, step)
        stats = trainer.step(queries, responses, list(step["scores"]), masks)
        masks = masks or [torch.ones(len(r)) for r in responses]
        ours = {key: stats[key] for key in SAME_NAME + VARIANCES}
        ours |= peer_view(stats, trainer.last_rollout, masks)
        if not (case["config"].get("use_score_scaling") or case["config"].get("score_clip")):
            ours["ppo/mean_scores"] = stats["objective/score"]
        if several_slices:
            for key in [*VARIANCES, "ppo/val/var_explained"]:
                del ours[key]
        wrong = {
            key: (value, step["statistics"][key])
            for key, value in ours.items()
            if value != pytest.approx(step["statistics"][key], **TOLERANCE)
        }
        assert not wrong, f"{name}, step {number}: (ours, peer's) {wrong}"
        assert_tokens_agree(case, step, trainer.last_rollout, masks)


def assert_tokens_agree(
    case: dict[str, Any], step: dict[str, Any], rollout: list[dict[str, Tensor]], masks: list[Tensor]
) -> None:
    for peer_name, our_name in PER_TOKEN.items():
        if peer_name == "reward" and case["config"].get("whiten_rewards"):
            continue  # recorded before whitening
        for i, (row, mask) in enumerate(zip(rollout, masks, strict=True)):
            expected = torch.tensor(step["tokens"][peer_name][i])
            torch.testing.assert_close(
                row[our_name][mask.bool()], expected, atol=1e-4, rtol=1e-4, msg=lambda m, i=i: f"sample {i}: {m}"
            )


@pytest.mark.parametrize("name", CASES)
def test_two_steps_agree_with_the_peer(name: str) -> None:
    assert_agrees(name, CASES[name], trainer_for(CASES[name]))


@pytest.mark.parametrize("mini_batch_size", [1, 2, 4])
def test_any_split_of_a_ragged_batch_still_agrees(mini_batch_size: int) -> None:
    case = CASES["gpt2_kl"]
    trainer = trainer_for(case, mini_batch_size=mini_batch_size, gradient_accumulation_steps=8 // mini_batch_size)
    assert_agrees("gpt2_kl", case, trainer)


def as_vector(score: float, query: Tensor, response: Tensor) -> Tensor:
    return torch.tensor([0.0] * (len(response) - 1) + [score])


def as_aligned_vector(score: float, query: Tensor, response: Tensor) -> Tensor:
    prompt_part = torch.full((len(query) - 1,), 55.0)  # must be ignored
    return torch.cat([prompt_part, as_vector(score, query, response)])


SCORE_KINDS: dict[str, Callable[[float, Tensor, Tensor], Any]] = {
    "0-d tensor": lambda score, q, r: torch.tensor(score),
    "(1,) tensor": lambda score, q, r: torch.tensor([score]),
    "numpy scalar": lambda score, q, r: np.float64(score),
    "token vector": as_vector,
    "aligned vector": as_aligned_vector,
}


def statistics_with(kind: Callable[[float, Tensor, Tensor], Any], call: bool = False) -> dict[str, float]:
    case = CASES["gpt2_kl"]
    trainer = trainer_for(case)
    for step in case["steps"]:
        queries, responses, _ = batch_of(case, step)
        scores = [kind(*each) for each in zip(step["scores"], queries, responses, strict=True)]
        stats = trainer.step(queries, responses, (lambda given=scores: given) if call else scores)
    return {key: value for key, value in stats.items() if not key.startswith("time/")}


@pytest.fixture(scope="module")
def scalar_statistics() -> dict[str, float]:
    return statistics_with(lambda score, q, r: score)


@pytest.mark.parametrize("kind", SCORE_KINDS)
def test_every_kind_of_score_gives_the_same_two_steps(kind: str, scalar_statistics: dict[str, float]) -> None:
    assert statistics_with(SCORE_KINDS[kind]) == scalar_statistics  # bit for bit


def test_mixed_kinds_and_a_callable_give_the_same_two_steps(scalar_statistics: dict[str, float]) -> None:
    def mixed(score: float, query: Tensor, response: Tensor) -> Any:
        kinds = [*SCORE_KINDS.values(), lambda s, q, r: s]
        return kinds[int(query.sum()) % len(kinds)](score, query, response)

    assert statistics_with(mixed, call=True) == scalar_statistics


def test_the_recorded_cases_can_tell_settings_apart() -> None:
    """Guards the golden file itself: KL moves, clips happen, and the controller changes the coefficient."""
    first, second = CASES["gpt2_kl"]["steps"]
    assert abs(first["statistics"]["objective/kl"]) > 0.1
    assert second["statistics"]["objective/kl_coef"] != first["statistics"]["objective/kl_coef"]
    tight = CASES["gpt2_tight_clip"]["steps"][0]["statistics"]
    assert tight["ppo/policy/clipfrac"] > 0.3
    assert tight["ppo/val/clipfrac"] > 0.3
