"""The fixtures of tests with a job service, its jobs and their real clients in one process: see `client_site`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from client_site import Clinic


@pytest.fixture(scope="module")
def clinic(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clinic]:
    from client_site import Clinic  # loads the service, which most tests do without

    made = Clinic(tmp_path_factory.mktemp("clinic"))
    yield made
    made.close()
