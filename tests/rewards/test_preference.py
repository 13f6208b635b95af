"""PreferenceReward: the reward model's own tokenizer, batching, long and empty texts, the public layout."""

import logging

import pytest
import torch

from tests.critic.toy_tokenizers import tokenizer_of
from tests.models.test_reward_model import public_state
from tests.tiny import stable_normal, tiny_gptj, tiny_llama, tiny_tokenizer
from trl.models import RewardModel
from trl.rewards import PreferenceReward

PROMPTS = ["The film was", "Nothing in this movie", "What a", "It is too long and", "I would"]
ANSWERS = [" a quiet wonder.", " works: the music is loud.", "", " slow 🎬", " watch it again, with my friends"]


def make_model(vocab_size: int = 320, seed: int = 0) -> RewardModel:
    model = RewardModel.from_pretrained(tiny_llama(seed, vocab_size=vocab_size))
    with torch.no_grad():
        model.head.weight.copy_(stable_normal("head", model.head.weight.shape, 3))
    return model.eval()


def by_hand(model: RewardModel, tokenizer, text: str, eos: bool = True) -> float:
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + ([tokenizer.eos_token_id] if eos else [])
    with torch.no_grad():
        return model(torch.tensor([ids]))[0, -1].item()


@pytest.mark.parametrize("kind", ["tiny", "byte_level", "unigram", "wordpiece", "slow_bytes"])
def test_scores_are_those_of_single_texts_with_the_models_own_tokenizer(kind):
    """The kinds differ from any policy's tokenizer in ids, in pieces and in how words are joined."""
    tokenizer = tiny_tokenizer() if kind == "tiny" else tokenizer_of(kind)
    model = make_model(max(len(tokenizer), 320))
    reward = PreferenceReward(model, tokenizer, batch_size=2)
    scores = reward(prompts=PROMPTS, completions=ANSWERS, references=["ignored"] * 5)
    expected = [by_hand(model, tokenizer, p + a) for p, a in zip(PROMPTS, ANSWERS, strict=True)]
    assert scores == pytest.approx(expected, abs=1e-5)
    assert len(set(scores)) == 5


def test_more_passes_than_there_are_texts_change_nothing():
    """Where passes are collectives, a process makes as many as the others; some of them for nothing."""
    reward = PreferenceReward(make_model(), tiny_tokenizer(), batch_size=2)
    scores = reward(prompts=PROMPTS, completions=ANSWERS)
    made, needed = [], []
    reward.model.register_forward_hook(lambda *_: made.append(1))
    reward.passes = lambda count: needed.append(count) or 4
    assert reward(prompts=PROMPTS, completions=ANSWERS) == scores
    assert reward(prompts=[""], completions=[" "]) == [None]
    assert (needed, len(made)) == ([3, 0], 8)


def test_policy_with_another_tokenizer(tmp_path):
    """A policy's ids become text and the reward model's ids: what the policy's ids were leaves no trace."""
    words, bytes_ = tokenizer_of("wordpiece"), tiny_tokenizer()
    model = make_model()
    model.save_pretrained(tmp_path)
    bytes_.save_pretrained(tmp_path)
    reward = PreferenceReward(str(tmp_path), device="cpu")
    prompt, answer = "the film was", "quite boring"
    of_words = words.decode(words(prompt)["input_ids"]), " " + words.decode(words(answer)["input_ids"])
    of_bytes = bytes_.decode(bytes_(prompt)["input_ids"]), bytes_.decode(bytes_(" " + answer)["input_ids"])
    scores = reward(prompts=[of_words[0], of_bytes[0]], completions=[of_words[1], of_bytes[1]])
    assert scores[0] == pytest.approx(scores[1], abs=1e-5)
    assert scores[0] == pytest.approx(by_hand(model, bytes_, "the film was quite boring"), abs=1e-5)


def test_the_border_between_prompt_and_completion_leaves_no_trace():
    reward = PreferenceReward(make_model(), tiny_tokenizer())
    text = "The film was a quiet wonder."
    scores = reward(prompts=[text[:n] for n in (3, 11, 12, 17)], completions=[text[n:] for n in (3, 11, 12, 17)])
    assert scores == pytest.approx([scores[0]] * 4, abs=1e-6)


def test_conversations():
    reward = PreferenceReward(make_model(), tiny_tokenizer())
    turn = [{"role": "user", "content": "What a"}]
    assert reward(prompts=[turn], completions=[[{"role": "assistant", "content": "film"}]]) == pytest.approx(
        reward(prompts=["What a\n"], completions=["film\n"])
    )


def test_an_empty_completion_is_judged_and_a_blank_text_is_not():
    model, tokenizer = make_model(), tiny_tokenizer()
    reward = PreferenceReward(model, tokenizer)
    scores = reward(prompts=["The film was", "", " \n"], completions=["", "", " "])
    assert scores == [pytest.approx(by_hand(model, tokenizer, "The film was"), abs=1e-5), None, None]
    assert reward(prompts=[], completions=[]) == []


