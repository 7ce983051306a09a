"""Which files of a working directory are a job's code.

Patterns are those of Git, by the library pathspec, and not `git ls-files`: a folder without a repository, or a machine
without Git, then gives the same files. `.gitignore` files count in every folder, and above the working directory up to
the root of the repository; `.raypsignore` has the same form and precedence over them, so that `!data/small.csv` adds an
ignored file. A file that Git tracks although a pattern ignores it is left out. So is a file with a secret
(`rayps.service.code.code_secrets`), whatever the patterns say; `PackedCode` names those that the patterns would have
sent.
"""

from __future__ import annotations

import fnmatch
import os
import re
import stat
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from pathspec import GitIgnoreSpec, RegexPattern
from rayps_client.errors import ConfigError

from rayps.core.job.code_archive import MOST_FILES, ArchiveEntry, check_link, hash_of, write
from rayps.service.code.code_secrets import find_secret_content, find_secret_folder, find_secret_name

# names that are never code, in any case of letters; no pattern can add them
_NEVER = (
    *(".git", ".hg", ".svn", "__pycache__", "*.pyc", "*.pyo", ".venv", "venv", "node_modules", ".cache", ".DS_Store"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".ipynb_checkpoints"),
)
# a folder with one of these is a virtual environment, or the state of a service, which has its token
_ENVIRONMENT = ("pyvenv.cfg", "conda-meta", "rayps.db", "service.lock")
_SLASH = "ps_d"  # in a pattern of pathspec: the slash after the folder that the pattern has matched
_TEMPORARY = ("/tmp", "/var/tmp")  # folders of all users, beside that of the variable TMPDIR
_MOST_VISITED = 200_000  # files that are looked at
_LISTED = 5  # largest files that an error names, and files with a secret that a note names
_NAMED, _LARGE = 3, 50_000  # the most files that a summary names, and their least bytes: source files are smaller
# files with these suffixes are named whatever their size
_DATA = (".parquet", ".arrow", ".feather", ".csv", ".tsv", ".jsonl", ".npy", ".npz", ".pt", ".pth", ".safetensors")
MEGABYTE = 1_000_000


@dataclass(frozen=True, slots=True)
class PackedCode:
    """A packed working directory: the archive, its SHA-256, and the number and bytes of its files.

    `secrets`: from the path of each file or folder that was left out because of a secret, to what it holds. `folder`
    is the directory. `data` has the files with a suffix of data, and `large` the path and bytes of a few of the
    largest files that have such a suffix or are large enough to be data.
    """

    hash: str
    archive: bytes
    paths: frozenset[str]
    size: int
    secrets: dict[str, str] = field(default_factory=dict)
    folder: Path = Path()
    large: tuple[tuple[str, int], ...] = ()
    data: tuple[str, ...] = ()

    def summary(self) -> str:
        """Return what was packed from where, its largest files, and how to leave out more."""
        count = len(self.paths)
        files = "1 file" if count == 1 else f"{count} files"
        largest = ", ".join(f"{path} ({_format_bytes(size)})" for path, size in self.large)
        named = f"; the largest: {largest}" if largest else ""
        packed = f"{files} of {_format_bytes(self.size)} packed from {self.folder}{named}"
        return f"{packed}; to leave out more, list it in .raypsignore"

    def data_note(self) -> str:
        """Return a warning, for a job whose rows stay with its clients, that files of data are sent; "" without any."""
        if not self.data:
            return ""
        more = f" and {len(self.data) - _NAMED} more" if len(self.data) > _NAMED else ""
        return (
            f"warning: the clients' rows are to stay with them, but files of data are sent to the service: "
            f"{', '.join(self.data[:_NAMED])}{more}; if they are rows of a client, list them in .raypsignore"
        )

    def left_out(self) -> str:
        """Return which files were left out because of a secret, and why; "" if there are none."""
        named = [f"{path} ({what})" for path, what in sorted(self.secrets.items())]
        more = [f"and {len(named) - _LISTED} more"] if len(named) > _LISTED else []
        if not named:
            return ""
        return f"not sent, because secrets never travel with a job: {', '.join([*named[:_LISTED], *more])}"


