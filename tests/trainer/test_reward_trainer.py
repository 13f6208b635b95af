"""Training a reward model: it learns a preference, measures it, resumes exactly, and saves what loads."""

import logging
import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.invariant.test_two_processes import run
from tests.tiny import tiny_gpt2, tiny_llama, tiny_tokenizer
from trl.jsonl import read_jsonl
from trl.models import RewardModel
from trl.models.reward_text import RewardText, longest_text
from trl.report.calibration import calibration_bins, calibration_error, save_calibration
from trl.trainer import RewardConfig, RewardTrainer
from trl.trainer.reward import encode_pairs, prompt_bootstrap
from trl.trainer.supervised import pack

TOKENIZER = tiny_tokenizer()
GOOD, BAD = " great", " dull"
PAIRS = [
    {"prompt": f"The film was {word}. TL;DR:", "chosen": f" It is{GOOD}.", "rejected": f" It is{BAD}."}
    for word in ("long", "a wonder", "loud", "slow", "warm", "funny", "bad", "better", "sharp", "lovely")
]


def make(folder: Path, *, pairs=PAIRS, held_out=PAIRS[:4], lm=None, **changes) -> RewardTrainer:
    torch.manual_seed(0)
    model = RewardModel.from_pretrained(lm or tiny_llama())
    settings = {"output_dir": str(folder), "batch_size": 5, "learning_rate": 5e-3, "epochs": 4, **changes}
    return RewardTrainer(RewardConfig(**settings), model, TOKENIZER, pairs, held_out)


def timeless(path: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(path / "metrics.jsonl")]


# --- learning ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["span_nopad", "span", "last"])
def test_it_learns_the_preference(tmp_path, mode):
    swapped = [{**pair, "chosen": pair["rejected"], "rejected": pair["chosen"]} for pair in PAIRS]
    for name, pairs in (("as it is", PAIRS), ("swapped", swapped)):  # whatever the initial model prefers
        trainer = make(tmp_path / name, pairs=pairs, held_out=pairs[:4], loss_mode=mode)
        metrics = trainer.train()
        assert metrics["eval/accuracy"] == 1.0
        assert metrics["eval/margin"] > 0.5
        assert metrics["eval/loss"] < 0.5
        assert metrics["loss"] < read_jsonl(tmp_path / name / "metrics.jsonl")[1]["loss"]


def test_everything_on_at_once(tmp_path):
    """bf16, checkpointed activations, frozen lower blocks, accumulation, margin, centring."""
    trainer = make(
        tmp_path, lm=tiny_gpt2(layers=3), bf16=True, gradient_checkpointing=True, num_frozen_layers=1, batch_size=6,
        gradient_accumulation_steps=3, margin=0.5, center_coef=0.01, warmup_ratio=0.2,
    )  # fmt: skip
    before = {name: p.detach().clone() for name, p in trainer.unwrapped.named_parameters()}
    metrics = trainer.train()
    assert metrics["eval/accuracy"] == 1.0
    changed = {name for name, p in trainer.unwrapped.named_parameters() if not torch.equal(p, before[name])}
    assert "head.weight" in changed
    assert any(".h.2." in name for name in changed)
    assert not any(".h.0." in name or "wte" in name for name in changed)


def test_checkpointed_activations_change_nothing(tmp_path):
    trainers = [make(tmp_path / str(on), gradient_checkpointing=on, steps=2) for on in (False, True)]
    for trainer in trainers:
        trainer.train()
    for name, tensor in trainers[0].unwrapped.state_dict().items():
        torch.testing.assert_close(tensor, trainers[1].unwrapped.state_dict()[name], atol=1e-6, rtol=1e-5)


def test_margin_and_centring_reach_the_loss(tmp_path):
    """One pair and the end scores only, so that the loss follows from the two scores in the log."""
    for name, changes in {"plain": {}, "margin": {"margin": 0.5}, "centred": {"center_coef": 0.1}}.items():
        metrics = make(tmp_path / name, pairs=PAIRS[:1], loss_mode="last", steps=1, **changes).train()
        chosen, rejected = metrics["score/chosen"], metrics["score/rejected"]
        expected = math.log1p(math.exp(rejected - chosen + changes.get("margin", 0.0)))
        expected += changes.get("center_coef", 0.0) * (chosen + rejected) ** 2
        assert metrics["loss"] == pytest.approx(expected, abs=1e-5)


def test_two_processes_equal_one(tmp_path):
    """Seven held-out pairs, which two processes can't share evenly."""
    worker = str(Path(__file__).with_name("reward_worker.py"))
    [alone] = run(tmp_path / "alone", worker)
    pair = run(tmp_path / "pair", "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", worker)
    assert [result["world"] for result in pair] == [2, 2]
    assert pair[0]["weights"] == pair[1]["weights"]
    assert pair[0]["weights"] == pytest.approx(alone["weights"], rel=1e-5)
    for name, value in alone["metrics"].items():
        assert pair[0]["metrics"][name] == pytest.approx(value, abs=1e-4), name
        assert pair[1]["metrics"][name] == pair[0]["metrics"][name]


