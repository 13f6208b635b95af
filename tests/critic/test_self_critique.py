"""Self-critique: one set of weights that trains as the policy and answers as its frozen base."""

import copy
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tests.tiny import fill_weights, tiny_tokenizer
from trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from trl.critic import LocalCritic, PromptTemplate
from trl.critic.choose import SCORE_PROMPTS
from trl.critic.random_spans import RandomSpanCritic
from trl.critic.self_critique import SelfCritic
from trl.critic.types import Critique, CritiqueRequest
from trl.loop import make_intrinsic
from trl.run import RunArgs

ROOT = Path(__file__).parents[2]
TEXTS = ["The film was a quiet wonder,", "The plot was dull, the jokes were bad", "It is too long", "What a lovely"]
REQUESTS = [CritiqueRequest(text) for text in TEXTS]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    """With room for the label words of the shipped scoring prompt, one token each after a space."""
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens([" fine", " rude"])
    return tokenizer


def base_model(vocab_size: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).eval()
    fill_weights(model, seed=0)
    with torch.no_grad():
        model.lm_head.weight.mul_(10)  # so that some windows are beyond the scoring critic's margin
    return model


def adapted(base: PreTrainedModel, dropout: float = 0.0) -> PeftModel:
    """A LoRA policy whose adapters matter: random, not the zeros that they start from."""
    config = LoraConfig(r=4, lora_alpha=32, lora_dropout=dropout, init_lora_weights=False, task_type="CAUSAL_LM")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return get_peft_model(base, config)


def generating(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> LocalCritic:
    (folder / "prompt.txt").write_text("Words of\n{}\nare:")
    template = PromptTemplate.from_file(folder / "prompt.txt", style="toxicity")
    return LocalCritic(template, model, tokenizer, "generate", max_new_tokens=12)


def scoring(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> LocalCritic:
    template = PromptTemplate.from_file(ROOT / SCORE_PROMPTS["toxicity"], style="toxicity")
    return LocalCritic(template, model, tokenizer, "score")


def answers(critiques: list[Critique]) -> list[tuple[object, ...]]:
    return [(critique.spans, critique.status, critique.reply) for critique in critiques]


@pytest.mark.parametrize("make", [generating, scoring])
def test_adapters_off_answers_as_a_separate_frozen_copy_does(
    make: Callable[..., LocalCritic], tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    base = base_model(len(tokenizer))
    frozen = copy.deepcopy(base)
    policy = adapted(base, dropout=0.5)
    critic = make(policy.get_base_model(), tokenizer, tmp_path)
    policy.train()
    expected = answers(make(frozen, tokenizer, tmp_path).critique(REQUESTS))
    assert answers(SelfCritic(policy, critic).critique(REQUESTS)) == expected
    policy.eval()
    assert answers(critic.critique(REQUESTS)) != expected  # the adapters would have changed the answers
    if make is scoring:
        assert any(spans for spans, _, _ in expected)


def test_the_policy_is_left_as_it_was(tokenizer: PreTrainedTokenizerBase, tmp_path: Path) -> None:
    base = base_model(len(tokenizer))
    policy = adapted(base)
    ids = tokenizer(TEXTS[0], return_tensors="pt")["input_ids"]
    with torch.no_grad():
        before = policy(input_ids=ids).logits
    state = {name: tensor.clone() for name, tensor in policy.state_dict().items()}
    trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
    critic = SelfCritic(policy, generating(policy.get_base_model(), tokenizer, tmp_path))
    for training in (True, False):
        policy.train(training)
        critic.critique(REQUESTS)
        assert policy.training is training
        assert all(module.training is training for module in policy.modules())
    assert [name for name, parameter in policy.named_parameters() if parameter.requires_grad] == trained != []
    assert all(torch.equal(tensor, state[name]) for name, tensor in policy.state_dict().items())
    with torch.no_grad():
        assert torch.equal(policy(input_ids=ids).logits, before)


def test_a_critique_that_fails_switches_the_adapters_on_again(tokenizer: PreTrainedTokenizerBase) -> None:
    policy = adapted(base_model(len(tokenizer)))

    class Fails:
        def critique(self, requests: object) -> list[Critique]:
            assert not policy.training
            raise RuntimeError("out of memory")

    policy.train()
    with pytest.raises(RuntimeError, match="out of memory"):
        SelfCritic(policy, Fails()).critique(REQUESTS)
    assert policy.training
    assert policy.get_model_status().enabled is True


@pytest.mark.parametrize("control", [False, True])
def test_the_scripts_critic_shares_weights_and_has_its_adapters_off(
    control: bool, tokenizer: PreTrainedTokenizerBase, tmp_path: Path
) -> None:
    base = base_model(len(tokenizer))
    frozen = copy.deepcopy(base)
    config = PPOConfig(model_name="builtin:x", batch_size=2)
    model = AutoModelForCausalLMWithValueHead(adapted(base))
    trainer = PPOTrainer(config, model, tokenizer=tokenizer)
    args = RunArgs(
        ppo_config=config,
        use_intrinsic_reward=True,
        critic="random" if control else None,
        output_dir=str(tmp_path),
    )
    before = {tensor.data_ptr() for tensor in model.parameters()}
    intrinsic = make_intrinsic(args, "toxicity", trainer, model.base_lm, lambda **columns: [])
    assert intrinsic is not None and args.asks_own_weights
    template = PromptTemplate.from_file(ROOT / SCORE_PROMPTS["toxicity"], style="toxicity")
    alone: SelfCritic | RandomSpanCritic | LocalCritic = LocalCritic(template, frozen, tokenizer, "score")
    if control:
        alone = RandomSpanCritic(alone, config.seed)
    expected = answers(alone.critique(REQUESTS))
    assert answers(intrinsic.critic.critique(REQUESTS)) == expected
    assert any(spans for spans, _, _ in expected)
    assert {tensor.data_ptr() for tensor in model.parameters()} == before
