"""A real Chromium against a server of the test's own. Skips with the reason where there is none; with
RAYPS_REQUIRE_ALL=1 such a skip is a failure.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")


def missing(reason: str) -> Any:
    """Skip, or fail where everything is required."""
    if os.environ.get("RAYPS_REQUIRE_ALL") == "1":
        pytest.fail(f"{reason} (RAYPS_REQUIRE_ALL=1)")
    pytest.skip(reason)


class Shared:
    """One browser for all tests of this process that need it."""

    def __init__(self) -> None:
        self.ends: contextlib.ExitStack | None = None
        self.browser: Any = None

    def get(self) -> Any:
        if self.ends is None:
            found = next((path for name in CHROMIUM if (path := shutil.which(name))), None)
            if found is None:
                missing("no Chromium: install Debian's `chromium`")
            try:
                from playwright.sync_api import sync_playwright
            except ImportError:
                missing("no playwright: pip install playwright")
            if not (ROOT / "dashboards/dist/index.html").is_file():
                missing("the dashboard is not built: npm ci && npm run build in dashboards/")
            self.ends = contextlib.ExitStack()
            play = self.ends.enter_context(sync_playwright())
            options = ["--no-sandbox", "--disable-dev-shm-usage"]
            self.browser = play.chromium.launch(executable_path=found, args=options)
            self.ends.callback(self.browser.close)
        return self.browser

    def end(self) -> None:
        ends, self.ends = self.ends, None
        if ends is not None:
            ends.close()


SHARED = Shared()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(nextitem: Any) -> Iterator[None]:
    """End the browser before the first test that does not use it: Playwright's event loop runs in this thread."""
    try:
        return (yield)
    finally:
        if "chromium" not in getattr(nextitem, "fixturenames", ()):
            SHARED.end()


@pytest.fixture
def chromium() -> Any:
    """The shared browser; it starts with the first test that uses it."""
    return SHARED.get()


class Tab:
    """A page and what it complained about."""

    def __init__(self, page: Any) -> None:
        self.page = page
        self.complaints: list[str] = []
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._console)

    def _console(self, message: Any) -> None:
        # a refused request is part of some tests; a script or policy error is not
        if message.type == "error" and "Failed to load resource" not in message.text:
            self.complaints.append(message.text)


@pytest.fixture
def tab(chromium: Any) -> Iterator[Callable[..., Any]]:
    """Opens pages in contexts of their own; a script error or a breach of the content policy fails the test."""
    tabs: list[Tab] = []
    contexts = []

    def new(width: int = 1280, height: int = 800, **options: Any) -> Any:
        context = chromium.new_context(viewport={"width": width, "height": height}, **options)
        context.set_default_timeout(120_000)  # ends a hang only
        contexts.append(context)
        tabs.append(Tab(context.new_page()))
        return tabs[-1].page

    yield new
    for context in contexts:
        context.close()
    assert [text for one in tabs for text in one.complaints] == []


def _fake(**options: Any) -> ThreadingHTTPServer:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "dashboards/dev")
        module = importlib.import_module("fake_service")
    server: ThreadingHTTPServer = module.serve(0, **options)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


@pytest.fixture
def fake() -> Iterator[Callable[..., str]]:
    """Starts stand-in services and gives their addresses."""
    servers: list[ThreadingHTTPServer] = []

    def start(**options: Any) -> str:
        servers.append(_fake(**options))
        return f"http://127.0.0.1:{servers[-1].server_address[1]}/"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()
