"""`rayps export`, and the download of a job's checkpoints through the service."""

import json

import pytest
import safetensors.torch
import torch
from federated_work import Fed
from folders import FOLDERS
from rayps_client.errors import CheckpointError, ConfigError, NotFound
from service_site import Site
from small_work import Small, distance, train

import rayps
from rayps import FedPer
from rayps.cli import main as cli
from rayps.runtime.results.saved_model import export_checkpoint
from rayps.service.client import Client
from rayps.tensors.checkpoints import checkpoint

WORK = """
import sys; sys.path[:0] = {tests!r}
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
def work(tmp_path):
    (tmp_path / "mine.py").write_text(WORK.format(tests=FOLDERS))
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


class Averaged(Small):
    def __init__(self, average=None, **options):
        super().__init__(**options)
        self.average = average


@pytest.mark.parametrize("strategy", ["all_reduce", "parameter_server:shards=2", "local_sgd:period=3"])
@pytest.mark.parametrize("average", [rayps.EMA(0.8), rayps.SWA(start=4, every=2)], ids=str)
def test_the_average_of_the_weights_is_exported(tmp_path, monkeypatch, capsys, strategy, average):
    monkeypatch.chdir(tmp_path)
    options = {"workers": 2, "epochs": 2, "checkpoint": "saved", "callbacks": [rayps.BestCheckpoint("error")]}
    result = train(Averaged(average, n=40), strategy, **options)
    wanted = result.model(average=True)
    assert distance(wanted, result.model()) > 0
    result.save("by_save", average=True)
    result.save("last")
    assert cli.main(["export", "saved", "by_name", "--average"]) == 0
    export_checkpoint(result.checkpoint, "by_model", Small(), average=True)
    for folder in ("by_save", "by_name", "by_model"):
        assert distance(rayps.load_state(Small().model(), folder), wanted) == 0
    assert distance(rayps.load_state(Small().model(), "last"), result.model()) == 0
    # what was evaluated is the average
    assert cli.main(["export", "saved", "best", "--checkpoint", "best", "--average"]) == 0
    data = Small(n=40).data()
    error = (rayps.load_state(Small().model(), "best")(data.x) - data.y).abs().mean().item()
    shown = [each for each in result.history["evaluation_error"].to_pylist() if each is not None]
    assert error == pytest.approx(min(shown), rel=1e-9)
    # the documented way to start from it
    begun = train(Small(n=40), steps=1, start_from="by_name", checkpoint="further")
    assert "by_name" in next(event["message"] for event in begun.events if event["kind"] == "started_from")


def test_a_checkpoint_without_an_average_says_the_way_out(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    train(Small(), checkpoint="none")
    late = train(Averaged(rayps.SWA(start=1000)), checkpoint="late")
    for folder, text in (("none", "was trained without one"), ("late", "SWA(start=1000, every=1) has not begun")):
        assert cli.main(["export", folder, "out", "--average"]) == 2
        found = capsys.readouterr().err
        assert "no average of the weights" in found and text in found and "--average" in found
    with pytest.raises(ConfigError, match="leave average out"):
        late.save("out", average=True)
    assert files(tmp_path) == ["late", "none"]


def test_a_checkpoint_that_does_not_name_its_average_takes_that_of_the_workload(tmp_path, monkeypatch):
    average = rayps.EMA(0.8)
    result = train(Averaged(average), checkpoint=tmp_path / "saved")
    state = checkpoint.load(result.checkpoint)
    del state.meta["average"]
    old = checkpoint.save(tmp_path / "old", 12, state)
    export_checkpoint(old, tmp_path / "out", Averaged(average), average=True)
    assert distance(rayps.load_state(Small().model(), tmp_path / "out"), result.model(average=True)) == 0
    with pytest.raises(ConfigError, match="give the workload"):
        export_checkpoint(old, tmp_path / "more", None, average=True)


WIDE = """
import sys; sys.path[:0] = {tests!r}
import torch
from small_work import Small
class Wide(Small):
    width: int = 4
    rate: float = float("inf")
    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(5, self.width), torch.nn.Linear(self.width, 1)).double()
class Doubled(Wide):
    def __init__(self):
        super().__init__()
        self.width = 2 * self.width
