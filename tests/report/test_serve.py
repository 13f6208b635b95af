"""``--live``: a server whose page follows the files, through HTTP."""

import json
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import httpx
import pytest

from tests.report.fake_run import sample, step_metrics, write_run
from trl.report.runlog import RunLog
from trl.report.serve import LivePage, make_server


@contextmanager
def served(page: LivePage) -> Iterator[str]:
    server = make_server(page, 0)
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


def last_step(text: str) -> int:
    data = re.search(r'id="curve-data">(.*?)</script>', text, re.S)
    assert data
    return max((arm["at"]["step"][-1] for arm in json.loads(data[1])["arms"]), default=0)


def grow(log: RunLog, step: int) -> None:
    rng = random.Random(step)
    log.log_metrics(step, step_metrics(rng, step, 1.0, True, False))
    log.log_samples(step, [sample(rng, step)])


def test_the_page_follows_runs_that_begin_and_grow(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with served(LivePage([folder])) as address:
        waiting = httpx.get(address)
        assert waiting.status_code == 200 and "No run yet" in waiting.text
        assert "connect-src 'self'" in waiting.text.replace("&#39;", "'") and 'data-refresh="5.0"' in waiting.text
        with RunLog(folder) as log:
            grow(log, 1)
            first = httpx.get(address)
            assert last_step(first.text) == 1 and first.headers["ETag"] != waiting.headers["ETag"]
            same = httpx.get(address, headers={"If-None-Match": first.headers["ETag"]})
            assert same.status_code == 304 and same.content == b""
            grow(log, 2)
        with (folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 3, "objective/sco')  # the writer is in the middle of a line
        newer = httpx.get(address, headers={"If-None-Match": first.headers["ETag"]})
        assert newer.status_code == 200 and last_step(newer.text) == 2


def test_a_file_that_cannot_be_read_leaves_the_last_page(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=3)
    page = LivePage([folder])
    version, content = page.current()
    (folder / "metrics.jsonl").write_text("{broken}\n")
    assert page.current() == (version, content)
    write_run(folder, steps=4)  # the file is whole again where the run is resumed from nothing
    (folder / "metrics.jsonl").write_text((folder / "metrics.jsonl").read_text().removeprefix("{broken}\n"))
    assert last_step(page.current()[1].decode()) == 4


def test_other_sites_other_paths_and_writes_are_refused(tmp_path: Path) -> None:
    with served(LivePage([write_run(tmp_path / "run", steps=1)])) as address:
        assert httpx.get(address, headers={"Host": "evil.example"}).status_code == 403
        assert httpx.get(address + "run.json").status_code == 404
        assert httpx.get(address + "../run.json").status_code == 404
        assert httpx.post(address).status_code == 501


def test_command(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", steps=2)
    command = [sys.executable, "-m", "trl.report", str(folder), "--live", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[0]
            assert last_step(httpx.get(address, timeout=60).text) == 2
            port = str(httpx.URL(address).port)
            taken = subprocess.run([*command[:-1], port], capture_output=True, text=True)
        finally:
            process.terminate()
    assert taken.returncode == 1 and taken.stderr.startswith("error: ") and "use" in taken.stderr
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize("arguments", [[], ["--port", "x"]])
def test_wrong_arguments_are_one_line(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "trl.report", *arguments], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode != 0 and "Traceback" not in done.stderr
