"""Golden statistics of the classic PPOTrainer (Hugging Face trl 0.11.4) on tiny, formula-filled models.

Runs two consecutive PPO steps per case and writes inputs, settings and statistics to
``tests/golden/peer_step.json``; ``tests/trainer/test_golden_peer.py`` replays the same inputs with our
trainer. The peer's package is called ``trl`` like ours, so it needs its own environment and never the
repository root on its path:

    python -m venv peer && peer/bin/pip install torch==2.13.0 trl==0.11.4 transformers==5.24.0 rich
    peer/bin/python benchmarks/peer/step_statistics.py

Covered: scalar scores, ragged and equal lengths, pad == eos, every KL penalty, score scaling, reward
whitening, masked response prefixes, clipping. Not covered: anything whose order depends on the peer's
shuffle (several optimizer steps per epoch), token-level scores, empty responses, several processes; the
peer lacks or crashes on token-level scores and empty responses.
"""

import argparse
import copy
import json
import platform
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import trl
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.core import masked_mean

REPO = Path(__file__).resolve().parents[2]
sys.path.append(str(REPO / "tests"))  # not the root: `trl` must stay the peer's

import tiny  # noqa: E402

QUERY_LENGTHS = [3, 6, 2, 5, 4, 1, 7, 3]
RESPONSE_LENGTHS = [4, 1, 6, 3, 7, 2, 5, 4]
EQUAL_QUERY_LENGTHS, EQUAL_RESPONSE_LENGTHS = [5] * 8, [4] * 8
SCORES = [[1.0, -0.5, 2.0, 0.25, -1.5, 0.0, 0.75, 3.0], [0.5, 1.5, -1.0, 2.5, 0.0, -0.25, 1.0, -2.0]]
MODEL_SEED, REFERENCE_SEED, HEAD_SEED, BATCH_SEEDS = 1, 2, 3, [10, 11]

COMMON: dict[str, Any] = {
    "batch_size": 8,
    "mini_batch_size": 8,
    "gradient_accumulation_steps": 1,
    "ppo_epochs": 4,
    "learning_rate": 1e-4,
    "adap_kl_ctrl": True,
    "init_kl_coef": 0.2,
    "target": 6.0,
    "horizon": 100.0,  # short, so that the controller's update between the two steps shows
    "kl_penalty": "kl",
    "gamma": 1.0,
    "lam": 0.95,
    "cliprange": 0.2,
    "cliprange_value": 0.2,
    "vf_coef": 0.1,
    "seed": 0,
}

CASES: dict[str, dict[str, Any]] = {
    "gpt2_kl": {"model": "gpt2"},
    "gpt2_abs": {"model": "gpt2", "config": {"kl_penalty": "abs"}},
    "gpt2_mse": {"model": "gpt2", "config": {"kl_penalty": "mse"}},
    "gpt2_full": {"model": "gpt2", "config": {"kl_penalty": "full"}},
    "gpt2_discount": {"model": "gpt2", "config": {"gamma": 0.9, "lam": 0.8, "adap_kl_ctrl": False}},
    "gpt2_scaled_scores": {"model": "gpt2", "config": {"use_score_scaling": True}},
    "gpt2_normed_scores": {
        "model": "gpt2",
        "config": {"use_score_scaling": True, "use_score_norm": True, "score_clip": 1.0},
    },
    "gpt2_clipped_scores": {"model": "gpt2", "config": {"score_clip": 0.8}},
    "gpt2_whitened_rewards": {
        "model": "gpt2",
        "equal_lengths": True,
        "config": {"whiten_rewards": True},
    },
    "gpt2_tight_clip": {
        "model": "gpt2",
        "config": {"cliprange": 0.02, "cliprange_value": 0.02, "learning_rate": 1e-3},
    },
    "gpt2_masked_prefix": {"model": "gpt2", "masked_prefix": [0, 0, 2, 1, 3, 0, 4, 2]},
    "gpt2_accumulated": {
        "model": "gpt2",
        "equal_lengths": True,
        "config": {"mini_batch_size": 4, "gradient_accumulation_steps": 2},
    },
    "llama_kl": {"model": "llama"},
    "llama_full": {"model": "llama", "config": {"kl_penalty": "full"}},
}

