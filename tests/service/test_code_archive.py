"""Packing of code: which files, which bytes, and what an archive may not contain."""

from __future__ import annotations

import io
import json
import os
import subprocess
import tarfile
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.serialization import Encoding
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rayps_client.errors import ConfigError, ServiceError
from rayps_client.exchange.signed_orders import ClientToken, Key
from rayps_client.machine.client_folder import ClientFolder

from rayps.cli.jobs import note_packed
from rayps.core.job.code_archive import ArchiveEntry, check_link, hash_of, read, unpack, write
from rayps.core.job.requirements import explain_refusal, read_requirements
from rayps.service.code.code_files import must_be_project, pack_code, yield_code_files
from rayps.service.code.code_origin import MOST_DIFF, origin_of
from rayps.service.code.code_upload import prepare_upload, write_code
from rayps.service.tokens.member_authority import create_authority, create_request, issue

NAMES = st.text("abcXYZ019 -_.é", min_size=1, max_size=8).filter(
    lambda name: name.strip(".") != "" and name == name.strip()
)
TREES = st.dictionaries(
    st.lists(NAMES, min_size=1, max_size=3).map(tuple), st.tuples(st.binary(max_size=200), st.booleans()), max_size=12
)


def plant(root: Path, files: dict[str, str | bytes]) -> Path:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


def tree(root: Path) -> dict[str, tuple[bytes, bool]]:
    """Return the content of each file, and whether its owner may execute it."""
    return {
        path.relative_to(root).as_posix(): (path.read_bytes(), os.access(path, os.X_OK))
        for path in root.rglob("*")
        if path.is_file()
    }


def without_conflicts(files: dict[tuple[str, ...], tuple[bytes, bool]]) -> dict[str, tuple[bytes, bool]]:
    paths = {"/".join(parts): value for parts, value in files.items()}
    return {name: value for name, value in paths.items() if not any(other.startswith(f"{name}/") for other in paths)}


@settings(max_examples=60, deadline=None)
@given(files=TREES)
def test_an_unpacked_archive_has_the_same_files(tmp_path_factory: pytest.TempPathFactory, files) -> None:
    wanted = without_conflicts(files)
    archive = write(ArchiveEntry(name, content, executable) for name, (content, executable) in wanted.items())
    again = write(ArchiveEntry(name, *wanted[name]) for name in sorted(wanted, reverse=True))
    folder = tmp_path_factory.mktemp("out")
    unpack(archive, folder)
    assert tree(folder) == wanted
    assert again == archive, "the order in which files are found must not matter"
    assert sorted(read(io.BytesIO(archive), 10_000)) == sorted(wanted)


@settings(max_examples=30, deadline=None)
@given(files=TREES)
def test_packing_what_was_unpacked_gives_the_same_hash(tmp_path_factory: pytest.TempPathFactory, files) -> None:
    first, second = tmp_path_factory.mktemp("first"), tmp_path_factory.mktemp("second")
    for name, (content, executable) in without_conflicts(files).items():
        plant(first, {name: content})
        (first / name).chmod(0o755 if executable else 0o640)
        os.utime(first / name, (1, 1))
    packed = pack_code(first)
    unpack(packed.archive, second)
    assert pack_code(second).hash == packed.hash


def test_one_changed_byte_or_mode_gives_another_hash(tmp_path: Path) -> None:
    plant(tmp_path, {"a.py": "x = 1\n", "b/c.py": ""})
    first = pack_code(tmp_path).hash
    (tmp_path / "a.py").write_text("x = 2\n")
    second = pack_code(tmp_path).hash
    (tmp_path / "a.py").chmod(0o755)
    third = pack_code(tmp_path).hash
    os.utime(tmp_path / "a.py", (5, 5))
    assert len({first, second, third}) == 3 and pack_code(tmp_path).hash == third


IGNORED = {
    ".gitignore": "*.log\ndata/\n!data/\n/only_here.txt\nbuild/\n",
    "sub/.gitignore": "!kept.log\nlocal.txt\n",
    "work.py": "",
    "a.log": "",
    "sub/kept.log": "",
    "sub/other.log": "",
    "sub/local.txt": "",
    "only_here.txt": "",
    "sub/only_here.txt": "",
    "build/sub/x.py": "",
    "data/rows.csv": "1",
    "deep/er/b.log": "",
}


