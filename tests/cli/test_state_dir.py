"""The state directory: only one that is empty or of a rayps service is used, and no other is changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rayps_client.errors import ConfigError

from rayps.cli import main as cli
from rayps.service.settings import Settings


def modes(*paths: Path) -> list[int]:
    return [path.stat().st_mode & 0o777 for path in paths]


@pytest.mark.parametrize("inside", ["thesis.tex", "jobs.txt", ".bashrc", "photos/"])
def test_a_directory_with_files_of_another_program_is_refused_unchanged(tmp_path: Path, inside: str) -> None:
    home = tmp_path / "home"
    home.mkdir()
    home.chmod(0o755)
    (home / "jobs").mkdir(mode=0o755)
    if inside.endswith("/"):
        (home / inside).mkdir()
    else:
        (home / inside).write_text("mine")
    with pytest.raises(ConfigError, match=inside.rstrip("/")) as caught:
        Settings(state_dir=home).prepare()
    assert str(home) in str(caught.value) and "--state-dir" in str(caught.value)
    assert len(str(caught.value).splitlines()) <= 3 and caught.value.data["field"] == "state_dir"
    assert modes(home, home / "jobs") == [0o755, 0o755] and len(list(home.iterdir())) == 2


@pytest.mark.parametrize("which", ["state", "state/jobs"])
def test_a_directory_of_another_user_is_refused_unchanged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, which: str
) -> None:
    state = Settings(state_dir=tmp_path / "state").prepare().state_dir
    for folder in (state, state / "jobs"):
        folder.chmod(0o755)
    mine, stat = os.geteuid(), Path.stat

    def owned(path: Path, **options: bool) -> os.stat_result:
        found = stat(path, **options)
        other = path == tmp_path / which
        return os.stat_result((*found[:4], mine + 1, *found[5:10])) if other else found

    monkeypatch.setattr(Path, "stat", owned)
    with pytest.raises(ConfigError, match=rf"belongs to user .*{mine + 1}.*runs as .*{mine}"):
        Settings(state_dir=state).prepare()
    assert modes(state, state / "jobs") == [0o755, 0o755]


@pytest.mark.parametrize(
    "held",
    [
        [],
        ["rayps.db", "notes.txt"],
        ["service.lock", "x"],
        ["lost+found"],
        ["clients"],
        ["rayps.db.old", "token", "ray.json", "ray_token", "clients.key"],
    ],
)
def test_an_empty_one_and_one_of_a_service_are_used_and_made_private(tmp_path: Path, held: list[str]) -> None:
    state = tmp_path / "state"
    state.mkdir(mode=0o755)
    for name in held:
        (state / name).write_text("")
    Settings(state_dir=state).prepare()
    assert modes(state, state / "jobs") == [0o700, 0o700]
    Settings(state_dir=state).prepare()


def test_the_command_says_which_directory_and_why(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.tex").write_text("mine")
    assert cli.main(["serve", "--state-dir", str(tmp_path), "--port", "0"]) == 2
    said = capsys.readouterr().err
    assert "thesis.tex" in said and str(tmp_path) in said and len(said.splitlines()) <= 3
