"""The page in headless Chromium, from a file: quiet, alone, and doing what its controls say.

Needs playwright and a Chromium (TRAINSHORT_BROWSER names one; else the usual names). Skipped where there is none,
unless CI=true and TRAINSHORT_BROWSER_REQUIRED=1 say that there must be one.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.report.made import change, make_run, make_runs, write
from tests.report.test_inspected import found as inspected
from trainshort.report.build import build_report
from trainshort.report.inspected import build_inspection

pytestmark = pytest.mark.slow
EVIL = "<script>window.hacked = 1</script><img src=x onerror='window.hacked = 2'>"
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
SCREENS = {"wide": (1280, 900, "light"), "dark": (1280, 900, "dark"), "narrow": (375, 800, "light")}


def _missing() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return None if _executable() else "there is no Chromium here"


def _executable() -> str | None:
    return os.environ.get("TRAINSHORT_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Opened:
    page: Any
    messages: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)

    def traces(self, chart: str = "extrapolation") -> list[dict[str, Any]]:
        code = f"document.getElementById('chart-{chart}').data.map(t => ({{name: t.name, visible: t.visible}}))"
        found: list[dict[str, Any]] = self.page.evaluate(code)
        return found

    def axis(self, which: str, chart: str = "extrapolation") -> str:
        return str(self.page.evaluate(f"document.getElementById('chart-{chart}').layout.{which}axis.type"))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if (missing := _missing()) is not None:
        if os.environ.get("CI") == "true" and os.environ.get("TRAINSHORT_BROWSER_REQUIRED") == "1":
            pytest.fail(f"{missing}, and this is where the page must be tested")
        pytest.skip(missing)
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_executable(), args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four methods, one of them with three seeds, sliding windows too, a sample that wants to be a script."""
    folder = tmp_path_factory.mktemp("report")
    folders = make_runs(folder / "runs", sliding=True)
    for seed in (1, 2):
        make_run(folder / "runs" / f"alibi-seed{seed}", seed=seed, sliding=True, factor=1.0 + seed / 10)
    write(folders[0] / "samples.json", [{"prompt": "def ", "text": f"def {EVIL}"}])
    return build_report([folder / "runs"], folder / "out", figures=False).page


def opened(browser: Any, path: Path, screen: str = "wide", *, chart: str = "training") -> Opened:
    """The page, once this chart of it is drawn."""
    width, height, scheme = SCREENS[screen]
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
    found = Opened(context.new_page())
    found.page.on("console", lambda message: found.messages.append(message.text))
    found.page.on("pageerror", lambda error: found.messages.append(str(error)))
    found.page.on("request", lambda request: found.requests.append(request.url))
    found.page.goto(path.as_uri())
    found.page.wait_for_selector("html[data-ready=true]")
    found.page.wait_for_selector(f"#chart-{chart} .main-svg")
    return found


@pytest.mark.parametrize("screen", SCREENS)
def test_it_opens_quietly_and_asks_for_nothing(browser: Any, report: Path, screen: str, tmp_path: Path) -> None:
    found = opened(browser, report, screen)
    assert found.messages == []
    assert found.requests == [report.as_uri()]
    assert found.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    buttons = found.page.evaluate("[...document.querySelectorAll('.modebar-btn')].map(e => e.dataset.title || '')")
    assert buttons
    assert not [title for title in buttons if "cloud" in title.lower() or "studio" in title.lower()]
    shot = Path(os.environ.get("TRAINSHORT_SCREENSHOTS", tmp_path)) / f"{screen}.png"
    found.page.screenshot(path=shot, full_page=True)
    assert shot.stat().st_size > 50_000
    ground = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
    text = found.page.evaluate("document.getElementById('chart-extrapolation').layout.font.color")
    assert (ground == "rgb(255, 255, 255)") == (screen != "dark")
    assert (text == "#1c2430") == (screen != "dark")


