"""Jobs with packed code: by the real client and service, with drivers in processes of their own and without Ray."""

from __future__ import annotations

import hashlib
import io
import os
import shutil
import sqlite3
import tarfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from code_work import project, wheel
from folders import PYTHONPATH
from rayps_client.errors import ConfigError, NotFound
from real_service import stop_running
from service_process import ProcessPlace
from service_site import Site

from rayps.cli.jobs import shorten_reason
from rayps.cli.main import main
from rayps.core.job.code_archive import hash_of
from rayps.core.job.job_environment import JobEnvironment
from rayps.service.backup import backup
from rayps.service.client import Client
from rayps.service.code.code_files import pack_code
from rayps.service.code.code_store import CodeStore
from rayps.service.settings import Settings


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("service")
    os.environ["PYTHONPATH"] = os.pathsep.join([os.environ.get("PYTHONPATH", ""), PYTHONPATH])
    site = Site(folder / "state", place=ProcessPlace(folder / "actors", cpus=8.0))  # a job of 9 workers waits
    yield site
    site.close()


@pytest.fixture
def client(site: Site) -> Iterator[Client]:
    with Client(site.url, site.token) as client:
        yield client
        for job in client.jobs():  # a failed test leaves its jobs: the next test must not find their code
            drop(job)


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return project(tmp_path / "project")


def archives(site: Site) -> set[str]:
    return {path.stem for path in (site.settings.state_dir / "code").glob("*.tar")}


def drop(job) -> None:
    """End and delete a job."""
    stop_running(job)
    job.wait(60)
    job.delete()


def test_a_job_runs_the_code_of_its_submission_though_the_folder_is_gone(site, client, home: Path) -> None:
    job = client.submit("src/line.py:Line", working_dir=home, workers=2, epochs=1, upload=True)
    shutil.rmtree(home)
    done = job.wait(240).data
    assert done["status"] == "SUCCEEDED", done["reason"]
    assert (done["metrics"]["shift"], done["metrics"]["scale"]) == (0.25, 2.0)
    assert done["spec"]["working_dir"] is None
    code = done["spec"]["code"]
    assert archives(site) == {code}
    drop(job)
    assert archives(site) == set()


def test_equal_code_is_sent_once_and_deleted_with_its_last_job(site, client, home: Path, monkeypatch) -> None:
    sent: list[str] = []
    request = client._http.request

    def counted(method, path, **options):
        sent.append(method)
        return request(method, path, **options)

    monkeypatch.setattr(client._http, "request", counted)
    first = client.submit("src/line.py:Line", working_dir=home, workers=9)
    assert sent.count("PUT") == 1
    os.utime(home / "src/line.py", (1, 1))
    second = client.submit("src/line.py:Line", working_dir=home, workers=9)
    assert sent.count("PUT") == 1 and first.data["spec"]["code"] == second.data["spec"]["code"]
    assert archives(site) == {first.data["spec"]["code"]}
    drop(first)
    assert archives(site) == {second.data["spec"]["code"]}
    drop(second)
    assert archives(site) == set()


def test_submitting_names_what_was_packed_and_what_was_left_out(
    site, client, home: Path, monkeypatch, capsys, caplog
) -> None:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    monkeypatch.chdir(home)
    (home / "ca.key").write_text("")
    (home / "job.yaml").write_text("workload: src/line.py:Line\nworkers: 9\n")
    assert main(["submit", "job.yaml"]) == 0
    said = capsys.readouterr()
    assert f"{len(pack_code(home).paths)} files of " in said.err and "ca.key (a private key)" in said.err
    code = client.download_code(client.job(said.out.strip()).data["spec"]["code"])
    with tarfile.open(fileobj=io.BytesIO(code)) as tar:
        assert "ca.key" not in tar.getnames()
    drop(client.job(said.out.strip()))
    drop(client.submit("src/line.py:Line", working_dir=home, workers=9))
    assert "ca.key (a private key)" in caplog.text  # no command prints it: a warning
    caplog.clear()
    assert main(["sweep", "job.yaml", "--over", "seed=1,2", "--name", "two"]) == 0
    assert "ca.key (a private key)" in capsys.readouterr().err
    assert "a private key" not in caplog.text  # said once: the command prints it, so it is no warning
    for job in client.jobs(sweep="two"):
        drop(job)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--env", "FILE=@/not/there"], "env.FILE: the file /not/there of the service's machine is no readable"),
        (["--env", "NOT_THERE_AT_ALL"], "env.NOT_THERE_AT_ALL: the service's environment has no NOT_THERE_AT_ALL"),
        (["--env", "A=1", "--env", "A=2"], "--env A was given twice"),
        (["--set", "params.nope=1"], "nope"),
    ],
)
def test_a_refused_job_prints_the_refusal_alone(
    site, client, home: Path, monkeypatch, capsys, more: list[str], says: str
) -> None:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    monkeypatch.chdir(home)
    (home / "job.yaml").write_text("workload: src/line.py:Line\n")
    assert main(["submit", "job.yaml", *more]) == 2
    said = capsys.readouterr().err
    assert says in said and "packed" not in said
    assert client.jobs() == []
    for code in archives(site):
        site.service.code.remove(code)


