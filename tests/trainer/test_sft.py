"""Fine-tuning on answers: which tokens are learned, and that speed-ups change nothing."""

import logging
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tokenizers import processors
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tests.invariant.test_two_processes import run
from tests.tiny import EOS_ID, EOS_TOKEN, tiny_gpt2, tiny_llama, tiny_neox, tiny_opt, tiny_tokenizer
from trl.jsonl import DataFileError, read_jsonl
from trl.trainer.sft import Example, SFTConfig, SFTTrainer, TargetLogits, collate, encode

WORKER = str(Path(__file__).with_name("sft_worker.py"))
ROWS = [
    {"prompt": f"The film number {'x' * n} was long.\n\nTL;DR:", "answer": f" It was {'very ' * (n % 3)}long."}
    for n in range(11)
]


def config(folder: Path, **changes: Any) -> SFTConfig:
    return SFTConfig(**{"output_dir": str(folder), "batch_size": 4, "learning_rate": 1e-2, **changes})


def trained(folder: Path, model: PreTrainedModel | None = None, **changes: Any) -> SFTTrainer:
    trainer = SFTTrainer(config(folder, **changes), model or tiny_llama(), tiny_tokenizer(), ROWS)
    trainer.train()
    return trainer


def weights(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def timeless(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(path / "metrics.jsonl")]


# --- tokens -----------------------------------------------------------------------------------------------


def test_an_answer_is_the_rest_of_the_text_and_ends_in_eos() -> None:
    tokenizer = tiny_tokenizer()
    example = encode(tokenizer, "The film.\n\nTL;DR:", " It was good.")
    assert example.prompt == tokenizer("The film.\n\nTL;DR:")["input_ids"]
    assert example.prompt + example.answer == [*tokenizer("The film.\n\nTL;DR: It was good.")["input_ids"], EOS_ID]


def test_a_tokenizer_that_opens_and_closes_every_text() -> None:
    tokenizer = tiny_tokenizer()
    plain = encode(tokenizer, "The film:", " good")
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{EOS_TOKEN} $A {EOS_TOKEN}", special_tokens=[(EOS_TOKEN, EOS_ID)]
    )
    assert encode(tokenizer, "The film:", " good") == Example([EOS_ID, *plain.prompt], plain.answer)


def test_a_token_across_the_border_leaves_the_prompt_as_it_is() -> None:
    tokenizer = tiny_tokenizer()
    alone, whole = (tokenizer(text)["input_ids"] for text in ("act th", "act the film"))
    assert whole[: len(alone)] != alone  # " the" is one token
    example = encode(tokenizer, "act th", "e film")
    assert example.prompt == alone and tokenizer.decode(example.prompt + example.answer[:-1]) == "act the film"


def test_what_cannot_be_learned_is_refused() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match="prompt without tokens"):
        encode(tokenizer, "", "x")
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="no EOS token"):
        encode(tokenizer, "x", "y")


def test_targets_are_the_positions_before_the_answers_tokens() -> None:
    input_ids, targets, labels = collate([Example([5, 6, 7], [8, 9, 0]), Example([5], [6, 0])])
    assert input_ids.tolist() == [[5, 6, 7, 8, 9, 0], [5, 6, 0, 0, 0, 0]]
    assert targets.int().tolist() == [[0, 0, 1, 1, 1, 0], [1, 1, 0, 0, 0, 0]]
    assert labels.tolist() == [8, 9, 0, 6, 0]


# --- the loss ---------------------------------------------------------------------------------------------


class Unknown(torch.nn.Module):
    """A causal LM of no known layout, with what `transformers` models have."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny_llama()

    def forward(self, **inputs: Any) -> Any:
        return self.inner(**inputs)


@pytest.mark.parametrize(
    "model",
    [tiny_gpt2(), tiny_llama(), tiny_llama(tied=True), tiny_neox(), tiny_opt(), tiny_opt(projected=True), Unknown()],
    ids=["gpt2", "llama", "tied", "neox", "opt", "opt-350m", "unknown"],
)
def test_projecting_the_targets_only_gives_the_models_own_loss(model: Any) -> None:
    """`transformers`' loss, with -100 where nothing is learned, and a mask for the padding, is the slow twin."""
    rows = [encode(tiny_tokenizer(), row["prompt"], row["answer"]) for row in ROWS[::3]]
    input_ids, targets, answers = collate(rows)
    loss = F.cross_entropy(TargetLogits(model)(input_ids, targets), answers)
    labels = torch.full_like(input_ids, -100)
    labels[:, 1:][targets[:, :-1]] = answers
    lengths = torch.tensor([len(row.prompt) + len(row.answer) for row in rows])
    mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    expected = model(input_ids=input_ids, attention_mask=mask, labels=labels).loss
    torch.testing.assert_close(loss, expected)


