"""Inputs and settings that once broke training: each test is the smallest case that went wrong."""

import json
import logging
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from accelerate.state import AcceleratorState
from peft import LoraConfig
from transformers import StoppingCriteriaList

from tests.tiny import EOS_ID, tiny_gpt2, tiny_llama, tiny_tokenizer
from tests.trainer.test_ppo import BATCH, RESPONSE_LENGTHS, SCORES, assert_same, make_trainer, weights
from trl import AutoModelForCausalLMWithValueHead, LengthSampler, PPOConfig, PPOTrainer, set_seed
from trl.core import entropy_from_logits, kl_penalty
from trl.trainer.generation import biasing_kwargs
from trl.trainer.rollout import Sequences

ROOT = Path(__file__).resolve().parents[2]
QUERIES, RESPONSES = BATCH


@pytest.fixture(autouse=True)
def fresh_accelerator_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


# ------------------------------------------------------------------ scores


def test_the_ignored_prompt_part_of_a_vector_may_hold_anything():
    """Log-ratios of prompt tokens are sometimes -inf; only the response part is a reward."""
    plain, aligned = make_trainer(), make_trainer()
    rewards = torch.arange(6.0)
    prompt_part = torch.tensor([-math.inf, math.nan, math.inf, 7.0])
    set_seed(1)
    plain.step(QUERIES, RESPONSES, [rewards, *SCORES[1:]])
    set_seed(1)
    aligned.step(QUERIES, RESPONSES, [torch.cat([prompt_part, rewards]), *SCORES[1:]])
    assert_same(weights(plain), weights(aligned))
    with pytest.raises(ValueError, match=r"scores\[0\] is infinite"):
        plain.step(QUERIES, RESPONSES, [torch.cat([torch.zeros(9), torch.tensor([math.inf])]), *SCORES[1:]])


@pytest.mark.parametrize("given", [None, "1.0", object()])
def test_a_score_that_is_no_number_is_named(given):
    with pytest.raises(TypeError, match=rf"scores\[2\] is a {type(given).__name__}"):
        make_trainer().step(QUERIES, RESPONSES, [*SCORES[:2], given, *SCORES[3:]])


def token_reward_totals(trainer: PPOTrainer) -> list[float]:
    return [float(sample["token_reward"].sum()) for sample in trainer.last_rollout]


@pytest.mark.parametrize("settings", [{"score_clip": 0.5}, {"use_score_scaling": True, "use_score_norm": True}])
def test_norm_and_clip_reach_a_response_whose_last_token_is_masked(settings):
    """What they take off the total comes off the last trainable token; a masked one keeps no reward."""
    masks = [torch.ones(n) for n in RESPONSE_LENGTHS]
    whole, masked = (make_trainer(init_kl_coef=0.0, **settings) for _ in range(2))
    whole.step(QUERIES, RESPONSES, SCORES)
    for mask in masks:
        if len(mask) > 1:
            mask[-1] = 0
    masked.step(QUERIES, RESPONSES, SCORES, masks)
    assert token_reward_totals(masked) == pytest.approx(token_reward_totals(whole), abs=1e-6)


@pytest.mark.parametrize("score", [3e38, torch.tensor([3e38, 3e38, 0, 0, 0, 0])])
def test_scores_whose_squares_overflow_change_no_parameter(score):
    trainer = make_trainer()
    before = weights(trainer)
    try:
        stats = trainer.step(QUERIES, RESPONSES, [score, *SCORES[1:]])
    except FloatingPointError as error:
        assert "sample 0" in str(error)
    else:
        assert stats["ppo/skipped_minibatches"] == 2
    assert_same(weights(trainer), before)
    assert not trainer.optimizer.state


# ------------------------------------------------------------------ batches