def test_the_list_shows_the_sentence_of_a_variable_that_is_missing() -> None:
    for env in ({"A": "@/not/there"}, {"A": None}):
        with pytest.raises(ConfigError) as caught:
            JobEnvironment(env=env).must_have({})
        assert len(shorten_reason(caught.value.message)) > 40


def test_code_that_was_deleted_between_upload_and_submission_is_sent_again(
    site, client, home: Path, monkeypatch
) -> None:
    send = client._send_code
    uploads = []

    def lost_once(packed):
        send(packed)
        uploads.append(packed.hash)
        if len(uploads) == 1:
            site.service.code.remove(packed.hash)

    monkeypatch.setattr(client, "_send_code", lost_once)
    job = client.submit("src/line.py:Line", working_dir=home, workers=9)
    assert len(uploads) == 2 and archives(site) == {job.data["spec"]["code"]}
    drop(job)


def test_a_cloned_job_has_byte_for_byte_the_same_code(
    site, client, home: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    first = client.submit("src/line.py:Line", working_dir=home, workers=9, seed=5)
    packed = pack_code(home)
    (home / "src/late.py").write_text("SHIFT = 9.0\n")
    target = tmp_path / "copy"
    assert main(["clone", first.id, str(target), "--set", "seed=6"]) == 0
    second = client.job(capsys.readouterr().out.strip())
    assert pack_code(target).hash == packed.hash == second.data["spec"]["code"] == first.data["spec"]["code"]
    assert second.data["spec"] == {**first.data["spec"], "seed": 6}
    assert not (target / ".env").exists() and not (target / "large.bin").exists()
    assert (target / "alias.txt").is_symlink() and os.access(target / "run.sh", os.X_OK)
    assert main(["clone", first.id, str(tmp_path / "other"), "--no-submit"]) == 0
    assert main(["clone", first.id, str(target), "--no-submit"]) == 2  # it is not empty
    capsys.readouterr()
    assert main(["submit", "--clone", first.id, "--set", "workers=10"]) == 0
    third = client.job(capsys.readouterr().out.strip())
    assert third.data["spec"] == {**first.data["spec"], "workers": 10}
    assert main(["submit"]) == 2 and main(["submit", "--clone", first.id, "--set", "wokers=3"]) == 2
    capsys.readouterr()
    assert main(["get", first.id]) == 0
    assert f"{packed.hash[:12]}, {len(packed.paths)} files" in capsys.readouterr().out
    for job in (first, second, third):
        drop(job)


def test_a_loop_is_cloned_and_has_no_state_to_export(
    site, client, home: Path, tmp_path: Path, monkeypatch, capsys
) -> None:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    (home / "loop.py").write_text("def train_fn(lr=0.1): ...\n")
    first = client.submit(run="loop.py:train_fn", working_dir=home, workers=9, params={"lr": 0.5})
    assert first.data["spec"]["workload"] is None and first.data["name"] == "train_fn"
    assert main(["clone", first.id, str(tmp_path / "copy"), "--set", "params.lr=0.7"]) == 0
    second = client.job(capsys.readouterr().out.strip())
    assert second.data["spec"] == {**first.data["spec"], "params": {"lr": 0.7}}
    assert (tmp_path / "copy" / "loop.py").read_bytes() == (home / "loop.py").read_bytes()
    assert main(["clone", first.id, str(tmp_path / "other"), "--set", "params.lrr=0.7"]) == 2
    assert "no such argument" in capsys.readouterr().err
    assert main(["get", first.id]) == 0
    shown = capsys.readouterr().out
    assert "run              loop.py:train_fn" in shown and "workload" not in shown
    assert main(["ls"]) == 0 and "train_fn" in capsys.readouterr().out
    assert main(["export", first.id, str(tmp_path / "model")]) == 2
    assert "has no checkpoint 'newest': it has none" in capsys.readouterr().err
    for job in (first, second):
        drop(job)


def test_an_archive_of_the_service_takes_the_place_of_the_folder(client, home: Path, monkeypatch) -> None:
    first = client.submit("src/line.py:Line", working_dir=home, workers=9)
    code = first.data["spec"]["code"]
    monkeypatch.setattr(client, "_send_code", lambda packed: pytest.fail("nothing is packed"))
    again = client.submit("src/line.py:Line", code=code, workers=9)
    assert again.data["spec"] == first.data["spec"]
    sweep = client.sweep({"workload": "src/line.py:Line", "code": code, "workers": 9}, seed=[1, 2])
    assert [job.data["spec"]["code"] for job in sweep.jobs] == [code, code]
    for job in (first, again, *sweep.jobs):
        drop(job)


def test_paths_of_other_files_of_a_job_become_absolute(client, home: Path) -> None:
    first = home / "base.safetensors"
    first.write_bytes(b"")
    given = {"path": "base.safetensors", "strict": False}
    job = client.submit("src/line.py:Line", working_dir=home, workers=9, start_from="base.safetensors")
    assert job.data["spec"]["start_from"] == str(first)
    other = client.submit("src/line.py:Line", working_dir=home, workers=9, start_from=given)
    assert other.data["spec"]["start_from"]["path"] == str(first)
    drop(job)
    drop(other)


def test_a_job_without_code_is_not_cloned(client, home: Path, tmp_path: Path) -> None:
    job = client.submit("src/line.py:Line", working_dir=home, upload=False, workers=9)
    with pytest.raises(ConfigError, match="no packed code"):
        job.write_code(tmp_path / "copy")
    assert client.submit_again(job.id).data["spec"] == job.data["spec"]
    drop(job)


def test_an_own_strategy_is_read_from_the_packed_code(site, client, home: Path) -> None:
    (home / "mine.py").write_text("import rayps\nclass Mine(rayps.LocalSGD):\n    name = 'mine'\n")
    job = client.submit("src/line.py:Line", working_dir=home, workers=2, epochs=1, strategy="mine.py:Mine:period=2")
    assert job.data["spec"]["strategy"]["name"] == "mine.py:Mine"
    assert job.wait(240).data["status"] == "SUCCEEDED", job.data["reason"]
    drop(job)
    with pytest.raises(ConfigError, match="there is no file"):
        client.submit("src/line.py:Line", working_dir=home, strategy="none.py:Mine")


def test_requirements_are_installed_for_the_job_alone(client, home: Path) -> None:
    wheel(home / "wheels")
    requirements = ["--no-index", "./wheels/rayps_tiny_test_package-1.0-py3-none-any.whl", "torch", "numpy>=1"]
    job = client.submit("src/line.py:Needs", working_dir=home, workers=2, epochs=1, requirements=requirements)
    done = job.wait(300).data
    assert done["status"] == "SUCCEEDED", done["reason"]
    assert done["metrics"]["tiny"] == 7.0 and done["spec"]["requirements"] == requirements
    assert "installing" in [event["kind"] for event in job.events()]
    drop(job)


def test_a_lock_file_with_hashes_is_installed_and_a_wrong_hash_is_not(client, home: Path, tmp_path: Path) -> None:
    """pip requires a hash of each package then; the packages of the cluster are constraints without hashes."""
    path = wheel(tmp_path / "wheels")
    lock = home / "requirements.lock"
    lines = ["--no-index", f"--find-links {path.parent}", "rayps_tiny_test_package==1.0 \\", "    --hash=sha256:{}", ""]
    jobs = []
    for text in (hashlib.sha256(path.read_bytes()).hexdigest(), "0" * 64):
        lock.write_text("\n".join(lines).format(text))
        jobs.append(
            client.submit("src/line.py:Needs", working_dir=home, epochs=1, requirements=lock, max_failures=0).wait(300)
        )
    good, bad = (job.data for job in jobs)
    assert good["status"] == "SUCCEEDED" and good["metrics"]["tiny"] == 7.0, good["reason"]
    assert bad["status"] == "FAILED" and "DO NOT MATCH THE HASHES" in bad["reason"], bad["reason"]
    for job in jobs:
        drop(job)


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["--no-index", "no_such_package_of_rayps"], "no_such_package_of_rayps"),
        (["--no-index", "torch==0.0.1"], "torch==0.0.1"),
        (["--no-index", "./none.whl"], "none.whl"),
    ],
)
def test_requirements_that_cannot_be_installed_end_the_job_with_pips_words(client, home: Path, lines, words) -> None:
    job = client.submit("src/line.py:Line", working_dir=home, requirements=lines, max_failures=0)
    done = job.wait(240).data
    assert done["status"] == "FAILED"
    assert "requirements could not be installed" in done["reason"] and words in done["reason"]
    drop(job)


