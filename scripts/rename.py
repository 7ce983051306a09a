"""Rename modules, tests and classes everywhere, by the tables of `renames.toml`.

Use: `python scripts/rename.py [--classes | --modules]`.

Modules move with `git mv`; imports, dotted names, paths and "module:Class" strings follow. A class is renamed where
its old module defines it and where a file imports it from there, so that two classes of one name stay apart.
Kept as a record of the renames and for branches made before them; it can be run again and then changes nothing.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLES = tomllib.loads((ROOT / "scripts" / "renames.toml").read_text(encoding="utf-8"))
TEXTS = {".py", ".md", ".toml", ".yaml", ".yml", ".ts", ".tsx", ".sh", ".json", ".html", ".mako", ".cfg", ""}
FUNCTIONS = {"rayps.tensor.agree", "rayps.tensor.pieces", "rayps.tensor.plan"}  # what the package gives under that name
KEPT = ("scripts/rename", "tests/fixtures/", "CHANGELOG.md", "dashboards/package", "tests/durations.json")


def tracked() -> list[Path]:
    """The text files under version control which may be changed."""
    names = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, text=True).split("\n")
    found = [ROOT / name for name in names if name and not name.startswith(KEPT)]
    return [path for path in found if path.suffix in TEXTS and path.is_file() and not path.is_symlink()]


def module_file(name: str) -> Path:
    """Where the module `name` lies: a file, or the `__init__` of a folder."""
    path = ROOT.joinpath(*name.split("."))
    return path / "__init__.py" if path.is_dir() and (path / "__init__.py").exists() else path.with_suffix(".py")


def move_files(modules: dict[str, str]) -> None:
    """`git mv` each module that is still at its old place; folders get an `__init__`."""
    moves = []
    for old, new in modules.items():
        source = module_file(old)
        package = source.name == "__init__.py"
        target = ROOT.joinpath(*new.split("."))
        target = target / "__init__.py" if package else target.with_suffix(".py")
        if source.exists() and not (package and old.count(".") == new.count(".") and old == new):
            moves.append((source, target))
    stage = ROOT / "scripts" / "_moving"  # a module and a folder may exchange names: everything is lifted first
    for number, (source, _) in enumerate(moves):
        stage.mkdir(exist_ok=True)
        subprocess.check_call(["git", "mv", str(source), str(stage / f"{number}.py")], cwd=ROOT)
    for number, (_, target) in enumerate(moves):
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.check_call(["git", "mv", str(stage / f"{number}.py"), str(target)], cwd=ROOT)
    for folder in sorted({target.parent for _, target in moves}):
        while folder != ROOT / "rayps":
            if not (folder / "__init__.py").exists():
                (folder / "__init__.py").write_text(f'"""{folder.name}."""\n', encoding="utf-8")
            folder = folder.parent


def rename_tests(tests: dict[str, str]) -> None:
    """`git mv` the test files, and rewrite their mentions."""
    for old, new in tests.items():
        if (ROOT / "tests" / f"{old}.py").exists():
            subprocess.check_call(["git", "mv", f"tests/{old}.py", f"tests/{new}.py"], cwd=ROOT)
    names = re.compile(r"(?<!\w)(" + "|".join(sorted(tests, key=len, reverse=True)) + r")(?!\w)")
    for path in [*tracked(), ROOT / "tests" / "durations.json"]:
        text = path.read_text(encoding="utf-8")
        if (new := names.sub(lambda m: tests[m[1]], text)) != text:
            path.write_text(new, encoding="utf-8")


def rename_modules(modules: dict[str, str]) -> None:
    """Rewrite every mention of a moved module; not in bytes, which are keys of files."""
    olds = sorted(modules, key=len, reverse=True)
    patterns = "|".join(dotted_pattern(old, modules) for old in olds)
    dotted = re.compile(rf"(?<![\w.])(?<!b\")({patterns})(?!\w)(?!\.(?:py|md)\b)")
    paths = re.compile(
        r"(?<![\w])(" + "|".join(re.escape(old.replace(".", "/")) for old in olds) + r")(?=\.py\b|/(?![a-z_]+\.py\b))"
    )
    for path in tracked():
        text = path.read_text(encoding="utf-8")
        new = text
        if path.suffix == ".py":
            new = from_imports(new, modules)
        new = dotted.sub(lambda m: modules[m[1]], new)
        new = new.replace("from NEW_rayps.", "from rayps.")
        new = paths.sub(lambda m: modules[m[1].replace("/", ".")].replace(".", "/"), new)
        if new != text:
            path.write_text(new, encoding="utf-8")


def dotted_pattern(old: str, modules: dict[str, str]) -> str:
    """Matches the old name; not where it is the folder of a new one already."""
    below = {new[len(old) + 1 :].partition(".")[0] for new in modules.values() if new.startswith(old + ".")}
    return re.escape(old) + (rf"(?!\.(?:{'|'.join(sorted(below))})\b)" if below else "")


def from_imports(text: str, modules: dict[str, str]) -> str:
    """`from a import b` where b is a moved module: import it from its new folder, and rename its uses."""
    if "import" not in text:
        return text
    lines = text.splitlines(keepends=True)
    renamed: dict[str, str] = {}
    edits: list[tuple[int, int, str]] = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not node.module or node.module.partition(".")[0] != "rayps":
            continue
        names = [alias for alias in node.names if f"{node.module}.{alias.name}" not in FUNCTIONS]
        moved = [alias for alias in names if f"{node.module}.{alias.name}" in modules]
        if not moved:
            continue
        parts = []
        stay = [alias for alias in node.names if alias not in moved]
        if stay:
            parts.append(f"from {node.module} import {', '.join(map(spelled, stay))}")
        for alias in moved:
            package, _, name = modules[f"{node.module}.{alias.name}"].rpartition(".")
            if alias.asname and alias.asname != alias.name:
                parts.append(f"from NEW_{package} import {name} as {alias.asname}")
            else:
                local = name if name == alias.name or not re.search(rf"\b{name}\b(?!\.py)", text) else f"{name}_module"
                parts.append(f"from NEW_{package} import {name}" + ("" if local == name else f" as {local}"))
                renamed[alias.name] = local
        assert node.end_lineno is not None
        edits.append((node.lineno, node.end_lineno, ("\n" + " " * node.col_offset).join(parts) + "\n"))
    for first, last, new in sorted(edits, reverse=True):
        indent = re.match(r"\s*", lines[first - 1])
        lines[first - 1 : last] = [(indent[0] if indent else "") + new]
    text = "".join(lines)
    changed = {old: new for old, new in renamed.items() if old != new}
    return tokens_renamed(text, changed, {}) if changed else text


def spelled(alias: ast.alias) -> str:
    """An import's name as it is written."""
    return f"{alias.name} as {alias.asname}" if alias.asname else alias.name


