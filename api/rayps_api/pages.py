"""Serves the built dashboard, or a page that says how to build it."""

from __future__ import annotations

from pathlib import Path

from fastapi import FastAPI
from fastapi.responses import HTMLResponse

import rayps

_NOT_BUILT = """<!doctype html><html lang=en><meta charset=utf-8><title>rayps</title>
<h1>The dashboard was not built</h1>
<p>The service runs; its pages are missing in this installation. In a source tree, run
<code>npm ci &amp;&amp; npm run build</code> in <code>dashboards/</code> and start the service again.</p>
<p>The command line (<code>rayps ls</code>) and the <a href="docs">REST interface</a> work without it.</p>
</html>"""


def built() -> Path | None:
    """Where the built dashboard lies: in the installed package, else in the source tree."""
    package = Path(rayps.__file__).resolve().parent
    for place in (package / "_dashboard", package.parent / "dashboards" / "dist"):
        if (place / "index.html").is_file():
            return place
    return None


def install(app: FastAPI) -> None:
    """Serve the dashboard at /, below every other route."""
    place = built()
    if place is not None:
        app.frontend("/", directory=place, fallback="index.html")
        return

    @app.get("/", include_in_schema=False)
    async def missing() -> HTMLResponse:
        return HTMLResponse(_NOT_BUILT, 503)
