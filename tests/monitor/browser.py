"""Pages in the system's Chromium, through playwright, and TensorBoard to serve them."""

import re
import shutil
import sys
from contextlib import contextmanager

from playwright.sync_api import sync_playwright

from tests.processes import started

NAMES = ("chromium", "chromium-browser", "google-chrome")


def executable():
    return next(filter(None, map(shutil.which, NAMES)), None)


@contextmanager
def open_page(width, height):
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": width, "height": height})
        page.set_default_timeout(30_000)
        yield page
        browser.close()


def wait_for(page, *words):
    """Until the page shows all of ``words``, also in custom elements."""
    for word in words:
        page.get_by_text(word).first.wait_for(state="attached")


@contextmanager
def open_tensorboard(logs):
    """Its address, on a free port of this machine."""
    serve = ["-m", "tensorboard.main", "--port", "0", "--host", "127.0.0.1", "--logdir"]
    with started([sys.executable, *serve, str(logs)]) as process:
        said = []
        for line in process.stdout:  # ends with the process
            said.append(line)
            if found := re.search(r"http://\S+:\d+/", line):
                yield found[0]
                return
        raise AssertionError("TensorBoard did not start:\n" + "".join(said))