def test_nested_patterns_and_negation_select_the_files_that_git_selects(tmp_path: Path) -> None:
    plant(tmp_path, IGNORED)
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    listed = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard", "-z"], cwd=tmp_path, capture_output=True, check=True
    )
    expected = {name for name in listed.stdout.decode().split("\0") if name}
    assert pack_code(tmp_path).paths == expected
    assert "sub/kept.log" in expected and "deep/er/b.log" not in expected  # the patterns are exercised


PATTERNS = st.lists(
    st.sampled_from(
        [
            *("*.x", "!*.x", "a/", "!a/", "/b", "b/*", "!b/c", "**/c", "c/**", "!c", "# text", "a/b", "!/a/b/"),
            *("*", "!*/", "**", "**/b/", "d/", "!d/a", "d/**", "?", "[ab]"),
        ]
    ),
    max_size=5,
)


@settings(max_examples=40, deadline=None)
@given(top=PATTERNS, below=PATTERNS)
@example(top=["a/b", "!a/"], below=[])  # the second pattern adds the folder a, not its folder b
@example(top=["d/**"], below=["!*.x"])  # d itself is kept, so that its own patterns count
@example(top=[], below=["a/", "!*/"])
def test_any_patterns_select_what_git_selects(tmp_path_factory: pytest.TempPathFactory, top, below) -> None:
    root = tmp_path_factory.mktemp("patterns")
    names = ["a/b/c", "a/c", "a/1.x", "b/c", "b/2.x", "c/d", "3.x", "d/a/4", "d/b/5", "d/c.x", "e"]
    plant(root, dict.fromkeys(names, "") | {".gitignore": "\n".join(top), "d/.gitignore": "\n".join(below)})
    subprocess.run(["git", "init", "-q", str(root)], check=True)
    listed = subprocess.run(
        ["git", "ls-files", "--others", "--exclude-standard", "-z"], cwd=root, capture_output=True, check=True
    )
    assert pack_code(root).paths == {name for name in listed.stdout.decode().split("\0") if name}


def test_secrets_environments_and_caches_are_never_packed(tmp_path: Path) -> None:
    never = [
        *(".env", ".env.local", "sub/prod.env", ".ENV", ".git/config", ".venv/lib/x.py", "sub/__pycache__/a.pyc"),
        *("mine/pyvenv.cfg", "mine/lib/x.py", "node_modules/a.js", ".ssh/id_rsa", ".netrc", ".mypy_cache/x"),
    ]
    plant(tmp_path, dict.fromkeys(never, "secret"))
    plant(tmp_path, {"work.py": "", "environment.py": "", ".raypsignore": "!.env\n!*.env\n!.venv/\n!**\n"})
    assert pack_code(tmp_path).paths == {"work.py", "environment.py", ".raypsignore"}


