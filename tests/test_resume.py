"""Runs as the scripts have them, in this process: broken off in every way, resumed, compared with an untouched one."""

import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from transformers import AutoModelForCausalLM, pipeline

from benchmarks.kill_resume import differences, praise_first_word, timeless
from tests.fake_openai import FakeOpenAI
from tests.trainer.state_runs import LENGTHS, ROWS, make
from trl.evaluation import HeldOut
from trl.failures import GoneError
from trl.jsonl import DataFileError, read_jsonl
from trl.loop import RunRecord, make_intrinsic
from trl.resume import budget_left
from trl.run import RunArgs, parse_args, prepare_output_dir
from trl.trainer import stop_signal
from trl.trainer.config import PPOConfig

CONFIG = PPOConfig(model_name="tiny", batch_size=8, mini_batch_size=4, ppo_epochs=2, learning_rate=1e-2)


@pytest.fixture(autouse=True)
def fresh_accelerator_state() -> Iterator[None]:
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


def args_of(folder: Path, **flags: Any) -> RunArgs:
    config = replace(
        CONFIG, **{name: flags.pop(name) for name in list(flags) if name in PPOConfig.__dataclass_fields__}
    )
    settings: dict[str, Any] = {"epochs": 9, "steps": 5, "use_intrinsic_reward": True, "critic": "lexicon"} | flags
    return RunArgs(ppo_config=config, output_dir=str(folder), intrinsic_reward_threshold=9.0, **settings)


def run(folder: Path, during: Callable[[int], None] = lambda step: None, **flags: Any) -> None:
    """A script's loop. ``during`` is called in every step, between critique and update, with the step's number."""
    args = args_of(folder, **flags)
    trainer = make("critic", **{n: getattr(args.ppo_config, n) for n in ("learning_rate", "seed")})

    def score(batch: dict[str, list[Any]], texts: list[str]) -> list[float]:
        return [len(text) / 9 - 1 for text in texts]

    intrinsic = make_intrinsic(args, "sentiment", trainer, None, score)
    prepare_output_dir(args)
    every = args.eval_every
    held_out = HeldOut(trainer, ROWS[:3], LENGTHS, score, every) if every else None
    with RunRecord(args, trainer, folder, args.steps or 0, held_out) as record:
        for batch in record.batches():
            responses = trainer.generate(batch["input_ids"], LENGTHS, return_prompt=False)
            texts = record.decode(batch["input_ids"], responses)
            scores = score(batch, texts)
            pending = intrinsic.submit(batch["input_ids"], responses, scores) if intrinsic else None
            if pending:
                pending.result()  # the thread of a run that ends here must not write to the next one's files
            during(record.done + 1)
            stats = trainer.step(batch["input_ids"], responses, record.merged(scores, pending), scores_are_scaled=True)
            record.step(stats, batch, responses, texts, scores, pending)
    trainer.save_pretrained(folder)


class Killed(BaseException):
    """Nothing of ours catches it, as nothing catches SIGKILL."""


def at(step: int, error: BaseException) -> Callable[[int], None]:
    def during(now: int) -> None:
        if now == step:
            raise error

    return during


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that nobody touched."""
    folder = tmp_path_factory.mktemp("whole")
    run(folder, eval_every=2)
    AcceleratorState._reset_state(reset_partial_state=True)
    return folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*-*/"))


@pytest.mark.parametrize("step", [1, 3, 4])
def test_a_killed_run_goes_on_and_its_files_are_those_of_an_untouched_one(
    step: int, whole: Path, tmp_path: Path
) -> None:
    """Killed before the first checkpoint, right after one, and a step later."""
    with pytest.raises(Killed):
        run(tmp_path, at(step, Killed()), eval_every=2, save_freq=2)
    for name in ("metrics.jsonl", "samples.jsonl", "critiques.jsonl"):
        with (tmp_path / name).open("a") as file:
            file.write('{"step": 99, "to')  # a torn line
    run(tmp_path, eval_every=2, save_freq=2, resume="latest")
    assert differences(whole, tmp_path) == []
    assert names(tmp_path) == ["checkpoint-4", "checkpoint-5"]
    assert [row["step"] for row in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4, 5]
    assert {row["step"] for row in read_jsonl(tmp_path / "critiques.jsonl")} == {1, 2, 3, 4, 5}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_step_saves_and_says_how_to_go_on(number: int, whole: Path, tmp_path: Path) -> None:
    def during(step: int) -> None:
        if step == 3:
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), number)  # the launcher passes on what the terminal sent

    before = signal.getsignal(number)
    with pytest.raises(SystemExit, match=r"^stopped after step 3 of 5; --resume goes on from there$"):
        run(tmp_path, during, eval_every=2)
    assert signal.getsignal(number) is before
    assert names(tmp_path) == ["checkpoint-3"]
    run(tmp_path, eval_every=2, resume="latest")
    assert differences(whole, tmp_path) == []


def test_a_second_signal_stops_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(stop_signal, "_ECHO", 0.0)

    def during(step: int) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        while "once more ends it now" not in caplog.text:  # two at once may arrive as one
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(60)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # workers of pytest-xdist ignore it
    try:
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path, during)
    finally:
        signal.signal(signal.SIGINT, before)
    assert names(tmp_path) == []


def test_a_critic_that_is_gone_leaves_a_checkpoint_that_goes_on_exactly(whole: Path, tmp_path: Path) -> None:
    """It fails in the middle of a step: numbers were drawn and data were taken since the checkpoint's moment."""
    with pytest.raises(SystemExit, match=r"error: gone\. The model so far is in .*/checkpoint-3, and --resume goes on"):
        run(tmp_path, at(4, GoneError("gone")), eval_every=2)
    run(tmp_path, eval_every=2, resume="latest")
    assert differences(whole, tmp_path) == []
    with pytest.raises(SystemExit, match=r"^error: gone$"):
        run(tmp_path / "new", at(1, GoneError("gone")))
    assert names(tmp_path / "new") == []


