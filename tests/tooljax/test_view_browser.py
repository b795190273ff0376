"""The viewer's page in a real browser: what a reader clicks, presses and sees. Skipped without chromium."""

import pytest
import view_browser
from view_browser import arrived
from view_cases import HOSTILE, served, write_run

if view_browser.missing():
    pytest.skip(view_browser.missing(), allow_module_level=True)

LEFT, RIGHT, DOWN, ENTER = "\ue012", "\ue014", "\ue015", "\ue007"


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    """Of a viewer of two runs, demo and torn; the end of torn's only step is lost."""
    root = tmp_path_factory.mktemp("runs")
    write_run(root / "demo")
    stored = write_run(root / "torn") / "trajectories"
    (stored / "step_2.log").unlink()
    file = stored / "step_1.log"
    file.write_bytes(file.read_bytes()[:-400])
    with served(root) as url:
        yield url


@pytest.fixture(scope="module")
def window(tmp_path_factory):
    """A browser."""
    with view_browser.browser(tmp_path_factory.mktemp("profile")) as window:
        yield window


@pytest.fixture
def page(window, address):
    """Opens a page of the viewer by what follows # in its address."""

    def page(name: str = "/") -> view_browser.Browser:
        window.open("about:blank")
        window.open(f"{address}/#{name}")
        arrived(window, name.partition("?")[0])
        return window

    return page


def test_all_pages_open_without_an_error_and_ask_nobody_outside(page, address):
    window = page()
    window.log("browser")
    for name in (
        *("/", "/run?run=demo", "/step?run=demo&step=1&order=worst", "/step?run=torn&step=1"),
        "/trajectory?run=demo&step=2&index=0",
        "/compare?run=demo&a=1&b=2",
    ):
        page(name)
        assert "cannot be shown" not in window.text("main")
    assert window.log("browser") == []
    asked = [url for url in window.requests() if url.startswith(("http", "ws"))]
    assert len(asked) > 20
    assert [url for url in asked if not url.startswith(address + "/")] == []


def test_two_clicks_from_the_runs_to_why_the_worst_trajectory_failed(page):
    window = page()
    window.click("a[href='#/run?run=torn']")
    arrived(window, "/run")
    assert "Worst trajectory of step 1" in window.text("a.worst")
    window.click("a.worst")
    arrived(window, "/trajectory")
    assert window.text("#why") == (
        "engine_error Ended by engine_error: generation failed: “out of memory”. "
        "It has no reward: the reward function failed or could not run."
    )
    assert "1 of 5, worst first" in window.text(".pager")


def colours(window) -> set[str]:
    """Backgrounds of the tokens that the policy sampled."""
    script = (
        "return [...document.querySelectorAll('.t:not(.masked)')]"
        ".map(t => getComputedStyle(t).backgroundColor)"
    )
    return set(window.run(script))


def test_the_selector_changes_the_colours_of_sampled_tokens_only(page):
    window = page("/trajectory?run=demo&step=1&index=1")
    seen = {}
    for name in ("log_prob", "ratio", "advantage", "entropy", "none"):
        window.click(f"input[value={name}]")
        seen[name] = colours(window)
        masked = "return [...document.querySelectorAll('.t.masked')].some(t => t.style.cssText)"
        assert window.run(masked) is False
    transparent = {"rgba(0, 0, 0, 0)"}
    assert seen["none"] == transparent
    assert seen["entropy"] == transparent  # the run has none
    assert all(len(seen[name]) == 1 for name in seen)
    assert len({str(seen[name]) for name in ("log_prob", "ratio", "advantage", "none")}) == 4
    window.click("input[value=ratio]")
    # exp(-0.25 + 0.5) for all: full colour is at the next nice step of the log-ratio, 0.5
    assert window.text(".legend").split() == ["0.607", "1", "1.65"]


def test_a_token_tells_its_numbers(page):
    window = page("/trajectory?run=demo&step=1&index=1")
    window.click(".t:not(.masked)")
    told = window.text(".token")
    for line in ("Token (kept)", '"c"', "-0.5", "-0.25", "1.284025"):
        assert line in told
    window.click(".t:not(.masked)")
    window.click(".t.masked")
    assert "not sampled by the policy" in window.text(".token")


