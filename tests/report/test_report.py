"""The page, figures and terminal views of a report."""

import json
import re
import subprocess
import sys
from html.parser import HTMLParser
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from tests.report.fake_run import sample, write_run
from trl.jsonl import DataFileError
from trl.report.figures import save_figures
from trl.report.heatmap import POSITIVE_RGB, heatmap_text, measure_scale, print_heatmap
from trl.report.heatmap_figure import extreme_samples, save_heatmap
from trl.report.html import render
from trl.report.runlog import Run, RunLog, load_runs
from trl.report.table import EvaluationTable, rich_table

HOSTILE = "</script><script>window.hacked=1</script><!--<script> \u2028 & \"'"


class Page(HTMLParser):
    """Collects scripts, ids, label targets and every address a browser would fetch."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.scripts: list[str] = []
        self.fetched: list[str] = []
        self.ids: list[str] = []
        self.tags: list[str] = []
        self.texts: list[str] = []
        self._in_script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("src", "href", "action", "srcset", "data") and not (value or "").startswith("#"):
                self.fetched.append(value or "")
        if tag == "script":
            self._in_script = True
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag == "script":
            self._in_script = False

    def handle_data(self, data: str) -> None:
        if self._in_script:
            self.scripts[-1] += data
        else:
            self.texts.append(data)


def embedded(text: str) -> dict[str, Any]:
    """What the page's script reads: curves, scales and samples."""
    curves, samples = Page(text).scripts[:2]
    return json.loads(curves) | json.loads(samples)


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "ppo_critic", steps=30)


