"""The sentiment script while its critic's endpoint fails for a while, and then for good."""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM

from tests.e2e.test_ppo_sentiment import ENVIRONMENT, ROOT, SCRIPT, launch, names, published
from tests.fake_openai import Answer, FakeOpenAI, completion, error
from trl.jsonl import read_jsonl

KEY = ENVIRONMENT["OPENAI_API_KEY"]
NOTHING = "None identified\n\nIdentified Negative Text Span:\nNone identified"
__all__ = ["names"]  # the fixture


class Outage(FakeOpenAI):
    """Step by step of the run in ``out``: good, 500, 429, good, and from then on gone."""

    def __init__(self, out: Path) -> None:
        good = completion(NOTHING, usage=(300, 20))
        self.steps = [good, error(500, KEY), error(429, KEY, retry_after="0"), good, error(502, KEY)]
        self.metrics = out / "metrics.jsonl"
        super().__init__(self._answer)

    def _answer(self, body: dict[str, Any]) -> Answer:
        if body["messages"][0]["content"] == "Say OK.":
            return completion("OK")
        done = len(read_jsonl(self.metrics)) if self.metrics.exists() else 0
        return self.steps[min(done, len(self.steps) - 1)]


def endpoint(server: FakeOpenAI, *more: str) -> list[str]:
    flags = ["--critic", "openai", "--critic_base_url", server.url, "--critic_model", "m", "--critic_timeout", "5"]
    return [*flags, *more]


def no_key_in(folder: Path) -> bool:
    return all(KEY.encode() not in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_run_bears_outages_and_stops_with_its_model_when_the_critic_is_gone(
    names: dict[str, str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    with Outage(out) as server:
        flags = endpoint(server, "--critic_deadline", "2", "--critic_fuse_seconds", "0.5", "--epochs", "9")
        flags += ["--critic_prices", "1", "2", "--critic_cache", str(tmp_path / "cache"), "--save_freq", "100"]
        done = launch(SCRIPT, *published(names, out), *flags, check=False)
    assert done.returncode == 1, done.stderr[-3000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: the critic has not answered for ")
    assert "HTTP 502" in last
    assert "Traceback" not in done.stderr

    metrics = read_jsonl(out / "metrics.jsonl")
    assert [row["step"] for row in metrics] == list(range(1, len(metrics) + 1))
    asked = [row["critic/requests"] for row in metrics]
    assert min(asked) > 4  # not all eight where a response shows no text
    assert [row["critic/failed"] for row in metrics[:5]] == [0, *asked[1:3], 0, asked[4]]
    assert [row["critic/none"] for row in metrics[:5]] == [asked[0], 0, 0, asked[3], 0]
    assert metrics[0]["critic/tokens_in"] == asked[0] * 300
    assert metrics[0]["critic/cost_usd"] == pytest.approx(asked[0] * (300 * 1 + 20 * 2) / 1e6)
    assert metrics[0]["critic/latency_p50"] <= metrics[0]["critic/latency_p95"]
    assert all(row["tokens/responses"] > 0 and row["ppo/skipped_minibatches"] == 0 for row in metrics)

    saved = out / f"checkpoint-{len(metrics)}"
    assert str(saved) in last
    assert AutoModelForCausalLM.from_pretrained(saved).config.num_hidden_layers == 4
    assert len(read_jsonl(out / "critiques.jsonl")) == sum(asked)
    assert KEY not in done.stdout + done.stderr
    assert no_key_in(tmp_path)


def test_a_spent_budget_ends_the_critiques_and_not_the_run(
    names: dict[str, str],
    tmp_path: Path,
) -> None:
    out = tmp_path / "run"
    with FakeOpenAI([completion(NOTHING)]) as server:
        flags = endpoint(server, "--critic_budget_requests", "12", "--steps", "3")
        done = launch(SCRIPT, *published(names, out), *flags)
        assert len(server.requests) == 1 + 12
    rows = read_jsonl(out / "metrics.jsonl")
    assert sum(row["critic/http_requests"] for row in rows) == 12
    assert [row["critic/budget_skipped"] > 0 for row in rows] == [False, True, True]
    assert all(row["critic/requests"] == row["critic/http_requests"] + row["critic/budget_skipped"] for row in rows)
    assert done.stderr.count("the budget of 12 requests is spent") == 1


@pytest.mark.parametrize("status", [401, 404])
def test_a_refused_key_or_model_is_one_line_at_the_start(
    names: dict[str, str],
    tmp_path: Path,
    status: int,
) -> None:
    with FakeOpenAI([error(status, f"no such key: {KEY}")]) as server:
        done = launch(SCRIPT, *published(names, tmp_path / "run"), *endpoint(server), check=False)
    assert done.returncode == 1
    assert done.stderr.strip().splitlines()[-1].startswith(f"error: {server.url} answered {status} for model 'm'")
    assert "Traceback" not in done.stderr
    assert KEY not in done.stderr
    assert not (tmp_path / "run").exists()


def test_when_one_process_loses_its_critic_all_stop_and_save(tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("{}")
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    worker = str(Path(__file__).with_name("critic_gone_worker.py"))
    with FakeOpenAI([completion(NOTHING)]) as good, FakeOpenAI([error(500)]) as dead:
        begin = time.monotonic()
        done = subprocess.run(
            [*launcher, worker, good.url, dead.url, str(tmp_path / "p.txt"), str(tmp_path / "out")],
            env=os.environ | ENVIRONMENT | {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true"},
            capture_output=True,
            text=True,
            timeout=240,
        )
    assert done.returncode != 0
    assert "error: the critic has not answered for" in done.stderr, done.stderr[-3000:]
    assert "error: the critic or reward of another process is gone" in done.stderr
    assert "HTTP 500" in done.stderr
    (saved,) = (tmp_path / "out").glob("checkpoint-*")
    assert AutoModelForCausalLM.from_pretrained(saved).config.num_hidden_layers == 2
    assert time.monotonic() - begin < 120