# --- measures ---------------------------------------------------------------------------------------------


def test_held_out_measures_are_those_of_the_end_scores(tmp_path):
    trainer = make(tmp_path)
    measures = trainer.evaluate()
    margins = []
    for pair in PAIRS[:4]:
        scores = []
        for column in ("chosen", "rejected"):
            ids = torch.tensor([[*TOKENIZER(pair["prompt"] + pair[column])["input_ids"], TOKENIZER.eos_token_id]])
            scores.append(trainer.reward_model.end_scores(ids, torch.ones_like(ids)).item())
        margins.append(scores[0] - scores[1])
    assert measures["margin"] == pytest.approx(np.mean(margins), abs=1e-5)
    assert measures["accuracy"] == np.mean([m > 0 for m in margins])
    assert measures["loss"] == pytest.approx(np.mean([math.log1p(math.exp(-m)) for m in margins]), abs=1e-5)
    assert measures["pairs"] == 4
    assert measures["accuracy_low"] <= measures["accuracy"] <= measures["accuracy_high"]
    assert (tmp_path / "calibration.png").read_bytes().startswith(b"\x89PNG")


def test_metrics_file(tmp_path):
    make(tmp_path, eval_every=3).train()
    rows = read_jsonl(tmp_path / "metrics.jsonl")
    assert [row["step"] for row in rows if "eval/accuracy" in row] == [0, 3, 6, 8]
    steps = [row for row in rows if "loss" in row]
    assert [row["step"] for row in steps] == [1, 2, 3, 4, 5, 6, 7, 8]
    assert {"accuracy", "margin", "score/chosen", "score/rejected", "learning_rate", "grad_norm"} <= set(steps[0])
    assert steps[0]["margin"] == pytest.approx(steps[0]["score/chosen"] - steps[0]["score/rejected"], abs=1e-6)


def test_bootstrap_draws_prompts():
    hits = np.array([1.0, 1, 1, 1, 0, 0, 0, 0])
    low, high = prompt_bootstrap(hits, np.arange(8))
    assert low == pytest.approx(0.125, abs=0.06)
    assert high == pytest.approx(0.875, abs=0.06)
    assert prompt_bootstrap(hits, np.array([0, 0, 0, 0, 1, 1, 1, 1])) == (0.0, 1.0)


def test_calibration(tmp_path):
    sure = calibration_bins([5.0, 5.0, 5.0, -5.0])  # three of four right, at 99.3 %
    assert [(round(b.predicted, 4), b.observed, b.count) for b in sure] == [(0.0067, 0.25, 4), (0.9933, 0.75, 4)]
    assert calibration_error(sure) == pytest.approx(0.2433, abs=1e-4)
    honest = calibration_bins([math.log(3)] * 3 + [-math.log(3)])  # three of four right, at 75 %
    assert calibration_error(honest) == pytest.approx(0, abs=1e-9)
    assert calibration_error(calibration_bins([0.0])) == pytest.approx(0)
    assert calibration_bins([1e6])[0].predicted < 1e-6
    assert save_calibration([0.3, -0.2], tmp_path / "plot.png").stat().st_size > 1000


# --- data -------------------------------------------------------------------------------------------------


def text(max_length: int = 128, **changes) -> RewardText:
    return RewardText(TOKENIZER, max_length, **changes)


def test_equal_texts_are_dropped_and_counted(caplog):
    equal = {"prompt": "A film.", "chosen": " It is great.", "rejected": " It is great."}
    with caplog.at_level(logging.INFO):
        rows = encode_pairs(text(), [*PAIRS, equal], "training")
    assert len(rows) == 10
    assert "dropped 1 of 11 training pairs" in caplog.text


@pytest.mark.parametrize(
    "bad", [{"chosen": "a", "rejected": "b"}, {**PAIRS[0], "chosen": " "}, {**PAIRS[0], "rejected": 3}]
)
def test_a_missing_or_empty_field_is_named_with_its_row(bad):
    with pytest.raises(ValueError, match=r"training pair 10: expected a text called (prompt|chosen|rejected)"):
        encode_pairs(text(), [*PAIRS, bad], "training")


def test_a_long_prompt_loses_its_beginning_in_both_texts_alike(caplog):
    pair = {"prompt": "one two three four five six", "chosen": " seven", "rejected": " eight nine ten"}
    with caplog.at_level(logging.INFO):
        [row] = encode_pairs(text(24), [pair], "training")
    assert "1 training pairs are too long" in caplog.text
    whole = [TOKENIZER(pair["prompt"] + pair[c])["input_ids"] + [0] for c in ("chosen", "rejected")]
    cut = len(whole[1]) - 24
    assert cut > 0
    assert (row.chosen, row.rejected) == (whole[0][cut:], whole[1][cut:])


