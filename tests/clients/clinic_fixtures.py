"""The fixtures of tests with a job service, its jobs and their real clients in one process: see `client_site`."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from client_site import Clinic

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def jobs_in_threads() -> Iterator[None]:
    """Keep this process as it is: a job in a thread changes the working directory."""
    yield
    os.chdir(ROOT)  # a driver in a thread goes where its workload is, and its folder is removed


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clinic]:
    from client_site import Clinic  # loads the service, which most tests do without

    made = Clinic(tmp_path_factory.mktemp("clinic"))
    yield made
    made.close()
