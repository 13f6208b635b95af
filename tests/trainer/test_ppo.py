"""PPOTrainer's behaviour: kinds of scores, masks, dropped steps, early stopping, errors, generation."""

import copy
import logging
import math

import numpy as np
import pytest
import torch
from peft import LoraConfig

from tests.tiny import perturb_weights, ragged_batch, tiny_gpt2, tiny_llama, tiny_tokenizer
from trl import (
    AutoModelForCausalLMWithValueHead,
    LengthSampler,
    PPOConfig,
    PPOTrainer,
    create_reference_model,
    set_seed,
)
from trl.core import merge_rewards
from trl.trainer.batches import ShardedBatches

QUERY_LENGTHS = [5, 2, 7, 3, 1, 4, 6, 2]
RESPONSE_LENGTHS = [6, 9, 1, 4, 8, 3, 5, 2]


def make_trainer(lm=None, *, layers=3, shared=None, ref_shift=0.02, sgd=False, **overrides) -> PPOTrainer:
    """``sgd`` for comparisons of weights: Adam blows rounding noise in zero gradients up to the learning rate."""
    set_seed(0)
    settings = {"batch_size": 8, "mini_batch_size": 8, "learning_rate": 1e-3, "ppo_epochs": 2} | overrides
    model = AutoModelForCausalLMWithValueHead.from_pretrained(lm or tiny_llama(layers=layers))
    reference = create_reference_model(model, shared)
    if shared is None:
        perturb_weights(reference.pretrained_model, seed=9, scale=ref_shift)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05) if sgd else None
    return PPOTrainer(PPOConfig(**settings), model, reference, tokenizer=tiny_tokenizer(), optimizer=optimizer)


def weights(trainer: PPOTrainer) -> dict[str, torch.Tensor]:
    return {k: v.clone() for k, v in trainer.policy.state_dict().items()}


def assert_same(a: dict, b: dict, tolerance: float = 0.0) -> None:
    for name in a:
        assert torch.allclose(a[name], b[name], rtol=0, atol=tolerance), name


BATCH = ragged_batch(QUERY_LENGTHS, RESPONSE_LENGTHS)
SCORES = [1.0, -0.5, 2.0, 0.25, 0.0, -1.5, 0.75, 3.0]


def test_score_kinds_are_the_same_thing():
    """A number, a 0-d and a (1,) tensor, a numpy scalar, and both vector forms of it give bit-equal updates."""
    queries, responses = BATCH
    results = []
    for kind in range(3):
        trainer = make_trainer()
        scores = []
        for i, score in enumerate(SCORES):
            n, q = RESPONSE_LENGTHS[i], QUERY_LENGTHS[i]
            vector = torch.zeros(n)
            vector[-1] = score
            aligned = torch.cat([torch.full((q - 1,), 7.0), vector])  # the prompt part must be ignored
            scalar = [score, torch.tensor(score), torch.tensor([score]), np.float32(score)][i % 4]
            scores.append([scalar, vector, aligned][kind if kind < 2 else i % 3])
        if kind == 2:
            scores[1] = torch.cat([torch.full((QUERY_LENGTHS[1] - 1,), 7.0), torch.zeros(8), torch.tensor([SCORES[1]])])
        stats = trainer.step(queries, responses, scores)
        results.append((stats["ppo/loss/total"], weights(trainer)))
    for loss, state in results[1:]:
        assert loss == results[0][0]
        assert_same(state, results[0][1])


def test_callable_scores_are_called_after_the_passes():
    queries, responses = BATCH
    trainer = make_trainer()
    seen = []

    def late():
        seen.append(trainer.last_rollout == [])
        return SCORES

    trainer.step(queries, responses, late)
    plain = make_trainer()
    plain.step(queries, responses, SCORES)
    assert seen == [True]
    assert_same(weights(trainer), weights(plain))


def test_hand_computed_advantages_reach_the_update(monkeypatch):
    """ppo.json's numbers with real values: token reward, advantage and KL of every token can be recomputed."""
    queries, responses = BATCH
    trainer = make_trainer(adap_kl_ctrl=False)
    stats = trainer.step(queries, responses, SCORES)
    assert len(trainer.last_rollout) == 8
    for i, row in enumerate(trainer.last_rollout):
        assert all(v.shape == (RESPONSE_LENGTHS[i],) for v in row.values())
        expected = -0.2 * row["kl"]
        expected[-1] += SCORES[i]
        assert torch.allclose(row["token_reward"], expected, atol=1e-6)
        assert torch.allclose(row["kl"], row["logprob"] - row["ref_logprob"])
    mean_kl = sum(float(r["kl"].sum()) for r in trainer.last_rollout) / 8
    assert stats["objective/kl"] == pytest.approx(mean_kl, abs=1e-5)
    assert stats["objective/score"] == pytest.approx(sum(SCORES) / 8)
    flat = torch.cat([r["advantage"] for r in trainer.last_rollout])
    assert float(flat.mean()) == pytest.approx(0, abs=1e-6)
    assert float(flat.std()) == pytest.approx(1, abs=1e-4)


