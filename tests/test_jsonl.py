"""A long job over JSON lines ends with the same file however often it is killed."""

import json
from pathlib import Path

import pytest

from trl.jsonl import DataFileError, Row, read_jsonl, read_prompts, run_resumable, sole_writer

ROWS = [{"prompt": {"text": f"prompt {index} é\u2028"}} for index in range(11)]


def run(path: Path, done: list[int], rows: list[Row] = ROWS, seed: int = 0, die_at: int | None = None) -> list[Row]:
    def process(index: int, chunk: list[Row]) -> list[Row]:
        if index == die_at:
            raise KeyboardInterrupt
        done.append(index)
        return [{**row, "generations": [{"text": f"{seed}-{index}-{n}"}]} for n, row in enumerate(chunk)]

    return run_resumable(rows, path, process, settings={"seed": seed}, chunk_size=3)


def test_resume_after_an_interrupt_does_the_rest(tmp_path: Path) -> None:
    whole = run(tmp_path / "whole.jsonl", [])
    done: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "out.jsonl", done, die_at=3)
    assert done == [0, 1, 2]
    assert run(tmp_path / "out.jsonl", done) == whole
    assert done == [0, 1, 2, 3]
    assert (tmp_path / "out.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_any_cut_of_the_file_is_continued_to_the_same_bytes(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, [])
    whole = path.read_bytes()
    for cut in range(0, len(whole), 37):
        path.write_bytes(whole[:cut])
        done: list[int] = []
        run(path, done)
        assert path.read_bytes() == whole
        complete = whole[:cut].count(b"\n")
        assert done == list(range(complete // 3, 4))


def test_a_finished_job_does_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    first, done = run(path, []), []
    assert run(path, done) == first
    assert done == []


def test_other_settings_or_rows_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    run(path, [])
    with pytest.raises(DataFileError, match=r"other settings \(seed: 0 → 1\)"):
        run(path, [], seed=1)
    with pytest.raises(DataFileError, match="input_sha256"):
        run(path, [], rows=ROWS[:5])
    stranger = tmp_path / "stranger.jsonl"
    stranger.write_text('{"precious": 1}\n')
    with pytest.raises(DataFileError, match="cannot be continued safely"):
        run(stranger, [])
    assert stranger.read_text() == '{"precious": 1}\n'


@pytest.mark.parametrize(
    ("line", "with_generations"),
    [
        ('{"text": "a"}', False),
        ('{"prompt": "a"}', False),
        ('{"prompt": {"text": 3}}', False),
        ('{"prompt": {"text": "a"}}', True),
        ('{"prompt": {"text": "a"}, "generations": ["b"]}', True),
    ],
)
def test_a_wrong_row_is_named(tmp_path: Path, line: str, with_generations: bool) -> None:
    path = tmp_path / "prompts.jsonl"
    good = {"prompt": {"text": "a"}, "generations": [{"text": "b"}]}
    path.write_text(json.dumps(good) + "\n" + line + "\n")
    with pytest.raises(DataFileError, match="row 2: expected"):
        read_prompts(path, with_generations=with_generations)


def test_a_hand_made_file_without_last_newline_keeps_its_last_row(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": {"text": "a"}}\n\n{"prompt": {"text": "b"}}')
    assert len(read_jsonl(path)) == 2
    path.write_text("")
    with pytest.raises(DataFileError, match="empty"):
        read_prompts(path)


def test_a_kill_while_settings_are_written_leaves_a_job_that_can_be_continued(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    whole = run(path, [])
    # what a kill in the middle of the second run's start may leave: the first run's files and a torn working file
    (tmp_path / "out.jsonl.settings.json.part").write_text('{"se')
    assert run(path, []) == whole
    path.unlink()
    assert run(path, []) == whole


def test_two_processes_do_not_write_one_file(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    with sole_writer(path), pytest.raises(DataFileError, match="another process"):
        run(path, [])
    assert path.read_bytes() == b""
    assert len(run(path, [])) == 11