@pytest.mark.parametrize("lm", [tiny_gpt2, tiny_llama])
@pytest.mark.parametrize("shared", [None, 1])
def test_one_token_queries_with_empty_responses(lm, shared):
    """Such a sample has no position to run the model on, and here whole mini-batches consist of them."""
    empty = torch.zeros(0, dtype=torch.long)
    queries = [torch.tensor([5])] * 15 + [torch.tensor([5, 6])]
    responses = [empty] * 15 + [torch.tensor([4, 7])]
    trainer = make_trainer(lm(layers=3), shared=shared, batch_size=16, mini_batch_size=1, gradient_accumulation_steps=4)
    stats = trainer.step(queries, responses, [1.0] * 16)
    assert stats["tokens/empty_responses"] == 15
    assert stats["tokens/trained"] == 2
    assert stats["ppo/optimizer_steps"] == 2
    assert trainer.step(queries[:1], responses[:1], [1.0])["tokens/trained"] == 0


@pytest.mark.parametrize("scores", [[math.nan] * 8, SCORES])
def test_a_batch_that_measured_nothing_leaves_the_kl_coefficient(scores):
    trainer = make_trainer()
    masks = None if math.isnan(scores[0]) else [torch.zeros(n) for n in RESPONSE_LENGTHS]
    trainer.step(QUERIES, RESPONSES, scores, masks)
    assert trainer.kl_ctl.value == trainer.config.init_kl_coef


def test_gradients_left_by_the_caller_do_not_enter_the_update():
    clean, littered = make_trainer(), make_trainer()
    for parameter in littered.policy.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.ones_like(parameter)
    for trainer in (clean, littered):
        set_seed(1)
        trainer.step(QUERIES, RESPONSES, SCORES)
    assert_same(weights(clean), weights(littered))


def test_queries_and_responses_may_be_on_different_devices():
    """Queries come from the data loader on the CPU, responses from the accelerator."""
    meta = torch.device("meta")
    sequences = Sequences(QUERIES, [r.to(meta) for r in RESPONSES], meta)
    assert {ids.device for ids in sequences.ids} == {meta}


def test_sequences_longer_than_the_context_are_refused_with_the_numbers():
    trainer = make_trainer(tiny_gpt2(layers=3))
    long = torch.ones(125, dtype=torch.long)
    with pytest.raises(ValueError, match=r"queries\[1\].*125.*10.*128"):
        trainer.generate([long[:5], long], max_new_tokens=10)
    with pytest.raises(ValueError, match=r"sample 1.*135.*128"):
        trainer.step([long[:5], long], [long[:10], long[:10]], [1.0, 1.0])
    assert len(trainer.generate([long], max_new_tokens=3)[0]) <= 128


# ------------------------------------------------------------------ distributions with zeros


def test_impossible_tokens_have_no_entropy_and_no_divergence():
    logits = torch.tensor([[0.0, 0.0, -math.inf]])
    logprobs = logits.log_softmax(-1)
    assert entropy_from_logits(logits).item() == pytest.approx(math.log(2))
    assert kl_penalty(logprobs, logprobs, "full").item() == 0.0
    narrower = torch.tensor([[0.0, -math.inf, -math.inf]]).log_softmax(-1)
    assert kl_penalty(narrower, logprobs, "full").item() == pytest.approx(math.log(2))
    assert kl_penalty(logprobs, narrower, "full").item() == math.inf


def forbid_last_token(lm):
    """A model that gives its last token (padding of the vocabulary, say) the logit -inf."""
    head = lm.get_output_embeddings()
    head.register_forward_hook(
        lambda module, args, logits: torch.cat([logits[..., :-1], torch.full_like(logits[..., :1], -math.inf)], -1)
    )
    return lm


@pytest.mark.parametrize("kind", ["kl", "full"])
def test_a_model_with_impossible_tokens_trains(kind):
    trainer = make_trainer(forbid_last_token(tiny_llama(layers=3)), kl_penalty=kind)
    stats = trainer.step(QUERIES, RESPONSES, SCORES)
    assert math.isfinite(stats["objective/kl"])
    assert math.isfinite(stats["objective/entropy"])
    assert stats["ppo/skipped_minibatches"] == 0
    assert all(weight.isfinite().all() for weight in weights(trainer).values())