def pack_code(folder: Path, most_bytes: int = 100 * MEGABYTE) -> PackedCode:
    """Pack the code of a working directory into an archive. Equal trees give equal bytes.

    `most_bytes` limits the sum of the files' sizes. Empty folders are not packed.

    Raises:
        ConfigError: there is no such folder, it is too large (the error names its largest files), a file cannot be
            read, or a symbolic link leaves the folder.

    Example:
        pack_code(Path("examples")).hash
    """
    folder = folder.resolve()
    if not folder.is_dir():
        raise ConfigError(
            f"the working directory {folder} does not exist: give another working_dir", field="working_dir"
        )
    secrets: dict[str, str] = {}
    found = list(yield_code_files(folder, secrets.__setitem__))
    sizes = {path: status.st_size for path, status in found if stat.S_ISREG(status.st_mode)}
    if sum(sizes.values()) > most_bytes or len(found) > MOST_FILES:
        raise _explain_too_large(folder, sizes, len(found), most_bytes)
    read = [_read_entry(folder, path, status) for path, status in found]
    holds = {entry.path: what for entry in read if (what := find_secret_content(entry.path, entry.content)) is not None}
    entries = [entry for entry in read if entry.path not in holds]
    size = sum(len(entry.content) for entry in entries)
    if size > most_bytes:  # a file has grown since
        raise _explain_too_large(folder, sizes, len(found), most_bytes)
    archive = write(entries)
    paths = frozenset(entry.path for entry in entries)
    by_size = sorted(((len(entry.content), entry.path) for entry in entries), reverse=True)
    data = tuple(path for _, path in by_size if path.lower().endswith(_DATA))
    large = tuple((path, bytes_) for bytes_, path in by_size if bytes_ >= _LARGE or path in data)[:_NAMED]
    return PackedCode(hash_of(archive), archive, paths, size, secrets | holds, folder, large, data)


def must_be_project(folder: Path) -> None:
    """Check that the current folder, which is packed if no working directory is given, can be a project.

    Raises:
        ConfigError: it is the home directory, the root of the file system, or a folder for temporary files.
    """
    folder, temporary = folder.resolve(), {Path(each).resolve() for each in (tempfile.gettempdir(), *_TEMPORARY)}
    if folder == Path(folder.anchor):
        what = "the root of the file system"
    elif folder == Path.home().resolve():
        what = "the home directory"
    elif folder in temporary:
        what = "the system's folder for temporary files"
    else:
        return
    raise ConfigError(
        f"the current folder is {folder}, {what}, which is not one project, and no working_dir is given:\n"
        "start in the project's folder, or name the folder to pack with --working-dir DIR (working_dir in a job file "
        "or in Python),\nalso this one (--working-dir . or working_dir=Path.cwd()), or send nothing with --no-upload "
        "(upload=False)",
        field="working_dir",
    )


