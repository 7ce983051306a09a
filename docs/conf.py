"""Settings of the documentation site: `make docs` builds it into `build/docs`.

All is local: no font, script or style comes from another host, and no page of another project is read. Docstrings are
shown as plain text with code, so that no docstring can break the build.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "api")]

from pygments.lexer import Lexer  # noqa: E402
from pygments.lexers.shell import BashLexer, BashSessionLexer  # noqa: E402
from sphinx.highlighting import lexers  # noqa: E402

import rayps  # noqa: E402

project = "rayps"
author = "the authors of rayps"
copyright = author  # shown in the footer
version = release = rayps.__version__
extensions = ["myst_parser", "sphinx.ext.autodoc"]

# Pages. Warnings (a broken link, a page in no table of contents) are errors: the build runs with -W.
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "attrs_inline"]
suppress_warnings = ["myst.xref_ambiguous"]
highlight_language = "text"
pygments_style = "friendly"
pygments_dark_style = "monokai"

# Reference.
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
add_module_names = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

# Look.
html_theme = "furo"
html_show_search_summary = False  # excerpts of found pages are fetched, which a browser refuses for files
html_title = "rayps"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sphinx = False
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#1d5bbf", "color-brand-content": "#1d5bbf"}
    | {"color-api-name": "#1d5bbf", "color-api-pre-name": "#1d5bbf"},
    "dark_css_variables": {"color-brand-primary": "#8ab4f8", "color-brand-content": "#8ab4f8"}
    | {"color-api-name": "#8ab4f8", "color-api-pre-name": "#8ab4f8"},
}

MADE_BY_RAYPS = {"Ring", "Result", "Job"}  # classes whose constructors are not for users


class Console(Lexer):
    """Commands: with prompts and their output, or without prompts."""

    name = "console"

    def get_tokens(self, text: str, unfiltered: bool = False) -> Any:
        """The tokens of a session where a line begins with `$`, else those of bash."""
        kind = BashSessionLexer if re.search(r"^\$ ", text, re.M) else BashLexer
        return kind(stripall=True).get_tokens(text)


lexers["console"] = Console()
SECTIONS = {"Args", "Arguments", "Attributes", "Raises", "Returns", "Yields", "Example", "Examples", "Note"}


def setup(app: Sphinx) -> None:
    """Register the conversion of docstrings and of signatures."""
    app.connect("autodoc-process-docstring", convert)
    app.connect("autodoc-process-signature", signature)


def signature(
    app: Sphinx, what: str, name: str, found: Any, options: Any, arguments: str | None, returned: str | None
) -> tuple[str | None, str | None]:
    """Show no arguments of a class that users do not construct."""
    return ("", None) if what == "class" and found.__name__ in MADE_BY_RAYPS else (arguments, returned)


def convert(app: Sphinx, what: str, name: str, found: Any, options: Any, lines: list[str]) -> None:
    """Write a docstring as reStructuredText; a strategy is shown with its module's text: the paper and the options."""
    text = "\n".join(lines)
    module = sys.modules.get(getattr(found, "__module__", "") or "")
    if what == "class" and module is not None and module.__name__.startswith("rayps.strategies.") and module.__doc__:
        statements = re.sub(r"([.:])\n(?=\S)", r"\1\n\n", module.__doc__)  # a paragraph for each statement
        first, example, rest = text.partition("\nExample:")
        text = text if found.__name__ == "Strategy" else f"{first}\n\n{statements}\n{example}{rest}"
    lines[:] = [*blocks(text), ""]


def blocks(text: str) -> Iterator[str]:
    """The lines of a docstring as reStructuredText: paragraphs, lists, sections and indented code."""
    lines = text.expandtabs(4).splitlines()
    at = 0
    while at < len(lines):
        heading = lines[at].rstrip().removesuffix(":")
        if lines[at].rstrip().endswith(":") and heading in SECTIONS:
            body, at = indented(lines, at + 1)
            yield from section(heading, body)
        elif lines[at].startswith("    "):
            body, at = indented(lines, at)
            yield from code(body)
        else:
            yield escaped(lines[at])
            at += 1


def indented(lines: list[str], at: int) -> tuple[list[str], int]:
    """The indented lines from `at` on, without their common indentation, and the number of the line after them."""
    end = at
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith("  ")):
        end += 1
    body = lines[at:end]
    while body and not body[-1].strip():
        body.pop()
    margin = min((len(line) - len(line.lstrip()) for line in body if line.strip()), default=0)
    return [line[margin:] for line in body], end


def code(body: list[str]) -> Iterator[str]:
    """A block of code: Python where it reads as Python, plain text elsewhere."""
    try:
        compile("\n".join(body), "docstring", "exec")
        language = "python"
    except SyntaxError:
        language = "text"
    yield from ["", f".. code-block:: {language}", "", *(f"   {line}" for line in body), ""]


def section(heading: str, body: list[str]) -> Iterator[str]:
    """A section of a docstring, such as `Raises:`; in it `Name: text` begins an item."""
    if heading.startswith("Example"):
        yield from ["", f"**{heading}**", *code([line.removeprefix(">>> ") for line in body])]
        return
    yield from ["", f"**{heading}**", ""]
    for line in body:
        item = re.match(r"([\w.*, ]+?)(?: \(([^)]*)\))?: (.*)", line)
        if item and not line.startswith(" "):
            kind = f" ({escaped(item[2])})" if item[2] else ""
            yield f"- ``{item[1]}``{kind}: {escaped(item[3])}"
        elif line.strip():
            yield f"  {escaped(line.strip())}" if line.startswith(" ") else f"- {escaped(line)}"
    yield ""


def escaped(line: str) -> str:
    """One line of text: what stands in backticks as a literal, the rest without any markup."""
    bullet = re.match(r"\s*[-*] ", line)
    head, rest = (line[: bullet.end()], line[bullet.end() :]) if bullet else ("", line)
    parts = re.split(r"(`+[^`]+`+)", rest)
    shown = [
        f"``{part.strip('`')}``" if part.startswith("`") else re.sub(r"([\\*_|`])", r"\\\1", part) for part in parts
    ]
    joined = ""
    for part in shown:  # a literal needs a space or punctuation on either side
        glue = "\\ " if joined and part and (joined.endswith("``") or part.startswith("``")) else ""
        joined += glue + part
    return head + joined
