"""Serve the built dashboard, or a page that says how to build it."""

from __future__ import annotations

from pathlib import Path
from urllib.parse import quote

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, RedirectResponse

import rayps

PAGES = ("jobs", "servers", "sweeps", "compare")  # the paths below / that the dashboard shows
_NOT_BUILT = """<!doctype html><html lang=en><meta charset=utf-8><title>rayps</title>
<h1>The dashboard is not built</h1>
<p>The service is running; this installation has no dashboard pages. In a source tree, run
<code>npm ci &amp;&amp; npm run build</code> in <code>dashboards/</code> and restart the service.</p>
<p>The command line (<code>rayps ls</code>) and the <a href="docs">REST interface</a> work without it.</p>
</html>"""


def built() -> Path | None:
    """Return the built dashboard's folder, in the installed package or the source tree, or None if it is not built."""
    package = Path(rayps.__file__).resolve().parent
    for place in (package / "_dashboard", package.parent / "dashboards" / "dist"):
        if (place / "index.html").is_file():
            return place
    return None


async def _redirect(request: Request) -> RedirectResponse:
    return RedirectResponse(in_page(request.url.path, request.url.query), 307)


def in_page(path: str, query: str) -> str:
    """Return the dashboard's relative address for a path: `../#/jobs/ID?smooth=0.9` for `/jobs/ID?smooth=0.9`."""
    parts = path.lstrip("/").split("/")
    up = "../" * (len(parts) - 1) or "./"
    inner = "/".join(quote(part, safe="") for part in parts if part)
    return f"{up}#/{inner}{'?' if query else ''}{quote(query, safe='=&%+._~-')}"


def install(app: FastAPI) -> None:
    """Serve the dashboard at /, for paths that no other route has.

    The dashboard reads its own route from the fragment (`/#/jobs/ID`). A request for the path `/jobs/ID` is redirected
    to this address. The redirect is relative, and therefore correct behind any path prefix.
    """
    place = built()
    if place is not None:
        for page in PAGES:
            app.add_api_route(f"/{page}", _redirect, methods=["GET", "HEAD"], include_in_schema=False)
            app.add_api_route(f"/{page}/{{rest:path}}", _redirect, methods=["GET", "HEAD"], include_in_schema=False)
        app.frontend("/", directory=place, fallback=None)
        return

    @app.get("/", include_in_schema=False)
    async def missing() -> HTMLResponse:
        return HTMLResponse(_NOT_BUILT, 503)