def test_values_are_read_before_their_token_and_logprobs_at_sampled_ids():
    queries, responses = BATCH
    trainer = make_trainer()
    policy = copy.deepcopy(trainer.policy)
    trainer.step(queries, responses, SCORES)
    for i, (q, r) in enumerate(zip(queries, responses, strict=True)):
        ids = torch.cat([q, r]).unsqueeze(0)
        with torch.no_grad():
            logits, _, values = policy(ids)
        logprobs = logits[0].float().log_softmax(-1)
        expected = torch.stack([logprobs[len(q) - 1 + j, token] for j, token in enumerate(r)])
        assert torch.allclose(trainer.last_rollout[i]["logprob"], expected, atol=1e-5)
        assert torch.allclose(trainer.last_rollout[i]["value"], values[0, len(q) - 1 : -1], atol=1e-5)


def test_any_split_of_a_batch_gives_the_same_update():
    """1 x 8, 2 x 4, 4 x 2 and 8 x 1 mini-batches per optimizer step: sums over the step's tokens."""
    queries, responses = BATCH
    reference = None
    for mini in (8, 4, 2, 1):
        trainer = make_trainer(mini_batch_size=mini, gradient_accumulation_steps=8 // mini, sgd=True)
        stats = trainer.step(queries, responses, SCORES)
        result = weights(trainer)
        if reference is None:
            reference = stats, result
        for name in ("ppo/loss/policy", "ppo/loss/value", "ppo/policy/approxkl", "ppo/policy/ratio"):
            assert stats[name] == pytest.approx(reference[0][name], abs=1e-5)
        assert_same(result, reference[1], tolerance=1e-5)


@pytest.mark.parametrize("build", [tiny_llama, tiny_gpt2])
def test_trunk_cache_equals_full_pass(build, monkeypatch):
    """Shared blocks with the cached trunk against the same models without it, fp32."""
    queries, responses = BATCH
    fast = make_trainer(build(layers=4), shared=3, sgd=True)
    assert fast.passes.caches_trunk
    slow = make_trainer(build(layers=4), shared=3, sgd=True)
    slow.passes.caches_trunk = False
    for _ in range(2):
        a, b = fast.step(queries, responses, SCORES), slow.step(queries, responses, SCORES)
        for name in a:
            if not name.startswith("time/"):
                assert a[name] == pytest.approx(b[name], abs=1e-5), name
    assert_same(weights(fast), weights(slow), tolerance=1e-5)


def test_shared_layers_never_change():
    trainer = make_trainer(shared=2)
    before = weights(trainer)
    trainer.step(*BATCH, SCORES)
    after = weights(trainer)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed
    assert not any("embed_tokens" in n or ".layers.0." in n or ".layers.1." in n for n in changed)
    assert any(".layers.2." in n for n in changed)


def test_empty_response_and_no_verdict_change_nothing_for_the_others():
    queries, responses = [list(x) for x in BATCH]
    trainer = make_trainer()
    full = trainer.step(queries[:6], responses[:6], SCORES[:6])
    other = make_trainer()
    responses[6] = torch.empty(0, dtype=torch.long)
    stats = other.step(queries, responses, [*SCORES[:6], 5.0, math.nan])
    assert stats["tokens/empty_responses"] == 1
    assert stats["reward/no_verdict"] == 1
    for name in ("ppo/loss/policy", "ppo/loss/value", "objective/kl", "objective/score"):
        assert stats[name] == pytest.approx(full[name], abs=1e-6), name
    assert_same(weights(trainer), weights(other), tolerance=1e-5)
    assert other.last_rollout[6]["logprob"].shape == (0,)


def test_nothing_to_learn_from_is_not_a_crash():
    queries, responses = BATCH
    trainer = make_trainer()
    before = weights(trainer)
    stats = trainer.step(queries, responses, [math.nan] * 8)
    assert stats["reward/no_verdict"] == 8
    assert_same(weights(trainer), before)
    empty = [torch.empty(0, dtype=torch.long)] * 8
    assert trainer.step(queries, empty, [1.0] * 8)["tokens/empty_responses"] == 8
    assert_same(weights(trainer), before)


def test_single_token_batch_is_finite():
    trainer = make_trainer()
    stats = trainer.step([torch.tensor([3, 4])], [torch.tensor([5])], [1.0])
    assert all(math.isfinite(v) for v in stats.values())


def test_masked_tokens_are_stepped_over():
    queries, responses = BATCH
    masks = [torch.ones(n, dtype=torch.bool) for n in RESPONSE_LENGTHS]
    masks[0][2] = False
    masks[1][-1] = False
    trainer = make_trainer(adap_kl_ctrl=False, init_kl_coef=0.0)
    stats = trainer.step(queries, responses, SCORES, response_masks=masks)
    assert stats["tokens/trained"] == sum(RESPONSE_LENGTHS) - 2
    assert trainer.last_rollout[0]["advantage"][2] == 0
    assert trainer.last_rollout[1]["token_reward"][-2] == pytest.approx(SCORES[1])  # on the last trainable token


def test_ratio_above_threshold_drops_the_step_bit_for_bit():
    queries, responses = BATCH
    trainer = make_trainer(ratio_threshold=10)
    trainer.step(queries, responses, SCORES)
    before, moments = weights(trainer), copy.deepcopy(trainer.optimizer.state_dict()["state"])
    trainer.updater.config.ratio_threshold = 0.5  # the ratio of a first pass is 1
    stats = trainer.step(queries, responses, SCORES)
    assert stats["ppo/skipped_minibatches"] == 2
    assert stats["ppo/optimizer_steps"] == 0
    assert_same(weights(trainer), before)
    for key, state in trainer.optimizer.state_dict()["state"].items():
        for name, value in state.items():
            assert torch.equal(torch.as_tensor(value), torch.as_tensor(moments[key][name]))


def test_early_stopping_stops_before_the_offending_step():
    queries, responses = BATCH
    settings = {"learning_rate": 0.05, "ppo_epochs": 6, "ratio_threshold": 1e9}
    free = make_trainer(**settings).step(queries, responses, SCORES)
    stopped = make_trainer(early_stopping=True, target_kl=1e-3, **settings).step(queries, responses, SCORES)
    assert free["ppo/optimizer_steps"] == 6
    assert 1 <= stopped["ppo/optimizer_steps"] < 6
    assert stopped["ppo/early_stopped"] == 1


def test_adaptive_kl_coefficient_is_reported_before_it_moves():
    trainer = make_trainer(target=1e-3)
    first = trainer.step(*BATCH, SCORES)
    second = trainer.step(*BATCH, SCORES)
    assert first["objective/kl_coef"] == 0.2
    error = max(-0.2, min(0.2, first["objective/kl"] / 1e-3 - 1))
    assert second["objective/kl_coef"] == pytest.approx(0.2 * (1 + error * 8 / 10_000))


@pytest.mark.parametrize("kind", ["kl", "abs", "mse", "full"])
def test_kl_kinds(kind):
    trainer = make_trainer(kl_penalty=kind)
    trainer.step(*BATCH, SCORES)
    for row in trainer.last_rollout:
        difference = row["logprob"] - row["ref_logprob"]
        if kind == "full":
            assert (row["kl"] >= -1e-6).all()
            assert not torch.allclose(row["kl"], difference)
        else:
            expected = {"kl": difference, "abs": difference.abs(), "mse": difference.square() / 2}[kind]
            assert torch.allclose(row["kl"], expected)


def test_score_scaling_acts_on_totals_and_scales_whole_vectors():
    trainer = make_trainer(use_score_scaling=True, use_score_norm=True, score_clip=1.0, init_kl_coef=0.0)
    vectors = [torch.full((n,), s / n) for n, s in zip(RESPONSE_LENGTHS, SCORES, strict=True)]
    trainer.step(*BATCH, vectors)
    mean, std = np.mean(SCORES), np.std(SCORES, ddof=1)
    for i, row in enumerate(trainer.last_rollout):
        total = np.clip((SCORES[i] - mean) / std, -1, 1)
        assert float(row["token_reward"].sum()) == pytest.approx(total, abs=1e-5)
        assert torch.allclose(row["token_reward"][:-1], vectors[i][:-1] / std, atol=1e-5)


def test_lora_policy_is_its_own_reference():
    lm = tiny_llama(layers=2)
    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(lm, peft_config=config)
    set_seed(0)
    trainer = PPOTrainer(
        PPOConfig(batch_size=8, mini_batch_size=8, learning_rate=1e-2), model, tokenizer=tiny_tokenizer()
    )
    base = {n: p.clone() for n, p in model.named_parameters() if "lora_" not in n and "v_head" not in n}
    first = trainer.step(*BATCH, SCORES)
    assert all((row["kl"] == 0).all() for row in trainer.last_rollout)
    assert first["objective/kl"] == 0
    assert trainer.step(*BATCH, SCORES)["objective/kl"] != 0
    after = dict(model.named_parameters())
    assert all(torch.equal(base[n], after[n]) for n in base)


def test_batch_errors_name_the_list_and_the_sample():
    queries, responses = BATCH
    trainer = make_trainer()
    before = weights(trainer)
    with pytest.raises(ValueError, match="responses has 7 entries but queries has 8"):
        trainer.step(queries, responses[:7], SCORES)
    with pytest.raises(ValueError, match="scores has 3"):
        trainer.step(queries, responses, lambda: SCORES[:3])
    with pytest.raises(ValueError, match=r"scores\[1\] has shape \(4,\): .*length 9 .*length 10"):
        trainer.step(queries, responses, [1.0, torch.zeros(4), *SCORES[2:]])
    with pytest.raises(ValueError, match=r"scores\[3\] is infinite"):
        trainer.step(queries, responses, [*SCORES[:3], math.inf, *SCORES[4:]])
    with pytest.raises(ValueError, match=r"queries\[0\] is empty"):
        trainer.step([torch.empty(0, dtype=torch.long), *queries[1:]], responses, SCORES)
    assert_same(weights(trainer), before)


def test_nan_weights_are_named_before_anything_changes():
    queries, responses = BATCH
    trainer = make_trainer()
    with torch.no_grad():
        trainer.policy.v_head.summary.bias.fill_(math.nan)
    before = weights(trainer)
    with pytest.raises(FloatingPointError, match="values are not finite at sample 0, response token 0"):
        trainer.step(queries, responses, SCORES)
    assert all(torch.equal(before[k].nan_to_num(7), v.nan_to_num(7)) for k, v in weights(trainer).items())


def test_config_errors():
    with pytest.raises(ValueError, match=r"batch_size \(8\).*mini_batch_size \(3\).*gradient_accumulation_steps \(2\)"):
        PPOConfig(batch_size=8, mini_batch_size=3, gradient_accumulation_steps=2)
    with pytest.raises(ValueError, match="use_score_norm needs use_score_scaling"):
        PPOConfig(use_score_norm=True)


def test_generate_cuts_each_response_and_never_returns_prompt_or_padding():
    trainer = make_trainer(ref_shift=0)
    queries = BATCH[0] * 4
    set_seed(1)
    responses = trainer.generate(queries, LengthSampler(3, 9), batch_size=5, return_prompt=False)
    assert len(responses) == 32
    for response in responses:
        assert 1 <= len(response) <= 9
        ends = (response == 0).nonzero()
        if len(ends):  # pad == eos: nothing follows the first one
            assert int(ends[0]) == len(response) - 1
        else:
            assert len(response) >= 3
    assert {len(r) for r in responses} > {3, 9}
    one = trainer.generate(queries[0], max_new_tokens=4)
    assert one.shape[0] == 1
    assert torch.equal(one[0, : len(queries[0])], queries[0])
    pair = trainer.generate(queries[:2], LengthSampler(2, 2), generate_ref_response=True)
    assert len(pair) == 2 and len(pair[1]) == 2


def test_generation_does_not_depend_on_padding_or_batching():
    trainer = make_trainer(ref_shift=0)
    together = trainer.generate(BATCH[0], LengthSampler(6, 6), return_prompt=False, do_sample=False)
    for query, response in zip(BATCH[0], together, strict=True):
        alone = trainer.generate([query], LengthSampler(6, 6), return_prompt=False, do_sample=False)[0]
        assert torch.equal(alone, response)


def test_generation_samples_from_the_policy():
    """First-token frequencies of 4,000 samples against the policy's own distribution (chi-square-like bound)."""
    trainer = make_trainer(ref_shift=0)
    # a checkpoint's own generation settings must not leak in
    trainer.policy.base_lm.generation_config.temperature = 0.1
    trainer.policy.base_lm.generation_config.do_sample = True
    query = BATCH[0][0]
    set_seed(3)
    first = torch.stack([r[0] for r in trainer.generate([query] * 4000, LengthSampler(1, 1), 500, return_prompt=False)])
    with torch.no_grad():
        expected = trainer.policy(query.unsqueeze(0))[0][0, -1].softmax(-1)
    observed = torch.bincount(first, minlength=len(expected)) / 4000
    assert float((observed - expected).abs().sum()) < 0.25
    assert trainer.policy.base_lm.generation_config.temperature == 0.1


def test_negative_kl_warning_names_the_generation_setting(caplog):
    trainer = make_trainer(ref_shift=0.3)
    responses = trainer.generate(BATCH[0], LengthSampler(8, 8), return_prompt=False, top_k=2, temperature=0.7)
    with caplog.at_level(logging.WARNING):
        trainer._update_kl_coef(-3.0, 8)
    assert "temperature=0.7" in caplog.text and "top_k=2" in caplog.text
    assert responses


def test_bf16_autocast_samples_from_a_refreshed_copy():
    trainer = make_trainer(ref_shift=0, accelerator_kwargs={"mixed_precision": "bf16"}, ppo_epochs=1)
    trainer.generate(BATCH[0], LengthSampler(2, 2))
    copied = trainer._half_copy
    assert copied is not None and copied.copy.dtype == torch.bfloat16
    stats = trainer.step(*BATCH, SCORES)
    assert abs(stats["ppo/policy/ratio"] - 1) < 0.2
    trainer.generate(BATCH[0], LengthSampler(2, 2))
    for own, original in zip(copied.copy.parameters(), trainer.policy.base_lm.parameters(), strict=True):
        assert torch.equal(own, original.bfloat16())
    assert trainer.policy.base_lm.dtype == torch.float32


def test_saved_policy_loads_with_plain_transformers(tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer = make_trainer(shared=2)
    trainer.step(*BATCH, SCORES)
    trainer.save_pretrained(tmp_path / "out")
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert_same(dict(plain.state_dict()), dict(trainer.policy.pretrained_model.state_dict()))
    again = AutoModelForCausalLMWithValueHead.from_pretrained(tmp_path / "out")
    assert_same(weights(trainer), again.state_dict())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token_id == 0


def test_dataloader_uses_every_sample_once():
    from datasets import Dataset

    data = Dataset.from_dict(
        {"input_ids": [[i] for i in range(21)], "query": [str(i) for i in range(21)], "extra": [0] * 21}
    )
    trainer = PPOTrainer(
        PPOConfig(batch_size=8, mini_batch_size=4),
        AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama()),
        tokenizer=tiny_tokenizer(),
        dataset=data,
    )
    batches = list(trainer.dataloader)
    assert [len(b["query"]) for b in batches] == [8, 8, 5]
    assert sorted(int(q) for b in batches for q in b["query"]) == list(range(21))
    assert "extra" not in batches[0]
    assert batches[0]["input_ids"][0].tolist() == [int(batches[0]["query"][0])]


def test_shards_join_to_one_global_order_whatever_the_number_of_processes():
    for size in (1, 7, 16, 33):
        alone = [sorted(batch) for batch in ShardedBatches(size, 8, seed=3)]
        for world in (2, 4):
            shards = [list(ShardedBatches(size, 8 // world, rank=r, world=world, seed=3)) for r in range(world)]
            assert len({len(s) for s in shards}) == 1, "every process makes the same number of steps"
            joined = [sorted({i for batch in step for i in batch}) for step in zip(*shards, strict=True)]
            assert joined == alone
    sampler = ShardedBatches(16, 16)
    assert list(sampler) != list(sampler)


def test_scores_scaled_beforehand_keep_token_rewards_at_their_size():
    queries, responses = BATCH
    trainer = make_trainer(use_score_scaling=True, init_kl_coef=0.0)
    scaled = trainer.score_scaler.numbers(SCORES)
    assert scaled == pytest.approx([s / np.std(SCORES, ddof=1) for s in SCORES])
    tokens = [torch.full((n,), 0.5) for n in RESPONSE_LENGTHS]
    trainer.step(queries, responses, lambda: merge_rewards(scaled, tokens), scores_are_scaled=True)
    assert trainer.last_rollout[0]["token_reward"][0] == 0.5
    assert trainer.last_rollout[0]["token_reward"][-1] == pytest.approx(0.5 + scaled[0])
    assert math.isnan(trainer.score_scaler.numbers([math.nan, 1.0])[0])


@pytest.mark.parametrize("name", ["learning_rate", "init_kl_coef", "vf_coef"])
@pytest.mark.parametrize("value", [-1.0, math.inf, math.nan])
def test_weights_and_rates_are_finite(name, value):
    with pytest.raises(ValueError, match=rf"PPOConfig.{name} must be 0 or more and finite, got {value}"):
        PPOConfig(**{name: value})