def test_the_prompt_is_not_learned(tmp_path: Path) -> None:
    """Two rows with the same tokens, divided elsewhere: the loss is of the answer's tokens alone."""
    tokenizer, model = tiny_tokenizer(), tiny_llama().eval()
    text, ids = "The plot was dull and the jokes were bad.", []
    for cut in (8, 17):
        trainer = SFTTrainer(
            config(tmp_path / str(cut)), model, tokenizer, [{"prompt": text[:cut], "answer": text[cut:]}]
        )
        [example] = trainer.rows
        ids.append(example.prompt + example.answer)
        loss, logged = trainer.loss(trainer.model, [example])
        log_probs = model(torch.tensor(ids[-1:])).logits[0].log_softmax(-1)
        start = len(example.prompt)
        own = [-log_probs[i - 1, token].item() for i, token in enumerate(ids[-1]) if i >= start]
        assert loss.item() == pytest.approx(sum(own), rel=1e-5) and trainer.units(example) == len(own)
        hits = [log_probs[i - 1].argmax() == token for i, token in enumerate(ids[-1]) if i >= start]
        assert logged["token_accuracy"].item() == sum(hits)
        torch.testing.assert_close(trainer.evaluate(), {})
    assert ids[0] == ids[1]


def test_a_step_by_hand(tmp_path: Path) -> None:
    trainer = trained(tmp_path, batch_size=11, max_grad_norm=None)
    twin = tiny_llama()
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.0)
    total, tokens = torch.zeros(()), 0
    for row in ROWS:  # one at a time: no padding
        example = encode(tiny_tokenizer(), row["prompt"], row["answer"])
        logits = twin(torch.tensor([example.prompt + example.answer])).logits[0, len(example.prompt) - 1 : -1]
        total, tokens = (
            total + F.cross_entropy(logits, torch.tensor(example.answer), reduction="sum"),
            tokens + len(example.answer),
        )
    (total / tokens).backward()
    optimizer.step()
    [row] = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "loss" in row]
    assert row["loss"] == pytest.approx((total / tokens).item(), rel=1e-5) and row["units"] == tokens
    torch.testing.assert_close(weights(trainer.lm), weights(twin), atol=1e-5, rtol=1e-4)


def test_any_division_of_a_batch_gives_the_same_update(tmp_path: Path) -> None:
    results = [trained(tmp_path / str(n), gradient_accumulation_steps=n, steps=3) for n in (1, 2, 4)]
    first = weights(results[0].unwrapped)
    assert any(not torch.equal(value, weights(TargetLogits(tiny_llama()))[name]) for name, value in first.items())
    for other in results[1:]:
        torch.testing.assert_close(weights(other.unwrapped), first, atol=1e-5, rtol=1e-4)


