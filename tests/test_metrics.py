"""Evaluation metrics against values worked out by hand or by a slow twin."""

import math

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from trl.metrics import (
    ContinuationNLL,
    bootstrap_interval,
    continuation_nll,
    distinct_n,
    perplexity_intervals,
    perplexity_summary,
    share_positive,
)

CORPUS = ["the film was a delight from start to end", "the plot was dull and the acting worse", "I loved it"]


def byte_level_tokenizer(vocab_size: int = 400, bos: bool = False) -> PreTrainedTokenizerFast:
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<eos>", "<bos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    core.train_from_iterator(CORPUS * 3, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", **({"bos_token": "<bos>"} if bos else {}))


def tiny_gpt2(vocab_size: int, positions: int = 64) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=vocab_size, n_positions=positions, n_embd=16, n_layer=2, n_head=2)
    return GPT2LMHeadModel(config).eval()


def one_by_one(model: torch.nn.Module, ids: list[int], first: int) -> float:
    """Slow twin: one forward pass per scored token, nothing batched or padded."""
    total = 0.0
    for position in range(first, len(ids)):
        logits = model(torch.tensor([ids[:position]])).logits[0, -1]
        total -= torch.log_softmax(logits.double(), -1)[ids[position]].item()
    return total


def test_distinct_by_hand() -> None:
    texts = [["a b a b", "a b c"], ["same same"], ["", "one"], [""]]
    # Prompt 1: words a b a b a b c -> 3 of 7; bigrams ab ba ab | ab bc -> ab ba bc of 5.
    np.testing.assert_allclose(distinct_n(texts, 1), [3 / 7, 1 / 2, 1.0, np.nan])
    np.testing.assert_allclose(distinct_n(texts, 2), [3 / 5, 1.0, np.nan, np.nan])
    np.testing.assert_allclose(distinct_n(texts, 3), [3 / 3, np.nan, np.nan, np.nan])


def test_share_positive_is_strict_and_marks_empty_prompts() -> None:
    np.testing.assert_allclose(share_positive([[0.5, 0.51, 0.9, 0.1], [1.0], []]), [0.5, 1.0, np.nan])


def test_bootstrap_matches_the_normal_interval_and_is_seeded() -> None:
    values = np.random.default_rng(1).normal(3.0, 2.0, 500)
    interval = bootstrap_interval(values, seed=4)
    half = 1.96 * values.std() / math.sqrt(len(values))
    assert interval.mean == pytest.approx(values.mean())
    assert interval.low == pytest.approx(values.mean() - half, abs=0.02)
    assert interval.high == pytest.approx(values.mean() + half, abs=0.02)
    assert interval == bootstrap_interval(values, seed=4)
    assert interval != bootstrap_interval(values, seed=5)
    assert bootstrap_interval([0.25]) == (0.25, 0.25, 0.25)


@pytest.mark.parametrize("bad", [[], [1.0, math.nan], [[1.0], [2.0]]])
def test_bootstrap_refuses_undefined_units(bad: list) -> None:
    with pytest.raises(ValueError, match="finite"):
        bootstrap_interval(bad)


def test_perplexity_of_a_model_with_known_probabilities() -> None:
    """With a zero embedding and one biased row, every next-token probability is known in closed form."""
    tokenizer = byte_level_tokenizer()
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer),
            hidden_size=8,
            intermediate_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
        )
    ).eval()
    with torch.no_grad():
        model.lm_head.weight.zero_()
    text = " was dull"
    scores = continuation_nll(model, tokenizer, ["the plot"], [text])
    count = len(tokenizer(text)["input_ids"])
    assert scores.tokens.tolist() == [count]
    assert scores.nll[0] == pytest.approx(count * math.log(len(tokenizer)), rel=1e-6)
    assert scores.perplexity[0] == pytest.approx(len(tokenizer), rel=1e-6)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_batches_equal_one_pass_per_token(batch_size: int) -> None:
    tokenizer = byte_level_tokenizer()
    model = tiny_gpt2(len(tokenizer))
    prompts = ["the film", "I", "the plot was dull and the acting worse", "the acting"]
    texts = [" was a delight from start", " loved it", " end", " was a delight — naïve 🙂"]
    scores = continuation_nll(model, tokenizer, prompts, texts, batch_size=batch_size)
    for index, (prompt, text) in enumerate(zip(prompts, texts, strict=True)):
        ids = tokenizer(prompt + text)["input_ids"]
        first = len(tokenizer(prompt)["input_ids"])
        assert scores.tokens[index] == len(ids) - first
        assert scores.nll[index] == pytest.approx(one_by_one(model, ids, first), rel=1e-5)


