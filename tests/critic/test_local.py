import json
import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)

from trl.critic.generate import cut_reply
from trl.critic.local import LocalCritic
from trl.critic.score import label_margins, plain_label_margins
from trl.critic.template import PromptTemplate
from trl.critic.types import CritiqueRequest, Span, Style
from trl.critic.windows import NEUTRAL_PHRASES, TextWindows

ROOT = Path(__file__).parents[2]
SCORE_PROMPT = "positive negative\nPhrases:\na good film: positive\nbad: negative\n{}:\n"
REPLY = "[Span 1]: a good film\n\nIdentified Negative Text Span:\n[Span 1]: bad\n\n##### Example 2"


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=["<end>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    raw.train_from_iterator([" positive negative" * 9, SCORE_PROMPT, REPLY], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>")


def tiny_model(kind: str, vocab_size: int = 330, **extra: object) -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {
        "gpt2": dict(n_embd=32, n_layer=2, n_head=4, n_positions=512),
        "mpt": dict(d_model=32, n_layers=2, n_heads=4, max_seq_len=512),
        "bloom": dict(hidden_size=32, n_layer=2, n_head=4),
    }.get(
        kind,
        dict(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            intermediate_size=64,
            max_position_embeddings=512,
        ),
    )
    ends = dict(bos_token_id=0, eos_token_id=0, pad_token_id=None)
    config = AutoConfig.for_model(kind, vocab_size=vocab_size, **ends, **sizes, **extra)
    return AutoModelForCausalLM.from_config(config).eval()


@pytest.fixture
def template(tmp_path: Path) -> PromptTemplate:
    return template_of(tmp_path, SCORE_PROMPT)


def template_of(folder: Path, text: str, style: Style = "sentiment") -> PromptTemplate:
    file = folder / "prompt.txt"
    file.write_text(text)
    return PromptTemplate.from_file(file, style=style)


@torch.no_grad()
def one_by_one(model: PreTrainedModel, sequences: list[list[int]], labels: tuple[int, int]) -> torch.Tensor:
    margins = []
    for sequence in sequences:
        logits = model(input_ids=torch.tensor([sequence]), use_cache=False).logits[0, -1].float()
        margins.append(logits[labels[0]] - logits[labels[1]])
    return torch.stack(margins)


def sequences_with(prompt_length: int, count: int = 60) -> list[list[int]]:
    rng = random.Random(prompt_length)
    prompt = [rng.randrange(330) for _ in range(prompt_length)]
    # Few different tokens and many lengths: shared beginnings, repeats, one sequence inside another.
    return [prompt + [rng.randrange(3) for _ in range(rng.randrange(1, 8))] for _ in range(count)]


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen2", "gemma3_text", "gpt_neox", "opt"])
@pytest.mark.parametrize("tokens_per_pass", [1, 20, 512])
@pytest.mark.parametrize("prompt_length", [0, 40])
def test_packed_scores_equal_one_forward_per_phrase(kind: str, tokens_per_pass: int, prompt_length: int) -> None:
    model = tiny_model(kind)
    sequences = sequences_with(prompt_length)
    expected = one_by_one(model, sequences, (5, 6))
    assert expected.std() > 1e-2
    packed = label_margins(model, sequences, (5, 6), tokens_per_pass=tokens_per_pass)
    torch.testing.assert_close(packed, expected, rtol=0, atol=1e-4)
    torch.testing.assert_close(plain_label_margins(model, sequences, (5, 6)), expected, rtol=0, atol=1e-4)


def test_packed_scores_with_eager_attention() -> None:
    model = tiny_model("llama", attn_implementation="eager")
    sequences = sequences_with(40)
    packed = label_margins(model, sequences, (5, 6), tokens_per_pass=50)
    torch.testing.assert_close(packed, one_by_one(model, sequences, (5, 6)), rtol=0, atol=1e-4)


def test_no_sequences_and_empty_sequence() -> None:
    model = tiny_model("llama")
    assert label_margins(model, [], (5, 6)).shape == (0,)
    with pytest.raises(ValueError, match="empty"):
        label_margins(model, [[1], []], (5, 6))


