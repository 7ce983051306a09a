"""The documentation site: builds without a warning, has every public name, works without a network."""

import re
import subprocess
import sys
import tomllib
import zlib
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import missing

import rayps

ROOT = Path(__file__).resolve().parent.parent
GENERATOR = ("sphinx", "furo", "myst_parser")


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; a warning (a broken link, a page in no table of contents) fails the build."""
    absent = [name for name in GENERATOR if find_spec(name) is None]
    if absent:
        missing(f"site generator ({', '.join(absent)}): install the dependency group `docs`")
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-d", str(folder / "trees")]
    run = subprocess.run([*command, str(ROOT / "docs"), str(folder / "html")], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return folder / "html"


def test_every_public_name_is_in_the_reference(site):
    inventory = (site / "objects.inv").read_bytes().split(b"\n", 4)[4]
    documented = {line.split(" ", 1)[0] for line in zlib.decompress(inventory).decode().splitlines()}
    public = {f"rayps.{name}" for name in rayps.__all__} - {"rayps.__version__"}
    assert public <= documented


def test_it_loads_nothing_from_other_hosts(site):
    loads = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=\"([^\"]*)|<link(?![^>]*rel=\"(?:canonical|next|prev))"
        r"[^>]*\shref=\"([^\"]*)|url\(['\"]?([^'\")]*)|@import\s+['\"]([^'\"]*)"
    )
    foreign = []
    for page in [*site.rglob("*.html"), *site.rglob("*.css")]:
        for found in loads.finditer(page.read_text(encoding="utf-8")):
            address = next(filter(None, found.groups()), "")
            if re.match(r"(?:[a-z]+:)?//", address):
                foreign.append(f"{page.relative_to(site)}: {address}")
    assert not foreign


def test_search_finds_a_term_of_the_glossary(site):
    index = (site / "searchindex.js").read_text(encoding="utf-8")
    assert "glossary" in index and "replay buffer" in index.lower()


def test_the_wheel_does_not_contain_it():
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert wheel == {"packages": ["rayps", "api/rayps_api"]}
    assert not [path for path in ROOT.glob("rayps/**/*.md") if "_dashboard" not in path.parts]
