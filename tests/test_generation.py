"""Sampling for evaluation: exact distribution, padding, seeds, and text that keeps its spaces."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import GenerationConfig, PreTrainedTokenizerFast

from tests.test_metrics import byte_level_tokenizer, tiny_gpt2
from trl.critic.generate import greedy_replies
from trl.generation import Sampling, batch_seed, count_cut, sample_continuations
from trl.trainer.generation import sample

PROMPTS = ["the film", "I", "the plot was dull and the acting"]


def metaspace_tokenizer() -> PreTrainedTokenizerFast:
    """Like Llama's: a leading space is a mark on the word, BOS is added, decoding drops the first space."""
    pieces = ["<unk>", "<s>", "</s>", "▁the", "▁film", "▁was", "▁I"]
    core = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    core.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<s>", eos_token="</s>", unk_token="<unk>")


def test_greedy_equals_one_prompt_at_a_time_without_padding() -> None:
    tokenizer = byte_level_tokenizer()
    model = tiny_gpt2(len(tokenizer))
    sampling = Sampling(max_new_tokens=8, min_new_tokens=8, do_sample=False)
    together = sample_continuations(model, tokenizer, PROMPTS, sampling, seed=0)
    for prompt, (text,) in zip(PROMPTS, together, strict=True):
        ids = tokenizer(prompt)["input_ids"]
        length = len(ids)
        for _ in range(8):
            logits = model(torch.tensor([ids])).logits[0, -1]
            logits[tokenizer.eos_token_id] = -torch.inf
            ids.append(int(logits.argmax()))
        assert text == tokenizer.decode(ids[length:])


def test_sampling_is_pure_whatever_the_checkpoint_asks_for() -> None:
    """A generation config with top_k=1 would make sampling greedy; 4,000 draws must follow the softmax."""
    tokenizer = byte_level_tokenizer()
    model = tiny_gpt2(len(tokenizer))
    model.generation_config = GenerationConfig(
        top_k=1, temperature=0.1, repetition_penalty=5.0, min_new_tokens=3, eos_token_id=tokenizer.eos_token_id
    )
    before = model.generation_config
    with torch.no_grad():
        model.transformer.wte.weight.mul_(25)  # tied to the head: far from uniform
        logits = model(torch.tensor([tokenizer("the film")["input_ids"]])).logits[0, -1]
    expected = torch.softmax(logits, -1)
    sampling = Sampling(max_new_tokens=1, num_return=4000)
    (texts,) = sample_continuations(model, tokenizer, ["the film"], sampling, seed=3)
    top = expected.topk(5).indices.tolist()
    assert expected[top[0]] < 0.9
    for token in top:
        text = tokenizer.decode([token], skip_special_tokens=True)
        share = texts.count(text) / len(texts)
        same_text = [i for i in range(len(tokenizer)) if tokenizer.decode([i], skip_special_tokens=True) == text]
        p = float(expected[same_text].sum())
        assert share == pytest.approx(p, abs=4 * (p * (1 - p) / len(texts)) ** 0.5 + 1e-3)
    assert model.generation_config is before


def test_top_p_keeps_only_the_nucleus() -> None:
    tokenizer = byte_level_tokenizer()
    model = tiny_gpt2(len(tokenizer))
    with torch.no_grad():
        logits = model(torch.tensor([tokenizer("the film")["input_ids"]])).logits[0, -1]
    probabilities, order = torch.softmax(logits, -1).sort(descending=True)
    size = int((probabilities.cumsum(-1) < 0.05).sum()) + 1
    nucleus = {tokenizer.decode([token], skip_special_tokens=True) for token in order[:size].tolist()}
    sampling = Sampling(max_new_tokens=1, num_return=500, top_p=0.05)
    (texts,) = sample_continuations(model, tokenizer, ["the film"], sampling, seed=0)
    assert set(texts) == nucleus


def test_seeds_fix_the_draw_and_leave_the_global_state_alone() -> None:
    tokenizer = byte_level_tokenizer()
    model = tiny_gpt2(len(tokenizer))
    sampling = Sampling(max_new_tokens=6, num_return=3)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    first = sample_continuations(model, tokenizer, PROMPTS, sampling, seed=1)
    assert torch.equal(torch.rand(3), expected)
    assert first == sample_continuations(model, tokenizer, PROMPTS, sampling, seed=1)
    assert first != sample_continuations(model, tokenizer, PROMPTS, sampling, seed=2)
    assert [len(texts) for texts in first] == [3, 3, 3]
    assert len({batch_seed(seed, batch) for seed in range(20) for batch in range(20)}) == 400