def test_texts_that_are_equal_once_cut_are_dropped():
    pair = {"prompt": "", "chosen": "A same end of both", "rejected": "B same end of both"}
    assert encode_pairs(text(6), [{**pair, "prompt": "x"}], "training") == []


def test_a_text_cannot_hold_special_tokens():
    [ids] = text().tokenize(["good<|endoftext|> bad"])
    assert TOKENIZER.eos_token_id not in ids
    assert TOKENIZER.decode(ids) == "good<|endoftext|> bad"


def test_prefix_and_no_eos():
    assert text(prefix="<|endoftext|>").fit([5, 6]) == ([[0, 5, 6, 0]], False)
    assert text(append_eos=False).fit([5, 6]) == ([[5, 6]], False)
    assert text(4, prefix="<|endoftext|>").fit([5, 6, 7]) == ([[0, 6, 7, 0]], True)
    with pytest.raises(ValueError, match="nothing is left for the text"):
        text(2, prefix="<|endoftext|>")


def test_the_longest_text():
    model = RewardModel.from_pretrained(tiny_gpt2())
    assert longest_text(model, TOKENIZER) == 128
    assert longest_text(model, TOKENIZER, 40) == 40
    with pytest.raises(ValueError, match="max_length is 200, but the reward model has 128 positions"):
        longest_text(model, TOKENIZER, 200)


def test_pairs_of_one_prompt_share_a_batch(tmp_path):
    many = [{**pair, "rejected": f" It is{BAD}{'!' * n}"} for pair in PAIRS for n in range(3)]
    trainer = make(tmp_path, pairs=many, batch_size=7)
    for _, batch in trainer.batches:
        prompts = [trainer.rows[i].prompt for i in batch]
        assert all(prompts.count(prompt) == 3 for prompt in prompts)
        assert len(batch) == 6 or len(batch) == 30 % 6
    assert trainer.batches[0][1] == pack([[3 * i, 3 * i + 1, 3 * i + 2] for i in range(10)], 7, 0)[0]


def test_a_text_that_several_pairs_share_is_read_once(tmp_path):
    """Three pairs of one prompt: the same loss and gradients as those of the pairs one by one, from four texts."""
    many = [{**PAIRS[0], "rejected": f" It is{BAD}{'!' * n}"} for n in range(3)] + [PAIRS[1]]
    trainer = make(tmp_path, pairs=many)
    ids, mask, chosen, rejected = trainer._texts(trainer.rows)
    assert ids.shape[0] == 6
    for row, i, j in zip(trainer.rows, chosen, rejected, strict=True):
        assert ids[i][mask[i].bool()].tolist() == row.chosen
        assert ids[j][mask[j].bool()].tolist() == row.rejected
    gradients = []
    for groups in ([trainer.rows], [[row] for row in trainer.rows]):
        trainer.model.zero_grad()
        losses = [trainer.loss(trainer.model, rows)[0] for rows in groups]
        sum(losses).backward()
        gradients.append((sum(losses).item(), [p.grad.clone() for p in trainer.model.parameters()]))
    assert gradients[0][0] == pytest.approx(gradients[1][0], abs=1e-5)
    for together, apart in zip(gradients[0][1], gradients[1][1], strict=True):
        torch.testing.assert_close(together, apart, atol=1e-5, rtol=1e-4)


# --- files ------------------------------------------------------------------------------------------------


def test_the_saved_model_scores_as_the_trained_one(tmp_path):
    trainer = make(tmp_path, save_steps=4)
    trainer.train()
    for folder in (tmp_path, tmp_path / "checkpoint-8"):
        again = RewardModel.from_pretrained(folder)
        for name, tensor in trainer.unwrapped.state_dict().items():
            assert torch.equal(tensor, again.state_dict()[name]), name
        assert (folder / "tokenizer.json").exists()


def test_a_resumed_run_is_the_uninterrupted_run_to_the_bit(tmp_path, monkeypatch):
    whole = make(tmp_path / "whole", save_steps=2, eval_every=2)
    whole.train()
    killed = make(tmp_path / "killed", save_steps=2, eval_every=2)
    step = killed._step
    monkeypatch.setattr(killed, "_step", lambda *a: step(*a) if killed.done < 5 else (_ for _ in ()).throw(KeyError))
    with pytest.raises(KeyError):
        killed.train()
    resumed = make(tmp_path / "killed", save_steps=2, eval_every=2, resume="latest")
    resumed.train()
    for name, tensor in whole.unwrapped.state_dict().items():
        assert torch.equal(tensor, resumed.unwrapped.state_dict()[name]), name
    assert timeless(tmp_path / "killed") == timeless(tmp_path / "whole")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"loss_mode": "all"}, "loss_mode must be"),
        ({"center_coef": -1.0}, "center_coef"),
        ({"margin": math.nan}, "margin"),
        ({"num_frozen_layers": 0}, "num_frozen_layers"),
    ],
)
def test_settings_that_cannot_be_right(changes, message):
    with pytest.raises(ValueError, match=message):
        RewardConfig(**changes)