STATISTICS = [
    "objective/kl",
    "objective/kl_coef",
    "objective/entropy",
    "ppo/loss/policy",
    "ppo/loss/value",
    "ppo/loss/total",
    "ppo/policy/entropy",
    "ppo/policy/approxkl",
    "ppo/policy/policykl",
    "ppo/policy/clipfrac",
    "ppo/returns/mean",
    "ppo/returns/var",
    "ppo/val/vpred",
    "ppo/val/error",
    "ppo/val/clipfrac",
    "ppo/val/mean",
    "ppo/val/var",
    "ppo/val/var_explained",
    "ppo/mean_non_score_reward",
    "ppo/mean_scores",
    "ppo/std_scores",
]

NOTES = {
    "comparable": (
        "With one optimizer step per epoch (mini_batch_size x gradient_accumulation_steps == batch_size) all "
        "statistics and all per-token values here are comparable to 1e-4, with the exceptions below."
    ),
    "ratio": (
        "The peer reports ppo/policy/ratio as a flattened tensor that includes prompt and padding positions; "
        "the number stored here is its ratio averaged over response tokens, then over mini-batches."
    ),
    "accumulation": (
        "The peer averages over tokens inside each mini-batch, then over mini-batches; ours divides the "
        "token sum by the tokens of the whole optimizer step. They agree only when mini-batches hold equally "
        "many tokens, so the accumulated case has equal lengths. Its ppo/returns/var, ppo/val/var and "
        "ppo/val/var_explained come from variances of shuffled halves and are not comparable."
    ),
    "score_scaling": (
        "The peer's use_score_scaling crashes as released (its running std is a float and .to() is called on "
        "it); the script wraps that number in a tensor and changes nothing else. Its std estimator is the "
        "unbiased one over all scores so far, plus fp32 eps; ppo/mean_scores and ppo/std_scores are taken "
        "after scaling, norm and clip."
    ),
    "masked_inside": (
        "With a masked token between two response tokens the peer's GAE discounts over it with value 0; ours "
        "skips it. Only prefixes are masked here, where both agree."
    ),
    "whitened_rewards": (
        "The peer's whiten_rewards adds the mean back at padded positions too, and its GAE then carries "
        "these into the response; ours never reads padding. The case has equal lengths, so no padding. The "
        "per-token reward stored here is taken before whiten_rewards acts."
    ),
    "approxkl": "The peer's approxkl is 0.5 * mean((new - old)^2); its policykl is mean(old - new).",
    "whitening": "masked_whiten of both: unbiased variance and eps 1e-8; the peer's is NaN for one token.",
    "grad_norm": (
        "The peer keeps its parameters in a generator, so max_grad_norm acts in the first optimizer step "
        "only; it is left off here."
    ),
    "entropy": "objective/entropy is the mean over samples of the summed negative log-prob of their tokens.",
}