def test_an_update_that_broke_off_is_no_checkpoint(tmp_path: Path) -> None:
    """The model is saved, by another name, as it was in the middle."""
    trainer = make("critic")
    apply = trainer.updater.gradients.apply
    calls: list[int] = []

    def broken() -> list[float]:
        calls.append(1)
        if len(calls) == 6:  # two mini-batches, two epochs
            raise RuntimeError("out of memory")
        return apply()

    trainer.updater.gradients.apply = broken  # type: ignore[method-assign]
    args = args_of(tmp_path, use_intrinsic_reward=False)
    with pytest.raises(RuntimeError, match="out of memory"), RunRecord(args, trainer, tmp_path, 5) as record:
        for batch in record.batches():
            responses = trainer.generate(batch["input_ids"], LENGTHS, return_prompt=False)
            texts = record.decode(batch["input_ids"], responses)
            stats = trainer.step(batch["input_ids"], responses, [1.0] * len(texts), scores_are_scaled=True)
            record.step(stats, batch, responses, texts, [1.0] * len(texts), None)
    assert names(tmp_path) == ["failed-2"]
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "failed-2").state_dict()
    own = trainer.policy.pretrained_model.state_dict()
    assert all(torch.equal(saved[key], own[key]) for key in own)


def test_a_checkpoint_is_a_model_for_others_too(tmp_path: Path) -> None:
    run(tmp_path, steps=2, save_freq=2)
    checkpoint = tmp_path / "checkpoint-2"
    loaded, final = (AutoModelForCausalLM.from_pretrained(path).state_dict() for path in (checkpoint, tmp_path))
    assert all(torch.equal(loaded[key], final[key]) for key in final)
    assert pipeline("text-generation", str(checkpoint))("The film", max_new_tokens=2)
    assert [path.name for path in tmp_path.glob("**/.*")] == [".lock"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"learning_rate": 0.5}, r"other settings \(--learning_rate: 0.01 → 0.5\)"),
        ({"seed": 3, "model_name": "other"}, r"\(--model_name: 'tiny' → 'other', --seed: 0 → 3\)"),
        ({"critic": "attribution"}, "--critic: 'lexicon' → 'attribution'"),
        ({"steps": 1}, "the checkpoint is of step 2 already, and this run ends at 1"),
        ({"resume": "{}/checkpoint-9"}, "checkpoint-9 is not a whole checkpoint"),
    ],
)  # fmt: skip
def test_a_resume_that_would_be_another_run_is_refused(flags: dict[str, Any], message: str, tmp_path: Path) -> None:
    run(tmp_path, steps=2, save_freq=2)
    logs = {path: path.read_bytes() for path in tmp_path.glob("*.jsonl")}
    flags = {"steps": 3, "resume": "latest"} | flags
    flags["resume"] = flags["resume"].format(tmp_path)
    with pytest.raises(DataFileError, match=message):
        run(tmp_path, **flags)
    assert {path: path.read_bytes() for path in logs} == logs


def test_what_may_change_may_and_a_finished_run_can_be_made_longer(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, steps=3, save_freq=3, eval_every=2)
    run(tmp_path, steps=5, save_freq=1, keep_checkpoints=1, critic_timeout=3.0, eval_every=2, resume="latest")
    assert names(tmp_path) == ["checkpoint-5"]
    longer, expected = (timeless(folder / "metrics.jsonl") for folder in (tmp_path, whole))
    assert "eval/score" in longer[3] and "eval/score" not in expected[3]  # its last step for a while
    assert [row for row in longer if row["step"] != 3] == [row for row in expected if row["step"] != 3]
    before = {path: path.read_bytes() for path in tmp_path.glob("*") if path.suffix in (".safetensors", ".jsonl")}
    run(tmp_path, resume="latest", eval_every=2)  # there is nothing left to do
    assert {path: path.read_bytes() for path in before} == before