def test_the_page_is_self_contained_and_well_formed(run_folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "ppo", steps=30, critic=False, seed=1)
    table = EvaluationTable(["model", "mean reward"], [["base", 0.31], ["PPO <b>", None]])
    text = render(load_runs([other, run_folder]), table)
    page = Page(text)
    assert page.fetched == []
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|url\(|@import|fetch\(|XMLHttpRequest", text)
    assert len(page.scripts) == 3
    assert len(page.ids) == len(set(page.ids))
    assert "b" not in page.tags  # the hostile row name stayed text
    assert "PPO <b>" in page.texts and "–" in page.texts
    assert page.tags.count("main") == 1 and page.tags.count("h1") == 1
    data = embedded(text)
    assert data["runs"] == [{"name": "ppo", "arm": 0}, {"name": "ppo_critic", "arm": 1}]
    assert len(data["samples"]) == 240


def test_nothing_from_a_model_leaves_its_place(tmp_path: Path) -> None:
    with RunLog(tmp_path / HOSTILE.replace("/", "_")) as log:
        log.log_metrics(1, {HOSTILE: 1.0})
        log.log_metrics(2, {HOSTILE: 2.0})
        token = {"text": HOSTILE, "intrinsic": 1.0, "kl": float("nan"), "value": 0.1, "advantage": 0.2}
        span = {"text": HOSTILE, "polarity": "negative", "label": HOSTILE}
        log.log_samples(
            2,
            [
                {
                    "query": HOSTILE,
                    "response": HOSTILE,
                    "score": float("inf"),
                    "tokens": [token],
                    "spans": [span],
                    "reply": HOSTILE + "\ud800",
                    "status": "ok",
                }
            ],
        )
    folder = log.output_dir
    text = render(load_runs([folder]), EvaluationTable([HOSTILE], [[HOSTILE]], title=HOSTILE, note=HOSTILE))
    text.encode("utf-8")
    page = Page(text)
    assert len(page.scripts) == 3
    assert "hacked" not in page.scripts[2]
    assert embedded(text)["charts"][0]["title"] == HOSTILE
    (row,) = embedded(text)["samples"]
    assert row == [
        0,
        2,
        None,
        HOSTILE,
        [[HOSTILE, 1, None, 0.1, 0.2]],
        [[HOSTILE, "negative", HOSTILE]],
        HOSTILE + "\ud800",
        "ok",
    ]


def test_a_thousand_long_samples_stay_below_three_megabytes_with_both_extremes() -> None:
    import random

    rng = random.Random(0)
    samples = []
    for step in range(1, 1001):
        row = {"step": step, **sample(rng, step), "query": "A long document. " * 120, "reply": "word " * 900}
        samples.append({**row, "tokens": row["tokens"] * 4, "score": float(step if step != 501 else -7)})
    metrics = [{"step": step, **{f"m{i}": float(step % (7 + i)) for i in range(50)}} for step in range(1, 1001)]
    text = render([Run("long", metrics, samples)])
    assert 2_500_000 < len(text.encode()) < 3_000_000
    kept = {row[1]: row[2] for row in embedded(text)["samples"]}
    assert 300 < len(kept) < 1000
    assert min(kept.values()) == -7 and max(kept.values()) == 1000
    assert f"it holds {len(kept)} of 1,000 samples" in text


def test_a_run_without_samples_or_metrics_still_renders(tmp_path: Path) -> None:
    with RunLog(tmp_path / "empty") as log:
        log.log_metrics(1, {"objective/score": 1.0})
    text = render(load_runs([tmp_path / "empty"]))
    assert "No samples were logged" in text
    assert embedded(text)["samples"] == []


def test_scales() -> None:
    def tokens(measure: str, values: list[float | None]) -> list[dict[str, Any]]:
        return [{"tokens": [{"text": "x", measure: value} for value in values]}]

    sparse = measure_scale(tokens("intrinsic", [0.0] * 500 + [0.5, -0.5, None]), "intrinsic")
    assert (sparse.centre, sparse.limit) == (0.0, 0.5)
    assert [sparse.position(v) for v in (0.5, -0.25, None)] == [1.0, -0.5, 0.0]
    outlier = measure_scale(tokens("kl", [*np.linspace(-1, 1, 999), 100.0]), "kl")
    assert outlier.limit == pytest.approx(0.98, abs=0.02)
    assert outlier.position(100.0) == 1.0
    assert measure_scale(tokens("value", [2.0, 4.0]), "value").centre == 3.0
    assert measure_scale([], "kl").limit == 1.0


def test_terminal_heat_map_with_and_without_colour() -> None:
    row = {
        "query": "It was",
        "score": 1.25,
        "tokens": [
            {"text": " superb", "intrinsic": 0.5},
            {"text": " and", "intrinsic": 0.0},
            {"text": " dull\n", "intrinsic": -0.5},
        ],
    }
    plain = StringIO()
    print_heatmap([row], console=Console(file=plain, width=200))
    assert "+1.25  It was [+superb] and [−dull↵]" in plain.getvalue()
    coloured = StringIO()
    print_heatmap([row], console=Console(file=coloured, width=200, force_terminal=True, color_system="truecolor"))
    assert "48;2;33;122;196m superb" in coloured.getvalue()
    assert "48;2;217;95;2m dull" in coloured.getvalue()
    text = heatmap_text(row, "intrinsic", measure_scale([row], "intrinsic"))
    assert text.plain == "It was superb and dull↵"


def test_tables_from_both_forms(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    path.write_text('[{"model": "base", "reward": 0.3154}, {"model": "PPO", "reward": -1.5, "calls": 1200}]')
    table = EvaluationTable.from_file(path)
    assert table.layout() == (
        ["model", "reward", "calls"],
        [["base", "0.32", "–"], ["PPO", "−1.50", "1,200"]],
    )
    table.save(path)
    assert EvaluationTable.from_file(path) == table
    out = StringIO()
    Console(file=out, width=80).print(rich_table(table))
    assert "−1.50" in out.getvalue()
    path.write_text('{"rows": 3}')
    with pytest.raises(DataFileError, match=r'expected \{"columns"'):
        EvaluationTable.from_file(path)
    with pytest.raises(ValueError, match="expected 2 cells"):
        EvaluationTable(["a", "b"], [[1]])


def test_a_wide_table_is_turned() -> None:
    table = EvaluationTable(["model", *"abcdefg"], [["base", *range(7)], ["PPO", *range(7)]])
    header, rows = table.layout()
    assert header == ["model", "base", "PPO"]
    assert rows[3] == ["d", "3", "3"]


def test_figures_are_png_and_pdf(run_folder: Path, tmp_path: Path) -> None:
    other = write_run(tmp_path / "ppo", steps=30, critic=False, seed=1)
    paths = save_figures(load_runs([other, run_folder]), tmp_path / "new" / "figures")
    names = ["curves.png", "curves.pdf", "efficiency.png", "efficiency.pdf", "heatmap.png", "heatmap.pdf"]
    assert [path.name for path in paths] == names
    for path in paths:
        assert path.read_bytes().startswith(b"\x89PNG" if path.suffix == ".png" else b"%PDF")
    assert [path.name for path in save_figures(load_runs([other]), tmp_path)] == ["curves.png", "curves.pdf"]
    with pytest.raises(DataFileError, match="nothing to plot"):
        save_figures([Run("empty", [], [])], tmp_path)


def test_the_heat_map_shows_the_best_and_the_worst_of_the_last_quarter(tmp_path: Path) -> None:
    rows = [
        {"step": step, "score": score, "tokens": [{"text": " a$b_\u202e", "intrinsic": 0.5}, {"text": ""}] * 60}
        for step, score in [(1, 9.0), (8, 2.0), (8, None), (8, float("nan")), (8, -1.0), (7, 1.0), (6, 0.0)]
    ]
    best, worst = extreme_samples(rows, count=2)
    assert [row["score"] for row in best] == [2.0, 1.0] and [row["score"] for row in worst] == [-1.0, 0.0]
    assert [row["score"] for row in extreme_samples(rows, count=3)[0]] == [9.0, 2.0]  # too few late ones
    assert extreme_samples(rows[:1]) == ([], [])
    assert save_heatmap(Run("few", [], rows[:1]), tmp_path / "no.png") is None and not (tmp_path / "no.png").exists()
    path = save_heatmap(Run("odd", [], rows), tmp_path / "heatmap.png")
    with Image.open(tmp_path / "heatmap.png") as image:
        assert path and image.width == 1600 and image.height > 900  # of several lines each
        colours = {colour for _, colour in image.convert("RGB").getcolors(1 << 24) or ()}
    full = tuple(round(255 * (1 - 0.6 * (1 - part / 255))) for part in POSITIVE_RGB)
    assert any(max(abs(a - b) for a, b in zip(colour, full, strict=True)) <= 1 for colour in colours)


def test_command(run_folder: Path, tmp_path: Path) -> None:
    table = tmp_path / "evaluation.json"
    EvaluationTable(["model", "reward"], [["base", 0.5]]).save(table)
    output = tmp_path / "deep" / "report.html"
    command = [sys.executable, "-m", "trl.report", str(run_folder), "-o", str(output)]
    figures = tmp_path / "figures"
    done = subprocess.run(
        [*command, "--table", str(table), "--figures", str(figures)], capture_output=True, text=True, check=True
    )
    assert output.exists() and (figures / "curves.png").exists() and (figures / "curves.pdf").exists()
    assert "0.500" in done.stdout and str(output) in done.stdout and "Environment reward" in done.stdout
    failed = subprocess.run(
        [sys.executable, "-m", "trl.report", str(tmp_path / "nowhere")], capture_output=True, text=True
    )
    assert failed.returncode == 1
    assert failed.stderr.startswith("error: ") and "no run folder" in failed.stderr
