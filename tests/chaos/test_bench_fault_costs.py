"""A job between hosts under faults: it goes on after each, and each push is applied exactly once."""

from __future__ import annotations

import os
import shutil

import pytest
from conftest import missing
from rayps_client.errors import ClusterError, ConfigError

from benchmarks.chaos.fault_costs import FAULTS, bench_fault_costs

pytestmark = pytest.mark.chaos


def test_a_lost_host_a_cut_line_and_a_slow_one_cost_no_push():
    """A line is cut for less than the job's timeout: nothing is replaced, and what was in flight arrives later."""
    if os.geteuid() != 0 or shutil.which("nsenter") is None:
        pytest.skip("network namespaces need root and util-linux")
    kinds = ["lose:host", "cut:host", "slow:host"]
    try:
        found = bench_fault_costs(
            "parameter_server:shards=2,staleness=none", kinds, repeats=1, every=1.5, pause=0.02, seed=1
        )
    except ClusterError as error:
        if "cannot make network namespaces" in str(error):
            missing("network namespace")
        raise
    assert found.ledger_exact and found.faults == 4 and 0 < found.goodput <= 1
    rows = {row.fault: row for row in found.rows}
    assert sorted(rows) == sorted([*kinds, "none:host"])
    assert rows["cut:host"].recovery_worst > 1.0 and found.restarted == 0  # out of step, members are replaced


@pytest.mark.parametrize(
    ("kinds", "more", "words"),
    [
        (["kill:manager"], {}, "there is no fault 'kill:manager'"),
        (["kill:worker"], {"hosts": 1}, "at least 2 hosts"),
        (["kill:worker"], {"repeats": 0}, "1 repeat"),
    ],
)
def test_what_cannot_be_measured(kinds, more, words):
    with pytest.raises(ConfigError, match=words):
        bench_fault_costs("all_reduce", kinds, **more)


def test_every_kind_names_what_it_hits():
    assert all(name.partition(":")[2] in (role, "host") for name, (role, _) in FAULTS.items())