def test_an_infinite_divergence_is_an_error_before_any_change():
    """The reference excludes a token that the policy does not."""
    trainer = make_trainer(kl_penalty="full")
    forbid_last_token(trainer.ref_model.base_lm)
    before = weights(trainer)
    with pytest.raises(FloatingPointError, match=r"KL.*sample 0"):
        trainer.step(QUERIES, RESPONSES, SCORES)
    assert_same(weights(trainer), before)


# ------------------------------------------------------------------ train mode, dropout, checkpointing


@pytest.mark.parametrize("lm", [tiny_gpt2, tiny_llama])
def test_gradient_checkpointing_leaves_generation_alone(lm):
    """In train mode transformers drops the cache of a checkpointed model, of GPT-2 without a word."""
    plain, checkpointed = make_trainer(lm(layers=3)), make_trainer(lm(layers=3))
    checkpointed.policy.pretrained_model.gradient_checkpointing_enable()
    greedy = {"max_new_tokens": 12, "do_sample": False}
    for a, b in zip(plain.generate(QUERIES, **greedy), checkpointed.generate(QUERIES, **greedy), strict=True):
        assert a.tolist() == b.tolist()


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("lm", [tiny_gpt2, tiny_llama])
def test_checkpointed_blocks_above_a_cached_trunk_get_gradients(lm, reentrant):
    plain, checkpointed = (make_trainer(lm(layers=3), shared=1, sgd=True) for _ in range(2))
    checkpointed.policy.pretrained_model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    for trainer in (plain, checkpointed):
        set_seed(1)
        trainer.step(QUERIES, RESPONSES, SCORES)
    assert_same(weights(plain), weights(checkpointed), 1e-6)


def lora_trainer(dropout: float) -> PPOTrainer:
    set_seed(0)
    lora = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"], lora_dropout=dropout)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama(layers=3), peft_config=lora)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return PPOTrainer(PPOConfig(batch_size=8, mini_batch_size=8), model, tokenizer=tiny_tokenizer())


def test_lora_dropout_acts_in_the_update_pass_only(caplog):
    trainer, without = lora_trainer(0.5), lora_trainer(0.0)
    greedy = {"max_new_tokens": 8, "do_sample": False}
    for a, b in zip(trainer.generate(QUERIES, **greedy), without.generate(QUERIES, **greedy), strict=True):
        assert a.tolist() == b.tolist()
    with caplog.at_level(logging.WARNING):
        trainer.step(QUERIES, RESPONSES, SCORES)
    without.step(QUERIES, RESPONSES, SCORES)
    for a, b in zip(trainer.last_rollout, without.last_rollout, strict=True):
        assert torch.equal(a["logprob"], b["logprob"])
        assert torch.equal(a["ref_logprob"], b["ref_logprob"])
    assert "ratio" not in caplog.text  # it can't be 1 here
    assert any(not torch.equal(a, b) for a, b in zip(weights(trainer).values(), weights(without).values(), strict=True))


# ------------------------------------------------------------------ generation


@pytest.mark.parametrize("name", ["num_return_sequences", "return_dict_in_generate"])
def test_generation_settings_that_change_the_shape_of_the_result_are_refused(name):
    """Several sequences per query were handed to the wrong queries."""
    with pytest.raises(ValueError, match=name):
        make_trainer().generate(QUERIES, max_new_tokens=3, **{name: 2})


def test_eos_token_id_minus_one_switches_the_end_token_off():
    trainer = make_trainer(tiny_gpt2(layers=3))
    trainer.tokenizer.pad_token = None
    responses = trainer.generate(QUERIES, max_new_tokens=40, return_prompt=False, eos_token_id=-1)
    assert [len(r) for r in responses] == [40] * 8


def test_a_pad_token_without_an_embedding_is_not_used():
    """add_special_tokens({"pad_token": ...}) without resizing the embeddings, a common slip."""
    trainer, usual = make_trainer(tiny_gpt2(layers=3)), make_trainer(tiny_gpt2(layers=3))
    trainer.tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert trainer.tokenizer.pad_token_id >= trainer.policy.base_lm.config.vocab_size
    sampled = []
    for one in (trainer, usual):
        set_seed(3)
        sampled.append([r.tolist() for r in one.generate(QUERIES, LengthSampler(5, 60), return_prompt=False)])
    assert sampled[0] == sampled[1]