@pytest.mark.parametrize("kind", ["mpt", "bloom"])
def test_models_that_cannot_pack_are_scored_row_by_row(
    kind: str, tokenizer: PreTrainedTokenizerBase, template: PromptTemplate, caplog: pytest.LogCaptureFixture
) -> None:
    critic = LocalCritic(template, tiny_model(kind), tokenizer, "score")
    phrases = ["a good", "bad film", "it", "a good film or not", "bad"]
    scores = critic.scores(phrases)
    prompts = [SCORE_PROMPT.split("\n", 1)[1].strip().replace("{}", phrase) for phrase in phrases]
    labels = tuple(tokenizer(f" {label}")["input_ids"][0] for label in ("positive", "negative"))
    expected = one_by_one(tiny_model(kind), [tokenizer(p)["input_ids"] for p in prompts], labels)
    torch.testing.assert_close(torch.tensor([scores[p] for p in phrases]), expected, rtol=0, atol=1e-4)
    assert "row by row" in caplog.text


def test_scores_are_those_of_the_written_out_prompt(
    tokenizer: PreTrainedTokenizerBase, template: PromptTemplate
) -> None:
    model = tiny_model("llama")
    (score,) = LocalCritic(template, model, tokenizer, "score").scores(["a\nbad film"]).values()
    ids = tokenizer("Phrases:\na good film: positive\nbad: negative\na bad film:")["input_ids"]
    labels = tokenizer(" positive")["input_ids"] + tokenizer(" negative")["input_ids"]
    assert score == pytest.approx(one_by_one(model, [ids], tuple(labels)).item(), abs=1e-4)


def test_words_and_windows_by_hand() -> None:
    text = "So then it is  good, film-making isn't"
    windows = TextWindows.of(CritiqueRequest(text, start=8), size=3)
    # words of the response (from character 8, "it"): it, is, good, film-making, isn't
    assert set(windows.phrases()) == {
        "it",
        "is",
        "good",
        "film-making",
        "isn't",
        "So then it",
        "then it is",
        "it is  good",
        "is  good, film-making",
        "good, film-making isn't",
    }
    score = dict.fromkeys(windows.phrases(), 1.0) | {"good": 5.0, "it is  good": 4.0, "isn't": -3.0}
    scores = windows.word_scores(score, baseline=0.5)
    # (alone + mean of the windows that hold the word) / 2 - baseline
    assert scores == pytest.approx(
        [(1 + 6 / 3) / 2 - 0.5, (1 + 6 / 3) / 2 - 0.5, (5 + 6 / 3) / 2 - 0.5, 0.5, (-3 + 1) / 2 - 0.5]
    )
    assert windows.spans(scores, margin=0.9) == [
        Span("it is  good", "positive"),
        Span("isn't", "negative"),
    ]
    assert windows.spans([2, -2, -2, 0, 2], 1.0) == [
        Span("it", "positive"),
        Span("is  good", "negative"),
        Span("isn't", "positive"),
    ]
    assert windows.spans([0, 0, 0, 0, 0], 1.0) == []


