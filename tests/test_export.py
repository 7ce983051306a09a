"""`rayps export`, and the download of a job's checkpoints through the service."""

import json

import pytest
import safetensors.torch
import torch
from service_site import Site
from small_work import Small, distance, train

import rayps
from rayps.cli import main as cli
from rayps.core.errors import CheckpointError, ConfigError, NotFound
from rayps.runtime.saved_model import export_checkpoint
from rayps.service.client import Client

WORK = """
import sys; sys.path.insert(0, {tests!r})
from small_work import Small
class Mine(Small): pass
class Other(Small):
    def model(self):
        from torch import nn
        return nn.Linear(5, 2).double()
"""
READS = """
from pathlib import Path
class Reads(Small):
    def model(self):
        made, text = super().model(), Path("note.txt").read_text()
        made.save_pretrained = lambda folder: (folder / "written_by_the_model").write_text(text)
        return made
"""


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    site = Site(tmp_path_factory.mktemp("state"))
    yield site
    site.close()


@pytest.fixture
def at(site, monkeypatch):
    monkeypatch.setenv("RAYPS_URL", site.url)
    monkeypatch.setenv("RAYPS_STATE_DIR", str(site.settings.state_dir))
    return site


@pytest.fixture
def work(tmp_path, request):
    (tmp_path / "mine.py").write_text(WORK.format(tests=str(request.path.parent)))
    return tmp_path


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != "__pycache__")


