"""Run many seeds, and report the ones that fail.

A seed decides the scenario and everything that happens in it. `python scripts/simulate.py --help` lists the options.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import multiprocessing
import os
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from simulation import elastic, servers, service
from simulation.kernel import Broken, Simulation
from simulation.planted import PLANTED, Planted

SCENARIOS: list[tuple[str, Any]] = [
    ("servers", servers),
    ("service", service),
    ("servers", servers),
    ("elastic", elastic),
]
FAILED = Path(__file__).with_name("failed_seeds.txt")
FIRST_DAY = datetime.date(2026, 1, 1)
CHUNK = 20  # seeds that a process runs before it reports


class SeedFailed(AssertionError):
    """A seed failed. The text has the seed, the reason and the last events."""


def scenario_of(seed: int) -> tuple[str, Any]:
    """Return the name and the module of the scenario that a seed chooses."""
    return SCENARIOS[seed % len(SCENARIOS)]


@contextlib.contextmanager
def prepared() -> Iterator[None]:
    """Prepare this process for simulations: one thread of torch, and garbage is collected between simulations only.

    A collection can run code of the product, such as a `finally` in a coroutine. Within a simulation, this would depend
    on what the process did before.
    """
    sys.modules.pop("__mp_main__", None)  # `pack` would take the command for a user's module
    before, collects = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.disable()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
        if collects:
            gc.enable()
        torch.set_num_threads(before)


def run_seed(seed: int, *, keep_trace: bool = False) -> Simulation:
    """Run one seed. Raises SeedFailed."""
    gc.collect()
    name, module = scenario_of(seed)
    scenario = module.scenario(seed, keep_trace=keep_trace)
    sim: Simulation = scenario.sim
    with module.substituted():
        try:
            module.play(scenario)
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt):
                raise
            kind = "" if isinstance(error, Broken) else f"{type(error).__name__}: "
            lines = "\n".join(line(each) for each in sim.last)
            raise SeedFailed(
                f"seed {seed} (scenario {name!r}) failed after {sim.now:.1f} s of virtual time:\n{kind}{error}\n"
                f"the last events:\n{lines}\nrun it again: python scripts/simulate.py --seed {seed} --trace"
            ) from error
    return sim


def find(bug: Planted, seeds: Iterable[int]) -> SeedFailed | None:
    """Return the failure of the first of these seeds that finds a planted bug, or None."""
    with bug.switched_off():
        for seed in seeds:
            if scenario_of(seed)[0] == bug.scenario:
                try:
                    run_seed(seed)
                except SeedFailed as error:
                    return error
    return None


def line(event: tuple[float, str, str]) -> str:
    """Return an event of a trace as a line of text."""
    at, kind, text = event
    return f"{at:10.4f} s  {kind:12s} {text}"


def rotating(count: int, day: datetime.date | None = None) -> range:
    """Return the seeds of a day: `count` of them, other ones each day."""
    number = ((day or datetime.date.today()) - FIRST_DAY).days
    return range(number * count, (number + 1) * count)


def failed_before() -> list[int]:
    """Return the seeds that once failed, and that every run of the tests repeats."""
    lines = FAILED.read_text(encoding="utf-8").splitlines()
    return [int(text.split()[0]) for text in lines if text.strip() and not text.startswith("#")]


def _run_chunk(seeds: list[int]) -> tuple[int, float, list[tuple[int, str]]]:
    failed, virtual = [], 0.0
    with prepared():
        for seed in seeds:
            try:
                virtual += run_seed(seed).now
            except SeedFailed as error:
                failed.append((seed, str(error)))
    return len(seeds), virtual, failed


def run_here(seeds: Iterable[int]) -> list[tuple[int, str]]:
    """Run seeds in this process; return the seeds that failed, each with its report."""
    return _run_chunk(list(seeds))[2]


def run_many(seeds: Iterable[int], processes: int, *, show: bool = True) -> list[tuple[int, str]]:
    """Run seeds in several processes; return the seeds that failed, each with its report."""
    everything = list(seeds)
    chunks = [everything[at : at + CHUNK] for at in range(0, len(everything), CHUNK)]
    done, virtual, failed, began = 0, 0.0, list[tuple[int, str]](), time.monotonic()
    # a process that was started anew has no threads of the caller
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for count, seconds, found in pool.imap_unordered(_run_chunk, chunks):
            done, virtual = done + count, virtual + seconds
            failed += found
            for _, text in found:
                print(text, flush=True)
            if show:
                took = time.monotonic() - began
                rate = f"{1000 * took * processes / done:.0f} ms of a core each"
                print(f"{done} of {len(everything)} seeds, {len(failed)} failed, {took:.0f} s, {rate}", flush=True)
    took = time.monotonic() - began
    print(
        f"{done} seeds from {everything[0]} to {everything[-1]}: {len(failed)} failed; {virtual / 3600:.1f} hours of "
        f"virtual time in {took:.0f} s on {processes} processes"
    )
    return failed


def main(arguments: list[str] | None = None) -> int:
    """Run the command; return 1 if a seed failed."""
    parser = argparse.ArgumentParser(
        prog="simulate.py", description="Simulate rayps on a virtual clock, with faults, from many seeds."
    )
    parser.add_argument("--seed", type=int, help="run this seed alone")
    parser.add_argument("--trace", action="store_true", help="print all events of the seed")
    parser.add_argument("--seeds", type=int, default=5000, help="number of seeds (default: 5000)")
    parser.add_argument("--first", type=int, help="the first seed (default: it changes every day)")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1, help="processes (default: all cores)")
    parser.add_argument("--planted", action="store_true", help="search for the seeds that find the planted bugs")
    given = parser.parse_args(arguments)
    if given.planted:
        return _search_planted(given.seeds, given.processes)
    if given.seed is not None:
        return _run_one(given.seed, trace=given.trace)
    seeds = rotating(given.seeds) if given.first is None else range(given.first, given.first + given.seeds)
    failed = run_many(seeds, max(1, given.processes))
    if failed:
        print(f"seeds that failed: {', '.join(str(seed) for seed, _ in sorted(failed))}")
        print(f"add each to {FAILED.name} with a word on its cause, and mend the cause")
    return bool(failed)


def _search_one(work: tuple[str, int]) -> tuple[str, str | None]:
    name, count = work
    with prepared():
        found = find(PLANTED[name], range(count))
    return name, None if found is None else "\n".join(str(found).splitlines()[:2])


def _search_planted(count: int, processes: int) -> int:
    missed = 0
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        for name, text in pool.imap_unordered(_search_one, [(name, count) for name in PLANTED]):
            missed += text is None
            print(f"{name} ({PLANTED[name].what}): {text or f'NOT FOUND by {count} seeds'}", flush=True)
    return bool(missed)


def _run_one(seed: int, *, trace: bool) -> int:
    name, module = scenario_of(seed)
    with prepared():
        scenario = module.scenario(seed, keep_trace=True)
        try:
            with module.substituted():
                module.play(scenario)
            report = f"seed {seed} (scenario {name!r}): all invariants hold"
        except BaseException as error:
            report = f"seed {seed} (scenario {name!r}) failed: {error}"
        for each in (scenario.sim.lines or []) if trace else []:
            print(line(each))
    print(f"{report}\n{scenario.sim.now:.1f} s of virtual time, trace {scenario.sim.digest[:16]}")
    return "failed" in report


__all__ = ["SeedFailed", "failed_before", "main", "rotating", "run_here", "run_many", "run_seed"]
