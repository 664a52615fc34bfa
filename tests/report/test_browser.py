"""The page in headless Chromium, from a file: quiet, alone, and doing what its controls say.

Needs playwright, axe-playwright-python and a Chromium (TRAINSHORT_BROWSER names one; else the usual names). Skipped
where they are not there, unless CI=true and TRAINSHORT_BROWSER_REQUIRED=1 say that they must be.
"""

from __future__ import annotations

import importlib.util
import itertools
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
SCREENS = {
    "wide": (1400, 900, "light"),
    "dark": (1400, 900, "dark"),
    "tablet": (768, 1024, "light"),
    "narrow": (375, 800, "light"),
}


def _missing() -> str | None:
    if importlib.util.find_spec("playwright") is None:
        return "playwright is not installed"
    return None if _executable() else "there is no Chromium here"


def _executable() -> str | None:
    return os.environ.get("TRAINSHORT_BROWSER") or next(filter(None, map(shutil.which, NAMES)), None)


def leave_out(missing: str) -> None:
    if os.environ.get("CI") == "true" and os.environ.get("TRAINSHORT_BROWSER_REQUIRED") == "1":
        pytest.fail(f"{missing}, and this is where the page must be tested")
    pytest.skip(missing)


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
        leave_out(missing)
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


@pytest.fixture(scope="module")
def shared(browser: Any, report: Path) -> Opened:
    """One page for the tests that only look at it."""
    return opened(browser, report)


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
    assert found.page.locator(".modebar-btn").count() == 0  # none of plotly's own buttons, which may lead elsewhere
    assert found.page.locator("a:not([href^='#'])").count() == 0
    shot = Path(os.environ.get("TRAINSHORT_SCREENSHOTS", tmp_path)) / f"{screen}.png"
    found.page.screenshot(path=shot, full_page=True)
    assert shot.stat().st_size > 50_000
    ground = found.page.evaluate("getComputedStyle(document.body).backgroundColor")
    text = found.page.evaluate("document.getElementById('chart-extrapolation').layout.font.color")
    assert (ground == "rgb(255, 255, 255)") == (screen != "dark")
    assert (text == "#1c2430") == (screen != "dark")


def test_the_finding_and_the_chart_stand_above_the_fold(shared: Opened) -> None:
    found = shared
    tops = [found.page.locator(each).bounding_box() for each in (".bar", "h1", ".finding", "#chart-extrapolation")]
    places = [(box["y"], box["y"] + box["height"]) for box in tops]
    assert places == sorted(places)
    assert places[-1][1] <= 900
    assert places[0][1] <= 100  # the bar is short
    found.page.locator("#runs").scroll_into_view_if_needed()
    assert found.page.locator(".bar").bounding_box()["y"] == 0  # and stays
    found.page.wait_for_selector(".bar a[href='#runs'][aria-current]")
    found.page.evaluate("scrollTo(0, 0)")
    headings = [text.strip() for text in found.page.locator("h1, h2").all_text_contents()]
    assert len(headings) == len(set(headings))


def test_the_chart_explains_itself(shared: Opened) -> None:
    found = shared
    found.page.wait_for_function("document.getElementById('chart-extrapolation').layout.annotations.length === 5")
    layout = found.page.evaluate("document.getElementById('chart-extrapolation').layout")
    labels = {each["text"]: each for each in layout["annotations"]}
    assert set(labels) == {
        "<b>ALiBi 4.400</b>", "Rotary 12.00", "Sinusoidal 24.00", "T5 bias 6.000", "longer than trained (64 tokens) →"
    }  # fmt: skip
    heights = sorted(each["y"] for each in layout["annotations"] if each["xanchor"] == "left" and each["y"] < 1)
    assert all(high - low > 0.03 for low, high in itertools.pairwise(heights))  # no label lies on another
    (shaded,) = (shape for shape in layout["shapes"] if shape["type"] == "rect")
    assert shaded["x0"] == 64


def test_four_curves_and_any_can_be_switched_off(browser: Any, report: Path) -> None:
    found = opened(browser, report)
    names = [each["name"] for each in found.traces() if "spread" not in each["name"]]
    assert sorted(names) == ["ALiBi", "Rotary", "Sinusoidal", "T5 bias"]
    drawn = "#chart-extrapolation .trace.scatter"
    assert found.page.locator(drawn).count() == 5  # and the band of ALiBi, which has three seeds
    box = found.page.get_by_label("Rotary", exact=True)
    box.focus()
    found.page.keyboard.press("Space")  # the keyboard alone does it
    found.page.wait_for_function(f"document.querySelectorAll('{drawn}').length === 4")
    assert [each["visible"] for each in found.traces() if each["name"] == "Rotary"] == ["legendonly"]
    assert [each["visible"] for each in found.traces("cost") if each["name"] == "Rotary"] == ["legendonly"]
    assert "Rotary" not in str(
        found.page.evaluate("document.getElementById('chart-extrapolation').layout.annotations")
    )
    found.page.get_by_label("ALiBi", exact=True).uncheck()
    found.page.wait_for_function(f"document.querySelectorAll('{drawn}').length === 2")
    box.check()
    found.page.wait_for_function(f"document.querySelectorAll('{drawn}').length === 3")
    assert (
        found.page.locator(".legendtoggle").count() <= 4
    )  # only of heads: methods have one legend, which is the switch
    assert found.messages == []


