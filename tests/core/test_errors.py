import ast
import copy
import linecache
import pickle
from pathlib import Path

import pytest
from rayps_client import errors
from rayps_client.errors import ActorDied, ConfigError, LinkError, NotFound, RaypsError, UserError

import rayps


def tree(kind=RaypsError):
    yield kind
    for child in kind.__subclasses__():
        if child.__module__ == errors.__name__:
            yield from tree(child)


EVERY = list(tree())


@pytest.mark.parametrize("kind", EVERY, ids=lambda kind: kind.__name__)
@pytest.mark.parametrize(
    "carry", [lambda e: pickle.loads(pickle.dumps(e)), copy.copy, copy.deepcopy], ids=["pickle", "copy", "deepcopy"]
)
def test_every_error_survives_with_its_data(kind, carry):
    error = kind("what happened:\nthe way out", peer="worker-1", seconds=3.5, missing=[1, 2], field=None)
    back = carry(error)
    assert type(back) is kind
    assert str(back) == back.message == "what happened:\nthe way out"
    assert back.data == error.data
    assert back.args == error.args
    assert back.exit_code == kind.exit_code


def test_the_drawing_is_the_tree():
    drawn = {}
    depth = {}
    for line in (errors.__doc__ or "").splitlines():
        name = line.replace("│", " ").replace("├──", "   ").replace("└──", "   ")
        words = name.split()
        if words and hasattr(errors, words[0]):
            level = (len(name) - len(name.lstrip())) // 4
            depth[level] = words[0]
            drawn[words[0]] = depth.get(level - 1)
    assert set(drawn) == {kind.__name__ for kind in EVERY}
    for kind in EVERY[1:]:
        assert drawn[kind.__name__] == kind.__bases__[0].__name__


def test_exit_codes():
    assert RaypsError("x").exit_code == 1
    assert UserError("x").exit_code == ConfigError("x").exit_code == 2
    assert NotFound("x").exit_code == 3
    assert ActorDied("x").exit_code == 4


def test_they_are_told_apart_by_class():
    assert issubclass(errors.PeerTimeout, LinkError)
    assert not issubclass(ActorDied, LinkError)
    with pytest.raises(LinkError):
        raise errors.StaleGeneration("old", peer="x")


FILES = [
    path for root in (Path(errors.__file__).parent, Path(rayps.__file__).parent) for path in sorted(root.rglob("*.py"))
]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_what_is_raised_is_of_the_tree_and_says_something(path):
    """A message is never empty, and never longer than three lines as it is written."""
    names = {kind.__name__ for kind in EVERY}
    for node in ast.walk(ast.parse(path.read_text())):
        called = getattr(node, "func", None)
        if isinstance(node, ast.Call) and getattr(called, "id", getattr(called, "attr", "")) in names and node.args:
            assert lines_in(node.args[0]) <= 3, f"{path.name}:{node.lineno}"


def lines_in(text):
    """The lines of a message as it is written, without what may follow at its end, such as a worker's output."""
    if isinstance(text, ast.BinOp) and isinstance(text.right, ast.IfExp):
        text = text.left
    return 1 + ast.unparse(text).count("\\n")


CELL = """
import rayps

def search():
    return rayps.run(print, workers=0)

search()
"""


def test_a_notebook_shows_the_message_and_the_users_line():
    """IPython calls `_render_traceback_` of an exception that has it, instead of formatting some fifty frames."""
    name = "<ipython-input-3-d11>"
    linecache.cache[name] = (len(CELL), None, CELL.splitlines(keepends=True), name)
    with pytest.raises(ConfigError) as caught:
        exec(compile(CELL, name, "exec"), {"__name__": "__main__"})
    assert caught.value._render_traceback_() == [
        "ConfigError: workers is 0: give a whole number of at least 1",
        "  at line 5: return rayps.run(print, workers=0)",
        "  (traceback.print_last() prints the whole traceback)",
    ]
    longer = ConfigError("one\ntwo\nthree")  # never raised: there is no line
    assert longer._render_traceback_()[:-1] == ["ConfigError: one", "two", "three"]