def test_long_texts_lose_the_beginning_of_the_prompt_and_are_counted(caplog):
    model, tokenizer = make_model(), tiny_tokenizer()
    reward = PreferenceReward(model, tokenizer, max_length=12)
    prompts, answers = ["one two three " * 30 + "The film was", "It is"], [" a quiet wonder.", " slow"]
    with caplog.at_level(logging.WARNING):
        scores = reward(prompts=prompts, completions=answers)
    assert reward.truncated == 1
    assert "lose the beginning of their prompt" in caplog.text
    ids = [*tokenizer(prompts[0] + answers[0])["input_ids"][-11:], tokenizer.eos_token_id]
    with torch.no_grad():
        assert scores[0] == pytest.approx(model(torch.tensor([ids]))[0, -1].item(), abs=1e-5)
    assert scores[1] == pytest.approx(by_hand(model, tokenizer, "It is slow"), abs=1e-5)
    reward(prompts=prompts[:1], completions=answers[:1])
    assert reward.truncated == 2
    whole = PreferenceReward(model, tokenizer)  # 128 positions
    whole(prompts=["word " * 1000], completions=["!"])
    assert whole.truncated == 1


def test_special_tokens_in_a_text_are_ordinary_characters():
    model, tokenizer = make_model(), tiny_tokenizer()
    reward = PreferenceReward(model, tokenizer)
    [written, plain] = reward(prompts=["A film"] * 2, completions=[" <|endoftext|>", ""])
    assert written != pytest.approx(plain, abs=1e-3)
    ids = [*tokenizer("A film <|endoftext|>", split_special_tokens=True)["input_ids"], 0]
    with torch.no_grad():
        assert written == pytest.approx(model(torch.tensor([ids]))[0, -1].item(), abs=1e-5)


def test_a_score_that_is_not_finite_is_no_verdict():
    model = make_model()
    with torch.no_grad():
        model.backbone.embed_tokens.weight[:, 0] = float("nan")
    assert PreferenceReward(model, tiny_tokenizer())(prompts=["A"], completions=["B"]) == [None]


def test_bf16_and_a_given_device(tmp_path):
    make_model().save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    half = PreferenceReward(tmp_path, dtype=torch.bfloat16, device="cpu")
    assert half.model.backbone.dtype == torch.bfloat16
    full = PreferenceReward(tmp_path, device="cpu")
    scores = [reward(prompts=PROMPTS, completions=ANSWERS) for reward in (half, full)]
    assert scores[0] == pytest.approx(scores[1], abs=0.1)


def test_public_layout_is_read_at_the_token_before_its_end(tmp_path):
    """As trained there: ``<|startoftext|>`` in ordinary characters, and the score of the last token before EOS."""
    lm, tokenizer = tiny_gptj(), tiny_tokenizer()
    lm.save_pretrained(tmp_path / "sft")
    tokenizer.save_pretrained(tmp_path / "sft")
    (tmp_path / "rm").mkdir()
    torch.save(public_state(lm), tmp_path / "rm" / "pytorch_model.bin")
    sft, prefix = str(tmp_path / "sft"), "<|startoftext|>"
    for source in (tmp_path / "rm", tmp_path / "rm" / "pytorch_model.bin"):
        reward = PreferenceReward(source, config_name=sft, prefix=prefix, append_eos=False, device="cpu")
        [score] = reward(prompts=["A post. TL;DR:"], completions=[" A film."])
        # one pass over the whole text with its EOS, and the value before the first padding id
        ids = tokenizer(f"{prefix}A post. TL;DR: A film.<|endoftext|>")["input_ids"]
        at = ids.index(tokenizer.pad_token_id) - 1
        with torch.no_grad():
            expected = RewardModel.from_pretrained(tmp_path / "rm", config_name=sft)(torch.tensor([ids]))[0, at].item()
        assert at == len(ids) - 2
        assert score == pytest.approx(expected, abs=1e-5)


def test_what_is_refused(tmp_path):
    with pytest.raises(ValueError, match="needs tokenizer"):
        PreferenceReward(make_model())
    with pytest.raises(ValueError, match="got 1 prompts and 2 completions"):
        PreferenceReward(make_model(), tiny_tokenizer())(prompts=["a"], completions=["b", "c"])
    with pytest.raises(ValueError, match="batch_size"):
        PreferenceReward(make_model(), tiny_tokenizer(), batch_size=0)
    with pytest.raises(ValueError, match="has 128 positions"):
        PreferenceReward(make_model(), tiny_tokenizer(), max_length=500)
    make_model().save_pretrained(tmp_path)
    with pytest.raises(OSError, match="has no tokenizer"):
        PreferenceReward(tmp_path, device="cpu")
    with pytest.raises(OSError):
        PreferenceReward(tmp_path / "nothing")
