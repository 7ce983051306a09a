"""Ray Train as a contender of `rayps bench step`: TorchTrainer's workers, which alternate with those of rayps.

It needs `pip install 'rayps[bench]'`. Files in a folder signal the workers when to train, because the loop of a trainer
cannot be called from outside. The workers must therefore be on this host.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import shutil
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from rayps_client.errors import ClusterError, ConfigError

from rayps.bench.contender import plain_steps, workload
from rayps.cluster.local import until

_LOOK_SECONDS = 0.005
_START_SECONDS = 180.0


class RayTrain:
    """A TorchTrainer that runs in the background. Its workers train only during `turn`."""

    def __init__(self, workers: int, model: str, hidden: int | None, timeout: float) -> None:
        try:
            # not imported at the top of the file: it is installed only for this benchmark, and rayps does not need it
            train, torch_train = (importlib.import_module(f"ray.train{part}") for part in ("", ".torch"))
        except ImportError as error:
            raise ConfigError("ray_train needs Ray Train: pip install 'rayps[bench]'", contender="ray_train") from error
        self._workers, self._timeout, self._turns = workers, timeout, 0
        self._folder = Path(tempfile.mkdtemp(prefix="rayps-bench-"))
        self._error: BaseException | None = None
        trainer = torch_train.TorchTrainer(
            _run_loop,
            train_loop_config={"folder": str(self._folder), "model": model, "hidden": hidden},
            scaling_config=train.ScalingConfig(num_workers=workers, resources_per_worker={"CPU": 0.01}),
            run_config=train.RunConfig(storage_path=str(self._folder / "results")),
        )
        self._thread = threading.Thread(target=self._fit, args=(trainer,), name="ray-train", daemon=True)
        self._thread.start()

    def turn(self, steps: int) -> list[dict[str, float]]:
        """Make `steps` steps in all workers; return each rank's milliseconds per step, in total and by part.

        Raises:
            ClusterError: Ray Train failed, or did not finish in time.
        """
        number, self._turns = self._turns, self._turns + 1
        _publish(self._folder / f"turn-{number}", steps)
        answers = [self._folder / f"done-{number}-{rank}" for rank in range(self._workers)]
        limit = self._timeout + (_START_SECONDS if number == 0 else 0.0)
        if not until(lambda: self._error is not None or all(path.exists() for path in answers), limit):
            raise ClusterError(f"Ray Train did not finish {steps} steps within {limit:g} s")
        if self._error is not None:
            raise ClusterError(f"Ray Train failed: {self._error}") from self._error
        return [json.loads(path.read_text()) for path in answers]

    def close(self) -> None:
        """End the trainer, and remove its folder."""
        _publish(self._folder / f"turn-{self._turns}", 0)
        self._thread.join(self._timeout)
        shutil.rmtree(self._folder, ignore_errors=True)

    def _fit(self, trainer: Any) -> None:
        try:
            trainer.fit()
        except BaseException as error:  # any error must reach the `turn` that waits for the workers
            self._error = error


def _publish(path: Path, value: Any) -> None:
    half = path.with_suffix(".new")
    with contextlib.suppress(FileNotFoundError):  # the trainer has ended, and its folder was removed
        half.write_text(json.dumps(value))
        half.rename(path)


def _run_loop(config: dict[str, Any]) -> None:
    """Run a worker of the trainer: train in each turn, until a turn has 0 steps or the folder is gone."""
    torch = importlib.import_module("torch")
    torch_train = importlib.import_module("ray.train.torch")
    context = importlib.import_module("ray.train").get_context()
    torch.set_num_threads(1)
    folder, rank = Path(config["folder"]), context.get_world_rank()
    work = workload(config["model"], config["hidden"], context.get_world_size())
    run = plain_steps(work, torch_train.prepare_model(work.model()))
    for number in range(1 << 30):
        turn = folder / f"turn-{number}"
        while not turn.exists():
            if not folder.exists():
                return
            time.sleep(_LOOK_SECONDS)
        steps = json.loads(turn.read_text())
        if steps == 0:
            return
        start = time.process_time()
        found = run(steps)
        found["cpu"] = 1000 * (time.process_time() - start) / steps
        _publish(folder / f"done-{number}-{rank}", found)
