"""A headless Chromium, driven through chromedriver's HTTP interface (W3C WebDriver): no library between."""

import base64
import json
import shutil
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ELEMENT = "element-6066-11e4-a52e-4f735466cecf"
"""The key of an element's id in answers, fixed by the W3C."""


def missing() -> str:
    """Which program is not there; "" if all are."""
    lacking = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    return f"needs {' and '.join(lacking)} on the PATH" if lacking else ""


class Browser:
    """One window."""

    def __init__(self, session: str):
        self._session = session

    def command(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """Of WebDriver, below this session."""
        return _ask(method, f"{self._session}/{path}", body)

    def open(self, url: str) -> None:
        """Goes to an address; waits until its page is loaded."""
        self.command("POST", "url", {"url": url})

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns."""
        return self.command("POST", "execute/sync", {"script": script, "args": list(arguments)})

    def wait(self, script: str, *arguments: Any, timeout_s: float = 20.0) -> Any:
        """What a script returns as soon as that is true."""
        end = time.monotonic() + timeout_s
        while not (found := self.run(script, *arguments)):
            if time.monotonic() > end:
                raise TimeoutError(f"{script!r} stayed false on {self.text('main')[:500]!r}")
            time.sleep(0.02)
        return found

    def find(self, css: str) -> str:
        """An element's id, once there is one."""
        self.wait("return document.querySelector(arguments[0]) !== null", css)
        found = self.command("POST", "element", {"using": "css selector", "value": css})
        return found[ELEMENT]

    def click(self, css: str) -> None:
        """As a mouse would: it fails if something else lies over the element."""
        self.command("POST", f"element/{self.find(css)}/click", {})

    def press(self, key: str) -> None:
        """A key, to whatever has the focus: "\\ue012" is the arrow to the left, "\\ue014" that to the right."""
        keys = [{"type": "keyDown", "value": key}, {"type": "keyUp", "value": key}]
        self.command("POST", "actions", {"actions": [{"type": "key", "id": "k", "actions": keys}]})

    def text(self, css: str) -> str:
        """What a reader sees of an element."""
        return self.run("return document.querySelector(arguments[0])?.innerText ?? ''", css)

    def log(self, kind: str) -> list[dict[str, Any]]:
        """What was logged since it was asked last: "browser" is the console, "performance" the network."""
        return self.command("POST", "se/log", {"type": kind})

    def requests(self) -> list[str]:
        """Addresses of all that was asked for since this was asked last."""
        events = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [
            event["params"]["request"]["url"]
            for event in events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, path: Path) -> None:
        """The window as PNG."""
        path.write_bytes(base64.b64decode(self.command("GET", "screenshot")))


def arrived(window: Browser, name: str) -> None:
    """Waits until a page of the viewer is shown: what follows # in its address begins with `name`."""
    window.wait(
        "return document.getElementById('page').dataset.ready === (location.hash || '#/')"
        " && location.hash.startsWith('#' + arguments[0])",
        name,
    )


@contextmanager
def browser(profile: Path, *, dark: bool = False, size: str = "1280,900") -> Iterator[Browser]:
    """A window that is closed afterwards, with its programs."""
    driver = subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert driver.stdout is not None
    try:
        port = next(
            line.rsplit(" ", 1)[1].rstrip(".\n")
            for line in driver.stdout
            if "started successfully on port" in line
        )
        flags = [
            *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"),
            *("--disable-background-networking", "--disable-component-update", "--no-first-run"),
            *(f"--window-size={size}", f"--user-data-dir={profile}"),
            *(("--force-dark-mode",) if dark else ()),
        ]
        wanted = {
            "browserName": "chrome",
            "goog:chromeOptions": {"args": flags, "binary": shutil.which("chromium")},
            "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
        }
        root = f"http://127.0.0.1:{port}/session"
        made = _ask("POST", root, {"capabilities": {"alwaysMatch": wanted}})
        session = f"{root}/{made['sessionId']}"
        try:
            yield Browser(session)
        finally:
            _ask("DELETE", session)
    finally:
        driver.terminate()
        driver.wait()
        driver.stdout.close()


def _ask(method: str, url: str, body: Mapping[str, Any] | None = None) -> Any:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urllib.request.urlopen(request, timeout=50) as answer:
            return json.load(answer)["value"]
    except urllib.error.HTTPError as error:
        with error:
            raise RuntimeError(f"{url}: {error.read().decode()[:600]}") from None