# ---- what the service refuses


def put(site: Site, archive: bytes, code: str | None = None):
    return site.http.put(f"/api/v1/code/{code or hash_of(archive)}", content=archive)


def test_an_upload_is_verified_and_refused_without_a_trace(site: Site, home: Path) -> None:
    good, before = pack_code(home), archives(site)  # the code of a refused job is kept for a day
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo("../../escape"), io.BytesIO(b""))
    assert site.http.head(f"/api/v1/code/{good.hash}").status_code == 404
    assert put(site, out.getvalue()).status_code == 422
    wrong = put(site, good.archive, "0" * 64)
    assert wrong.status_code == 422 and "SHA-256" in wrong.json()["detail"]
    assert put(site, good.archive[:-2048], good.hash).status_code == 422
    for name in ("../x", "A" * 64, "0" * 63, "..%2f..%2frayps.db"):
        assert site.http.put(f"/api/v1/code/{name}", content=b"x").status_code in (404, 405, 422)
    assert {path.stem for path in (site.settings.state_dir / "code").iterdir()} == before
    first, second = put(site, good.archive), put(site, good.archive)
    assert (first.status_code, second.status_code) == (201, 200)
    assert site.http.head(f"/api/v1/code/{good.hash}").status_code == 204
    assert site.http.get(f"/api/v1/code/{good.hash}").content == good.archive
    assert (site.settings.state_dir / "code" / f"{good.hash}.tar").stat().st_mode & 0o077 == 0
    site.service.code.remove(good.hash)