def test_keys_and_tokens_are_never_packed_and_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All that the commands of rayps write with a secret in it, below the folder of a job."""
    monkeypatch.delenv("RAYPS_MEMBER_PASSPHRASE", raising=False)
    create_authority(tmp_path / "federation", "North", 10)
    create_request("a", tmp_path / "a.key", tmp_path / "a.csr")
    member = issue(tmp_path / "federation", tmp_path / "a.csr", 10.0)
    certificate = member.certificate.public_bytes(Encoding.PEM)
    client = ClientFolder(tmp_path / "clients" / "JOB" / "a")
    client.save_state(0, 1, "ditto", {}, 0)
    client.close()
    token, user = (
        str(ClientToken.create("JOB", Key.load_or_create(tmp_path / "clients.key"), "a b")),
        "rps_" + "x-_" * 11,
    )
    key = (tmp_path / "a.key").read_bytes()
    plant(
        tmp_path,
        {
            "certificate.pem": certificate,
            "both.pem": certificate + key,
            "renamed.txt": b"\n" + key,
            "ssh": "-----BEGIN OPENSSH PRIVATE KEY-----\nx\n",
            "token.txt": f"{token}\n",
            "token.json": json.dumps({"id": "1", "token": user}, indent=2),
            "tokens.sh": f"# ours\nexport RAYPS_CLIENT_TOKEN='{token}'\nRAYPS_TOKEN={user}\n",
            "moved/identity.json": (tmp_path / "clients/JOB/a/identity.json").read_bytes(),
            ".env": "",
            "ignored.key": "",
            ".gitignore": "ignored.key\n",
            ".raypsignore": "!a.key\n!token.txt\n!clients/\n",
            "work.py": 'KEY = """\n-----BEGIN PRIVATE KEY-----\n"""\n# rpc.JOB.x is no token\n',
            "keys.json": '{"token": "the word", "key": 1}',
            "other/identity.json": '{"name": "a", "key": "b"}',
        },
    )
    packed = pack_code(tmp_path)
    sent = {path for path in packed.paths if not path.startswith("federation/")}
    assert sent == {
        *("a.csr", "certificate.pem", "work.py", "keys.json", "other/identity.json", ".gitignore", ".raypsignore")
    }
    assert {path: what.removesuffix(" of rayps") for path, what in packed.secrets.items()} == {
        **dict.fromkeys(
            ("federation/ca.key", "a.key", "clients.key", "both.pem", "renamed.txt", "ssh"), "a private key"
        ),
        **dict.fromkeys(("token.txt", "token.json", "tokens.sh"), "a token"),
        "moved/identity.json": "the key of a client",
        "clients/JOB/a/": "the folder of a client",
        ".env": "a file of passwords",
    }
    for secret in (token.split(".")[2], user, client.key, key.decode().splitlines()[1]):
        assert secret.encode() not in packed.archive
    assert "clients/JOB/a/ (the folder of a client of rayps)" in packed.left_out() and "and 7 more" in packed.left_out()
    assert packed.summary().startswith(f"{len(packed.paths)} files of ") and ".raypsignore" in packed.summary()
    assert f"packed from {packed.folder}; to leave out" in packed.summary()
    (packed.folder / "patients.csv").write_bytes(b"x" * 60_000)
    assert "; the largest: patients.csv (60 kB); to leave" in pack_code(packed.folder).summary()
    (packed.folder / "site.PARQUET").write_bytes(b"x" * 700)
    found = pack_code(packed.folder)
    assert "; the largest: patients.csv (60 kB), site.PARQUET (0.7 kB); to leave" in found.summary()
    note = found.data_note()
    assert packed.data_note() == "" and "sent to the service: patients.csv, site.PARQUET; " in note
    note_packed([found], strategy="fedavg")
    assert note not in capsys.readouterr().err
    for strategy in ("fedavg:clients=remote", [{"strategy": {"name": "fedavg", "clients": {"name": "remote"}}}]):
        note_packed([found], strategy=strategy)
        assert note in capsys.readouterr().err
    assert pack_code(tmp_path / "other").left_out() == ""


def test_raypsignore_precedes_gitignore_in_every_folder(tmp_path: Path) -> None:
    plant(tmp_path, {"work.py": "", "big.bin": "", "sub/need.csv": "", "sub/.gitignore": "*.csv\n"})
    (tmp_path / ".raypsignore").write_text("big.bin\n!sub/need.csv\n")
    assert pack_code(tmp_path).paths == {"work.py", "sub/need.csv", "sub/.gitignore", ".raypsignore"}


def test_patterns_above_the_working_directory_count_unless_they_ignore_it_whole(tmp_path: Path) -> None:
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    plant(tmp_path, {".gitignore": "*.bin\ntrials/\n", "src/work.py": "", "src/x.bin": "", "trials/work.py": ""})
    plant(tmp_path, {".git/info/exclude": "/src/mine.txt\n", "src/mine.txt": ""})
    assert pack_code(tmp_path / "src").paths == {"work.py"}
    assert pack_code(tmp_path / "trials").paths == {"work.py"}


@pytest.mark.parametrize("target", ["/etc/passwd", "../outside", "sub/../../outside", "sub/../work.py", "../../../etc"])
def test_a_link_that_leaves_the_folder_is_refused_by_name(tmp_path: Path, target: str) -> None:
    plant(tmp_path, {"in/work.py": "", "in/sub/x": "", "outside": ""})
    (tmp_path / "in/bad").symlink_to(target)
    with pytest.raises(ConfigError, match=r"bad -> .*(\n.*)*list bad in \.raypsignore"):
        pack_code(tmp_path / "in")
    (tmp_path / "in/.raypsignore").write_text("bad\n")
    assert "bad" not in pack_code(tmp_path / "in").paths


def test_links_that_stay_inside_are_packed_as_links(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    plant(first, {"data/a.csv": "1", "sub/x": "", ".env": "secret"})
    (first / "sub/rows").symlink_to("../data")
    (first / "alias").symlink_to("data/a.csv")
    (first / "shown").symlink_to(".env")  # the link is packed, the secret is not
    packed = pack_code(first)
    second.mkdir()
    unpack(packed.archive, second)
    assert (second / "sub/rows/a.csv").read_text() == (second / "alias").read_text() == "1"
    assert not (second / "shown").exists() and b"secret" not in packed.archive


def test_the_error_of_a_large_folder_names_the_five_largest_files(tmp_path: Path) -> None:
    plant(tmp_path, {f"{size}.bin": b"x" * size for size in (10, 900_000, 700_000, 800_000, 600_000, 500_000)})
    with pytest.raises(ConfigError) as caught:
        pack_code(tmp_path, 3_000_000)
    text = str(caught.value)
    assert caught.value.data["largest"] == [f"{n}00000.bin" for n in (9, 8, 7, 6, 5)]
    assert "900000.bin (0.9 MB)" in text and ".raypsignore" in text and "RAYPS_CODE_MB" in text and "10.bin" not in text
    assert len(text.splitlines()) <= 3
    (tmp_path / ".raypsignore").write_text("[6-9]*.bin\n")
    assert "500000.bin" in pack_code(tmp_path, 3_000_000).paths


def test_home_root_and_temporary_folders_are_no_projects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = plant(tmp_path / "home", {"project/w.py": "1"})
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "scratch"))
    for folder, what in (
        (home, "the home directory"),
        (Path("/"), "the root of the file system"),
        (Path("/tmp"), "temporary files"),
        (tmp_path / "scratch", "temporary files"),
    ):
        with pytest.raises(ConfigError, match=what) as error:
            must_be_project(folder)
        assert "--working-dir DIR" in str(error.value) and error.value.data["field"] == "working_dir"
    must_be_project(home / "project")
    assert pack_code(home).paths == {"project/w.py"}  # whoever names the folder gets it
    with pytest.raises(ConfigError, match="does not exist"):
        pack_code(tmp_path / "none")


# ---- what an archive may not contain


def tar_of(*members: tuple[str, bytes | None, bytes, str], **fields: int) -> bytes:
    """Return a tar file of (name, content, type, link target)."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for name, content, kind, link in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname, member.size = kind, link, len(content or b"")
            tar.addfile(member, io.BytesIO(content or b""))
    return out.getvalue()


