"""The supervised loop: batches, accumulation, schedule, resume, files; on a model small enough to see through."""

import json
import math
import os
import resource
import signal
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.invariant.test_two_processes import run
from trl.jsonl import DataFileError, read_jsonl
from trl.trainer.supervised import SupervisedTrainer, pack, schedule_of
from trl.trainer.supervised_config import SupervisedConfig

WORKER = str(Path(__file__).with_name("supervised_worker.py"))
ROWS = [(torch.tensor([float(i), 1.0, -0.5 * i]), float(i % 3), 1 + i % 4) for i in range(22)]
"""Input, target, and how many terms the row's loss sums."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layers = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).squeeze(-1)


class Regression(SupervisedTrainer):
    def __init__(self, config: SupervisedConfig, *, dropout: float = 0.2, rows=ROWS, groups=None) -> None:
        net = Net()
        net.layers[2].p = dropout
        super().__init__(config, net, rows, groups)

    def units(self, row) -> int:
        return row[2]

    def loss(self, model, rows):
        predicted = model(torch.stack([x for x, _, _ in rows]))
        weights = torch.tensor([float(n) for _, _, n in rows])
        error = (predicted - torch.tensor([y for _, y, _ in rows])).square() * weights
        return error.sum(), {"error": error.sqrt().sum()}

    def save_model(self, folder: Path, state_dict) -> None:
        torch.save(state_dict, folder / "weights.bin")
        (folder / "config.json").write_text("{}")

    def evaluate(self):
        assert not self.unwrapped.training
        assert not torch.is_grad_enabled()
        return {"mean": float(self.model(torch.stack([x for x, _, _ in self.rows])).mean())}


def config(folder: Path, **changes) -> SupervisedConfig:
    base = {"output_dir": str(folder), "batch_size": 4, "learning_rate": 1e-2, "epochs": 2}
    return SupervisedConfig(**{**base, **changes})


def weights(trainer: SupervisedTrainer) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in trainer.unwrapped.parameters()])


def timeless(path: Path) -> list[dict]:
    return [{k: v for k, v in row.items() if not k.startswith("time/")} for row in read_jsonl(path / "metrics.jsonl")]


# --- batches and schedule ---------------------------------------------------------------------------------


def test_every_row_comes_once_per_epoch_and_none_is_lost_at_the_tail(tmp_path):
    trainer = Regression(config(tmp_path))
    assert [len(batch) for _, batch in trainer.batches] == [4, 4, 4, 4, 4, 2] * 2
    for epoch in (0, 1):
        assert sorted(i for e, batch in trainer.batches if e == epoch for i in batch) == list(range(22))
    assert trainer.batches[0] != trainer.batches[6]


def test_groups_share_a_batch():
    groups = [[0, 1, 2], [3], [4, 5], [6, 7, 8, 9, 10, 11], [12]]
    for seed in range(20):
        batches = pack(groups, 4, seed)
        assert sorted(i for batch in batches for i in batch) == list(range(13))
        for group in groups:
            assert sum(set(group) <= set(batch) for batch in batches) == 1
        assert all(len(batch) <= 4 or batch == groups[3] for batch in batches)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("constant", [0.5, 1, 1, 1, 1, 1, 1, 1, 1, 1]),
        ("linear", [0.5, 1, 1, 7 / 8, 6 / 8, 5 / 8, 4 / 8, 3 / 8, 2 / 8, 1 / 8]),
        ("cosine", [0.5, 1, *[0.5 * (1 + math.cos(math.pi * i / 8)) for i in range(8)]]),
    ],
)
def test_schedule(name, expected):
    factor = schedule_of(SupervisedConfig(lr_scheduler=name, warmup_ratio=0.2), 10)
    assert [factor(done) for done in range(10)] == pytest.approx(expected)


def test_the_rate_that_is_logged_is_the_rate_that_was_used(tmp_path):
    trainer = Regression(config(tmp_path, lr_scheduler="linear", warmup_ratio=0.25, epochs=1, steps=4))
    before = weights(trainer)
    trainer.train()
    rates = [row["learning_rate"] for row in read_jsonl(tmp_path / "metrics.jsonl") if "learning_rate" in row]
    assert rates == pytest.approx([1e-2, 1e-2, 1e-2 * 2 / 3, 1e-2 / 3])
    assert (weights(trainer) - before).abs().max() < sum(rates) * 1.01  # Adam moves at most its rate a step


# --- the step ---------------------------------------------------------------------------------------------


def test_accumulation_gives_the_same_update(tmp_path):
    """Rows sum different numbers of terms, so that a mean of means would differ."""
    results = []
    for accumulation in (1, 2, 4):
        out = tmp_path / str(accumulation)
        trainer = Regression(config(out, gradient_accumulation_steps=accumulation), dropout=0.0)
        trainer.train()
        results.append((weights(trainer), timeless(out)))
    for result, metrics in results[1:]:
        torch.testing.assert_close(result, results[0][0], atol=1e-6, rtol=1e-6)
        for row, first in zip(metrics, results[0][1], strict=True):
            assert row == pytest.approx(first, abs=1e-5)


def test_one_step_by_hand(tmp_path):
    trainer = Regression(config(tmp_path, batch_size=22, steps=1, weight_decay=0.1), dropout=0.0)
    twin = Net()
    twin.layers[2].p = 0.0
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1)
    losses = [n * (twin(x[None]) - y).square() for x, y, n in ROWS]
    loss = sum(losses) / sum(n for _, _, n in ROWS)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
    optimizer.step()
    metrics = trainer.train()
    assert metrics["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert metrics["grad_norm"] == pytest.approx(norm.item(), rel=1e-5)
    torch.testing.assert_close(weights(trainer), torch.cat([p.detach().flatten() for p in twin.parameters()]))


def test_a_loss_that_is_not_finite_stops_the_run_before_the_weights(tmp_path):
    rows = [(torch.tensor([math.nan, 0.0, 0.0]), 0.0, 1)] * 4
    trainer = Regression(config(tmp_path), rows=rows)
    before = weights(trainer)
    with pytest.raises(FloatingPointError, match="loss of step 1"):
        trainer.train()
    assert torch.equal(weights(trainer), before)


def test_two_processes_equal_one(tmp_path):
    """Seven rows a step, so that one process has a pass more to make than the other has rows for."""
    [alone] = run(tmp_path / "alone", WORKER)
    pair = run(tmp_path / "pair", "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone", WORKER)
    assert pair[0]["weights"] == pair[1]["weights"]
    assert pair[0]["weights"] == pytest.approx(alone["weights"], rel=1e-5, abs=1e-7)
    assert pair[0]["loss"] == pytest.approx(alone["loss"], rel=1e-5)


# --- files and resume -------------------------------------------------------------------------------------


def test_a_resumed_run_is_the_uninterrupted_run_to_the_bit(tmp_path, monkeypatch):
    whole = Regression(config(tmp_path / "whole", save_steps=3, eval_every=2))
    whole.train()

    killed = Regression(config(tmp_path / "killed", save_steps=3, eval_every=2))
    step = killed._step
    monkeypatch.setattr(killed, "_step", lambda *a: step(*a) if killed.done < 8 else (_ for _ in ()).throw(KeyError))
    with pytest.raises(KeyError):
        killed.train()
    torch.manual_seed(99)  # a new process has another state
    resumed = Regression(config(tmp_path / "killed", save_steps=3, eval_every=2, resume="latest"))
    resumed.train()
    assert torch.equal(weights(resumed), weights(whole))
    assert timeless(tmp_path / "killed") == timeless(tmp_path / "whole")
    saved = [torch.load(tmp_path / name / "weights.bin", weights_only=True) for name in ("whole", "killed")]
    assert all(torch.equal(saved[0][key], saved[1][key]) for key in saved[0])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_stops_and_the_run_goes_on_to_the_same_end(tmp_path, monkeypatch, number):
    Regression(config(tmp_path / "whole")).train()
    stopped = Regression(config(tmp_path / "stopped"))
    step = stopped._step

    def interrupted(*arguments):
        if stopped.done == 4:
            os.kill(os.getpid(), number)
        return step(*arguments)

    monkeypatch.setattr(stopped, "_step", interrupted)
    before = signal.getsignal(number)
    with pytest.raises(SystemExit, match="stopped after step 5 of 12"):
        stopped.train()
    assert signal.getsignal(number) is before
    assert [path.name for path in (tmp_path / "stopped").glob("checkpoint-*")] == ["checkpoint-5"]
    Regression(config(tmp_path / "stopped", resume="latest")).train()
    assert timeless(tmp_path / "stopped") == timeless(tmp_path / "whole")


def test_resuming_a_finished_run_measures_again_and_changes_nothing(tmp_path):
    first = Regression(config(tmp_path, save_steps=6))
    metrics, rows = first.train(), read_jsonl(tmp_path / "metrics.jsonl")
    again = Regression(config(tmp_path, save_steps=6, resume="latest"))
    assert again.train()["eval/mean"] == metrics["eval/mean"]
    assert read_jsonl(tmp_path / "metrics.jsonl") == rows
    assert torch.equal(weights(again), weights(first))


def test_only_the_newest_whole_checkpoints_stay_and_half_ones_are_ignored(tmp_path):
    Regression(config(tmp_path, save_steps=2, keep_checkpoints=3)).train()
    names = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert names == ["checkpoint-10", "checkpoint-12", "checkpoint-8"]
    assert {"config.json", "weights.bin", "state", "trainer.json"} == set(os.listdir(tmp_path / "checkpoint-8"))
    (tmp_path / "checkpoint-12" / "trainer.json").unlink()
    resumed = Regression(config(tmp_path, save_steps=2, resume="latest"))
    resumed.train()
    assert read_jsonl(tmp_path / "metrics.jsonl")[-1]["step"] == 12
    assert not list(tmp_path.glob(".*"))  # no leavings


@pytest.mark.parametrize(
    "name",
    ["trainer.json", "weights.bin", "state/optimizer.bin", "state/model.safetensors", "state/random_states_0.pkl"],
)
@pytest.mark.parametrize("share", [0, 0.5])
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(tmp_path, caplog, name, share):
    Regression(config(tmp_path, save_steps=6)).train()
    reference = timeless(tmp_path)
    file = tmp_path / "checkpoint-12" / name
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(DataFileError, match="not a whole checkpoint"):
        Regression(config(tmp_path, resume=str(tmp_path / "checkpoint-12"))).train()
    caplog.set_level("INFO")
    Regression(config(tmp_path, resume="latest")).train()
    assert "checkpoint-12 is damaged" in caplog.text
    assert f"resumed from {tmp_path / 'checkpoint-6'}" in caplog.text
    assert timeless(tmp_path) == reference


def test_a_full_disk_leaves_what_was_saved_and_says_so(tmp_path):
    """Files can't grow beyond 1,000 bytes while the second checkpoint is written."""

    class Filling(Regression):
        def _save_checkpoint(self) -> None:
            unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
            try:
                if self.done == 4:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
                super()._save_checkpoint()
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)

    with pytest.raises(
        OSError, match=rf"^could not write {tmp_path} \(.*MB are free there\); what was saved .* whole$"
    ):
        Filling(config(tmp_path, save_steps=2)).train()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "metrics.jsonl", "samples.jsonl"]
    Regression(config(tmp_path, resume="latest")).train()
    Regression(config(tmp_path / "whole")).train()
    assert timeless(tmp_path) == timeless(tmp_path / "whole")


