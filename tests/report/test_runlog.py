"""The run's record survives kills and stays strict JSON."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from trl.jsonl import DataFileError, dump_line, read_jsonl
from trl.report.runlog import RunLog, load_run


def reject(constant: str) -> float:
    raise AssertionError(f"not strict JSON: {constant}")


def test_numbers_become_strict_json(tmp_path: Path) -> None:
    values = {
        "nan": float("nan"),
        "inf": np.float32("inf"),
        "tensor": torch.tensor(0.5),
        "numpy": np.float64(1.5),
        "count": np.int64(3),
        "flag": True,
    }
    with RunLog(tmp_path) as log:
        log.log_metrics(1, values)
    row = json.loads((tmp_path / "metrics.jsonl").read_text(), parse_constant=reject)
    assert row == {"step": 1, "nan": None, "inf": None, "tensor": 0.5, "numpy": 1.5, "count": 3, "flag": True}


def test_a_value_without_a_json_form_is_an_error() -> None:
    with pytest.raises(TypeError, match="cannot write a set"):
        dump_line({"a": {1}})


def test_rows_are_on_disk_before_close(tmp_path: Path) -> None:
    log = RunLog(tmp_path)
    log.log_metrics(1, {"a": 1.0})
    log.log_samples(1, [{"query": "q"}, {"query": "r"}])
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 1
    assert [row["query"] for row in read_jsonl(tmp_path / "samples.jsonl")] == ["q", "r"]
    log.close()


@pytest.mark.parametrize("cut", [1, 5, 14])
def test_a_torn_last_line_is_ignored_and_then_cut(tmp_path: Path, cut: int) -> None:
    with RunLog(tmp_path) as log:
        log.log_metrics(1, {"a": 1.0})
        log.log_metrics(2, {"a": 2.0})
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])  # cut=1 loses only the newline: the row is whole
    assert load_run(tmp_path).series("a")[0] == ([1, 2] if cut == 1 else [1])
    with RunLog(tmp_path) as log:
        log.log_metrics(3, {"a": 3.0})
    assert load_run(tmp_path).series("a") == ([1, 3], [1.0, 3.0])


def test_a_broken_line_in_the_middle_is_reported(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": \n{"step": 3}\n')
    with pytest.raises(DataFileError, match=r"metrics\.jsonl, line 2"):
        load_run(tmp_path)


def test_repeated_steps_after_a_resume_replace_the_first_ones(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        for step, value in [(1, 1.0), (2, 2.0), (3, 3.0), (2, 2.5), (3, 3.5)]:
            log.log_metrics(step, {"a": value})
            log.log_samples(step, [{"query": f"{value}"}])
        log.log_metrics(3, {"eval/score": 9.0})
    run = load_run(tmp_path)
    assert run.series("a") == ([1, 2, 3], [1.0, 2.5, 3.5])
    assert run.series("eval/score") == ([3], [9.0])
    assert [row["query"] for row in run.samples][:2] == ["1.0", "2.5"]


def test_null_values_leave_the_series(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.log_metrics(1, {"a": float("nan")})
        log.log_metrics(2, {"a": 2})
    assert load_run(tmp_path).series("a") == ([2], [2.0])


def test_a_lone_surrogate_is_written_and_read_back(tmp_path: Path) -> None:
    with RunLog(tmp_path) as log:
        log.log_samples(1, [{"reply": "bad \ud83d end — é 🙂\u2028"}])
    assert read_jsonl(tmp_path / "samples.jsonl")[0]["reply"] == "bad \ud83d end — é 🙂\u2028"


def test_no_run_folder(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no run folder"):
        load_run(tmp_path)