def test_a_checkpoint_folder_is_exported(work, monkeypatch, capsys):
    monkeypatch.chdir(work)
    train(Small(), workers=2, epochs=1, checkpoint=work / "saved")
    result = train(Small(), workers=2, epochs=2, checkpoint=work / "saved", resume=True)
    newest = result.checkpoint
    assert cli.main(["export", str(newest), "by_name"]) == 0
    assert cli.main(["export", "saved", "with_code", "--workload", "mine.py:Mine"]) == 0
    capsys.readouterr()
    for folder in ("by_name", "with_code"):
        assert distance(rayps.load_state(Small().model(), work / folder), result.model()) == 0
    older = sorted(each.name for each in (work / "saved").iterdir())[0]
    assert cli.main(["export", "saved", "older", "--checkpoint", str(int(older[5:]))]) == 0
    assert distance(rayps.load_state(Small().model(), work / "older"), result.model()) > 0
    capsys.readouterr()
    assert cli.main(["export", "saved", "with_code", "--workload", "mine.py:Mine"]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert cli.main(["export", "saved", "none", "--checkpoint", "77"]) == 2
    assert f"has no checkpoint '77': it has {older}" in capsys.readouterr().err
    assert cli.main(["export", "saved", "none", "--workload", "mine.py:Other"]) == 2
    assert "another model" in capsys.readouterr().err
    assert files(work) == ["by_name", "mine.py", "older", "saved", "with_code"]


def test_a_job_is_exported_through_the_service(at, work, capsys):
    job = at.add(workload="mine.py:Mine", working_dir=str(work))
    home = at.start(job)
    result = train(Small(), workers=2, epochs=2, checkpoint=home / "checkpoints")
    assert cli.main(["export", job[:20], str(work / "out")]) == 0
    assert capsys.readouterr().out.strip() == str(work / "out")
    assert distance(rayps.load_state(Small().model(), work / "out"), result.model()) == 0
    assert cli.main(["export", job, str(work / "no"), "--checkpoint", "best"]) == 2
    assert "has no checkpoint 'best': it has step-" in capsys.readouterr().err
    (work / "mine.py").unlink()
    assert cli.main(["export", job, str(work / "no")]) == 2
    assert "there is no file" in capsys.readouterr().err
    assert files(work) == ["out"]
    # a job without checkpoints
    empty = at.add()
    assert cli.main(["export", empty, str(work / "no")]) == 2
    assert "it has none" in capsys.readouterr().err


def test_a_job_with_packed_code_is_exported_by_its_code(at, work, capsys):
    (work / "mine.py").write_text((work / "mine.py").read_text() + READS)
    (work / "note.txt").write_text("a relative file")
    with Client() as client:
        job = client.submit("mine.py:Reads", working_dir=work).id
    home = at.start(job)
    train(Small(), workers=2, epochs=2, checkpoint=home / "checkpoints")
    (work / "mine.py").unlink()
    (work / "note.txt").unlink()
    assert cli.main(["export", job, str(work / "out")]) == 0
    assert (work / "out" / "written_by_the_model").read_text() == "a relative file"
    assert capsys.readouterr().out.strip() == str(work / "out") and files(work) == ["out"]


def test_only_checkpoints_and_traces_can_be_downloaded(at, tmp_path):
    job = at.add()
    home = at.start(job)
    saved = home / "checkpoints" / "step-00000010"
    (saved / "tables" / "users").mkdir(parents=True)
    (saved / "tables" / "users" / "rows-00000.parquet").write_bytes(b"rows")
    (saved / "manifest.json").write_text(json.dumps({}))
    (home / "checkpoints" / "step-00000011.tmp-1").mkdir()
    (home / "checkpoints" / "step-00000011.tmp-1" / "manifest.json").write_text("{}")
    (home / "checkpoints" / "step-00000012").mkdir()
    (home / "checkpoints" / "step-00000012" / "model.safetensors").write_text("without a manifest")
    (home / "secret.json").write_text("secret")
    (saved / "link.json").symlink_to(home / "secret.json")
    (home / "profile").mkdir()
    (home / "profile" / "rank-0.json").write_text("{}")
    with Client() as client:
        found = client.job(job)
        assert found.files() == {
            "checkpoints/step-00000010/manifest.json": 2,
            "checkpoints/step-00000010/tables/users/rows-00000.parquet": 4,
            "profile/rank-0.json": 2,
        }
        found.download("checkpoints/step-00000010", tmp_path / "got")
        assert (tmp_path / "got" / "tables" / "users" / "rows-00000.parquet").read_bytes() == b"rows"
        found.download("profile/rank-0.json", tmp_path / "got")
        with pytest.raises(ConfigError, match="nothing is overwritten"):
            found.download("profile/rank-0.json", tmp_path / "got")
        with pytest.raises(NotFound, match="has no file"):
            found.download("secret.json", tmp_path)
        for path in (
            "secret.json",
            "job.json",
            "checkpoints/../secret.json",
            "checkpoints/step-00000010/../../secret.json",
            "profile/../secret.json",
            "profile//rank-0.json",
            "checkpoints/step-00000010/link.json",
            "checkpoints/step-00000012/model.safetensors",
            "checkpoints/step-00000011.tmp-1/manifest.json",
            "/etc/passwd",
            "profile",
        ):
            assert at.http.get(f"/api/v1/jobs/{job}/file", params={"path": path}).status_code == 404, path
    url = f"/api/v1/jobs/{job}/file?path=profile/rank-0.json"
    assert at.http.get(url, headers={"Authorization": "Bearer wrong"}).status_code == 401
    assert at.http.get(url).content == b"{}"


def test_a_start_from_of_the_service_is_checked(at, work):
    job = at.add(workload="mine.py:Mine", working_dir=str(work))
    for start, text in (("nothing.safetensors", "there is no file or folder"), ({"path": job}, "has not ended")):
        body = {"workload": "mine.py:Mine", "working_dir": str(work), "start_from": start}
        answer = at.http.post("/api/v1/jobs", json=body)
        assert answer.status_code == 422, answer.text
        assert text in answer.json()["detail"]
    (work / "base.safetensors").write_bytes(b"x")
    added = at.add(workload="mine.py:Mine", working_dir=str(work), start_from={"path": "base.safetensors"})
    spec = at.http.get(f"/api/v1/jobs/{added}").json()["spec"]
    assert spec["start_from"]["path"] == "base.safetensors"


def test_an_export_without_a_workload_has_every_tensor(tmp_path):
    result = train(Small(), checkpoint=tmp_path / "saved")
    export_checkpoint(result.checkpoint, tmp_path / "out", None)
    stored = safetensors.torch.load_file(tmp_path / "out" / "model.safetensors")
    assert stored.keys() == Small().model().state_dict().keys()
    assert all(torch.equal(stored[name], value) for name, value in result.model().state_dict().items())
    with pytest.raises(CheckpointError):
        export_checkpoint(tmp_path / "saved", tmp_path / "more", None)
    assert files(tmp_path) == ["out", "saved"]