@pytest.mark.parametrize("scale", ["log", "stretched"])
def test_what_is_switched_off_makes_room_for_the_others(browser: Any, report: Path, scale: str) -> None:
    found = opened(browser, report)
    found.page.locator("select[data-chart=extrapolation][data-scale]").select_option(scale)
    top = "document.getElementById('chart-extrapolation').layout.yaxis.range[1]"
    across = "document.getElementById('chart-extrapolation').layout.xaxis.range"
    found.page.wait_for_function("document.getElementById('chart-extrapolation').data.length")
    before, lengths = found.page.evaluate(top), found.page.evaluate(across)
    found.page.get_by_label("Sinusoidal", exact=True).uncheck()
    found.page.wait_for_function(f"{top} < {before} - 0.1")  # 24 was the highest, 12 is
    for name in ("Rotary", "T5 bias", "ALiBi"):
        found.page.get_by_label(name, exact=True).uncheck()
    found.page.wait_for_function("!document.querySelector('#chart-extrapolation .trace.scatter')")
    assert found.page.evaluate(across) == lengths
    assert found.messages == []


def test_every_view_can_be_chosen_on_a_phone(browser: Any, report: Path) -> None:
    found = opened(browser, report, "narrow")
    outside = "each => each.getBoundingClientRect().right > innerWidth || each.scrollWidth > each.clientWidth + 1"
    assert found.page.locator(".choice label").count() > 3
    assert not found.page.evaluate(f"[...document.querySelectorAll('.choice, .choice label')].some({outside})")
    labels = found.page.locator("fieldset:has([name=view-extrapolation]) label")
    boxes = [each.bounding_box() for each in labels.all()]
    assert len({box["y"] for box in boxes}) == len(boxes) == 4  # each in a row of its own, of the same width
    assert len({(box["x"], box["width"]) for box in boxes}) == 1


def test_axes_scales_and_views_change(browser: Any, report: Path) -> None:
    found = opened(browser, report)
    chart = "document.getElementById('chart-extrapolation')"
    button = found.page.locator("button[data-chart=extrapolation][data-across]")
    assert (found.axis("x"), button.get_attribute("aria-pressed")) == ("log", "true")
    button.click()
    found.page.wait_for_function(f"{chart}.layout.xaxis.type === 'linear'")
    assert button.get_attribute("aria-pressed") == "false"
    scale = found.page.locator("select[data-chart=extrapolation][data-scale]")
    assert (found.axis("y"), scale.input_value()) == ("log", "log")
    scale.select_option("stretched")
    found.page.wait_for_function(f"{chart}.data[0].y[0] < 5")  # heights, no perplexities
    assert found.page.evaluate(f"{chart}.data[0].text[0]") == "5.500 ± 0.500"
    found.page.get_by_role("radio", name="bits per byte").check()
    found.page.wait_for_function(f"{chart}.layout.yaxis.title.text === 'bits per byte'")
    assert found.axis("x") == "log"
    assert scale.input_value() == found.axis("y")
    caption = found.page.locator("figure:has(#chart-extrapolation) figcaption")
    label = found.page.locator("#chart-extrapolation")
    assert caption.inner_text().startswith("Bits per byte (lower is better) by the length")
    assert caption.inner_text() in label.get_attribute("aria-label")
    found.page.get_by_role("radio", name="ratio to the trained length").check()
    found.page.wait_for_function(f"{chart}.data.some(trace => trace.y[2] === 3)")
    assert caption.inner_text().startswith("Perplexity divided by that at the training length")
    assert "bands" not in caption.inner_text()
    assert label.get_attribute("aria-label").endswith(caption.inner_text())
    options = found.page.locator("select[data-chart=kept] option").count()
    assert options == 9
    for place in range(options):
        found.page.locator("select[data-chart=kept]").select_option(str(place))
    assert found.messages == []


def test_one_tooltip_has_the_rounded_values_of_all_methods(shared: Opened) -> None:
    found = shared
    box = found.page.locator("#chart-extrapolation .nsewdrag").bounding_box()
    found.page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    found.page.wait_for_selector("#chart-extrapolation .hoverlayer .legendtext")
    shown = found.page.locator("#chart-extrapolation .hoverlayer .legendtext").all_text_contents()
    shown = [" ".join(text.split()) for text in shown]
    assert shown == ["4.950 ± 0.450 ALiBi", "5.750 T5 bias", "6.000 Rotary", "12.00 Sinusoidal"]
    radius = "getComputedStyle(document.querySelector('#chart-extrapolation .hoverlayer .bg')).rx"
    assert found.page.evaluate(radius) not in ("auto", "0px")