def test_a_token_across_the_border_belongs_to_the_continuation() -> None:
    """ "the film w" + "as dull": " was" is one token; a difference of counts would score one too few."""
    tokenizer = byte_level_tokenizer()
    model = tiny_gpt2(len(tokenizer))
    whole = tokenizer("the film was dull")
    tokens = tokenizer.convert_ids_to_tokens(whole["input_ids"])
    assert "Ġwas" in tokens
    first = tokens.index("Ġwas")
    scores = continuation_nll(model, tokenizer, ["the film w"], ["as dull"])
    assert scores.tokens[0] == len(tokens) - first
    assert scores.nll[0] == pytest.approx(one_by_one(model, whole["input_ids"], first), rel=1e-5)
    by_counts = len(tokens) - len(tokenizer("the film w")["input_ids"])
    assert by_counts != scores.tokens[0]


def test_an_empty_prompt_starts_from_bos_and_else_skips_the_first_token() -> None:
    with_bos, without = byte_level_tokenizer(bos=True), byte_level_tokenizer()
    text = "the plot was dull"
    model = tiny_gpt2(len(with_bos))
    ids = with_bos(text)["input_ids"]
    scores = continuation_nll(model, with_bos, [""], [text])
    assert scores.tokens[0] == len(ids)
    assert scores.nll[0] == pytest.approx(one_by_one(model, [with_bos.bos_token_id, *ids], 1), rel=1e-5)
    scores = continuation_nll(model, without, ["", ""], [text, ""])
    assert scores.tokens.tolist() == [len(ids) - 1, 0]


def test_long_inputs_score_every_token_once_with_half_a_window_of_context() -> None:
    tokenizer = byte_level_tokenizer()
    model = tiny_gpt2(len(tokenizer), positions=16)
    prompt, text = "the film " * 5, "was dull and the acting worse " * 8
    ids = tokenizer(prompt + text)["input_ids"]
    ends = [end for _, end in tokenizer(prompt + text, return_offsets_mapping=True)["offset_mapping"]]
    first = next(index for index, end in enumerate(ends) if end > len(prompt))
    assert len(ids) > 3 * 16
    expected, position = 0.0, first
    while position < len(ids):
        end = min(len(ids), max(position + 8, 16))
        start = max(0, end - 16)
        expected += one_by_one(model, ids[start:end], position - start)
        position = end
    scores = continuation_nll(model, tokenizer, [prompt], [text])
    assert scores.tokens[0] == len(ids) - first
    assert scores.nll[0] == pytest.approx(expected, rel=1e-5)


def test_a_slow_tokenizer_is_refused() -> None:
    class Slow:
        is_fast = False

    with pytest.raises(ValueError, match="slow tokenizer"):
        continuation_nll(tiny_gpt2(10), Slow(), ["a"], ["b"])  # type: ignore[arg-type]


def test_summary_counts_what_it_leaves_out() -> None:
    scores = ContinuationNLL(
        nll=np.array([math.log(2) * 3, math.log(8), math.log(2e4) * 2, 0.0]), tokens=np.array([3, 1, 2, 0])
    )
    summary = perplexity_summary(scores)
    assert summary["mean_capped"] == pytest.approx(5.0)
    assert summary["median_capped"] == pytest.approx(5.0)
    assert summary["mean"] == pytest.approx((2 + 8 + 2e4) / 3)
    assert summary["median"] == pytest.approx(8.0)
    assert summary["corpus"] == pytest.approx(math.exp(scores.nll.sum() / 6))
    assert (summary["dropped"], summary["empty"], summary["undefined"], summary["continuations"]) == (1, 1, 0, 4)
    broken = ContinuationNLL(nll=np.array([math.log(2) * 3, math.nan]), tokens=np.array([3, 2]))
    summary = perplexity_summary(broken)
    assert summary["mean"] == summary["corpus"] == pytest.approx(2.0)
    assert (summary["dropped"], summary["empty"], summary["undefined"], summary["continuations"]) == (0, 0, 1, 2)


def test_perplexity_intervals_resample_whole_prompts() -> None:
    draw = np.random.default_rng(3)
    prompt_of = np.sort(draw.integers(0, 12, 60))
    tokens = draw.integers(0, 4, 60)  # some empty
    scores = ContinuationNLL(nll=draw.gamma(9.0, 0.6, 60) * tokens, tokens=tokens)
    got = perplexity_intervals(scores, prompt_of, cap=400.0, resamples=200, seed=5)

    values = scores.perplexity
    for name, keep in (("", ~np.isnan(values)), ("_capped", values < 400.0)):
        owners = np.unique(prompt_of[~np.isnan(values)], return_inverse=True)[1][keep[~np.isnan(values)]]
        kept, generator = values[keep], np.random.default_rng(5)
        pools = [
            np.concatenate(
                [kept[owners == owner] for owner in generator.integers(0, owners.max() + 1, owners.max() + 1)]
            )
            for _ in range(200)
        ]
        for statistic in (np.mean, np.median):
            low, high = np.quantile([statistic(pool) for pool in pools], [0.025, 0.975])
            assert got[statistic.__name__ + name] == pytest.approx({"low": low, "high": high})
            assert low < statistic(kept) < high
    assert 0 < (values >= 400.0).sum() < 60
    nothing = ContinuationNLL(nll=np.zeros(2), tokens=np.zeros(2, dtype=np.int64))
    assert perplexity_intervals(nothing, np.array([0, 1]))["mean"] is None
