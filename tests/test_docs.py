"""Every code block of the README and of docs/, and every example of a public docstring, is run or parsed.

A page's Python blocks run in order, in one namespace, in a temporary folder that has `examples/` with fewer rows.
`rayps.train` and `rayps.run` use the threads cluster there; a page with `rayps.Client()` gets a real service with a
real Ray. A command is parsed by the command line's own parser, its files and strategies are looked up; what is cheap
(`rayps plan`, `rayps clients`) runs. A block that cannot be checked is preceded by `<!-- not run: REASON -->`.
"""

import ast
import importlib
import inspect
import io
import json
import re
import shlex
import shutil
import sys
import textwrap
from contextlib import redirect_stdout
from functools import cache, wraps
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import pyarrow.parquet as pq
import pytest
import torch
import typer.main
import yaml
from folders import TESTS
from rayps_client.__main__ import options_of
from typer.testing import CliRunner

import rayps
from rayps.cli import extras
from rayps.cli.main import app
from rayps.cluster.local import LocalCluster
from rayps.strategies.catalogue import CATALOGUE, parse
from rayps.strategies.job import JobSpec

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/**/*.md"))]
ROWS = 400  # of each example's data set, so that an epoch takes a moment
NOT_RUN = {
    (
        "docs/embeddings.md",
        "needs a server group on which a job trains; tests/tables/test_ps_follow.py has such a reader",
    ),
    ("docs/callbacks.md", "needs an MLflow server and an account"),
}  # (page, reason) of the blocks that are not checked


class Block(NamedTuple):
    """A fenced block of a page."""

    page: Path
    line: int  # of its first line of code
    language: str
    text: str
    reason: str  # why it is not run; "" = it is

    def __str__(self):
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page):
    """The fenced blocks of a page, in order."""
    found, lines, reason, number = [], page.read_text(encoding="utf-8").splitlines(), "", 0
    while number < len(lines):
        fence = re.match(r"( *)(`{3,}|:{3,})(\S*)", lines[number])
        if fence:
            end = next(n for n in range(number + 1, len(lines)) if lines[n].strip() == fence[2])
            body = [line[len(fence[1]) :] for line in lines[number + 1 : end]]
            found.append(Block(page, number + 2, fence[3], "\n".join(body), reason))
            number = end
        comment = re.fullmatch(r" *<!-- not run: (.+) -->", lines[number])
        reason = comment[1] if comment else ""
        number += 1
    return found


BLOCKS = [block for page in PAGES for block in blocks(page)]
RUN = [block for block in BLOCKS if not block.reason]


def in_language(*languages):
    return [block for block in RUN if block.language in languages]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_has_no_marker_of_an_unfinished_merge(page):
    lines = page.read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if line.startswith(("<<<<<<< ", ">>>>>>> "))] == []


def test_blocks_are_found_and_only_these_are_not_run():
    assert len(in_language("python")) > 15 and len(in_language("console")) > 8 and in_language("yaml")
    assert {(str(block.page.relative_to(ROOT)), block.reason) for block in BLOCKS if block.reason} == NOT_RUN


def test_every_block_has_a_language_that_is_checked():
    known = {"python", "console", "yaml", "text"}
    others = [f"{block}: {block.language or 'none'}" for block in BLOCKS if block.language not in known]
    assert [each for each in others if not re.search(r": \{(toctree|eval-rst)\}$", each)] == []


# Python


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """The examples with little data, and the digits beside them."""
    path = tmp_path_factory.mktemp("small")
    examples = path / "examples"
    (examples / "data").mkdir(parents=True)
    for source in [*ROOT.glob("examples/*.py"), *ROOT.glob("examples/*.yaml")]:
        (examples / source.name).write_text(source.read_text(encoding="utf-8"), encoding="utf-8")
    for source in ROOT.glob("examples/data/*.parquet"):
        pq.write_table(pq.read_table(source).slice(0, ROWS), examples / "data" / source.name)
    (examples / "data" / "hamlet.txt").write_text((ROOT / "examples/data/hamlet.txt").read_text()[:4000])
    shutil.copy(examples / "data" / "digits.parquet", path)
    (examples / "config.py").write_text("LR = 0.1\nSTARTED = False\n")  # the modules of docs/code.md
    (examples / "model.py").write_text("import config\n\n\ndef rate():\n    return config.LR\n")
    return path