class RecordingTrainer(PPOTrainer):
    """The peer's trainer, unchanged in its arithmetic, that keeps what it otherwise throws away."""

    def compute_rewards(
        self, scores: Tensor, logprobs: Tensor, ref_logprobs: Tensor, masks: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        rewards, non_score, kls = super().compute_rewards(scores, logprobs, ref_logprobs, masks)
        self.tokens = {"kl": kls, "reward": rewards}
        return rewards, non_score, kls

    def compute_advantages(self, values: Tensor, rewards: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, advantages, returns = super().compute_advantages(values, rewards, mask)
        self.tokens.update(value=values, advantage=advantages, returns=returns)
        self.step_mask, self.ratios = mask, []
        return values, advantages, returns

    def loss(
        self,
        old_logprobs: Tensor,
        values: Tensor,
        logits: Tensor,
        vpreds: Tensor,
        logprobs: Tensor,
        mask: Tensor,
        advantages: Tensor,
        returns: Tensor,
    ) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        ratio = torch.exp(logprobs.detach() - old_logprobs)
        self.ratios.append(masked_mean(ratio, mask).item())
        return super().loss(old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns)


def tensor_moments(trainer: PPOTrainer) -> None:
    """Make the peer's running mean and std tensors, as its step expects and its update does not deliver."""
    update = trainer.running.update

    def patched(scores: Tensor) -> tuple[float, float]:
        trainer.running.mean = float(trainer.running.mean)
        moments = update(scores)
        trainer.running.mean = torch.tensor(trainer.running.mean)
        trainer.running.std = torch.tensor(trainer.running.std)
        return moments

    trainer.running.update = patched


def build_models(name: str) -> tuple[torch.nn.Module, torch.nn.Module]:
    """Policy and reference with value heads; the reference is a slightly moved copy."""
    base = {"gpt2": tiny.tiny_gpt2, "llama": tiny.tiny_llama}[name](MODEL_SEED)
    reference_base = copy.deepcopy(base)
    tiny.perturb_weights(reference_base, REFERENCE_SEED)
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(base)
    reference = AutoModelForCausalLMWithValueHead.from_pretrained(reference_base)
    head = {k.removeprefix("v_head."): v for k, v in tiny.value_head_weights(HEAD_SEED).items()}
    policy.v_head.load_state_dict(head)
    return policy, reference


def run_case(case: dict[str, Any]) -> dict[str, Any]:
    """Two steps of one case: settings, inputs and, per step, statistics and per-token values."""
    policy, reference = build_models(case["model"])
    settings = {**COMMON, **case.get("config", {})}
    tokenizer = tiny.tiny_tokenizer()
    tokenizer.padding_side = "right"  # the peer passes no position_ids: left padding would shift GPT-2's
    trainer = RecordingTrainer(PPOConfig(**settings), policy, reference, tokenizer)
    tensor_moments(trainer)

    query_lengths, response_lengths = QUERY_LENGTHS, RESPONSE_LENGTHS
    if case.get("equal_lengths"):
        query_lengths, response_lengths = EQUAL_QUERY_LENGTHS, EQUAL_RESPONSE_LENGTHS
    prefix = case.get("masked_prefix")
    steps = []
    for batch_seed, scores in zip(BATCH_SEEDS, SCORES, strict=True):
        queries, responses = tiny.ragged_batch(query_lengths, response_lengths, batch_seed)
        masks = None
        if prefix is not None:
            masks = [(torch.arange(len(r)) >= n).long() for r, n in zip(responses, prefix, strict=True)]
        statistics = trainer.step(queries, responses, [torch.tensor(s) for s in scores], masks)
        trainer.tokens["logprob"] = torch.from_numpy(statistics["objective/logprobs"])
        trainer.tokens["ref_logprob"] = torch.from_numpy(statistics["objective/ref_logprobs"])
        steps.append(
            {
                "batch_seed": batch_seed,
                "scores": scores,
                "statistics": {
                    **{name: rounded(float(statistics[name])) for name in STATISTICS},
                    "ppo/policy/ratio": rounded(float(np.mean(trainer.ratios))),
                },
                "tokens": {
                    name: [
                        [rounded(x) for x in row[mask.bool()].tolist()]
                        for row, mask in zip(values, trainer.step_mask, strict=True)
                    ]
                    for name, values in trainer.tokens.items()
                },
            }
        )
    return {
        "model": case["model"],
        "config": settings,
        "query_lengths": query_lengths,
        "response_lengths": response_lengths,
        "masked_prefix": prefix,
        "steps": steps,
    }


def rounded(number: float) -> float:
    """Seven significant digits: all that fp32 has."""
    return float(f"{number:.7g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=REPO / "tests" / "golden" / "peer_step.json")
    output = parser.parse_args().output
    if not hasattr(trl, "__version__") or trl.__version__ != "0.11.4":
        raise SystemExit(f"expected Hugging Face trl 0.11.4, found {list(trl.__path__)}; see the docstring")
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    golden = {
        "about": "Written by benchmarks/peer/step_statistics.py; not edited by hand.",
        "versions": {
            "trl": trl.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "recipe": {
            "builders": "tests/tiny.py",
            "model_seed": MODEL_SEED,
            "reference_seed": REFERENCE_SEED,
            "head_seed": HEAD_SEED,
        },
        "notes": NOTES,
        "cases": {name: run_case(case) for name, case in CASES.items()},
    }
    # one line per list of numbers, so that a difference between two files can be read
    text = re.sub(r"\[[^\[\]{}]*\]", lambda found: " ".join(found.group().split()), json.dumps(golden, indent=1))
    output.write_text(text + "\n")
    print(f"{len(CASES)} cases, {output.stat().st_size / 1e3:.0f} kB -> {output}")


if __name__ == "__main__":
    main()
