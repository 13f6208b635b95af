"""The custom task as a user runs it: own prompts, own rewards, own critic prompt; tiny models and local servers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.fake_openai import Answer, FakeOpenAI, completion
from tests.fake_reward import FakeReward, reward_reply
from tests.tiny import tiny_llama, tiny_tokenizer
from trl.jsonl import read_jsonl

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = str(ROOT / "examples" / "custom" / "ppo_custom.py")
KEY = "sk-secret-of-the-test"
ENVIRONMENT = os.environ | {
    "OMP_WAIT_POLICY": "PASSIVE",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "OPENAI_API_KEY": KEY,
}
CHAT = "{% for m in messages %}[{{ m['role'] }}]{{ m['content'] }}\n{% endfor %}[assistant]"
FUNCTION = """
def odd_share(prompts, completions, completion_ids, level, **columns):
    assert all(each[-1]["role"] == "user" for each in prompts)
    assert all(len(each) == 1 and each[0]["role"] == "assistant" for each in completions)
    assert set(level) == {3}
    return [sum(token % 2 for token in ids) / len(ids) for ids in completion_ids]
"""
CRITIC_PROMPT = "My own words about\n{text}\nfollow.\n"
SETTINGS = {"batch_size": 8, "mini_batch_size": 8, "learning_rate": 0.01, "max_new_tokens": 6, "num_shared_layers": 1}


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a chat policy, 40 prompts, a reward function and a critic's prompt."""
    folder = tmp_path_factory.mktemp("task")
    tiny_llama(layers=2).save_pretrained(folder / "policy")
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder / "policy")
    rows = [
        {
            "systemInstruction": {"parts": [{"text": "Be brief."}]},
            "contents": [{"role": "user", "parts": [{"text": f"Film number {number}"}]}],
            "references": {"answer": str(number)},
            "level": 3,
        }
        for number in range(40)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.py").write_text(FUNCTION)
    (folder / "critic.txt").write_text(CRITIC_PROMPT)
    return folder


def service(url: str) -> str:
    return json.dumps({"rewardName": "mine", "cloudRunRewardScorer": {"cloudRunUri": url}})


def flags(task: Path, reward: str, out: Path, *more: str, **settings: Any) -> list[str]:
    named = {"data": task / "train.jsonl", "reward": reward, "model_name": task / "policy", "output_dir": out}
    return [f"--{name}={value}" for name, value in {**named, **SETTINGS, **settings}.items()] + list(more)


def launch(*command: str, check: bool = True, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, SCRIPT, *command], cwd=cwd, env=ENVIRONMENT, capture_output=True, text=True, timeout=300
    )
    if check:
        assert done.returncode == 0, done.stderr[-3000:]
    return done


