"""The page in a real browser: layout, colours, keyboard, accessibility, hostile text, printing, ``--live``.

Run by ``make test-browser`` (``make test`` leaves this file out by its name): it needs Chromium from the system, or
what ``playwright install chromium`` brings.
"""

import random
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, expect, sync_playwright

from tests.report.fake_run import sample, step_metrics, write_run
from tests.report.test_serve import served
from trl.report.html import write_report
from trl.report.runlog import Run, RunLog, load_runs
from trl.report.serve import LivePage
from trl.report.table import EvaluationTable

HOSTILE = "</script><script>window.hacked=1</script><img src=x onerror=window.hacked=2> & \"'"
ARABIC = "كان الفيلم"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    installed = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=installed, args=["--no-sandbox"])
        yield running
        running.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A page of two arms of two seeds each, one with a priced critic, one run longer, with odd texts at its end."""
    folder = tmp_path_factory.mktemp("report")
    runs = [write_run(folder / f"ppo_s{seed}", steps=40, gain=0.7, critic=False, seed=seed) for seed in (1, 2)]
    runs += [write_run(folder / f"llm_s{seed}", steps=36 + 4 * seed, seed=seed, prices=True) for seed in (1, 2)]
    with RunLog(runs[-1]) as log:
        log.log_samples(44, [odd_sample(HOSTILE, HOSTILE, 99.0), odd_sample(ARABIC, " رائع", 98.0)])
        log.log_samples(44, [odd_sample("turned \u202e", " round", 97.0)])
    table = EvaluationTable(["model", "reward"], [["base", 0.5], [HOSTILE, 1.0]], title=HOSTILE, note=HOSTILE)
    return write_report(load_runs(runs), folder / "report.html", table).as_uri()


def odd_sample(query: str, response: str, score: float) -> dict[str, Any]:
    tokens = [
        {"text": response, "intrinsic": 0.5, "kl": 0.1, "value": 1.0, "advantage": -2.0},
        {"text": " end\n", "intrinsic": -0.2, "kl": None, "value": 1.5, "advantage": 0.1},
        {"text": "", "intrinsic": 0.0, "kl": 0.3, "value": 0.5, "advantage": 0.1},
    ]
    spans = [{"text": response.strip(), "polarity": "positive", "label": HOSTILE}]
    spans.append({"text": "elsewhere", "polarity": "negative", "label": None})
    reply = f"[Span 1]: {response}"
    return {"query": query, "score": score, "tokens": tokens, "spans": spans, "reply": reply, "status": "ok"}


@contextmanager
def opened(
    browser: Browser, address: str, width: int = 1600, scheme: Literal["light", "dark"] = "light"
) -> Iterator[Page]:
    """The page at an address; an error in it, a dialog, or a request for anything else fails the test."""
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page = context.new_page()
    page.set_default_timeout(60_000)
    expect.set_options(timeout=60_000)
    problems: list[str] = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on("dialog", lambda dialog: problems.append(dialog.message))
    page.on("request", lambda request: problems.append(request.url) if request.url != address else None)
    page.goto(address)
    page.locator("figure .plot path").first.wait_for(state="attached")
    yield page
    context.close()
    assert problems == []


@pytest.mark.parametrize(
    ("width", "scheme"), [(390, "light"), (390, "dark"), (1600, "light"), (1600, "dark"), (3840, "dark")]
)
def test_every_width_and_theme_fits_and_has_no_serious_fault(
    browser: Browser, report: str, tmp_path: Path, width: int, scheme: Literal["light", "dark"]
) -> None:
    with opened(browser, report, width, scheme) as page:
        page.locator("#more summary").click()
        page.locator("#best .tok").first.focus()
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        boxes = page.locator("figure, .sample, .tile, .inspector, header, .bar")
        assert boxes.evaluate_all("(all) => Math.max(...all.map((e) => e.getBoundingClientRect().right))") <= width + 1
        paper = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper)[:3])) > 600) == (scheme == "light")
        result = Axe().run(page).response
        serious = [
            (item["id"], item["nodes"][0]["html"][:150])
            for item in result["violations"]
            if item["impact"] in ("serious", "critical")
        ]
        assert serious == [] and len(result["passes"]) > 20
        page.screenshot(path=tmp_path / "shot.png")


def test_axes_switch_for_all_figures(browser: Browser, report: str) -> None:
    with opened(browser, report) as page:
        reward = page.locator("#charts figure").first
        expect(reward.locator("svg.swatch + bdi")).to_have_text(["ppo", "llm"])
        for name in ("Samples", "Critic calls", "Critic cost, $"):
            label = name.lower()
            page.locator("#axis").get_by_label(name, exact=True).check()
            assert reward.locator(".plot text").last.text_content() == label
            expect(page.locator("#reach text").last).not_to_have_text("")
            assert f"{label} until ppo's final reward" in (page.locator("#reach").text_content() or "")
        expect(page.locator("#axis-note")).to_have_text("ppo: none spent; drawn as a level line at its last value.")
        assert reward.locator("path.flat").count() == 1 and reward.locator("path.bold").count() == 1
        page.locator("#axis input").first.check()
        expect(page.locator("#axis-note")).to_be_hidden()
        assert reward.locator("path.bold").count() == 2 and reward.locator("path.band").count() == 2
        page.locator("#toggles input").last.uncheck()
        assert reward.locator("path.bold").count() == 1
        assert page.locator("#reach text.strong").count() == 1


def test_lines_are_where_their_numbers_are(browser: Browser, tmp_path: Path) -> None:
    rows = [{"step": step, "objective/score": value} for step, value in [(0, 0.0), (5, 1.0), (10, 0.5)]]
    with opened(browser, write_report([Run("a", rows, [])], tmp_path / "r.html").as_uri()) as page:
        path = page.locator("path.bold").get_attribute("d") or ""
        (x0, y0), (x1, y1), (x2, y2) = [tuple(map(float, pair.split())) for pair in re.findall(r"[\d.]+ [\d.]+", path)]
        assert x0 == 48 and x1 - x0 == pytest.approx(x2 - x1, abs=0.11)
        # the 6 % margins above and below 0..1 lie within a height of 200
        assert [y0, y1, y2] == pytest.approx(
            [10 + 200 * 1.06 / 1.12, 10 + 200 * 0.06 / 1.12, 10 + 200 * 0.56 / 1.12], abs=0.06
        )
        ticks = page.locator(".plot text").all_text_contents()
        assert ticks == ["0", "0.25", "0.5", "0.75", "1", "0", "2", "4", "6", "8", "10", "step"] or ticks[-1] == "step"
        assert page.locator("figcaption b").text_content() == "0 → 0.5"


def test_charts_and_tokens_by_keyboard(browser: Browser, report: str) -> None:
    with opened(browser, report) as page:
        slider = page.get_by_role("slider", name="Environment reward over step")
        slider.focus()
        slider.press("Home")
        assert re.match(r"ppo 1: [\d.−]+ ± [\d.]+, llm 1: ", slider.get_attribute("aria-valuetext") or "")
        slider.press("ArrowRight")
        assert slider.get_attribute("aria-valuenow") == "2"
        token = page.locator("#best .tok").first
        token.focus()
        token.press("ArrowRight")
        focused = page.locator(":focus")
        expect(focused).to_have_text("end↵")
        expect(page.locator("#spoken")).to_have_text("Intrinsic reward −0.2, KL –, Value 1.5, Advantage 0.1")
        expect(page.locator("#inspector .value")).to_have_text(["−0.2", "–", "1.5", "0.1"])
        focused.press("End")
        expect(page.locator("#inspector .token")).to_have_text("no text of its own")
        page.keyboard.press("Escape")
        expect(page.locator("#inspector .token")).to_have_count(0)
        page.locator("[name=theme][value=system]").focus()
        page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        assert page.evaluate("document.documentElement.dataset.theme") == "dark"


def test_pointing_shows_numbers_quotes_and_the_raw_reply(browser: Browser, report: str) -> None:
    with opened(browser, report) as page:
        page.locator("#best .tok").first.hover()
        inspector = page.locator("#inspector")
        expect(inspector.locator("dt")).to_have_text(["Intrinsic reward", "KL", "Value", "Advantage"])
        expect(inspector.locator(".value")).to_have_text(["0.5", "0.1", "1", "−2"])
        expect(inspector.locator("pre")).to_have_text(f"[Span 1]: {HOSTILE}")
        assert inspector.locator(".here").count() == 1 and inspector.locator("li").count() == 2
        first = page.locator("#best .tok").first
        assert {"pos", "strong"} <= set((first.get_attribute("class") or "").split())
        page.locator("#word-bar").get_by_label("Advantage").check()
        assert {"neg", "strong"} <= set((first.get_attribute("class") or "").split())


def test_hostile_text_stays_text(browser: Browser, report: str) -> None:
    with opened(browser, report) as page:
        for summary in page.locator("#best summary").all():
            summary.click()
        assert page.evaluate("window.hacked === undefined && !document.images.length && document.scripts.length === 3")
        assert HOSTILE in (page.locator("#best .text").first.text_content() or "")
        assert page.locator("th", has_text="onerror").count() == 1


def test_text_of_both_directions_keeps_to_its_place(browser: Browser, report: str) -> None:
    with opened(browser, report) as page:
        turned, right_to_left = page.locator("#best .text").nth(2), page.locator("#best .text").nth(1)
        assert "turned ⟦U+202E⟧" in (turned.text_content() or "")
        assert turned.evaluate("(e) => getComputedStyle(e).direction") == "ltr"
        assert right_to_left.evaluate("(e) => getComputedStyle(e).direction") == "rtl"
        query, response = (right_to_left.locator(part).bounding_box() for part in (".query", ".response"))
        assert query and response and query["x"] > response["x"]  # the response follows on the left
        bidi = "(e) => getComputedStyle(e).unicodeBidi"
        assert {turned.locator(part).evaluate(bidi) for part in (".query", ".response")} == {"isolate"}


def test_samples_are_ordered_found_and_paged(browser: Browser, report: str) -> None:
    with opened(browser, report) as page:
        expect(page.locator("#where")).to_have_text("1–12 of 179")
        page.locator("#next").click()
        expect(page.locator("#where")).to_have_text("13–24 of 179")
        page.locator("#order").select_option("high")
        expect(page.locator("#all .score").first).to_have_text("score 99")
        page.locator("#find").fill("elsewhere")
        expect(page.locator("#where")).to_have_text("1–3 of 3")
        page.locator("#run").select_option(label="ppo_s1")
        expect(page.locator("#where")).to_have_text("no samples")


def test_it_prints_on_white_without_controls(browser: Browser, report: str) -> None:
    with opened(browser, report, scheme="dark") as page:
        page.emulate_media(media="print")
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
        for hidden in ("#inspector", ".pager", ".theme", ".controls"):
            expect(page.locator(hidden)).to_be_hidden()
        assert page.pdf(format="A4").startswith(b"%PDF")


def test_a_page_of_little_has_no_error(browser: Browser, tmp_path: Path) -> None:
    with RunLog(tmp_path / "short") as log:
        log.log_metrics(1, {"objective/score": 1.0, "b": float("nan")})
    runs = [*load_runs([tmp_path / "short"]), Run("nothing", [], [])]
    with opened(browser, write_report(runs, tmp_path / "r.html").as_uri(), 390) as page:
        assert page.locator("figure").count() == 1 and page.locator("figure .plot path.mark").count() == 1


def test_a_live_page_grows_and_keeps_what_was_chosen(browser: Browser, tmp_path: Path) -> None:
    rng = random.Random(0)
    with RunLog(tmp_path / "run") as log, served(LivePage([tmp_path / "run"], refresh=0.2)) as address:

        def grow(step: int) -> None:
            log.log_metrics(step, step_metrics(rng, step, 1.0, True, False))
            log.log_samples(step, [sample(rng, step)])

        grow(1)
        with opened(browser, address, 390) as page:
            expect(page.locator("#live")).to_have_text("live, last step 1")
            page.locator("#axis").get_by_label("Samples", exact=True).check()
            for step in range(2, 5):
                grow(step)
            expect(page.locator("#live")).to_have_text("live, last step 4")
            expect(page.locator("#where")).to_have_text("1–4 of 4")
            assert page.locator("#axis input").nth(1).is_checked()
            assert page.locator("#charts .plot text").nth(-1).text_content() == "samples"
            page.locator("#all .tok").first.focus()
            grow(5)
            expect(page.locator("#live")).to_have_text("live, last step 5")
            assert page.evaluate("document.activeElement.className.includes('tok')")  # the reader is not interrupted


def test_a_live_page_says_when_its_server_is_gone(browser: Browser, tmp_path: Path) -> None:
    with RunLog(tmp_path / "run") as log, ExitStack() as serving:
        log.log_metrics(1, {"objective/score": 1.0})
        address = serving.enter_context(served(LivePage([tmp_path / "run"], refresh=0.2)))
        with opened(browser, address) as page:
            serving.close()
            expect(page.locator("#live")).to_have_text("the server is gone; this is its last state")