def test_a_continuation_keeps_its_leading_space_in_sentencepiece_models() -> None:
    tokenizer = metaspace_tokenizer()
    model = tiny_gpt2(len(tokenizer))
    word = tokenizer.convert_tokens_to_ids("▁the")
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        model.lm_head.weight[word] = 1000
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
    sampling = Sampling(max_new_tokens=2, do_sample=False)
    assert sample_continuations(model, tokenizer, ["the film"], sampling, seed=0) == [[" the the"]]
    assert tokenizer.decode([word, word]) == "the the"  # the trap: decoded alone, the space is gone


def test_the_end_of_sequence_ends_a_text_and_min_length_puts_it_off() -> None:
    tokenizer = byte_level_tokenizer()
    model = tiny_gpt2(len(tokenizer))
    with torch.no_grad():
        model.lm_head.weight = torch.nn.Parameter(torch.zeros_like(model.lm_head.weight))
        model.lm_head.weight[tokenizer.eos_token_id] = 1000
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
    assert sample_continuations(model, tokenizer, ["I"], Sampling(), seed=0) == [[""]]
    (texts,) = sample_continuations(model, tokenizer, ["I"], Sampling(min_new_tokens=4), seed=0)
    assert texts[0] != ""


def test_what_cannot_work_is_refused() -> None:
    tokenizer = byte_level_tokenizer()
    model = tiny_gpt2(len(tokenizer))
    with pytest.raises(ValueError, match="equal texts"):
        Sampling(do_sample=False, num_return=2)
    with pytest.raises(ValueError, match="min <= max"):
        Sampling(min_new_tokens=30)
    with pytest.raises(ValueError, match="top_p"):
        Sampling(top_p=0.0)
    with pytest.raises(ValueError, match="64 positions"):
        sample_continuations(model, tokenizer, ["x"], Sampling(max_new_tokens=64), seed=0)
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no BOS or EOS token"):
        sample_continuations(model, tokenizer, [""], Sampling(), seed=0)


def test_a_prompt_without_room_loses_its_beginning_and_is_counted() -> None:
    tokenizer = byte_level_tokenizer()
    model = tiny_gpt2(len(tokenizer))
    greedy = Sampling(max_new_tokens=20, min_new_tokens=20, do_sample=False)
    long = "the film was dull " * 30 + "the acting"
    ids = tokenizer(long)["input_ids"]
    assert len(ids) > 44
    kept = tokenizer.decode(ids[-44:])  # 64 positions less 20
    assert sample_continuations(model, tokenizer, [long, "I"], greedy, seed=0) == sample_continuations(
        model, tokenizer, [kept, "I"], greedy, seed=0
    )
    assert count_cut(model, tokenizer, [long, kept, "I", ""], greedy) == 1


def test_a_cut_prompt_keeps_its_bos_and_an_empty_one_starts_with_a_special_token() -> None:
    tokenizer = metaspace_tokenizer()
    model = tiny_gpt2(len(tokenizer), positions=8)
    greedy = Sampling(max_new_tokens=3, min_new_tokens=3, do_sample=False)
    texts = sample_continuations(model, tokenizer, ["the film was the film was I", "was the film was"], greedy, seed=0)
    short = sample_continuations(model, tokenizer, ["the film was I"], greedy, seed=0)  # BOS and 4 of 5 fit
    assert len(tokenizer("the film was I")["input_ids"]) == 5
    assert texts[0] == short[0]

    byte_level = byte_level_tokenizer()
    model = tiny_gpt2(len(byte_level))
    from_eos = sample_continuations(model, byte_level, [byte_level.eos_token], greedy, seed=0)
    assert sample_continuations(model, byte_level, [""], greedy, seed=0) == from_eos


def test_the_head_never_reads_a_tensor_for_which_its_weights_are_copied() -> None:
    """torch.matmul folds the batch into rows only where the tensor allows it, and else copies the weights per row."""
    tokenizer = byte_level_tokenizer()
    model = tiny_gpt2(len(tokenizer))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    seen: list[tuple[torch.Size, bool]] = []
    model.lm_head.register_forward_hook(
        lambda _, inputs, output: seen.append((inputs[0].shape, inputs[0].is_contiguous()))
    )
    sample_continuations(model, tokenizer, PROMPTS, Sampling(max_new_tokens=3, min_new_tokens=3), seed=0)
    queries = [torch.tensor(tokenizer(prompt)["input_ids"]) for prompt in PROMPTS]
    sample(model, tokenizer, queries, [3, 3, 3], 8, {})
    greedy_replies(model, tokenizer, PROMPTS, style="toxicity", max_new_tokens=3, batch_size=8)
    assert len(seen) == 9
    assert all(shape == (3, 1, model.config.n_embd) and whole for shape, whole in seen)
    assert not model.lm_head._forward_pre_hooks