@pytest.fixture
def folder(small, tmp_path, monkeypatch):
    """The working folder of a page: a copy of `small`."""
    path = tmp_path / "page"
    shutil.copytree(small, path)
    monkeypatch.chdir(path)
    monkeypatch.syspath_prepend(str(path / "examples"))
    yield path
    for name in [name for name, module in sys.modules.items() if str(path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


@pytest.fixture
def threads(monkeypatch):
    """`rayps.train`, `rayps.run` and `rayps.statistics` on the threads cluster, without progress."""

    def on_threads(function, **more):
        @wraps(function)
        def call(*args, **options):
            cluster = LocalCluster()
            try:
                return function(*args, **{"cluster": cluster, **more, **options})
            finally:
                cluster.close()

        return call

    monkeypatch.setattr(rayps, "train", on_threads(rayps.train, progress=False))
    monkeypatch.setattr(rayps, "run", on_threads(rayps.run))
    monkeypatch.setattr(rayps, "statistics", on_threads(rayps.statistics, progress=False))


def execute(page):
    """Run a page's Python blocks in order; an error's traceback shows the page's own line."""
    space = {"__name__": "__main__"}  # classes of __main__ travel by value
    for block in in_language("python"):
        if block.page == page:
            code = compile("\n" * (block.line - 1) + block.text, str(page), "exec")
            with redirect_stdout(io.StringIO()):
                exec(code, space)


@pytest.mark.parametrize("block", [block for block in BLOCKS if block.reason and block.language == "python"], ids=str)
def test_what_is_not_run_imports_names_that_exist(block):
    imports = [node for node in ast.parse(block.text).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    exec(compile(ast.Module(imports, []), str(block), "exec"), {})


PYTHON = sorted({block.page for block in in_language("python")})
SERVICE = [page for page in PYTHON if "rayps.Client()" in page.read_text(encoding="utf-8")]


def name_of(page):
    return str(page.relative_to(ROOT))


@pytest.mark.parametrize("page", [page for page in PYTHON if page not in SERVICE], ids=name_of)
def test_python_runs(page, folder, threads):
    execute(page)


@pytest.mark.ray
@pytest.mark.parametrize("page", SERVICE, ids=name_of)
def test_python_runs_with_a_service(page, ray_service, folder, monkeypatch):
    monkeypatch.setenv("RAYPS_STATE_DIR", str(ray_service.state))
    execute(page)


# Examples in docstrings


class Line(rayps.Workload):
    """The `work` of the examples: a small network, which can be cut into stages and between tensor ranks."""

    owners = None

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.ReLU(), torch.nn.Linear(4, 1))

    def data(self):
        x = torch.randn(48, 3, generator=torch.Generator().manual_seed(0))
        return rayps.data.tensors(x, x.sum(1, keepdim=True), batch_size=8, client=self.owners)

    def loss(self, model, batch):
        return torch.nn.functional.mse_loss(model(batch.x), batch.y)


class Clients(Line):
    """The `clients` of the examples."""

    owners = rayps.data.iid(4)


WORKLOADS = {"work": Line(), "clients": Clients()}
for found in sorted(TESTS.glob("*/example_*.py")):  # of rooms that a tree may lack
    WORKLOADS |= importlib.import_module(found.stem).WORKLOADS
PUBLIC = [name for name in rayps.__all__ if name != "__version__"]


def example(name):
    """The code below `Example:` in the docstring of a public name."""
    found = re.search(r"^Example:\n((?:    .*\n|\n)+)", f"{inspect.getdoc(getattr(rayps, name))}\n", re.M)
    assert found, f"rayps.{name} has no example in its docstring"
    return textwrap.dedent(found[1])


def run_example(name):
    space = {"__name__": "__main__", "rayps": rayps, "torch": torch}
    space |= WORKLOADS
    with redirect_stdout(io.StringIO()):
        exec(compile(example(name), f"the example of rayps.{name}", "exec"), space)


def has_workload(name):
    """Whether the example of a name has its workload in this tree, which may lack the room of sparse tables."""
    return "ratings" in WORKLOADS or not re.search(r"\bratings\b", inspect.getdoc(getattr(rayps, name)) or "")


@pytest.mark.parametrize("name", [name for name in PUBLIC if name != "Client" and has_workload(name)])
def test_an_example_of_a_docstring_runs(name, threads):
    run_example(name)


@pytest.mark.ray
def test_the_example_of_the_client_runs(ray_service, folder, monkeypatch):
    monkeypatch.setenv("RAYPS_STATE_DIR", str(ray_service.state))
    run_example("Client")


# Commands


class Command(NamedTuple):
    """A line of a console block, with its continuations."""

    block: Block
    line: str

    def __str__(self):
        return f"{self.block}: {self.line.split('  ')[0]}"


def commands(block):
    """The commands of a block: all lines, or, where some begin with `$`, those."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if any(line.startswith("$ ") for line in lines):
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    return [Command(block, line) for line in lines if line.strip() and not line.startswith("#")]


COMMANDS = [command for block in in_language("console") for command in commands(block)]
RUN_TOO = {"plan", "clients"}  # cheap ones
PROGRAMS = {"cat", "export", "source", "pip", "kill", "cp"}  # of others


def words_of(line):
    lexer = shlex.shlex(line, posix=True, punctuation_chars="|&;")
    lexer.whitespace_split = True
    return list(lexer)


def looked_up(words):
    """Check the arguments that name files, classes or strategies; `words` are those after `rayps`."""
    for option, value in pairwise(words):
        if option == "--strategy":
            parse(value, ROOT)
    for word in words:
        if re.fullmatch(r"examples/\S+\.py(:\w+)?", word):
            path, _, name = word.partition(":")
            tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
            assert not name or name in {node.name for node in tree.body if isinstance(node, ast.ClassDef)}, word
        elif re.fullmatch(r"examples/\S+\.yaml", word):
            assert (ROOT / word).is_file(), word


command_line = cache(typer.main.get_command)  # building the commands takes longer than parsing a line


def command_of(group, name):
    """A command of a group; one that another package brings is that of its package."""
    for entry in entry_points(group=extras.GROUP, name=name):
        return command_line(importlib.import_module(entry.module).app)
    return group.get_command(None, name)


def parsed(words, app=app):
    """Parse the words after `rayps` as the command line does, without running anything; the command's path."""
    path, rest = [], list(words)
    command = command_line(app)
    while hasattr(command, "commands"):
        assert rest and rest[0] in command.list_commands(None), f"rayps {' '.join(path)} has no {rest[:1]}"
        path.append(rest.pop(0))
        command = command_of(command, path[-1])
    command.make_context(path[-1], rest)  # raises for an option or a value that does not exist
    return path


def check_make(words):
    targets = re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert {word for word in words if re.fullmatch(r"[a-z]+", word)} <= set(targets), words


@cache
def routes_of_the_service():
    from rayps_api.app import create_app
    from service_site import NoPlace

    from rayps.service.settings import Settings

    return list(create_app(Settings(), place=NoPlace()).openapi()["paths"])


def check_curl(words):
    """The address is a route of the service, and the body a job or a notice."""
    from rayps_api.schemas import NoticeIn

    address = next(word for word in words if word.startswith("http"))
    path = re.sub(r"^https?://[^/]+", "", address).partition("?")[0]
    shapes = [re.sub(r"\{\w+\}", r"[^/]+", route) for route in routes_of_the_service()]
    assert any(re.fullmatch(shape, path) for shape in shapes), path
    if "-d" in words and path == "/api/v1/notices":
        NoticeIn.model_validate_json(words[words.index("-d") + 1])
    elif "-d" in words:
        spec = json.loads(words[words.index("-d") + 1])
        parse(JobSpec.from_dict(spec).check().strategy)


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_is_one(command, request):
    line = re.split(r"\s#\s", command.line)[0].strip().removesuffix("&").strip()
    words = words_of(re.sub(r"^\w+=\$\(.*\)$", "export", line.split(" | ")[0]))
    program, rest = words[0], words[1:]
    if program == "rayps":
        looked_up(rest)
        path = parsed(rest)
        if path[0] in RUN_TOO:
            request.getfixturevalue("folder")
            done = CliRunner().invoke(app, rest)
            assert done.exit_code == 0, done.output
    elif program == "rayps-client":
        assert options_of(rest).target
    elif program == "make":
        check_make(rest)
    elif program == "curl":
        check_curl(rest)
    elif words[:3] == ["python", "-m", "benchmarks"]:
        parsed(words[3:], importlib.import_module("benchmarks.__main__").app)
    elif program == "python":
        assert (ROOT / rest[0]).is_file(), rest
        looked_up(rest)
    else:
        assert program in PROGRAMS, f"{program}: say in this test how to check it"


def inline_commands():
    """Inline code that begins with `rayps COMMAND` or `python -m benchmarks COMMAND`; values may be placeholders."""
    for page in PAGES:
        for span in re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.S)):
            span = " ".join(span.split())
            if re.match(r"rayps [a-z]|python -m benchmarks [a-z]", span) and "..." not in span:
                yield pytest.param(span, id=f"{name_of(page)}: {span}")