def test_resume_from_a_path_and_from_nothing(tmp_path, caplog):
    Regression(config(tmp_path, save_steps=6)).train()
    reference = timeless(tmp_path)
    again = Regression(config(tmp_path, resume=str(tmp_path / "checkpoint-6")))
    again.train()
    assert timeless(tmp_path) == reference
    Regression(config(tmp_path / "new", resume="latest")).train()
    assert "holds no checkpoint: starting from the beginning" in caplog.text
    with pytest.raises(DataFileError, match=r"not a whole checkpoint.*no path for the newest"):
        Regression(config(tmp_path, resume=str(tmp_path / "nothing"))).train()


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    Regression(config(tmp_path, save_steps=6)).train()
    with pytest.raises(DataFileError, match=r"seed: 0 → 1"):
        Regression(config(tmp_path, seed=1, resume="latest")).train()
    with pytest.raises(DataFileError, match=r"rows: 22 → 20"):
        Regression(config(tmp_path, resume="latest"), rows=ROWS[:20]).train()
    # as many rows, and one of them is another one
    with pytest.raises(DataFileError, match=r"settings \(data: '\w+' → '\w+'\)"):
        Regression(config(tmp_path, resume="latest"), rows=[*ROWS[:-1], (ROWS[-1][0], 7.0, ROWS[-1][2])]).train()