def rename_classes(classes: dict[str, str], modules: dict[str, str]) -> None:
    """Rename each class in its own module and wherever it is imported from there."""
    wanted: dict[str, dict[str, str]] = {}
    for key, new in classes.items():
        module, _, old = key.partition(":")
        wanted.setdefault(modules.get(module, module), {})[old] = new
    reexports = {"rayps.comm.ring", "rayps.comm.link", "rayps.ps.fixed", "rayps.data", "rayps.parallel.tensor"}
    for path in tracked():
        text = path.read_text(encoding="utf-8")
        new = text
        if path.suffix == ".py":
            tree = ast.parse(text)
            parts = list(path.relative_to(ROOT).with_suffix("").parts)
            name = ".".join(parts[1:] if parts[0] == "api" else parts).removesuffix(".__init__")
            here = dict(wanted.get(name, {}))
            defined = {n.name for n in ast.walk(tree) if isinstance(n, ast.ClassDef)}
            here = {old: to for old, to in here.items() if old in defined}
            through: dict[str, dict[str, str]] = {}
            aliased: list[tuple[int, int, int, str]] = []
            for node in ast.walk(tree):
                if isinstance(node, ast.ImportFrom) and node.module:
                    for alias in node.names:
                        if (to := wanted.get(node.module, {}).get(alias.name)) is not None:
                            if alias.asname in (None, alias.name):
                                here[alias.name] = to
                            else:
                                aliased.append((alias.lineno, alias.col_offset, len(alias.name), to))
                        elif (inner := wanted.get(f"{node.module}.{alias.name}")) is not None:
                            through[alias.asname or alias.name] = inner
                        elif node.module in reexports:
                            for module, names in wanted.items():
                                if module.startswith(node.module + ".") and alias.name in names:
                                    here[alias.name] = names[alias.name]
            for node in tree.body:
                if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
                    aliased += [
                        (item.lineno, item.col_offset + 1, len(item.value), here[item.value])
                        for item in ast.walk(node.value)
                        if isinstance(item, ast.Constant) and item.value in here
                    ]
            new = tokens_renamed(text, here, through, aliased)
        for module, names in wanted.items():
            for old, to in names.items():
                new = re.sub(rf"({re.escape(module)}[:.]){old}\b", rf"\g<1>{to}", new)
        if new != text:
            path.write_text(new, encoding="utf-8")


