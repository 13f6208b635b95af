"""A disk that fills up: what was written stays whole, one line names the file, and the next run goes on."""

import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from tests.e2e.test_eval_scripts import lm, prompts
from tests.e2e.test_ppo_sentiment import ENVIRONMENT, ROOT, SCRIPT, names, published
from tests.faults.limits import full_disk, limit_file_size
from trl.critic.log import CritiqueLog
from trl.critic.types import Critique, CritiqueRequest
from trl.jsonl import read_jsonl, run_resumable
from trl.report.runlog import RunLog, load_run

__all__ = ["lm", "names", "prompts"]  # fixtures


def test_metrics_and_samples_keep_their_rows_and_go_on_when_there_is_room(tmp_path: Path) -> None:
    sample = {"query": "q", "response": "é" * 300, "tokens": [], "spans": []}
    log = RunLog(tmp_path)
    with full_disk(2000), pytest.raises(OSError, match=r"samples\.jsonl") as failed:
        for step in range(1, 100):
            log.log_metrics(step, {"loss": 0.5})
            log.log_samples(step, [sample, sample])
    assert failed.value.filename == str(tmp_path / "samples.jsonl")
    assert (tmp_path / "samples.jsonl").read_bytes().endswith(b"\n")
    kept = load_run(tmp_path)
    assert [row["step"] for row in kept.metrics] == list(range(1, step + 1))
    assert [row["step"] for row in kept.samples] == [s for s in range(1, step) for _ in range(2)]
    log.log_samples(step, [sample])
    log.close()
    assert len(load_run(tmp_path).samples) == 2 * (step - 1) + 1


def test_critiques_name_their_file_and_stay_readable(tmp_path: Path) -> None:
    log = CritiqueLog(tmp_path / "critiques.jsonl")
    batch = 1, [CritiqueRequest("a" * 100)], [Critique((), "none", reply="b" * 100)], [torch.zeros(3)]
    log.write(*batch)
    size = (tmp_path / "critiques.jsonl").stat().st_size
    with full_disk(size + 50), pytest.raises(OSError, match=r"critiques\.jsonl"):
        log.write(*batch)
        log.write(*batch)
    assert len(read_jsonl(tmp_path / "critiques.jsonl")) == 1
    log.write(*batch)
    assert len(read_jsonl(tmp_path / "critiques.jsonl")) == 2


def test_a_long_job_goes_on_where_the_disk_was_full(tmp_path: Path) -> None:
    rows = [{"number": number} for number in range(60)]

    def job(path: Path) -> list[dict]:
        return run_resumable(rows, path, lambda _, chunk: chunk, settings={}, chunk_size=4)

    whole = tmp_path / "whole.jsonl"
    job(whole)
    path = tmp_path / "out.jsonl"
    with full_disk(whole.stat().st_size // 2), pytest.raises(OSError, match=r"out\.jsonl"):
        job(path)
    assert job(path) == rows
    assert path.read_bytes() == whole.read_bytes()


def test_a_run_ends_in_one_line_and_its_files_are_whole(names: dict[str, str], tmp_path: Path) -> None:
    out = tmp_path / "run"
    flags = published(names, out, "--critic", "lexicon", "--save_freq", "100")
    done = subprocess.run(
        [sys.executable, SCRIPT, *flags],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=600,
        preexec_fn=partial(limit_file_size, 16_000),
    )
    assert done.returncode == 1, done.stderr[-3000:]
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith("error: ") and "File too large" in last and str(out) in last
    assert "Traceback" not in done.stderr
    run = load_run(out)
    assert run.samples
    for name in ("metrics.jsonl", "samples.jsonl"):
        assert (out / name).read_bytes().endswith(b"\n")


def test_an_evaluation_ends_in_one_line_and_goes_on(lm: Path, prompts: Path, tmp_path: Path, monkeypatch) -> None:
    whole, path = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"

    def decode(output: Path) -> None:
        command = ["decoding.py", "--lm_dir", lm, "--prompts_file", prompts, "--output_file", output]
        monkeypatch.setattr(sys, "argv", [*map(str, command), "--num_returns", "2", "--do_sample", "--batch_size", "8"])
        runpy.run_path(str(ROOT / "eval_scripts" / "decoding.py"), run_name="__main__")

    decode(whole)
    with full_disk(whole.stat().st_size // 2), pytest.raises(SystemExit) as stopped:
        decode(path)
    assert str(stopped.value) == f"error: [Errno 27] File too large: '{path}'"
    decode(path)
    assert path.read_bytes() == whole.read_bytes()
