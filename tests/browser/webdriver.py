"""A browser that is driven as W3C WebDriver says, by requests to Debian's chromedriver."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

ARGUMENTS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--window-size=1300,1600", "--force-color-profile=srgb"),
]
KEYS = {
    "ArrowLeft": "\ue012",
    "ArrowRight": "\ue014",
    "PageDown": "\ue00f",
    "Home": "\ue011",
    "End": "\ue010",
}
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """One page at a time."""

    def __init__(self, url: str, session: dict[str, Any]) -> None:
        self._url = f"{url}/session/{session['sessionId']}"

    def open(self, url: str) -> None:
        """Load a page anew and wait until its tables are shown."""
        self._post("/url", {"url": "about:blank"})
        self._post("/url", {"url": url})
        self.run(
            "const content = document.getElementById('content');"
            "return new Promise((done) => { const look = () => "
            "content.hidden ? setTimeout(look, 10) : done(); look(); });"
        )

    def run(self, script: str, *arguments: object) -> Any:
        """What a script returns; a promise is waited for."""
        return self._post("/execute/sync", {"script": script, "args": arguments})

    def text(self, selector: str) -> str:
        """What a reader sees of an element."""
        return str(self._get(f"/element/{self._find(selector)}/text"))

    def texts(self, selector: str) -> list[str]:
        """The text of every element that the selector fits, seen or not."""
        script = "return [...document.querySelectorAll(arguments[0])].map((e) => e.textContent);"
        return list(self.run(script, selector))

    def keys(self, selector: str, *keys: str) -> None:
        """Press keys while an element has the focus."""
        text = "".join(KEYS.get(key, key) for key in keys)
        self._post(f"/element/{self._find(selector)}/value", {"text": text})

    def click(self, selector: str, x: int | None = None, y: int | None = None) -> None:
        """Click on an element, in the middle or at a place counted from its upper left corner."""
        element = self._find(selector)
        if x is None or y is None:
            self._post(f"/element/{element}/click", {})
            return
        self.run("document.querySelector(arguments[0]).scrollIntoView();", selector)
        box = self._get(f"/element/{element}/rect")
        left, top = self.run("return [window.scrollX, window.scrollY];")
        move = {
            "type": "pointerMove",
            "duration": 0,
            "origin": "viewport",
            "x": round(box["x"] - left + x),
            "y": round(box["y"] - top + y),
        }
        press = [{"type": "pointerDown", "button": 0}, {"type": "pointerUp", "button": 0}]
        mouse = {"type": "pointer", "id": "mouse", "actions": [move, *press]}
        self._post("/actions", {"actions": [mouse]})

    def media(self, **features: str) -> None:
        """Show the page as on paper (`type="print"`) or in another colour scheme."""
        media = features.pop("type", "")
        listed = [{"name": name.replace("_", "-"), "value": v} for name, v in features.items()]
        parameters = {"media": media, "features": listed}
        self._post("/goog/cdp/execute", {"cmd": "Emulation.setEmulatedMedia", "params": parameters})
        # Pages hear of it when the next frame is drawn.
        frame = "requestAnimationFrame(() => requestAnimationFrame(done))"
        self.run(f"return new Promise((done) => {frame});")

    def complaints(self) -> list[str]:
        """What the browser had to say since it was last asked: errors, refused loads."""
        entries = self._post("/se/log", {"type": "browser"})
        # Rendering: advice about reading pixels back, which only tests do.
        return [entry["message"] for entry in entries if entry["source"] != "rendering"]

    def _find(self, selector: str) -> str:
        found = self._post("/element", {"using": "css selector", "value": selector})
        return str(found[_ELEMENT])

    def _get(self, path: str) -> Any:
        return _ask(Request(self._url + path))

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        return _ask(Request(self._url + path, json.dumps(body).encode(), method="POST"))

    def quit(self) -> None:
        """Close the browser."""
        _ask(Request(self._url, method="DELETE"))


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A browser with a profile of its own, for as long as the block runs."""
    with subprocess.Popen(
        ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as driver:
        try:
            assert driver.stdout is not None
            lines = []
            while not (port := re.search(r"successfully on port (\d+)", "".join(lines[-1:]))):
                lines.append(driver.stdout.readline())
                assert lines[-1], "".join(lines)
            url = f"http://127.0.0.1:{port[1]}"
            chosen = {
                "goog:chromeOptions": {"args": [*ARGUMENTS, f"--user-data-dir={profile}"]},
                "goog:loggingPrefs": {"browser": "ALL"},
            }
            body = json.dumps({"capabilities": {"alwaysMatch": chosen}}).encode()
            opened = Browser(url, _ask(Request(f"{url}/session", body, method="POST")))
            try:
                yield opened
            finally:
                opened.quit()
        finally:
            driver.terminate()


def _ask(request: Request) -> Any:
    with urlopen(request, timeout=60) as answer:
        return json.load(answer)["value"]