def test_two_processes_equal_one(tmp_path: Path) -> None:
    [alone] = run(tmp_path / "alone", WORKER)
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone")
    pair = run(tmp_path / "pair", *launcher, WORKER)
    assert len(pair) == 2 and pair[0] == pair[1]
    for name, value in alone.items():
        assert pair[0][name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


def test_gradient_checkpointing_changes_nothing(tmp_path: Path) -> None:
    for layers in (None, 1):
        plain, checkpointed = (
            trained(tmp_path / f"{layers}{on}", gradient_checkpointing=on, steps=2, num_frozen_layers=layers)
            for on in (False, True)
        )
        assert checkpointed.lm.is_activation_checkpointing
        torch.testing.assert_close(weights(checkpointed.unwrapped), weights(plain.unwrapped), atol=1e-6, rtol=1e-5)


def test_frozen_blocks_stay_and_the_others_learn(tmp_path: Path) -> None:
    for tied in (False, True):
        before = weights(tiny_llama(layers=3, tied=tied))
        trainer = trained(tmp_path / str(tied), tiny_llama(layers=3, tied=tied), num_frozen_layers=2, steps=2)
        after = weights(trainer.lm)
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        top = {name for name in before if "layers.2." in name or name in ("model.norm.weight", "lm_head.weight")}
        assert changed == top
    with pytest.raises(ValueError, match="num_shared_layers=3 is out of range"):
        trained(tmp_path / "all", tiny_llama(layers=3), num_frozen_layers=3)


def test_bf16_learns_in_fp32_weights(tmp_path: Path) -> None:
    trainer = trained(tmp_path, bf16=True, epochs=4)
    losses = [row["loss"] for row in read_jsonl(tmp_path / "metrics.jsonl") if "loss" in row]
    assert losses[-1] < 0.7 * losses[0]
    assert all(p.dtype == torch.float32 for p in trainer.unwrapped.parameters())


# --- held-out rows, lengths, files ------------------------------------------------------------------------


def test_held_out_loss_is_per_token(tmp_path: Path) -> None:
    held_out = ROWS[:7]
    trainer = SFTTrainer(config(tmp_path), tiny_llama(), tiny_tokenizer(), ROWS, held_out)
    trainer.model.eval()
    with torch.no_grad():
        found = trainer.evaluate()
        parts = [trainer.loss(trainer.model, [example])[0].item() for example in trainer.eval_examples]
    mean = sum(parts) / sum(len(example.answer) for example in trainer.eval_examples)
    assert found["loss"] == pytest.approx(mean, rel=1e-5) and found["perplexity"] == pytest.approx(math.exp(mean))
    metrics = trainer.train()
    assert metrics["eval/loss"] < found["loss"]
    rows = [row for row in read_jsonl(tmp_path / "metrics.jsonl") if "eval/loss" in row]
    assert [row["step"] for row in rows] == [0, 3] and rows[0]["eval/loss"] == pytest.approx(found["loss"])


def test_rows_that_are_too_long_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    lengths = [
        len(e.prompt) + len(e.answer) for e in (encode(tiny_tokenizer(), r["prompt"], r["answer"]) for r in ROWS)
    ]
    limit = sorted(lengths)[5]
    with caplog.at_level(logging.INFO):
        trainer = SFTTrainer(config(tmp_path, max_length=limit), tiny_llama(), tiny_tokenizer(), ROWS, ROWS)
    kept = sum(length <= limit for length in lengths)
    assert len(trainer.rows) == len(trainer.eval_examples) == kept
    assert f"left out {11 - kept} of 11 training rows of more than {limit} tokens" in caplog.text
    with pytest.raises(DataFileError, match=r"all 11 training rows have more than 3 tokens.*max_length"):
        SFTTrainer(config(tmp_path, max_length=3), tiny_llama(), tiny_tokenizer(), ROWS)
    long = [*ROWS, {"prompt": "y" * 130, "answer": " z"}]  # the model has 128 positions
    assert len(SFTTrainer(config(tmp_path, max_length=500), tiny_llama(), tiny_tokenizer(), long).rows) == 11


@pytest.mark.parametrize("tied", [False, True])
def test_the_saved_folder_loads_anywhere(tied: bool, tmp_path: Path) -> None:
    trainer = trained(tmp_path, tiny_llama(tied=tied), save_steps=2)
    for folder in (tmp_path, tmp_path / "checkpoint-2"):
        model = AutoModelForCausalLM.from_pretrained(folder)
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
        assert tokenizer("The film")["input_ids"] == tiny_tokenizer()("The film")["input_ids"]
        if folder == tmp_path:
            torch.testing.assert_close(weights(model), weights(trainer.lm), atol=0, rtol=0)
    assert model.config.tie_word_embeddings is tied


def test_a_resumed_run_is_the_same_run_bit_for_bit(tmp_path: Path) -> None:
    """With dropout, so that the random state has to come back too."""

    def dropping() -> PreTrainedModel:
        model = tiny_gpt2()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        return model

    whole = trained(tmp_path / "whole", dropping(), epochs=2, save_steps=2)
    cut = config(tmp_path / "cut", epochs=2, save_steps=2)

    class Killed(SFTTrainer):
        def loss(self, model: Any, rows: Any) -> Any:
            if self.done == 3:
                raise KeyboardInterrupt
            return super().loss(model, rows)

    with pytest.raises(KeyboardInterrupt):
        Killed(cut, dropping(), tiny_tokenizer(), ROWS).train()
    resumed = trained(tmp_path / "cut", dropping(), epochs=2, save_steps=2, resume="latest")
    first, second = weights(whole.unwrapped), weights(resumed.unwrapped)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert timeless(tmp_path / "whole") == timeless(tmp_path / "cut")


def test_it_learns_what_it_is_shown(tmp_path: Path) -> None:
    """After enough passes, greedy decoding gives the answers, and stops."""
    trainer = SFTTrainer(config(tmp_path, epochs=30), tiny_llama(), tiny_tokenizer(), ROWS[:3])
    trainer.train()
    for example in trainer.rows:
        output = trainer.lm.generate(torch.tensor([example.prompt]), do_sample=False, max_new_tokens=40)
        assert output[0, len(example.prompt) :].tolist() == example.answer