@pytest.mark.parametrize("span", list(inline_commands()))
def test_an_inline_command_and_its_options_exist(span):
    words = span.split()
    peers = words[0] == "python"
    command = command_line(importlib.import_module("benchmarks.__main__").app if peers else app)
    words = words[3:] if peers else words[1:]
    while hasattr(command, "commands") and words:
        assert words[0] in command.list_commands(None), span
        command = command_of(command, words.pop(0))
    known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
    given = {word.partition("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert given <= known | {"--help"}, span


# Job files, strategies in text


@pytest.mark.parametrize("block", in_language("yaml"), ids=str)
def test_a_job_file_is_one(block):
    spec = JobSpec.from_dict(yaml.safe_load(block.text)).check()
    assert parse(spec.strategy, ROOT / (spec.working_dir or "."))


def strategies():
    """Inline code, and lines of text blocks, that read as a strategy with options."""
    name = "|".join(sorted(CATALOGUE, key=len, reverse=True))
    shape = re.compile(rf"(?:\d+\*)?(?:{name}):[a-z_]+=[^`\s]*\S*(?: > [^`]*)?")
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        spans = [*re.findall(r"`([^`\n]+)`", text), *(line.split("  ")[0] for line in text.splitlines())]
        for span in spans:
            if shape.fullmatch(span.strip('"')) and "..." not in span:
                yield pytest.param(span.strip('"'), id=f"{name_of(page)}: {span}")


@pytest.mark.parametrize("text", list(strategies()))
def test_a_strategy_in_text_is_one(text):
    assert parse(text)
