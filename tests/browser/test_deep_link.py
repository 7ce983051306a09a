"""A plain path that is typed or reloaded, `/jobs/ID`, shows its page: at the root, and behind a proxy's path prefix."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from service_site import Site

PREFIX = "/team/rayps"
HOP = ("connection", "transfer-encoding", "content-length", "keep-alive")


@pytest.fixture
def site(tmp_path: Path, chromium: Any) -> Iterator[Site]:
    running = Site(tmp_path / "state")
    yield running
    running.close()


@pytest.fixture
def proxy(site: Site) -> Iterator[str]:
    """A reverse proxy that takes PREFIX off, as nginx's `location /team/rayps/ { proxy_pass http://...:port/; }`."""

    class Handler(BaseHTTPRequestHandler):
        def forward(self) -> None:
            if not self.path.startswith(f"{PREFIX}/"):
                self.send_error(404)
                return
            body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            line = http.client.HTTPConnection("127.0.0.1", site.port, timeout=60)
            line.request(self.command, self.path.removeprefix(PREFIX), body, dict(self.headers))
            answer = line.getresponse()
            self.send_response(answer.status)
            for name, value in answer.getheaders():
                if name.lower() not in HOP:
                    self.send_header(name, value)
            self.end_headers()
            self.close_connection = True
            try:
                while block := answer.read1(65536):
                    self.wfile.write(block)
                    self.wfile.flush()
            except OSError:
                pass  # the browser has left
            line.close()

        do_GET = do_POST = do_DELETE = do_PATCH = forward

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}{PREFIX}"
    server.shutdown()
    server.server_close()


@pytest.mark.browser
@pytest.mark.parametrize("behind", ["the root", "a prefix"])
def test_a_plain_path_shows_its_page(site: Site, proxy: str, tab: Callable[..., Any], behind: str) -> None:
    job = site.add(name="deep-job")
    base = site.url if behind == "the root" else proxy
    page = tab()
    code = site.http.post("/api/v1/codes").json()["code"]
    page.goto(f"{base}/#code={code}")
    page.wait_for_selector(f"a[href*='{job}']")
    for path in (f"/jobs/{job}", f"/jobs/{job}?smooth=0.5", "/servers", "/jobs"):
        page.goto(f"{base}{path}")
        page.wait_for_url(f"{base}/#{path}")
        page.wait_for_selector("h1")
        page.reload()
        page.wait_for_selector("h1")
        if job in path:
            assert "deep-job" in page.inner_text("#main")


@pytest.mark.browser
def test_a_plain_path_asks_a_stranger_to_sign_in_and_then_shows_the_page(site: Site, tab: Callable[..., Any]) -> None:
    job = site.add(name="deep-job")
    page = tab()
    page.goto(f"{site.url}/jobs/{job}")
    page.fill("#code", site.token)
    page.keyboard.press("Enter")
    page.wait_for_selector("h1:has-text('deep-job')")
    assert page.url == f"{site.url}/#/jobs/{job}"


@pytest.mark.browser
def test_a_page_that_was_asked_for_is_shown_after_an_address_with_a_code(site: Site, tab: Callable[..., Any]) -> None:
    job = site.add(name="deep-job")
    page = tab()
    page.goto(f"{site.url}/#/jobs/{job}")
    page.wait_for_selector("#code")
    code = site.http.post("/api/v1/codes").json()["code"]
    page.goto(f"{site.url}/#code={code}")
    page.wait_for_selector("h1:has-text('deep-job')")
    assert page.url == f"{site.url}/#/jobs/{job}"


@pytest.mark.browser
@pytest.mark.parametrize("path", ["nonsense", "tokens", "jobs/x/logs"])
def test_an_address_without_a_page_says_so(site: Site, tab: Callable[..., Any], path: str) -> None:
    page = tab()
    code = site.http.post("/api/v1/codes").json()["code"]
    page.goto(f"{site.url}/#code={code}")
    page.wait_for_selector("nav")
    page.goto(f"{site.url}/#/{path}")
    page.wait_for_selector("text=There is no such page")
    page.click("a:has-text('All jobs')")
    page.wait_for_url(f"{site.url}/#/jobs")