def test_code_needs_a_users_token(site: Site) -> None:
    for method in ("GET", "HEAD", "PUT"):
        answer = site.http.request(method, f"/api/v1/code/{'0' * 64}", headers={"Authorization": "Bearer no"})
        assert answer.status_code == 401


def test_an_upload_over_the_limit_is_refused(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAYPS_CODE_MB", "0.001")
    with pytest.raises(ConfigError, match="RAYPS_CODE_MB"):
        Client("http://127.0.0.1:1", "x").submit("src/line.py:Line", working_dir=home)
    with pytest.raises(ConfigError, match="above 0"):
        Settings.read({"RAYPS_CODE_MB": "0"})
    big = pack_code(project(tmp_path / "big"))
    monkeypatch.setattr("service_site.Settings", lambda state_dir: Settings(state_dir=state_dir, code_mb=0.001))
    site = Site(tmp_path / "state")
    try:
        assert put(site, big.archive).status_code == 422
        assert archives(site) == set()
    finally:
        site.close()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"code": "0" * 64}, None),
        ({"code": "abc"}, "code"),
        ({"code": "HASH", "working_dir": "/tmp"}, "working_dir"),
        ({"code": "HASH", "workload": "src/none.py:Line"}, "workload"),
        ({"code": "HASH", "workload": "../src/line.py:Line"}, "workload"),
        ({"requirements": ["-r x"]}, "requirements"),
        ({"requirements": "x"}, "requirements"),
        ({"origin": {"commit": "HEAD"}}, "origin/commit"),
        ({"origin": {"password": "x"}}, "origin/password"),
    ],
)
def test_a_job_with_wrong_code_is_refused(site: Site, home: Path, fields: dict, field: str | None) -> None:
    good = pack_code(home)
    put(site, good.archive)
    body = {"workload": "src/line.py:Line", **fields}
    if body.get("code") == "HASH":
        body["code"] = good.hash
    answer = site.http.post("/api/v1/jobs", json=body)
    assert answer.status_code == (404 if field is None else 422), answer.text
    if field is not None:
        assert [error["pointer"] for error in answer.json()["errors"]] == [f"/{field}"]
    site.service.code.remove(good.hash)