def yield_code_files(
    folder: Path, secret: Callable[[str, str], None] = lambda path, what: None
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path, relative to `folder`, and the `lstat` of each file and symbolic link of the code.

    `secret` is called with the path of each file and folder that is left out because its name or its form is that of a
    secret, and with what it holds. Contents of files are not read here.

    Raises:
        ConfigError: the folder has too many files, or cannot be read.
    """
    rules = _Rules(folder)
    visited = 0
    for here, folders, names in os.walk(folder, onerror=_refuse_unreadable):
        prefix = Path(here).relative_to(folder).as_posix()
        prefix = "" if prefix == "." else f"{prefix}/"
        rules.enter(prefix)
        visited += len(names) + len(folders)
        if visited > _MOST_VISITED:
            raise ConfigError(
                f"the working directory {folder} has more than {_MOST_VISITED} files: give a smaller folder as "
                "working_dir, or list folders in .raypsignore",
                field="working_dir",
            )
        links = [name for name in folders if (Path(here) / name).is_symlink()]
        kept = []
        for name in sorted(set(folders) - set(links)):
            if rules.wants(f"{prefix}{name}", folder=True) and not _is_environment(Path(here) / name):
                what = find_secret_name(name) or find_secret_folder(Path(here) / name)
                if what is None:
                    kept.append(name)
                else:
                    secret(f"{prefix}{name}/", what)
        folders[:] = kept
        for name in sorted([*names, *links]):
            status = (Path(here) / name).lstat()
            kind = stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode)
            if kind and rules.wants(f"{prefix}{name}", folder=False):
                what = find_secret_name(name)
                if what is None:
                    yield f"{prefix}{name}", status
                else:
                    secret(f"{prefix}{name}", what)


def is_ignored(folder: Path, path: str) -> bool:
    """Return whether `yield_code_files` would leave out the file `path` of `folder`, which need not exist."""
    rules = _Rules(folder)
    rules.enter("")
    *parents, _ = (path[:at] for at, letter in enumerate(f"{path}/") if letter == "/")
    for parent in parents:
        if not rules.keeps(parent, folder=True):
            return True
        rules.enter(f"{parent}/")
    return not rules.keeps(path, folder=False)


class _Patterns:
    """The patterns of one ignore file."""

    def __init__(self, spec: GitIgnoreSpec) -> None:
        patterns = [each for each in spec.patterns if isinstance(each, RegexPattern)]
        self._last_first = [(each.regex, bool(each.include)) for each in reversed(patterns) if each.regex is not None]

    def ignores(self, path: str) -> bool | None:
        """Return whether the last pattern that matches `path` ignores it; None if no pattern matches.

        As in Git, a pattern that matches only a folder above `path` does not count: `!a/` does not add `a/b`. The path
        of a folder ends with a slash.
        """
        for regex, ignored in self._last_first:
            for match in regex.finditer(path):
                if _is_of(match, path):
                    return ignored
        return None


class _Rules:
    """The patterns of the ignore files that were read so far; folders are entered from the top down."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._git: dict[str, _Patterns] = {}  # from a folder's prefix such as "src/" to its patterns
        self._ours: dict[str, _Patterns] = {}
        self._above: list[tuple[str, _Patterns]] = []  # the path from the spec's folder to `folder`, and patterns
        self._read_above()

    def _read_above(self) -> None:
        folder = self._folder
        root = next((each for each in (folder, *folder.parents) if (each / ".git").exists()), None)
        if root is None:
            return
        prefix = ""
        for each in (folder, *folder.parents):
            files = [each / ".gitignore"] if each != folder else []
            if each == root:
                files.insert(0, root / ".git" / "info" / "exclude")
            for file in reversed(files):
                spec = GitIgnoreSpec.from_lines(_read_lines(file))
                if not (prefix and spec.check_file(prefix).include):  # it ignores the working directory itself
                    self._above.append((prefix, _Patterns(spec)))
            if each == root:
                return
            prefix = f"{each.name}/{prefix}"

    def enter(self, prefix: str) -> None:
        """Read the ignore files of the folder with this prefix ("" or a path that ends with a slash)."""
        for name, found in ((".gitignore", self._git), (".raypsignore", self._ours)):
            lines = _read_lines(self._folder / prefix / name)
            if lines:
                found[prefix] = _Patterns(GitIgnoreSpec.from_lines(lines))

    def keeps(self, path: str, *, folder: bool) -> bool:
        """Return whether a file, or the content of a folder, is code: it is wanted, and has no name of a secret."""
        return find_secret_name(path.rpartition("/")[2]) is None and self.wants(path, folder=folder)

    def wants(self, path: str, *, folder: bool) -> bool:
        """Return whether a file, or the content of a folder, is wanted by the patterns that apply to its path."""
        name = path.rpartition("/")[2].lower()
        if any(fnmatch.fnmatchcase(name, pattern.lower()) for pattern in _NEVER):
            return False
        text = f"{path}/" if folder else path
        prefixes = ["", *(text[: at + 1] for at, letter in enumerate(path) if letter == "/")]
        for found in (self._ours, self._git):
            for prefix in reversed(prefixes):  # the patterns of the deepest folder decide first
                if prefix in found:
                    ignored = found[prefix].ignores(text.removeprefix(prefix))
                    if ignored is not None:
                        return not ignored
        for above, patterns in self._above:
            ignored = patterns.ignores(above + text)
            if ignored is not None:
                return not ignored
        return True


def _is_of(match: re.Match[str], path: str) -> bool:
    """Return whether a pattern has matched `path` itself: neither a folder above, nor only what is in this folder."""
    if _SLASH in match.re.groupindex:
        return match.end(_SLASH) in (-1, len(path))
    return not (path.endswith("/") and match.end() == len(path))  # such as d/**, which leaves d itself


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []


def _is_environment(folder: Path) -> bool:
    return any((folder / name).exists() for name in _ENVIRONMENT)


def _read_entry(folder: Path, path: str, status: os.stat_result) -> ArchiveEntry:
    try:
        if not stat.S_ISLNK(status.st_mode):
            return ArchiveEntry(path, (folder / path).read_bytes(), executable=bool(status.st_mode & 0o100))
        target = os.readlink(folder / path)  # noqa: PTH115  Path.readlink changes the text
    except OSError as error:
        raise ConfigError(
            f"{folder / path} cannot be read: {error.strerror}\ncorrect it, or list it in .raypsignore",
            field="working_dir",
        ) from error
    why = check_link(path, target)
    if why is not None:
        raise ConfigError(
            f"the symbolic link {path} -> {target} {why}, and its target would be missing on the cluster:\n"
            f"put a copy into {folder}, or list {path} in .raypsignore",
            field="working_dir",
            file=path,
        )
    return ArchiveEntry(path, link=target)


def _explain_too_large(folder: Path, sizes: dict[str, int], count: int, most_bytes: int) -> ConfigError:
    largest = sorted(sizes.items(), key=lambda item: (-item[1], item[0]))[:_LISTED]
    names = ", ".join(f"{path} ({_format_bytes(size)})" for path, size in largest)
    total = sum(sizes.values())
    return ConfigError(
        f"the code in {folder} has {count} files of {_format_bytes(total)}, and the limits are {MOST_FILES} files and "
        f"{_format_bytes(most_bytes)}; the largest are {names}:\n"
        "list data in .raypsignore or .gitignore and read it by an absolute path or an address (or set RAYPS_CODE_MB "
        "here and at the service),\nor use a folder of the service's machine with upload=False (--no-upload)",
        field="working_dir",
        largest=[path for path, _ in largest],
    )


def _format_bytes(size: int) -> str:
    return f"{size / MEGABYTE:.3g} MB" if size >= MEGABYTE / 10 else f"{size / 1000:.3g} kB"


def _refuse_unreadable(error: OSError) -> None:
    raise ConfigError(
        f"{error.filename} cannot be read: {error.strerror}\ncorrect it, or list it in .raypsignore",
        field="working_dir",
    ) from error