def tokens_renamed(
    text: str, here: dict[str, str], through: dict[str, dict[str, str]], more: Sequence[tuple[int, int, int, str]] = ()
) -> str:
    """`text` with the names of `here` exchanged, and those of `through` where they are attributes of its modules."""
    if not here and not through and not more:
        return text
    lines = text.splitlines(keepends=True)
    edits: list[tuple[int, int, int, str]] = list(more)
    found = list(tokenize.generate_tokens(io.StringIO(text).readline))
    for number, token in enumerate(found):
        before = found[number - 1].string if number else ""
        if token.type == tokenize.NAME:
            if before == ".":
                owner = through.get(found[number - 2].string)
                if owner and token.string in owner and found[number - 3].string != ".":
                    edits.append((token.start[0], token.start[1], len(token.string), owner[token.string]))
            elif token.string in here and not keyword_argument(found, number):
                edits.append((token.start[0], token.start[1], len(token.string), here[token.string]))
        elif token.type in (tokenize.STRING, tokenize.COMMENT):
            edits += quoted(token, here, through)
    for row, column, length, new in sorted(set(edits), reverse=True):
        line = lines[row - 1]
        lines[row - 1] = line[:column] + new + line[column + length :]
    return "".join(lines)


def keyword_argument(found: list[tokenize.TokenInfo], number: int) -> bool:
    """Whether the token is the name of a keyword argument in a call."""
    after = found[number + 1]
    return after.string == "=" and found[number - 1].string in ("(", ",") and after.start == found[number].end


def quoted(
    token: tokenize.TokenInfo, here: dict[str, str], through: dict[str, dict[str, str]]
) -> list[tuple[int, int, int, str]]:
    """Mentions of the names in a comment or a string: within backticks, or in the braces of an f-string."""
    edits = []
    for offset, line in enumerate(token.string.split("\n")):
        start = token.start[1] if offset == 0 else 0
        spans = [m.span() for m in re.finditer(r"`[^`]*`", line)]
        if token.type == tokenize.STRING and token.string[:2].lower().strip("\"'") in ("f", "fr", "rf"):
            spans += [m.span() for m in re.finditer(r"\{[^{}]*\}", line)]
        names = dict(here)
        for module, inner in through.items():
            names.update({f"{module}.{old}": f"{module}.{new}" for old, new in inner.items()})
        for old, new in names.items():
            for m in re.finditer(rf"(?<![\w.]){re.escape(old)}\b", line):
                if any(a <= m.start() < b for a, b in spans):
                    edits.append((token.start[0] + offset, start + m.start(), len(old), new))
    return edits


def main() -> None:
    """Apply the tables."""
    modules, classes = TABLES["modules"], TABLES["classes"]
    if "--classes" not in sys.argv:
        move_files(modules)
        rename_tests(TABLES["tests"])
        rename_modules(modules)
    if "--modules" not in sys.argv:
        rename_classes(classes, modules)


if __name__ == "__main__":
    main()