FILE, LINK = tarfile.REGTYPE, tarfile.SYMTYPE
HOSTILE = {
    "absolute": tar_of(("/tmp/x", b"", FILE, "")),
    "upwards": tar_of(("../x", b"", FILE, "")),
    "inner upwards": tar_of(("a/../../x", b"", FILE, "")),
    "dot": tar_of(("./x", b"", FILE, "")),
    "hard link": tar_of(("a", b"", FILE, ""), ("b", None, tarfile.LNKTYPE, "/etc/passwd")),
    "link out": tar_of(("a", None, LINK, "../../etc")),
    "absolute link": tar_of(("a", None, LINK, "/etc")),
    "link through a link": tar_of(("x/y/a", None, LINK, "../../s"), ("x/y/b", None, LINK, "a/../..")),
    "file through a link": tar_of(("a", None, LINK, "sub"), ("a/x", b"", FILE, "")),
    "file below a file": tar_of(("a", b"", FILE, ""), ("a/x", b"", FILE, "")),
    "twice": tar_of(("a", b"1", FILE, ""), ("a", b"2", FILE, "")),
    "folder and file": tar_of(("a/x", b"1", FILE, ""), ("a", b"2", FILE, "")),
    "device": tar_of(("a", None, tarfile.CHRTYPE, "")),
    "pipe": tar_of(("a", None, tarfile.FIFOTYPE, "")),
    "folder": tar_of(("a", None, tarfile.DIRTYPE, "")),
    "sparse": tar_of(("a", None, tarfile.GNUTYPE_SPARSE, "")),
    "long path": tar_of(("a/" * 600 + "x", b"", FILE, "")),
    "no tar": b"x" * 2048,
    "compressed": __import__("gzip").compress(tar_of(("a", b"", FILE, ""))),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_a_hostile_archive_is_refused_and_writes_nothing(tmp_path: Path, kind: str) -> None:
    inner = tmp_path / "one" / "two"
    inner.mkdir(parents=True)
    with pytest.raises(ConfigError, match="the code archive is refused"):
        unpack(HOSTILE[kind], inner)
    assert [path for path in tmp_path.rglob("*") if not path.is_dir()] == []


def test_archives_with_too_many_bytes_or_files_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tar_of(*[(f"f{n}", b"x" * 100, FILE, "") for n in range(10)])
    assert len(read(io.BytesIO(archive), 1000)) == 10
    with pytest.raises(ConfigError, match="more than 999 bytes"):
        read(io.BytesIO(archive), 999)
    monkeypatch.setattr("rayps.core.job.code_archive.MOST_FILES", 9)
    with pytest.raises(ConfigError, match="more than 9 files"):
        read(io.BytesIO(archive), 1000)
    with pytest.raises(ConfigError, match=r"cut off|not a tar file"):
        read(io.BytesIO(archive[:600]), 10**9)


def test_a_member_that_claims_more_bytes_than_there_are_is_refused() -> None:
    member = tarfile.TarInfo("a")
    member.size = 10**15
    with pytest.raises(ConfigError, match="cut off"):
        read(io.BytesIO(member.tobuf() + b"\0" * 1024), 10**18)


# ---- sizes that overlap, and names that no file may have


def octal(number: int) -> bytes:
    return f"{number:o}".encode().rjust(11, b"0") + b"\0" if number >= 0 else f"-{-number:o}".encode().ljust(12, b"\0")


def base256(number: int) -> bytes:
    return (b"\x80" if number >= 0 else b"\xff") + (number % 256**11).to_bytes(11, "big")


def head(name: bytes, size: bytes, kind: bytes = b"0", link: bytes = b"") -> bytes:
    """Return a header of 512 bytes with these raw fields."""
    fields = [
        (0, name[:100]), (100, b"0000644\0"), (108, b"0000000\0"), (116, b"0000000\0"), (124, size),
        (136, b"00000000000\0"), (156, kind), (157, link[:100]), (257, b"ustar\x0000"),
    ]  # fmt: skip
    block = bytearray(512)
    for at, field in fields:
        block[at : at + len(field)] = field
    block[148:156] = b" " * 8
    block[148:156] = f"{sum(block):06o}\0 ".encode()
    return bytes(block)


def pax(records: dict[str, str], kind: bytes = b"x") -> bytes:
    """Return an extended header for the next member, or (kind `g`) for all that follow."""
    text = b""
    for key, value in records.items():
        rest = f" {key}={value}\n".encode()
        length = len(rest) + 1
        while len(str(length)) + len(rest) != length:
            length = len(str(length)) + len(rest)
        text += str(length).encode() + rest
    return head(b"pax", octal(len(text)), kind) + text.ljust(-(-len(text) // 512) * 512, b"\0")


WAYS = {  # a header of a file of `size` bytes
    "octal": lambda name, size: head(name, octal(size)),
    "base 256": lambda name, size: head(name, base256(size)),
    "pax": lambda name, size: pax({"size": str(size)}) + head(name, octal(0)),
}
END = b"\0" * 1024


def overlapping(way: str, count: int = 8, room: int = 65536) -> bytes:
    """Return an archive in which `count` files share the bytes of the first one, by way of negative sizes.

    After the end of each file stands a file of a negative size, which leads back to the next header in the first.
    """
    lead = WAYS[way]
    inner = [lead(b"b%d" % number, 0) for number in range(count)]
    tails = [lead(b"n%d" % number, 0) for number in range(count + 1)]
    first, inside, last = len(lead(b"a", 0)), len(inner[0]), len(tails[0])
    size = first + room
    begins = [first + number * inside for number in range(count)]  # of the headers inside of the first file
    ends = [size + number * last for number in range(count + 1)]  # of the headers with a negative size
    inner = [lead(b"b%d" % n, ends[n + 1] - begins[n] - inside) for n in range(count)]
    tails = [lead(b"n%d" % n, begins[n] - ends[n] - last) for n in range(count)]
    data = b"".join(inner).ljust(room, b"x")
    return lead(b"a", room) + data + b"".join(tails) + END


def all_at_once(count: int = 8, room: int = 65536) -> bytes:
    """Return an archive whose global header gives all files one size, though their headers follow each other."""
    size = pax({"size": str(room)}, b"g")
    return size + b"".join(head(b"f%d" % n, octal(0)) for n in range(count)) + b"x" * room + END


def behind_a_link(room: int = 1024) -> bytes:
    """Return an archive in which a link states a size, so that readers differ about what follows it."""
    return head(b"l", octal(room), b"2", b"a") + head(b"a", octal(512)) + b"x" * room + END


STATED = {
    **{f"negative sizes, {way}": overlapping(way) for way in WAYS},
    "a global size": all_at_once(),
    "a link's size": behind_a_link(),
    "a negative size at the end": head(b"a", octal(512)) + b"x" * 512 + head(b"b", base256(-512)) + END,
    "a negative extended header": head(b"pax", base256(-512), b"x") + head(b"a", octal(0)) + END,
    "an extended header without an end": head(b"pax", base256(2**80), b"x") + head(b"a", octal(0)) + END,
}


@pytest.mark.parametrize("kind", STATED)
def test_members_that_share_bytes_are_refused(tmp_path: Path, kind: str) -> None:
    """On the service, from a file, and on a host, from memory."""
    archive = STATED[kind]
    with pytest.raises(ConfigError, match="the code archive is refused"):
        unpack(archive, tmp_path)
    assert tree(tmp_path) == {}
    stored = tmp_path / "archive"
    stored.write_bytes(archive)
    with stored.open("rb") as file, pytest.raises(ConfigError, match="the code archive is refused"):
        read(file, 10**12)


SIZES = st.one_of(st.integers(-3, 5).map(lambda blocks: blocks * 512), st.integers(-2000, 2000))
PARTS = st.one_of(
    st.text(st.characters(codec="utf-8", exclude_characters="/"), min_size=1, max_size=6),
    st.sampled_from(["a", "b", "c", "x" * 255, "x" * 256, "é" * 128, "a\nb", "\x1b[2J", "a\x9bb"]),
)
MEMBERS = st.fixed_dictionaries(
    {
        "path": st.lists(PARTS, min_size=1, max_size=3).map("/".join),
        "size": SIZES,
        "way": st.sampled_from(sorted(WAYS)),
        "long": st.booleans(),  # the path in an extended header
        "common": st.one_of(st.none(), st.none(), SIZES),  # the size in a header for all that follow
        "link": st.one_of(st.none(), st.lists(PARTS, min_size=1, max_size=2).map("/".join)),
        "honest": st.booleans(),  # the bytes follow that the header states
    }
)


def by_hand(members: list[dict[str, Any]]) -> bytes:
    """Return a tar file of members whose headers state whatever `MEMBERS` draws."""
    out = b""
    for each in members:
        path, size = each["path"].encode(), each["size"]
        if each["common"] is not None:
            out += pax({"size": str(each["common"])}, b"g")
        if each["long"]:
            out += pax({"path": each["path"]})
        if each["link"] is not None:
            out += head(path, octal(size), b"2", each["link"].encode())
        else:
            out += WAYS[each["way"]](path, size)
        if each["honest"] and size > 0 and each["link"] is None:
            out += (b"y" * size).ljust(-(-size // 512) * 512, b"\0")
    return out + END


def claimed(begin: int, size: int) -> dict[str, Any]:
    return {
        "path": f"f{begin}",
        "size": size,
        "way": "pax",
        "long": False,
        "common": None,
        "link": None,
        "honest": False,
    }


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(members=st.lists(MEMBERS, min_size=1, max_size=5))
@example(members=[claimed(0, -512), claimed(1, 0)])
@example(members=[{**claimed(n, 0), "way": "octal", "common": [None, 1024][n == 0]} for n in range(5)])
@example(members=[{**claimed(n, 0), "path": path} for n, path in enumerate(["x" * 255, "a\nb"])])
def test_an_accepted_archive_has_no_more_bytes_than_it_writes(
    tmp_path_factory: pytest.TempPathFactory, members: list[dict[str, Any]]
) -> None:
    """Whatever headers state: an archive is refused, and nothing is written, or each of its files is as it says."""
    archive, folder = by_hand(members), tmp_path_factory.mktemp("out")
    try:
        names = read(io.BytesIO(archive), 10**9)
    except ConfigError:
        with pytest.raises(ConfigError):
            unpack(archive, folder, 10**9)
        assert list(folder.iterdir()) == []
        return
    unpack(archive, folder, 10**9)
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    assert sorted(path.relative_to(folder).as_posix() for path in files) == sorted(names)
    heads = sum(512 for _ in names)
    assert sum(path.stat().st_size for path in files if not path.is_symlink()) + heads <= len(archive)
    for name in (each for path in files for each in path.relative_to(folder).parts):
        assert len(os.fsencode(name)) <= 255 and not any(unicodedata.category(each) == "Cc" for each in name)


NO_NAMES = {
    "256 bytes": "x" * 256,
    "128 letters of two bytes": "é" * 128,
    "a line end": "a\nb",
    "a tab": "a\tb",
    "a terminal's title": "\x1b]0;t\x07",
    "delete": "a\x7f",
    "an escape of one byte": "a\x9b2J",
}


@pytest.mark.parametrize("name", NO_NAMES.values(), ids=NO_NAMES)
@pytest.mark.parametrize("place", ["file", "folder", "link"])
def test_a_name_that_no_file_may_have_is_refused_by_name(tmp_path: Path, name: str, place: str) -> None:
    """When it is packed, by the service and on a host; the error has no control character itself."""
    entry = {
        "file": ArchiveEntry(f"a/{name}"),
        "folder": ArchiveEntry(f"{name}/a"),
        "link": ArchiveEntry("a/l", link=name),
    }[place]
    with pytest.raises(ConfigError, match="the code archive is refused") as packed:
        write([entry])
    link = b"" if entry.link is None else b"l"
    records = {"path": entry.path} | ({} if entry.link is None else {"linkpath": entry.link})
    archive = pax(records) + head(b"a", octal(0), b"2" if link else b"0", link) + END
    with pytest.raises(ConfigError) as unpacked:
        unpack(archive, tmp_path)
    for error in (str(packed.value), str(unpacked.value)):
        assert not any(unicodedata.category(each) == "Cc" for each in error)
        assert "255" in error or "control character" in error
    assert list(tmp_path.iterdir()) == []


def test_names_of_other_languages_are_packed(tmp_path: Path) -> None:
    names = ["日本.py", "x" * 255, "é" * 127, "a b.py", "\u200ebild.png"]
    unpack(write(ArchiveEntry(f"d/{name}", b"1") for name in names), tmp_path)
    assert sorted(path.name for path in (tmp_path / "d").iterdir()) == sorted(names)


@given(
    path=st.lists(st.sampled_from(["a", "b"]), min_size=1, max_size=4),
    link=st.lists(st.sampled_from(["..", "a", ".", "b"]), min_size=1, max_size=6),
)
def test_an_accepted_link_stays_inside_for_any_folder_depth(path: list[str], link: list[str]) -> None:
    """The slow version: follow the link's parts one by one from the link's folder."""
    if check_link("/".join(path), "/".join(link)) is None:
        depth = len(path) - 1
        for part in link:
            depth += {"..": -1, ".": 0}.get(part, 1)
            assert depth >= 0


# ---- the origin of the code


def git(folder: Path, *arguments: str) -> str:
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, text=True).stdout


def test_the_origin_has_the_commit_and_what_differs_but_no_secret(tmp_path: Path) -> None:
    git(tmp_path, "init", "-q", "-b", "trunk")
    plant(
        tmp_path, {"a.py": "x = 1\n", ".env": "KEY=old\n", "gone.py": "", "lost.env": "KEY=lost\n", "sub/é.py": "1\n"}
    )
    plant(tmp_path, {"lost.txt": "KEY of a file whose name tells nothing\n"})
    git(tmp_path, "add", "-f", ".")
    git(tmp_path, "commit", "-qm", "first")
    clean = pack_code(tmp_path)
    origin = origin_of(tmp_path, clean.paths, clean.size)
    assert origin["commit"] == git(tmp_path, "rev-parse", "HEAD").strip() and origin["branch"] == "trunk"
    assert origin["dirty"] is False and origin["diff"] == ""

    plant(tmp_path, {"a.py": "x = 2\n", ".env": "KEY=new\n", "new.py": "y = 3\n", "new.log": "l\n", "sub/é.py": "2\n"})
    plant(tmp_path, {".gitignore": "*.log\nhidden.txt\n"})
    (tmp_path / "gone.py").unlink()
    (tmp_path / "lost.env").unlink()
    (tmp_path / "lost.txt").unlink()
    packed = pack_code(tmp_path)
    origin = origin_of(tmp_path, packed.paths, packed.size)
    assert origin["dirty"] is True and origin["untracked"] == 2  # new.py and .gitignore
    assert "+x = 2" in origin["diff"] and "gone.py" in origin["diff"] and "é.py" in origin["diff"]
    assert "KEY" not in origin["diff"] and ".env" not in origin["diff"]
    below = origin_of(tmp_path / "sub", {"é.py"}, 2)
    assert "+2" in below["diff"] and "x = 2" not in below["diff"]

    plant(tmp_path, {"a.py": "x = 3\n" * MOST_DIFF})
    packed = pack_code(tmp_path)
    long = origin_of(tmp_path, packed.paths, packed.size)
    assert len(long["diff"]) == MOST_DIFF and long["diff_cut"] is True


def test_a_folder_without_a_repository_has_no_commit(tmp_path: Path) -> None:
    plant(tmp_path, {"a.py": ""})
    packed = pack_code(tmp_path)
    assert origin_of(tmp_path, packed.paths, packed.size) == {"files": 1, "bytes": 0, "folder": str(tmp_path)}


# ---- the job's fields


def test_the_jobs_paths_become_relative_to_the_packed_folder(tmp_path: Path) -> None:
    plant(tmp_path, {"src/w.py": "", "s.py": "", "runs/step-1/manifest.json": "{}"})
    fields = {
        "workload": str(tmp_path / "src/w.py") + ":W",
        "strategy": [{"epochs": 1, "strategy": {"name": str(tmp_path / "s.py") + ":S", "k": 2}}, "all_reduce"],
        "resume": "runs/step-1",
    }
    found = prepare_upload(tmp_path, fields, 10**6).fields
    assert found["workload"] == "src/w.py:W" and found["resume"] == str(tmp_path / "runs/step-1")
    assert found["strategy"] == [{"epochs": 1, "strategy": {"name": "s.py:S", "k": 2}}, "all_reduce"]
    assert prepare_upload(tmp_path, {"workload": "src/../src/w.py:W"}, 10**6).fields["workload"] == "src/w.py:W"
    with pytest.raises(ConfigError, match="outside of the working directory"):
        prepare_upload(tmp_path / "src", {"workload": "../s.py:W"}, 10**6)


def test_downloaded_code_is_verified_and_needs_an_empty_folder(tmp_path: Path) -> None:
    packed = pack_code(plant(tmp_path / "a", {"w.py": "1"}))
    with pytest.raises(ServiceError, match="SHA-256"):
        write_code(packed.archive + b"\0", packed.hash, tmp_path / "b")
    assert not (tmp_path / "b").exists()
    write_code(packed.archive, packed.hash, tmp_path / "b")
    assert pack_code(tmp_path / "b").hash == packed.hash == hash_of(packed.archive)
    with pytest.raises(ConfigError, match="not empty"):
        write_code(packed.archive, packed.hash, tmp_path / "b")


# ---- requirements


def test_requirements_are_read_from_files_and_lists(tmp_path: Path) -> None:
    text = "# first\neinops==0.8.1 \\\n    --hash=sha256:ab \\\n    --hash=sha256:cd  # why\n\n./wheels/x.whl\n"
    (tmp_path / "requirements.txt").write_text(text)
    expected = ["einops==0.8.1 --hash=sha256:ab --hash=sha256:cd", "./wheels/x.whl"]
    assert read_requirements(tmp_path / "requirements.txt") == expected == read_requirements(expected)
    assert all(explain_refusal(line) is None for line in expected)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_requirements(tmp_path / "none.txt")


@pytest.mark.parametrize(
    "name", ["uv.lock", "poetry.lock", "pdm.lock", "Pipfile.lock", "pylock.toml", "pylock.dev.toml", "pyproject.toml"]
)
def test_lock_files_of_another_form_are_refused_with_the_way_out(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text('[[package]]\nname = "einops"\nversion = "0.8.1"\n')
    with pytest.raises(ConfigError, match=r"is no requirements file:\n.*`uv export --format requirements-txt`"):
        read_requirements(tmp_path / name)
    for line in (tmp_path / name).read_text().splitlines():  # under another name
        assert "uv export" in (explain_refusal(line) or "")
    assert [explain_refusal(line) for line in ("a == 1", "a[b]==1", "a>=1; python_version == '3.11'")] == [None] * 3


@pytest.mark.parametrize(
    "line",
    [
        "-r other.txt",
        "-rother.txt",
        "--requirement=a",
        "-c x",
        "-e .",
        "--editable .",
        "",
        "a\0b",
        "x" * 3000,
        "--index-url https://me:pw@host/simple",
        "pkg @ git+https://u:p@host/x",
    ],
)
def test_a_requirement_that_refers_to_files_or_has_a_password_is_refused(line: str) -> None:
    assert explain_refusal(line) is not None


def test_the_state_directory_of_a_service_is_never_sent(tmp_path):
    """It has the service's token, its jobs, and the code of earlier jobs."""
    (tmp_path / "work.py").write_text("x = 1\n")
    for name, marker in (("state", "rayps.db"), ("other", "service.lock")):
        (tmp_path / name / "jobs").mkdir(parents=True)
        (tmp_path / name / marker).write_text("")
        (tmp_path / name / "token").write_text("secret")
        (tmp_path / name / "jobs" / "rounds.json").write_text("{}")
    assert [path for path, _ in yield_code_files(tmp_path)] == ["work.py"]