def test_a_longer_run_goes_on_with_a_warning(tmp_path, caplog):
    Regression(config(tmp_path, save_steps=2, steps=2)).train()
    Regression(config(tmp_path, save_steps=2, steps=4, resume="latest")).train()
    assert "4 steps instead of 2" in caplog.text
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 2, 3, 4, 4]


def test_saving_replaces_whole_files_and_keeps_others(tmp_path):
    (tmp_path / "weights.bin").write_text("old")
    (tmp_path / "notes.txt").write_text("mine")
    trainer = Regression(config(tmp_path))
    trainer.save_pretrained()
    assert set(os.listdir(tmp_path)) == {"weights.bin", "config.json", "notes.txt"}
    assert torch.load(tmp_path / "weights.bin", weights_only=True)
    assert json.loads((tmp_path / "config.json").read_text()) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 6, "gradient_accumulation_steps": 4}, "multiple of gradient_accumulation_steps"),
        ({"steps": 0}, "steps must be at least 1"),
        ({"learning_rate": math.nan}, "learning_rate must not be negative, got nan"),
        ({"warmup_ratio": 2.0}, "share of the steps"),
        ({"max_grad_norm": 0.0}, "max_grad_norm must be positive"),
    ],
)
def test_settings_that_cannot_be_right(changes, message):
    with pytest.raises(ValueError, match=message):
        SupervisedConfig(**changes)


def test_no_rows():
    with pytest.raises(ValueError, match="nothing to train on"):
        Regression(SupervisedConfig(), rows=[])