@pytest.mark.parametrize("text", ["", "?!", "one", "two words"])
def test_short_texts(text: str, tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> None:
    critic = LocalCritic(template, tiny_model("llama"), tokenizer, "score", margin=0.0)
    (critique,) = critic.critique([CritiqueRequest(text)])
    assert "".join(span.text for span in critique.spans) in text.replace(" ", "") or critique.spans
    assert critique.status == ("ok" if text.strip("?!") else "none")
    (beyond,) = critic.critique([CritiqueRequest(text, start=len(text))])
    assert (beyond.status, beyond.spans) == ("none", ())


def test_batch_equals_one_text_at_a_time(tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> None:
    critic = LocalCritic(template, tiny_model("llama"), tokenizer, "score", margin=0.01)
    requests = [CritiqueRequest(t) for t in ("a good film it is", "bad", "so it was a bad film", "a good film it is")]
    together = critic.critique(requests)
    assert together == [critic.critique([request])[0] for request in requests]
    assert any(critique.spans for critique in together)
    for request, critique in zip(requests, together, strict=True):
        assert all(span.text in request.text for span in critique.spans)
    assert critic.critique([]) == []


def test_neutral_phrases_are_the_zero(tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    label = tokenizer(" positive")["input_ids"][0]
    texts = [CritiqueRequest(phrase) for phrase in ("a good film", "it was bad")]
    before = LocalCritic(template, model, tokenizer, "score", margin=0.02).critique(texts)
    # A model in favour of one label, whatever the phrase: a constant on top of its logit.
    head = torch.nn.Linear(32, 330)
    with torch.no_grad():
        head.weight.copy_(model.lm_head.weight)
        head.bias.zero_()
        head.bias[label] = 7.0
    model.lm_head = head
    biased = LocalCritic(template, model, tokenizer, "score", margin=0.02)
    assert min(biased.scores(NEUTRAL_PHRASES).values()) > 5
    assert biased.critique(texts) == before


def test_flaw_styles_keep_negative_spans_only(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    model = tiny_model("llama")
    requests = [CritiqueRequest("a good film it was so bad"), CritiqueRequest("Identified Text bad")]

    def spans(style: Style) -> list[Span]:
        critic = LocalCritic(template_of(tmp_path, SCORE_PROMPT, style), model, tokenizer, "score", margin=0.0)
        return [span for critique in critic.critique(requests) for span in critique.spans]

    assert {span.polarity for span in spans("sentiment")} == {"positive", "negative"}
    assert spans("toxicity") == [span for span in spans("sentiment") if span.polarity == "negative"]


def test_model_is_left_as_it_is(tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> None:
    model = tiny_model("llama")
    before = {name: value.clone() for name, value in model.state_dict().items()}
    critic = LocalCritic(template, model, tokenizer, "score", dtype=torch.bfloat16)
    critic.critique([CritiqueRequest("a good film")])
    assert model.dtype == torch.float32
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    # and later training of the model does not reach the copy
    asked = critic.scores(["a good film"])
    with torch.no_grad():
        model.lm_head.weight.add_(1.0)
        model.model.norm.weight.mul_(3.0)
    assert critic.scores(["a good film"]) == asked


def test_bfloat16_copy_is_close(tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> None:
    model = tiny_model("llama")
    phrases = ["a good film", "bad", "it was a film"]
    full = LocalCritic(template, model, tokenizer, "score").scores(phrases)
    half = LocalCritic(template, model, tokenizer, "score", dtype=torch.bfloat16).scores(phrases)
    assert full != half
    assert half == pytest.approx(full, abs=0.02)


def test_errors_say_what_to_do(tmp_path: Path, tokenizer: PreTrainedTokenizerBase, template: PromptTemplate) -> None:
    model = tiny_model("llama")
    with pytest.raises(ValueError, match="'oracle'"):
        LocalCritic(template, model, tokenizer, "oracle")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="label 'flabbergasting' is not one token"):
        LocalCritic(template_of(tmp_path, "positive flabbergasting\nx: positive\n{}:"), model, tokenizer, "score")
    with pytest.raises(ValueError, match="expected the two label words"):
        LocalCritic(template_of(tmp_path, "Which tone has it?\n{}:"), model, tokenizer, "score")
    with pytest.raises(ValueError, match="training mode"):
        LocalCritic(template, model.train(), tokenizer, "score").critique([CritiqueRequest("x")])


# --- mode="generate"


@pytest.mark.parametrize(
    ("style", "text", "expected"),
    [
        ("toxicity", "Toxic Span 1: fool\nToxic Span 2: idiot\n\nSo", "Toxic Span 1: fool\nToxic Span 2: idiot"),
        ("toxicity", "Toxic Span 1: fool\nToxic", None),
        ("toxicity", "\n\nToxic Span 1: fool\n", None),  # blank lines in front end nothing
        ("toxicity", "Toxic Span 1: fool ##### Example", "Toxic Span 1: fool "),
        ("summary", "Span 1: why (Label: Irrelevant)\n \nmore", "Span 1: why (Label: Irrelevant)"),
        ("sentiment", "[Span 1]: good\n\n", None),
        ("sentiment", "[Span 1]: good\n\nIdentified Negative Text Span:\n", None),
        ("sentiment", "[Span 1]: good\n\nIdentified Negative Text Span:\n\n", None),
        (
            "sentiment",
            "None\n\nIdentified Negative Text Span:\n[Span 1]: bad\n\nIn",
            "None\n\nIdentified Negative Text Span:\n[Span 1]: bad",
        ),
        ("sentiment", "[Span 1]: good\n##### Example 6", "[Span 1]: good\n"),
        ("sentiment", "", None),
    ],
)
def test_where_a_reply_ends(style: Style, text: str, expected: str | None) -> None:
    assert cut_reply(text, style) == expected


def test_left_padded_batch_equals_single_prompts(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    template = template_of(tmp_path, "Words of\n{}\nare:")
    texts = ["a", "a good film it was or not", "bad film", "a"]
    for kind in ("gpt2", "llama"):
        model = tiny_model(kind)
        critic = LocalCritic(template, model, tokenizer, "generate", max_new_tokens=12, batch_size=2)
        critiques = critic.critique([CritiqueRequest(text) for text in texts])
        for text, critique in zip(texts, critiques, strict=True):
            ids = tokenizer(f"Words of\n{text}\nare:", return_tensors="pt")["input_ids"]
            with torch.no_grad():
                for _ in range(12):
                    ids = torch.cat([ids, model(input_ids=ids, use_cache=False).logits[:, -1:].argmax(-1)], dim=1)
            alone = tokenizer.decode(ids[0, -12:], skip_special_tokens=True)
            assert critique.reply == (cut_reply(alone, "sentiment") or alone)


@pytest.mark.parametrize("chat", [False, True])
def test_reply_of_a_model_that_learnt_the_format(
    tmp_path: Path, tokenizer: PreTrainedTokenizerBase, chat: bool
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(_saved(tokenizer, tmp_path))
    if chat:
        tokenizer.chat_template = "{% for m in messages %}U {{ m['content'] }}\nA {% endfor %}"
    prompt = "Which words?\nIt is a good film\n"
    shown = f"U {prompt}\nA " if chat else prompt
    model = _overfit(tiny_model("llama"), tokenizer(shown + REPLY)["input_ids"])
    template = template_of(tmp_path, "Which words?\n{}\n")
    critic = LocalCritic(template, model, tokenizer, "generate", max_new_tokens=100)
    (critique,) = critic.critique([CritiqueRequest("It is a good film")])
    assert critique.reply == REPLY.split("\n\n#####")[0]
    assert critique.spans == (Span("a good film", "positive"), Span("bad", "negative"))


def test_prompt_beyond_the_context_fails(tmp_path: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    critic = LocalCritic(template_of(tmp_path, "{}"), tiny_model("llama"), tokenizer, max_new_tokens=8)
    long, short = critic.critique([CritiqueRequest("xq " * 400), CritiqueRequest("a film")])
    assert (long.status, long.spans) == ("failed", ())
    assert "context" in str(long.error)
    assert short.status != "failed"


def _saved(tokenizer: PreTrainedTokenizerBase, folder: Path) -> Path:
    tokenizer.save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def _overfit(model: PreTrainedModel, ids: list[int]) -> PreTrainedModel:
    batch = torch.tensor([ids])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(150):
        loss = model(input_ids=batch, labels=batch, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1
    return model


# --- the built-in model


@pytest.fixture(scope="module")
def smollm2() -> LocalCritic:
    from trl.builtin import resolve_model

    path = resolve_model("builtin:smollm2")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    template = PromptTemplate.from_file(ROOT / "prompts/score_sentiment.txt", style="sentiment")
    return LocalCritic(template, model, AutoTokenizer.from_pretrained(path), "score", dtype=torch.bfloat16)


@pytest.mark.builtin
def test_smollm2_marks_the_words_that_matter(smollm2: LocalCritic) -> None:
    texts = [
        "What a delightful surprise this film was.",
        "The dialogue is terrible and I left early.",
        "He was born in the north and lives in a small town.",
    ]
    good, bad, neutral = smollm2.critique([CritiqueRequest(text) for text in texts])
    assert any("delightful" in span.text and span.polarity == "positive" for span in good.spans)
    assert any("terrible" in span.text and span.polarity == "negative" for span in bad.spans)
    assert not neutral.spans


@pytest.mark.builtin
def test_smollm2_tells_good_reviews_from_bad_ones(smollm2: LocalCritic) -> None:
    from sklearn.metrics import roc_auc_score

    from trl.builtin import resolve

    lines = (
        (Path(resolve("builtin:rotten-tomatoes", "data set")) / "test.jsonl").read_text(encoding="utf-8").splitlines()
    )
    rows = [json.loads(line) for line in random.Random(0).sample(lines, 200)]
    scores = smollm2.scores(row["text"] for row in rows)
    auc = roc_auc_score([row["label"] for row in rows], [scores[row["text"]] for row in rows])
    assert auc >= 0.8