@pytest.mark.parametrize(
    "name",
    [
        "/step?run=demo&step=1&order=worst",
        "/trajectory?run=demo&step=1&index=1",
        "/trajectory?run=demo&step=1&index=1&status=<img src=x onerror=window.stolen=4>",
        "/run?run=<img src=x onerror=window.stolen=5>",
    ],
)
def test_hostile_text_is_text(page, name):
    window = page(name)
    window.run("document.querySelectorAll('details').forEach(d => d.open = true)")
    shown = window.text("main")
    assert "<script>window.stolen=1</script>" in shown or "onerror=window.stolen" in shown
    if name.startswith("/trajectory?run=demo&step=1&index=1"):
        assert HOSTILE in shown
    assert window.run("return window.stolen === undefined")
    markup = "return document.querySelectorAll('main script, main img, main a[href^=java]').length"
    assert window.run(markup) == 0


def test_no_script_but_the_pages_own_may_run(page):
    window = page()
    window.run(
        "const s = document.createElement('script'); s.textContent = 'window.stolen = 6';"
        "document.body.append(s);"
        "const i = new Image(); i.setAttribute('onerror', 'window.stolen = 7'); i.src = '/static/x';"
        "document.body.append(i); window.failed = false;"
        "i.addEventListener('error', () => window.failed = true)"
    )
    window.wait("return window.failed")
    assert window.run("return window.stolen === undefined")


def test_arrows_go_from_one_trajectory_to_the_next(page):
    window = page("/step?run=demo&step=1&order=worst")
    index = "return new URLSearchParams(location.hash.split('?')[1]).get('index')"
    window.press(DOWN)
    window.press(DOWN)
    window.press(ENTER)
    arrived(window, "/trajectory?run=demo&step=1&index=5")
    seen = [window.run(index)]
    for key in (RIGHT, RIGHT, LEFT):
        before = window.run("return location.hash")
        window.press(key)
        window.wait("return location.hash !== arguments[0]", before)
        arrived(window, "/trajectory")
        seen.append(window.run(index))
    assert seen == ["5", "2", "1", "2"]  # of 3, 5, 2, 1, 0, 4


def test_filters_are_part_of_the_address(page):
    window = page("/step?run=demo&step=1")
    choose = (
        "const s = document.querySelector(`select[name=${arguments[0]}]`); s.value = arguments[1];"
        "s.dispatchEvent(new Event('change'))"
    )
    assert window.text(".total") == "1 to 6 of 6"
    window.run(choose, "tool", "calculator")
    window.wait("return document.querySelector('.total').textContent === '1 to 3 of 3'")
    window.run(choose, "error", "error")
    window.wait("return document.querySelector('.total').textContent === '1 to 1 of 1'")
    assert "tool=calculator&error=error" in window.run("return location.hash")
    window.command("POST", "refresh", {})
    window.wait("return document.querySelector('.total')?.textContent === '1 to 1 of 1'")


def test_two_steps_side_by_side_have_the_same_filters(page):
    window = page("/compare?run=demo&a=1&b=2")
    totals = "return [...document.querySelectorAll('.total')].map(t => t.textContent)"
    assert window.run(totals) == ["1 to 6 of 6", "1 to 1 of 1"]
    window.run(
        "const s = document.querySelector('select[name=status]'); s.value = 'max_turns';"
        "s.dispatchEvent(new Event('change'))"
    )
    window.wait("return document.body.innerText.includes('Nothing fits these filters')")
    window.wait(f"return (() => {{ {totals} }})()[0] === '1 to 1 of 1'")
    window.click(".list a.row")
    window.wait("return document.querySelector('.open #why') !== null")
    assert "Ended by max_turns" in window.text(".open #why")
    assert "policy/loss" in window.text("main")


def test_what_was_lost_is_told(page):
    window = page("/step?run=torn&step=1")
    assert "Part of this step is lost." in window.text("[role=alert]")
    assert "5 of 6 trajectories are left" in window.text("main")
    page("/step?run=demo&step=7")
    assert "step 7 of demo is not stored; stored are 1 to 2" in window.text("[role=alert]")


def test_dark_and_light(page):
    window = page("/run?run=demo")
    background = "return getComputedStyle(document.body).backgroundColor"
    first = window.run(background)
    window.click("#theme")
    second = window.run(background)
    assert first != second
    page("/run?run=demo")
    assert window.run(background) == second  # it is remembered
    window.click("#theme")
    assert window.run(background) == first