def test_an_older_checkpoint_goes_on_elsewhere_or_once_the_newer_is_gone(whole: Path, tmp_path: Path) -> None:
    run(tmp_path / "a", save_freq=2, keep_checkpoints=9, eval_every=2)
    older = str(tmp_path / "a" / "checkpoint-2")
    with pytest.raises(DataFileError, match=r"later checkpoint than checkpoint-2, checkpoint-5.*another --output_dir"):
        run(tmp_path / "a", resume=older, eval_every=2)
    run(tmp_path / "b", resume=older, eval_every=2)
    assert [row["step"] for row in read_jsonl(tmp_path / "b" / "metrics.jsonl")] == [3, 4, 5]
    assert (tmp_path / "b" / "model.safetensors").read_bytes() == (whole / "model.safetensors").read_bytes()
    with pytest.raises(SystemExit, match="already holds a run"):
        run(tmp_path / "b", resume=older)
    for name in ("checkpoint-4", "checkpoint-5"):
        (tmp_path / "a" / name / "trainer.json").unlink()  # damaged, and so passed over
    run(tmp_path / "a", resume="latest", eval_every=2)
    assert differences(whole, tmp_path / "a") == []


def test_resume_without_any_checkpoint_starts_anew_but_not_over_a_finished_run(whole: Path, tmp_path: Path) -> None:
    run(tmp_path, eval_every=2, resume="latest")
    assert differences(whole, tmp_path) == []
    logged = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(DataFileError, match="holds a finished run and no checkpoint"):
        run(tmp_path, resume="latest")
    assert (tmp_path / "metrics.jsonl").read_bytes() == logged


def test_a_full_disk_ends_the_run_and_leaves_the_checkpoint_before(whole: Path, tmp_path: Path) -> None:
    """From the fourth step on, files can't grow beyond 200 kB, which the logs don't reach."""
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)

    def during(step: int) -> None:
        if step == 4:
            resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, unlimited[1]))

    try:
        with pytest.raises(OSError, match=r"^could not write .*MB are free there\); what was saved before is whole$"):
            run(tmp_path, during, eval_every=2, save_freq=2)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert names(tmp_path) == ["checkpoint-2"]
    run(tmp_path, eval_every=2, save_freq=2, resume="latest")
    assert differences(whole, tmp_path) == []


def test_a_budget_counts_what_was_spent_on_steps_that_were_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """300 and 20 tokens a call at 1,000 and 500 dollars per million: 31 cents."""
    monkeypatch.setenv("OPENAI_API_KEY", "none")
    with FakeOpenAI(praise_first_word) as server:
        endpoint: dict[str, Any] = {
            "critic": "openai",
            "critic_base_url": server.url,
            "prompt_file": "prompts/prompt_sentiment_3shot_v2.txt",
            "critic_prices": (1000.0, 500.0),
            "critic_budget_requests": 100,
            "critic_budget_usd": 50.0,
        }
        assert budget_left(args_of(tmp_path, **endpoint)) == {}
        for step in (4, 3):  # killed after a checkpoint, and again before the next
            with pytest.raises(Killed):
                run(tmp_path, at(step, Killed()), save_freq=2, **endpoint, resume="latest")
        args = args_of(tmp_path, **endpoint, resume="latest")
        paid = len(asked(server))
        left = budget_left(args)
        assert left["budget_requests"] == 100 - paid
        assert left["budget_usd"] == pytest.approx(50 - paid * 0.31)
        assert {row["step"] for row in read_jsonl(tmp_path / "critiques.lost.jsonl")} == {3, 4}
        assert paid > 30
        run(tmp_path, save_freq=2, **(endpoint | {"critic_budget_requests": paid + 5}), resume="latest")
        assert len(asked(server)) == paid + 5


def asked(server: FakeOpenAI) -> list[Any]:
    return [body for body in server.requests if body["messages"][0]["content"] != "Say OK."]


def test_a_run_that_still_goes_on_is_not_resumed_or_replaced(tmp_path: Path) -> None:
    """Such as the script of a launcher that was killed."""
    program = "import sys, trl.run as r; r.prepare_output_dir(r.RunArgs(output_dir=sys.argv[1])); print(); input()"
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None
        other.stdout.readline()
        for flags in ({"resume": "latest"}, {"overwrite": True}, {}):
            with pytest.raises(SystemExit, match=r"^error: another process is writing the run"):
                prepare_output_dir(args_of(tmp_path, **flags))
        other.communicate(b"\n")
    run(tmp_path, steps=1, resume="latest")


def test_no_key_and_no_password_gets_into_a_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, steps=1, save_freq=1, critic_base_url="https://me:PASS-5678@host/v1")
    text = (tmp_path / "checkpoint-1" / "trainer.json").read_text()
    assert "PASS-5678" not in text
    assert json.loads(text)["settings"]["learning_rate"] == 0.01


def test_resume_and_overwrite_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="--resume goes on with the run that --overwrite would remove"):
        RunArgs(resume="latest", overwrite=True)
    assert parse_args(RunArgs, ["--resume", "--keep_checkpoints", "3"]).resume == "latest"
    assert parse_args(RunArgs, ["--resume", "a/checkpoint-2"]).resume == "a/checkpoint-2"