def test_four_curves_and_any_can_be_switched_off(browser: Any, report: Path) -> None:
    found = opened(browser, report)
    assert sorted(each["name"] for each in found.traces()) == ["ALiBi", "Rotary", "Sinusoidal", "T5 bias"]
    drawn = "#chart-extrapolation .scatterlayer .trace"
    assert found.page.locator(drawn).count() == 4
    box = found.page.get_by_label("Rotary")
    box.focus()
    found.page.keyboard.press("Space")  # the keyboard alone does it
    found.page.wait_for_function(f"document.querySelectorAll('{drawn}').length === 3")
    assert [each["visible"] for each in found.traces() if each["name"] == "Rotary"] == ["legendonly"]
    assert [each["visible"] for each in found.traces("cost") if each["name"] == "Rotary"] == ["legendonly"]
    found.page.locator("#chart-extrapolation .legendtoggle").first.click()
    found.page.wait_for_function(f"document.querySelectorAll('{drawn}').length === 2")
    assert not found.page.get_by_label("ALiBi", exact=True).is_checked()
    box.check()
    found.page.wait_for_function(f"document.querySelectorAll('{drawn}').length === 3")
    assert found.messages == []


def test_axes_and_views_change(browser: Any, report: Path) -> None:
    found = opened(browser, report)
    button = found.page.locator("button[data-chart=extrapolation][data-axis=x]")
    assert (found.axis("x"), button.get_attribute("aria-pressed")) == ("log", "true")
    button.click()
    found.page.wait_for_function("document.getElementById('chart-extrapolation').layout.xaxis.type === 'linear'")
    assert button.get_attribute("aria-pressed") == "false"
    found.page.locator("select[data-chart=extrapolation]").select_option(label="bits per byte")
    found.page.wait_for_function(
        "document.getElementById('chart-extrapolation').layout.yaxis.title.text === 'bits per byte'"
    )
    assert found.axis("x") == "log"
    options = found.page.locator("select[data-chart=kept] option").count()
    assert options == 9
    for place in range(options):
        found.page.locator("select[data-chart=kept]").select_option(str(place))
    assert found.messages == []


def test_hovering_shows_values(browser: Any, report: Path) -> None:
    found = opened(browser, report)
    found.page.evaluate("Plotly.Fx.hover('chart-extrapolation', [{curveNumber: 1, pointNumber: 2}])")
    shown = found.page.locator("#chart-extrapolation .hoverlayer").text_content()
    assert "12" in shown
    assert "Rotary" in shown


def test_the_csv_downloads_and_is_the_data(browser: Any, report: Path, tmp_path: Path) -> None:
    found = opened(browser, report)
    for name in ("extrapolation", "kept", "runs"):
        with found.page.expect_download() as waiting:
            found.page.locator(f"button[data-table={name}]").first.click()
        download = waiting.value
        assert download.suggested_filename == f"{name}.csv"
        download.save_as(tmp_path / name)
        assert (tmp_path / name).read_bytes() == (report.parent / "tables" / f"{name}.csv").read_bytes()
    assert found.messages == []


def test_injected_scripts_stay_text(browser: Any, tmp_path: Path) -> None:
    folder = make_run(tmp_path / "runs" / "<img src=x onerror=alert(1)>", EVIL)
    make_run(tmp_path / "runs" / "alibi")
    write(folder / "samples.json", [{"prompt": EVIL, "text": EVIL + EVIL}])
    change(folder / "config.json", model={"note": EVIL})
    found = opened(browser, build_report([tmp_path / "runs"], tmp_path / "out", title=EVIL, figures=False).page)
    assert found.page.evaluate("window.hacked") is None
    assert found.page.locator("img").count() == 0
    assert found.page.locator("h1").text_content() == EVIL
    assert EVIL in found.page.locator("pre").first.text_content()
    legend = found.page.locator("#chart-extrapolation .legendtext").all_text_contents()
    assert EVIL in [text.replace("\xa0", " ") for text in legend]
    assert found.messages == []
    assert len(found.requests) == 1


@pytest.mark.parametrize("screen", SCREENS)
def test_the_page_of_an_inspection(browser: Any, screen: str, tmp_path: Path) -> None:
    path = build_inspection(inspected(), tmp_path, figures=False)
    found = opened(browser, path, screen, chart="positions")
    assert found.messages == []
    assert found.requests == [path.as_uri()]
    assert found.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert found.page.evaluate("window.hacked") is None
    found.page.select_option("select[data-chart=heads]", index=3)
    found.page.wait_for_function("document.getElementById('chart-heads').data[0].z[0][0] === 10")