def test_damaged_code_ends_the_job_with_the_reason(site: Site, client: Client, home: Path) -> None:
    good = pack_code(home)
    put(site, good.archive)
    path = site.settings.state_dir / "code" / f"{good.hash}.tar"
    path.write_bytes(good.archive[:512] + good.archive[512:].replace(b"SHIFT", b"SHIFU"))
    job = client.submit("src/line.py:Line", working_dir=home, max_failures=0)
    done = job.wait(120).data
    assert done["status"] == "FAILED" and "damaged" in done["reason"]
    drop(job)


# ---- the origin, the backup, what nobody uses


def test_the_origin_is_shown_with_the_job(site: Site, client: Client, home: Path, capsys, monkeypatch) -> None:
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_TOKEN", site.token)
    for command in ("init -q -b trunk", "add .", "-c user.name=a -c user.email=a@b.c commit -qm first"):
        assert os.system(f"git -C {home} {command}") == 0
    (home / "src/late.py").write_text("SHIFT = 0.5\n")
    job = client.submit("src/line.py:Line", working_dir=home, workers=9)
    shown = client.call("GET", f"/api/v1/jobs/{job.id}/code")
    assert shown["code"] == job.data["spec"]["code"] and "+SHIFT = 0.5" in shown["origin"]["diff"]
    assert shown["origin"]["branch"] == "trunk" and shown["origin"]["dirty"] and "secret" not in str(shown)
    assert main(["get", job.id]) == 0
    text = capsys.readouterr().out
    assert f"commit {shown['origin']['commit'][:12]} (trunk)" in text and "changed since: 2 lines" in text
    again = client.submit_again(job.id)
    assert client.call("GET", f"/api/v1/jobs/{again.id}/code") == shown
    drop(job)
    drop(again)


def test_the_backup_has_the_code(site: Site, client: Client, home: Path, tmp_path: Path) -> None:
    job = client.submit("src/line.py:Line", working_dir=home, workers=9)
    backup(site.settings, tmp_path / "copy")
    code = job.data["spec"]["code"]
    assert hash_of((tmp_path / "copy" / "code" / f"{code}.tar").read_bytes()) == code
    with sqlite3.connect(tmp_path / "copy" / "rayps.db") as store:
        assert code in store.execute("SELECT spec FROM jobs WHERE id = ?", [job.id]).fetchone()[0]
    drop(job)


def test_what_no_job_needs_is_deleted_after_a_day(tmp_path: Path) -> None:
    store = CodeStore(tmp_path, 1000)
    names = ["0" * 64 + ".tar", "1" * 64 + ".tar", "2" * 64 + ".tar", ".part-x", ".part-y"]
    (tmp_path / "code").mkdir()
    for name in names:
        (tmp_path / "code" / name).touch()
        if name not in (names[2], names[4]):
            os.utime(tmp_path / "code" / name, (time.time() - 90_000,) * 2)
    assert sorted(store.remove_unused({"1" * 64})) == sorted([names[0], names[3]])
    assert store.has("1" * 64) and not store.has("0" * 64)
    with pytest.raises(NotFound):
        store.path("0" * 64)
