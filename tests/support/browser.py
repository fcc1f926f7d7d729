"""A real browser for pages: headless Chromium, asked through its debugging pipe (Chrome DevTools Protocol).

https://chromedevtools.github.io/devtools-protocol/: messages are JSON, each ended by a zero byte; the browser reads
file descriptor 3 and writes 4.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
_SECONDS = 60.0
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


def found() -> str | None:
    """The first Chromium on the path; None when there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


@dataclass
class Seen:
    """One page as it was shown: words of its console, and what it asked for."""

    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


class Browser:
    """`with Browser() as browser:`; one page at a time."""

    def __enter__(self) -> Browser:
        program = found()
        assert program is not None
        self._profile = tempfile.TemporaryDirectory(prefix="skill-train-browser-", ignore_cleanup_errors=True)
        reads, self._write = os.pipe()
        self._read, writes = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (reads, writes)]  # neither is 3 or 4 already
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--hide-scrollbars"]
        folder = f"--user-data-dir={self._profile.name}"
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, *map(str, high), program, *options, folder],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (reads, writes, *high):
            os.close(end)
        self._buffer, self._number, self._seen = b"", 0, Seen()
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.ask(f"{domain}.enable")
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        self._profile.cleanup()

    def show(self, page: Path, *, width: int, dark: bool = False) -> Seen:
        """Opens a file at this width in CSS pixels, as a phone or a desktop would, and waits until it has loaded."""
        self._seen = Seen()
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.ask("Emulation.setEmulatedMedia", features=[feature])
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.ask("Emulation.setDeviceMetricsOverride", **metrics)
        self.ask("Page.navigate", url=page.resolve().as_uri())
        end = time.monotonic() + _SECONDS
        while self.value("document.readyState + ' ' + location.protocol") != "complete file:":
            assert time.monotonic() < end
        return self._seen

    def value(self, expression: str) -> Any:
        """What a JavaScript expression gives in the page."""
        answer = self.ask("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def picture(self) -> bytes:
        """The whole page as PNG."""
        answer = self.ask("Page.captureScreenshot", format="png", captureBeyondViewport=True)
        return base64.b64decode(answer["data"])

    def ask(self, method: str, **params: Any) -> dict[str, Any]:
        return self._ask(method, session=self._session, **params)

    def _ask(self, method: str, *, session: str | None = None, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        os.write(self._write, json.dumps(message | ({"sessionId": session} if session else {})).encode() + b"\0")
        while True:
            got = self._next()
            if got.get("id") == self._number:
                assert "error" not in got, got
                return dict(got["result"])
            self._note(got.get("method", ""), got.get("params", {}))

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            ready, _, _ = select.select([self._read], [], [], _SECONDS)
            assert ready, "the browser does not answer"
            more = os.read(self._read, 1 << 20)
            assert more, "the browser ended"
            self._buffer += more
        text, _, self._buffer = self._buffer.partition(b"\0")
        return dict(json.loads(text))

    def _note(self, method: str, said: dict[str, Any]) -> None:
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded"):
            self._seen.problems.append(json.dumps(said)[:500])
        elif method == "Network.requestWillBeSent":
            self._seen.requests.append(said["request"]["url"])