"""


class Unnamed(Small):
    """A model whose width is no parameter, as in a checkpoint that does not record it."""

    def model(self):
        return torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Linear(8, 1)).double()


@pytest.fixture
def wide(tmp_path, monkeypatch):
    (tmp_path / "wide.py").write_text(WIDE.format(tests=FOLDERS))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def width(folder):
    return len(safetensors.torch.load_file(f"{folder}/model.safetensors")["0.weight"])


def test_the_parameters_that_a_checkpoint_records_shape_the_model(wide, capsys):
    train("wide.py:Wide", params={"width": 8}, checkpoint="saved")
    train("wide.py:Doubled", checkpoint="doubled")
    train(Unnamed(), checkpoint="unnamed")
    assert cli.main(["export", "saved", "recorded", "--workload", "wide.py:Wide"]) == 0
    assert cli.main(["export", "doubled", "computed", "--workload", "wide.py:Doubled"]) == 0
    assert cli.main(["export", "unnamed", "given", "--workload", "wide.py:Wide", "--set", "width=8"]) == 0
    assert [width(each) for each in ("recorded", "computed", "given")] == [8, 8, 8]
    capsys.readouterr()
    for source, changes in (("unnamed", []), ("saved", ["--set", "width=3"])):
        assert cli.main(["export", source, "no", "--workload", "wide.py:Wide", *changes]) == 2
        assert "--set NAME=VALUE" in capsys.readouterr().err
    assert cli.main(["export", "saved", "no", "--workload", "wide.py:Wide", "--set", "widht=8"]) == 2
    assert "did you mean 'width'" in capsys.readouterr().err
    assert cli.main(["export", "saved", "no", "--set", "width=8"]) == 2
    assert "--workload" in capsys.readouterr().err


def test_the_parameters_of_a_job_shape_the_model(at, wide, capsys):
    job = at.add(workload="wide.py:Wide", working_dir=str(wide), params={"width": 8})
    home = at.start(job)
    train(Unnamed(), epochs=2, checkpoint=home / "checkpoints")
    assert cli.main(["export", job, "own"]) == 0
    assert cli.main(["export", job, "other", "--workload", "wide.py:Wide"]) == 0
    assert [width("own"), width("other")] == [8, 8]
    capsys.readouterr()
    assert cli.main(["export", job, "no", "--set", "width=3"]) == 2
    assert "another model" in capsys.readouterr().err
    # the job has another parameter than the model: --set is the way out
    job = at.add(workload="wide.py:Wide", working_dir=str(wide))
    train(Unnamed(), epochs=2, checkpoint=at.start(job) / "checkpoints")
    for changes in ([], ["--workload", "wide.py:Wide"]):
        assert cli.main(["export", job, f"set{len(changes)}", *changes, "--set", "width=8"]) == 0
        assert width(f"set{len(changes)}") == 8


def test_the_average_of_a_job_is_exported(at, work, capsys):
    job = at.add(workload="mine.py:Mine", working_dir=str(work))
    result = train(Averaged(rayps.EMA(0.8)), workers=2, epochs=2, checkpoint=at.start(job) / "checkpoints")
    assert cli.main(["export", job, str(work / "out"), "--average"]) == 0
    assert distance(rayps.load_state(Small().model(), work / "out"), result.model(average=True)) == 0


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


FEDERATED = """
import sys; sys.path[:0] = {tests!r}
import federated_work, rayps
from small_work import rows
class Fed(federated_work.Fed): pass
class NoData(Fed):
    def data(self): raise rayps.errors.DataError("the rows are elsewhere")
"""


def test_the_model_of_a_client_is_exported(at, tmp_path, monkeypatch, capsys):
    (tmp_path / "fed.py").write_text(FEDERATED.format(tests=FOLDERS))
    monkeypatch.chdir(tmp_path)
    with Client() as client:
        job = client.submit("fed.py:Fed", working_dir=tmp_path, strategy="fedper:private=2").id
    saved = str(at.start(job) / "checkpoints")
    law = train(Fed(), FedPer(private="2"), workers=2, epochs=2, checkpoint=saved)
    mine = law.client("3").model()
    assert cli.main(["export", job, "of_job", "--client", "3"]) == 0
    assert cli.main(["export", saved, "elsewhere", "--client", "3", "--workload", "fed.py:NoData"]) == 0
    for folder in ("of_job", "elsewhere"):  # names are in the checkpoint: no data is read
        found = rayps.load_state(Fed().model(), tmp_path / folder)
        assert distance(found, mine) == 0 and distance(found, law.model()) > 0
    capsys.readouterr()
    for given, why in (
        (["--client", "33", "--workload", "fed.py:Fed"], "there is no client '33' (did you mean '3'?)"),
        (["--client", "3"], "give --workload"),
        (["--client", "3", "--workload", "fed.py:Fed", "--average"], "leave --average out"),
    ):
        assert cli.main(["export", saved, "none", *given]) == 2
        assert why in capsys.readouterr().err