def test_the_keyboard_reads_a_chart_and_reaches_every_control(shared: Opened) -> None:
    found = shared
    found.page.locator("#chart-extrapolation").focus()
    for _ in range(3):
        found.page.keyboard.press("ArrowRight")
    said = found.page.locator("#said").text_content()
    assert said == "256: ALiBi 4.400 ± 0.400, Rotary 12.00, Sinusoidal 24.00, T5 bias 6.000"
    found.page.wait_for_selector("#chart-extrapolation .hoverlayer .legendtext")
    found.page.keyboard.press("ArrowLeft")
    assert found.page.locator("#said").text_content().startswith("128: ")
    found.page.locator("#chart-kept").focus()
    for key in ("ArrowRight", "ArrowRight", "ArrowDown"):
        found.page.keyboard.press(key)
    assert found.page.locator("#said").text_content() == "layer 2, head 2: 25.0%"
    selector = "a, button:not([hidden]), select, summary, .scroll, .chart, input:not([type=radio])"
    shown = f"[...document.querySelectorAll('{selector}')].filter(each => each.checkVisibility())"
    wanted = found.page.evaluate(f"{shown}.map((each, place) => each.dataset.stop = place)")
    found.page.locator(".skip").focus()
    reached = [0]
    for _ in range(len(wanted) + 40):
        found.page.keyboard.press("Tab")
        stop = found.page.evaluate("document.activeElement.dataset.stop ?? null")
        reached += [] if stop is None or int(stop) in reached else [int(stop)]
    assert reached == sorted(reached)  # in the order of the page
    assert set(reached) == set(wanted)


def test_zooming_has_a_way_back(browser: Any, report: Path) -> None:
    found = opened(browser, report)
    back = found.page.locator("button[data-reset=extrapolation]")
    assert not back.is_visible()
    box = found.page.locator("#chart-extrapolation .nsewdrag").bounding_box()
    found.page.mouse.move(box["x"] + 50, box["y"] + 50)
    found.page.mouse.down()
    found.page.mouse.move(box["x"] + 400, box["y"] + 200, steps=4)
    found.page.mouse.up()
    back.wait_for()
    before = found.page.evaluate("document.getElementById('chart-extrapolation').layout.xaxis.range")
    back.click()
    back.wait_for(state="hidden")
    assert found.page.evaluate("document.getElementById('chart-extrapolation').layout.xaxis.range") != before


def test_a_table_that_scrolls_says_so(browser: Any, shared: Opened, report: Path) -> None:
    box = ".box:has(#perplexity-table)"
    shared.page.wait_for_selector(f"{box}:not(.scrolls)")
    narrow = opened(browser, report, "narrow")
    narrow.page.wait_for_selector(f"{box}.scrolls .more", state="visible")
    narrow.page.locator(f"{box} .scroll").evaluate("each => each.scrollTo(10000, 0)")
    narrow.page.wait_for_selector(f"{box}.ended")


def test_files_are_made_here_and_hold_the_data(shared: Opened, report: Path, tmp_path: Path) -> None:
    found = shared
    with found.page.expect_download() as waiting:
        found.page.locator("button[data-image=extrapolation]").click()
    assert waiting.value.suggested_filename == "extrapolation.png"
    assert all(each.startswith(("data:", "blob:")) for each in found.requests[1:])
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
    assert EVIL in found.page.locator(".legend label").all_text_contents()
    ends = found.page.locator("#chart-extrapolation .annotation-text").all_text_contents()
    assert any(text.startswith("<script>") for text in ends)  # shortened where it is too long
    assert found.messages == []
    assert len(found.requests) == 1


@pytest.mark.parametrize("screen", ["dark", "narrow"])
def test_the_page_of_an_inspection(browser: Any, screen: str, tmp_path: Path) -> None:
    path = build_inspection(inspected(), tmp_path, figures=False)
    found = opened(browser, path, screen, chart="positions")
    assert found.messages == []
    assert found.requests == [path.as_uri()]
    assert found.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert found.page.evaluate("window.hacked") is None
    found.page.select_option("select[data-chart=heads]", index=3)
    found.page.wait_for_function("document.getElementById('chart-heads').data[0].z[0][0] === 10")


@pytest.mark.parametrize("screen", ["wide", "dark", "narrow"])
@pytest.mark.parametrize("which", ["report", "inspection"])
def test_axe_finds_nothing(browser: Any, report: Path, which: str, screen: str, tmp_path: Path) -> None:
    """Names, roles, contrast and order, of the whole page with all of it opened; findings of any weight count."""
    if importlib.util.find_spec("axe_playwright_python") is None:
        leave_out("axe-playwright-python is not installed")
    from axe_playwright_python.sync_playwright import Axe

    path = report if which == "report" else build_inspection(inspected(), tmp_path, figures=False)
    found = opened(browser, path, screen, chart="training" if which == "report" else "positions")
    found.page.evaluate("document.querySelectorAll('details').forEach(each => each.open = true)")
    answer = Axe().run(found.page).response["violations"]
    assert [(each["id"], each["impact"], each["nodes"][0]["html"][:200]) for each in answer] == []
