"""A headless Chromium that opens pages, over the DevTools protocol on a pipe: no driver, and no package.

``python -m tests.monitor.browser LOGDIR FILE.png`` keeps a picture of TensorBoard's custom scalars.
"""

from __future__ import annotations

import base64
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tests.processes import clean_env, end_session

NAMES = ("chromium", "chromium-browser", "google-chrome")
# text of a page, with what custom elements keep in shadow roots of their own
_TEXT = """
(function text(node) {
  if (node.nodeType === Node.TEXT_NODE) return node.data;
  if (['SCRIPT', 'STYLE', 'TEMPLATE'].includes(node.nodeName)) return '';
  const inside = node.shadowRoot ? [...node.shadowRoot.childNodes] : [];
  return [...inside, ...node.childNodes].map(text).join(' ');
})(document.body)
"""


def executable() -> str | None:
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One page of a Chromium that was started by `open_browser`."""

    def __init__(self, to_browser: BinaryIO, from_browser: BinaryIO) -> None:
        self._to, self._from = to_browser, from_browser
        self._count = 0
        self._session: str | None = None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def call(self, method: str, **params: Any) -> Any:
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        self._to.write(json.dumps(message).encode() + b"\0")
        self._to.flush()
        while True:
            answer = json.loads(self._read())
            if answer.get("id") == self._count:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _read(self) -> bytes:
        received = bytearray()
        while (byte := self._from.read(1)) != b"\0":
            assert byte, "the browser has gone"
            received += byte
        return bytes(received)

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url="about:blank")  # else an address that differs after its # is not loaded again
        self.call("Page.navigate", url=url)

    def evaluate(self, script: str) -> Any:
        return self.call("Runtime.evaluate", expression=script, returnByValue=True)["result"].get("value")

    def text(self) -> str:
        """All that the page says, one space for any white space."""
        return " ".join((self.evaluate(_TEXT) or "").split())

    def wait_for(self, *words: str, seconds: float = 30) -> str:
        """The page's text, once it has all of ``words``."""
        until = time.monotonic() + seconds
        text = self.text()
        while missing := [word for word in words if word not in text]:
            assert time.monotonic() < until, f"after {seconds} s the page has no {missing}:\n{text[:3000]}"
            time.sleep(0.2)
            text = self.text()
        return text

    def screenshot(self) -> bytes:
        """PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])


@contextmanager
def open_browser(folder: Path) -> Iterator[Browser]:
    """``folder`` holds its profile. Ends with every process that it started."""
    chromium = executable()
    assert chromium is not None, f"none of {NAMES} is installed"
    read_here, write_there = os.pipe()
    read_there, write_here = os.pipe()
    options = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        f"--user-data-dir={folder}",
        "--remote-debugging-pipe",
    ]

    def place_pipes() -> None:
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (read_there, write_there)]
        for end, expected in zip(ends, (3, 4), strict=True):  # where Chromium looks for them
            os.dup2(end, expected)
            os.close(end)

    process = subprocess.Popen(
        [chromium, *options],
        close_fds=False,  # Python's own are closed anyway
        preexec_fn=place_pipes,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(read_there)
    os.close(write_there)
    try:
        with os.fdopen(write_here, "wb") as to_browser, os.fdopen(read_here, "rb") as from_browser:
            yield Browser(to_browser, from_browser)
    finally:
        end_session(process)
        process.wait(timeout=60)


@contextmanager
def open_tensorboard(logs: Path) -> Iterator[str]:
    """Its address, on a free port of this machine."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tensorboard.main", "--logdir", str(logs), "--port", "0", "--host", "127.0.0.1"],
        env=clean_env(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert process.stderr is not None
        said = []
        for line in process.stderr:  # ends with the process
            said.append(line)
            if found := re.search(r"http://\S+:\d+/", line):
                yield found[0]
                return
        raise AssertionError("TensorBoard did not start:\n" + "".join(said))
    finally:
        end_session(process)
        process.wait(timeout=60)


def main(logs: str, picture: str) -> None:
    import tempfile

    with (
        tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder,
        open_tensorboard(Path(logs)) as address,
        open_browser(Path(folder)) as browser,
    ):
        browser.size(1500, 1950)
        browser.open(f"{address}#custom_scalars")
        print(browser.wait_for("Training", "Communication")[:2000])
        time.sleep(6)
        Path(picture).write_bytes(browser.screenshot())


if __name__ == "__main__":
    main(*sys.argv[1:])
