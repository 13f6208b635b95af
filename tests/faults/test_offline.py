"""With local paths and HF_HUB_OFFLINE=1 nothing asks the network; without a network, a name is one clear error."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.test_eval_scripts import lm, prompts
from tests.e2e.test_ppo_custom import flags as custom_flags
from tests.e2e.test_ppo_custom import task
from tests.e2e.test_ppo_sentiment import ENVIRONMENT, ROOT, SCRIPT, names, published

__all__ = ["lm", "names", "prompts", "task"]  # fixtures
GUARD = Path(__file__).parent / "no_network"
NAMED = ("--model_name", "--query_dataset", "--reward_model")


def guarded(folder: Path, *commands: list[str], offline: bool = True) -> tuple[list[str], str]:
    """How commands end in a process that reaches no other machine, and the attempts that were made."""
    attempts, jobs, results = (folder / name for name in ("attempts.txt", "jobs.json", "results.json"))
    environment = {name: value for name, value in ENVIRONMENT.items() if name != "HF_HUB_OFFLINE"} | {
        "PYTHONPATH": os.pathsep.join([str(GUARD), str(ROOT)]),
        "NETWORK_ATTEMPTS": str(attempts),
        "HF_HOME": str(folder / "hf"),
        **({"HF_HUB_OFFLINE": "1"} if offline else {}),
    }
    jobs.write_text(json.dumps(commands))
    worker = str(Path(__file__).with_name("offline_worker.py"))
    done = subprocess.run(
        [sys.executable, worker, str(jobs), str(results)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(results.read_text()), attempts.read_text() if attempts.exists() else ""


@pytest.fixture
def unreachable(names: dict[str, str], tmp_path: Path) -> list[list[str]]:
    """The sentiment script, each time with another name that is nowhere."""
    plain = published(names, tmp_path / "unreachable", "--critic", "lexicon")
    return [[SCRIPT, *plain, flag, "nobody/nothing"] for flag in NAMED]


def check_one_line(ended: list[str], tmp_path: Path) -> None:
    for message in ended:
        assert message.startswith("error: ") and "nobody/nothing" in message and "\n" not in message
    assert not (tmp_path / "unreachable").exists()


def test_local_paths_need_no_network(
    names: dict[str, str], task: Path, lm: Path, prompts: Path, unreachable: list[list[str]], tmp_path: Path
) -> None:
    custom = custom_flags(task, f"{task}/mine.py:odd_share", tmp_path / "custom", steps=2, eval_every=2)
    out, scored = str(tmp_path / "out.jsonl"), str(tmp_path / "perplexity.jsonl")
    ended, attempts = guarded(
        tmp_path,
        [SCRIPT, *published(names, tmp_path / "run", "--critic", "lexicon", "--steps", "2")],
        ["examples/custom/ppo_custom.py", *custom],
        ["eval_scripts/decoding.py", "--lm_dir", str(lm), "--prompts_file", str(prompts), "--output_file", out],
        [
            "eval_scripts/eval_perplexity_dist.py",
            "--generations_file",
            out,
            "--model",
            str(lm),
            "--output_file",
            scored,
        ],
        *unreachable,
    )
    assert ended[:4] == ["done"] * 4
    check_one_line(ended[4:], tmp_path)
    assert attempts == ""


def test_a_name_that_cannot_be_reached_is_one_line(unreachable: list[list[str]], tmp_path: Path) -> None:
    """Here the hub is asked, again and again, which also shows that the guard sees an attempt."""
    ended, attempts = guarded(tmp_path, unreachable[0], offline=False)
    check_one_line(ended, tmp_path)
    assert "huggingface.co" in attempts