def test_padding_after_a_custom_stop_is_no_response():
    trainer = make_trainer(tiny_gpt2(layers=3))
    trainer.tokenizer.add_special_tokens({"pad_token": "!"})
    assert trainer.tokenizer.pad_token_id != EOS_ID
    width = max(map(len, QUERIES))

    def stop_first_rows_early(ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:
        done = torch.zeros(len(ids), dtype=torch.bool)
        done[: len(ids) // 2] = ids.shape[1] >= width + 3  # half of the rows end after three tokens
        return done

    responses = trainer.generate(
        QUERIES,
        max_new_tokens=9,
        return_prompt=False,
        stopping_criteria=StoppingCriteriaList([stop_first_rows_early]),
    )
    assert sorted(map(len, responses)) == [3] * 4 + [9] * 4  # no row sampled the end token


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True}, []),
        ({"typical_p": 1.0, "num_beams": 1, "top_k": None}, []),
        ({"num_beams": 4, "typical_p": 0.9}, ["num_beams=4", "typical_p=0.9"]),
        ({"suppress_tokens": [3], "epsilon_cutoff": 0.1}, ["suppress_tokens=[3]", "epsilon_cutoff=0.1"]),
    ],
)
def test_the_settings_named_as_biasing_are_those_that_bias(given, named):
    assert sorted(biasing_kwargs(given)) == sorted(named)


# ------------------------------------------------------------------ configuration


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("target", 0.0),
        ("horizon", 0.0),
        ("max_grad_norm", -1.0),
        ("cliprange", -0.1),
        ("cliprange_value", 0.0),
        ("gamma", -1.0),
        ("lam", 1.5),
        ("learning_rate", -1.0),
        ("learning_rate", math.nan),
        ("init_kl_coef", -0.1),
        ("vf_coef", -1.0),
        ("ratio_threshold", 0.0),
        ("target_kl", 0.0),
        ("score_clip", math.nan),
        ("log_with", "paper"),
    ],
)
def test_settings_out_of_range_are_refused_at_start(name, value):
    with pytest.raises(ValueError, match=rf"{name}.*{value}"):
        PPOConfig(**{name: value})


def test_tensorboard_needs_no_further_settings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kwargs = {"tensorboard": {"filename_suffix": ".mine"}, "wandb": {"key": "a-secret"}}
    trainer = make_trainer(log_with="tensorboard", tracker_kwargs=kwargs)
    stats = trainer.step(QUERIES, RESPONSES, SCORES)
    trainer.log_stats(stats, {}, SCORES)
    trainer.accelerator.end_training()
    assert list((tmp_path / "runs").rglob("events.*.mine"))
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert not any(b"a-secret" in file.read_bytes() for file in files)


def test_a_tracker_that_is_not_installed_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)  # hides it, installed or not
    with pytest.raises(ValueError, match="pip install wandb"):
        make_trainer(log_with="wandb")


SCHEDULED = """
import json, pathlib, sys, torch
from tests.trainer.test_ppo import BATCH, SCORES, tiny_llama, tiny_tokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama())
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
config = PPOConfig(batch_size=8, mini_batch_size=8, ppo_epochs=1)
trainer = PPOTrainer(config, model, tokenizer=tiny_tokenizer(), optimizer=optimizer, lr_scheduler=schedule)
rates = [trainer.step(*BATCH, SCORES)["ppo/learning_rate"] for _ in range(2)]
pathlib.Path(sys.argv[1], f"{trainer.accelerator.process_index}.json").write_text(json.dumps(rates))
trainer.accelerator.wait_for_everyone()
trainer.accelerator.end_training()
"""


def test_the_learning_rate_schedule_does_not_depend_on_the_number_of_processes(tmp_path):
    """accelerate steps a scheduler that it prepared once per process."""
    launch = ["-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", "--no-python", sys.executable]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(
        [sys.executable, *launch, "-c", SCHEDULED, str(tmp_path)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    rates = [json.loads(file.read_text()) for file in tmp_path.iterdir()]
    assert rates == [pytest.approx([1 / 2, 1 / 3])] * 2
