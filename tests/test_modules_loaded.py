"""How modules are loaded: without the garbage collector, and without pandas."""

import gc
import subprocess
import sys

import pytest
from rayps_client.machine.loading import without_collection


def test_the_collector_is_off_inside_and_as_before_afterwards():
    assert gc.isenabled()
    with pytest.raises(ValueError), without_collection():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_exists_then_can_be_left_out_of_collections():
    before = gc.get_freeze_count()
    try:
        with without_collection(freeze=True):
            pass
        assert gc.get_freeze_count() > before
    finally:
        gc.unfreeze()


def test_a_driver_and_a_worker_load_no_pandas():
    modules = "sys, rayps.runtime.training, rayps.runtime.driver.worker_actor, rayps.data.tabular.arrow_tables"
    code = f"import {modules}; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "rayps.data.tabular.arrow_tables" in found and "pandas" not in found and "pyarrow.dataset" not in found


def test_a_worker_loads_no_functions_of_arrow():
    code = "import sys, rayps.runtime.driver.worker_actor; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "rayps.data.clients" in found and "pyarrow.compute" not in found