def test_a_function_of_the_users_own_is_learned(task: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    more = {"eval_fraction": 0.3, "eval_every": 4, "samples_per_prompt": 4, "batch_size": 32, "steps": 8, "epochs": 3}
    # from elsewhere, with a path of its own
    launch(*flags(task, "mine.py:odd_share", out, **more, mini_batch_size=16, init_kl_coef=0.01), cwd=task)
    rows = read_jsonl(out / "metrics.jsonl")
    curve = {row["step"]: row["eval/score"] for row in rows if "eval/score" in row}
    assert list(curve) == [0, 4, 8]
    assert curve[8] > curve[0] + 0.2
    assert rows[-1]["objective/score"] > rows[1]["objective/score"] + 0.2
    assert rows[0]["eval/no_verdict"] == 0
    samples = [row for row in read_jsonl(out / "samples.jsonl") if row["step"] == 1]
    assert [row["query"] for row in samples[::4]] == [row["query"] for row in samples[3::4]]
    assert len({row["query"] for row in samples}) == 4
    assert AutoModelForCausalLM.from_pretrained(out).config.num_hidden_layers == 2
    assert json.loads((out / "run.json").read_text())["args"]["ppo_config"]["query_dataset"].endswith("train.jsonl")


def test_a_service_scores_and_a_critic_with_the_users_prompt_marks_the_low_ones(task: Path, tmp_path: Path) -> None:
    out, reward = tmp_path / "run", tmp_path / "reward.json"

    def score(body: dict[str, Any], nth: int) -> Answer:
        return reward_reply(0.25 if int(body["example"]["references"]["answer"]) % 2 else 1.0)

    def quote(body: dict[str, Any]) -> Answer:
        asked = body["messages"][-1]["content"]
        if not asked.startswith("My own words about\n"):
            return completion("OK")
        text = asked.removeprefix("My own words about\n").removesuffix("\nfollow.\n")
        return completion(f"Toxic Span 1: {text[len('Film number 1') :].split()[-1]}\n")

    with FakeReward(score) as server, FakeOpenAI(quote) as critic:
        reward.write_text(service(server.url))
        more = ("--use_intrinsic_reward", "--critic=openai", "--critic_style=toxicity", "--steps=2")
        asked = {"prompt_file": task / "critic.txt", "critic_base_url": critic.url, "eval_every": None}
        done = launch(*flags(task, str(reward), out, *more, **asked))
    samples = read_jsonl(out / "samples.jsonl")
    assert len(samples) == 16
    for row in samples:
        odd = int(row["query"].removeprefix("Film number ")) % 2
        assert row["score"] == (0.25 if odd else 1.0)
        assert (row["status"] == "skipped") == (not odd or not row["response"].strip())
    marked = [row for row in samples if row["status"] == "ok"]
    assert marked and any(token["intrinsic"] == -1.0 for row in marked for token in row["tokens"])
    prompts = [body["messages"][-1]["content"] for body in critic.requests]
    assert sum(text.startswith("My own words about\nFilm number") for text in prompts) == len(
        [row for row in samples if row["status"] != "skipped"]
    )
    assert not any("[user]" in text or "Be brief" in text for text in prompts)
    assert {body["metadata"]["step"] for body in server.requests} == {1, 2}
    assert server.requests[0]["example"]["systemInstruction"]["parts"] == [{"text": "Be brief."}]
    assert read_jsonl(out / "metrics.jsonl")[0]["reward/mine"] == pytest.approx(
        sum(row["score"] for row in samples if row["step"] == 1) / 8
    )
    assert KEY not in done.stdout + done.stderr


def test_when_the_reward_is_gone_the_model_is_saved_and_the_run_fails(task: Path, tmp_path: Path) -> None:
    out, reward = tmp_path / "run", tmp_path / "reward.json"
    with FakeReward(lambda body, nth: reward_reply(1.0) if body["metadata"]["step"] < 3 else Answer(400)) as server:
        reward.write_text(service(server.url))
        done = launch(*flags(task, str(reward), out, epochs=50, eval_every=None), check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: of the last ")
    assert " got no reward: " in last and "HTTP 400" in last
    assert "Traceback" not in done.stderr
    metrics = read_jsonl(out / "metrics.jsonl")
    assert [row["reward/no_verdict"] for row in metrics[:3]] == [0, 0, 8]
    assert metrics[2]["reward_failed/mine"] == 1
    # 16 good ones; more than 80 % of the last 88 are bad from step 11 on, which therefore does not end
    assert [row["step"] for row in metrics] == list(range(1, 11))
    saved = out / "checkpoint-10"
    assert str(saved) in last
    assert AutoModelForCausalLM.from_pretrained(saved).config.num_hidden_layers == 2


def test_a_dry_run_trains_nothing_and_bad_data_are_one_line(task: Path, tmp_path: Path) -> None:
    done = launch(*flags(task, f"{task}/mine.py:odd_share", tmp_path / "run", "--dry_run", eval_fraction=0.3))
    assert "queries" in done.stdout and "mine.py:odd_share (a test text scores " in done.stdout
    assert not (tmp_path / "run").exists()
    bad = tmp_path / "bad.jsonl"
    bad.write_text((task / "train.jsonl").read_text() + '\n{"contents": "Hi"}\n')
    done = launch(*flags(task, f"{task}/mine.py:odd_share", tmp_path / "run", data=bad), check=False)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {bad}, line 42: contents is ")
    assert not (tmp_path / "run").exists()


def test_a_function_that_fails_later_costs_no_finished_step(task: Path, tmp_path: Path) -> None:
    """An error of the user's own code is shown as it is, and what was learned is saved before."""
    (tmp_path / "later.py").write_text(
        "calls = []\ndef reward(completions, **_):\n    calls.append(1)\n"
        "    return [1.0] * len(completions) if len(calls) < 4 else 1 / 0\n"
    )
    out = tmp_path / "run"
    done = launch(*flags(task, f"{tmp_path / 'later.py'}:reward", out, eval_every=100), check=False)
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    (saved,) = out.glob("checkpoint-*")
    assert f"The model so far is in {saved}" in done.stderr
    assert AutoModelForCausalLM.from_pretrained(saved).config.num_hidden_layers == 2
