"""What costs a job most of its time, which worker causes it, and what to change. Pure: the facts are a `JobTime`.

Each possible cause has a cost: the share of the workers' time after their start that would be useful without it. The
largest cost is the verdict, with one exception: a cause that one member can be named for comes first if it costs at
least `NAMED_COST`, and at least `NAMED_SHARE` of each larger cost, because the member can be looked at. The time in
which all workers wait for a CPU does not count as a larger cost here: it is within what counts as computing, so that
it cannot be compared with the others. The start is no cost of this kind: it happens once, and its share shrinks by
itself. It is named last, and only if it is most of the time. The causes:

- One worker holds up the others. Its excess is what its own seconds per round (computing, data, communication) exceed
  the median of the other workers by, over the time in which they took part together (`rayps.core.time.time_together`).
  If most of it is communication, the cause is `network` if the measured lines show it, else `exchange`. Otherwise the
  cause is what explains most of the excess: the time that the worker's thread is measured to wait for a CPU (`cpu`) or
  a disk (`disk`), or to use a CPU (`code`), longer than the others. If what is left is more, the cause is `data` if
  this is the part of the account in which the excess is, else `blocked`: the thread waits for something else.
- All workers wait for data (`data`, `disk`), for a CPU (`cpu`), for the network (`network`), for servers that are busy
  (`servers`), or exchange for another reason (`exchange`).
- The job waits for the real clients of a federation (`clients`): to join, and for their replies.
- The time is spent outside of rounds: `start`, `evaluation`, `checkpoint`, `recovery`, `idle`. `recovery` is the time
  after failures, and in an elastic job also that of each change of the workers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from rayps_client.values import JsonObject

from rayps.core.time.goodput import JobTime, MemberTotals
from rayps.core.time.member_times import CLIENTS, LineFacts
from rayps.core.time.time_together import CHANGED, find_common_spans

LEAST_COST = 0.05  # share of the time that is worth a verdict
NAMED_COST = 0.1  # share of the time from which a cause that one member can be named for may come first
NAMED_SHARE = 0.5  # the share of a larger cost from which it comes before that one
LEAST_START = 0.5  # share of all time from which the start is named
EXPLAINS = 0.4  # the share of the waits for data that waits for a disk must have, to be their cause
BUSY = 0.5  # the share of its time that a server computes or communicates if it limits the workers
ON_LINES = 0.3  # the share of the exchange in which data is under way if the network limits it
ON_ONE_LINE = 0.5  # the share of one worker's excess in which data is under way if its line is the cause
SLOWER = 0.5  # a line is slow if its rate is below this share of the next one
LEAST_BYTES, LEAST_BUSY = 1 << 16, 0.02  # a line with less traffic has no rate

FAILED = frozenset({"restarted", "mending", "mended", "replaced", "rejoined", "server_lost"})  # kinds of events

Line = tuple[str, str]  # (the member that sends, the member that receives)


@dataclass(frozen=True, slots=True)
class TimeFinding:
    """One cause of lost time."""

    cause: str
    cost: float  # share of the workers' time, 0 to 1
    guilty: tuple[str, ...]  # the members that cause it; () if no member alone does
    summary: str
    evidence: tuple[str, ...] = ()
    advice: str = ""

    def to_json(self) -> JsonObject:
        """Return the finding as JSON data."""
        return {
            "cause": self.cause,
            "cost": round(self.cost, 4),
            "guilty": list(self.guilty),
            "summary": self.summary,
            "evidence": list(self.evidence),
            "advice": self.advice,
        }


@dataclass(frozen=True, slots=True)
class TimeVerdict:
    """The findings, the first of which is the verdict. Without a finding, the workers' time is useful."""

    findings: tuple[TimeFinding, ...] = ()
    goodput: float | None = None
    guilty: tuple[str, ...] = field(init=False, default=())

    def __post_init__(self) -> None:
        object.__setattr__(self, "guilty", self.findings[0].guilty if self.findings else ())

    @property
    def cause(self) -> str:
        """The cause with the largest cost, or "none"."""
        return self.findings[0].cause if self.findings else "none"

    @property
    def summary(self) -> str:
        """The verdict in one sentence."""
        if self.findings:
            return self.findings[0].summary
        if self.goodput is None:
            return "no worker has reported its time yet"
        return f"{self.goodput:.0%} of the workers' time was useful, and no cause costs more than {LEAST_COST:.0%}"

    def to_json(self) -> JsonObject:
        """Return the verdict as JSON data."""
        return {
            "cause": self.cause,
            "guilty": list(self.guilty),
            "summary": self.summary,
            "findings": [finding.to_json() for finding in self.findings],
        }


def reach_verdict(time: JobTime) -> TimeVerdict:
    """Return what costs the job most of its time."""
    workers = [each for each in time.workers if each.after_start > 0]
    if not workers:
        return TimeVerdict()
    slow = _find_straggler(time)
    found = [slow] if slow is not None else []
    explained = slow.cost if slow is not None else 0.0
    found += [finding for rule in _RULES if (finding := rule(time, workers, explained)) is not None]
    costly = [each for each in found if each.cost >= LEAST_COST]
    return TimeVerdict((*_rank(costly), *_start(time)), time.goodput)


def _rank(found: Sequence[TimeFinding]) -> list[TimeFinding]:
    """Return the findings, the verdict first, as this module says."""
    largest = max((each.cost for each in found if each.guilty or each.cause != "cpu"), default=0.0)
    least = max(NAMED_COST, NAMED_SHARE * largest)
    return sorted(found, key=lambda each: (not (len(each.guilty) == 1 and each.cost >= least), -each.cost))


# ---- one worker holds up the others


def _find_straggler(time: JobTime) -> TimeFinding | None:
    """Return the finding that one worker is slower than the others, or None if the workers are alike.

    What a worker costs in several spans of time adds up; the evidence is that of the span with the largest cost.
    """
    spans: dict[str, list[TimeFinding]] = {}
    for span in find_common_spans(time):
        found = _find_slowest(span.workers, span.share, time)
        if found is not None:
            spans.setdefault(found.guilty[0], []).append(found)
    costs = {name: sum(each.cost for each in findings) for name, findings in spans.items()}
    name = max(costs, key=lambda each: costs[each], default="")
    if not name or costs[name] < LEAST_COST:
        return None
    return replace(max(spans[name], key=lambda each: each.cost), cost=costs[name])


def _find_slowest(timed: Sequence[MemberTotals], share: float, time: JobTime) -> TimeFinding | None:
    """Return the finding that one of the workers is slower than the others, in a span that has `share` of the time."""
    slowest = max(timed, key=_add_up_own)
    others = [each for each in timed if each is not slowest]
    excess = _add_up_own(slowest) - median(_add_up_own(each) for each in others)
    # what the others lose to it cannot be more than what they wait, without what the exchange itself takes
    lost = median(each.share("waiting") + each.share("idle") for each in others)
    cost = min(excess * slowest.times.rounds / slowest.after_start, lost)
    if cost < LEAST_COST:  # of the span: workers that are alike in it cost nothing
        return None
    cause, evidence = _explain(slowest, others, excess, time)
    name = _name_with_host(slowest)
    own, usual = _format_seconds(_add_up_own(slowest)), _format_seconds(_find_median(_add_up_own, others))
    seconds = [
        f"{name} needs {own} of its own for a round, the median of the others is {usual}",
        f"the others wait or are idle in {lost:.0%} of their time",
    ]
    if share < 1:
        seconds.append(f"this is measured in {share:.0%} of the workers' time, in which the same workers took part")
    return TimeFinding(
        cause,
        cost * share,
        (slowest.name,),
        f"{name} holds up the others: {_WHY[cause]}",
        (*seconds, *evidence),
        _advise(cause, slowest),
    )


def _add_up_own(worker: MemberTotals) -> float:
    """Return the worker's own seconds for a round: what it does not spend waiting for others."""
    return sum(worker.parts.get(part, 0.0) for part in ("compute", "data", "communication")) / max(
        1, worker.times.rounds
    )


def _explain(
    slowest: MemberTotals, others: Sequence[MemberTotals], excess: float, time: JobTime
) -> tuple[str, list[str]]:
    """Return why a worker is slower than the others, and the measurements that say so."""

    def more(measure: Callable[[MemberTotals], float]) -> float:
        return measure(slowest) - _find_median(measure, others)

    parts = {part: more(lambda each, part=part: _divide_by_rounds(each, each.parts.get(part, 0.0))) for part in _PARTS}  # type: ignore[misc]
    most = max(parts, key=lambda part: parts[part])
    measured = {cause: more(measure) for cause, (measure, _) in _MEASURED.items()}
    evidence = [
        f"per round, it spends {_format_seconds(parts[part])} more in {part}"
        for part in _PARTS
        if parts[part] > excess / 4
    ]
    evidence += [
        f"per round, its thread is {_format_seconds(seconds)} longer {_MEASURED[cause][1]} than the others'"
        for cause, seconds in measured.items()
        if seconds > excess / 10
    ]
    if most == "communication":
        on_lines, lines = _on_lines(slowest, others, parts[most], time)
        return ("network" if on_lines else "exchange"), [*evidence, *lines]
    rest = excess - sum(max(0.0, seconds) for seconds in measured.values())
    cause = max(measured, key=lambda each: measured[each])
    if measured[cause] >= rest:
        return cause, evidence
    evidence.append(
        f"per round, its thread is {_format_seconds(rest)} longer neither on a CPU, nor waiting for a CPU or a disk"
    )
    return ("data" if most == "data" else "blocked"), evidence


def _on_lines(
    slowest: MemberTotals, others: Sequence[MemberTotals], excess: float, time: JobTime
) -> tuple[bool, list[str]]:
    """Return whether a worker communicates longer because of its network lines, and the measurements that say so.

    `excess`: the seconds per round that it communicates longer. Between processes of one host, data may be under way
    for long because a process has no CPU; then only lines that are slower than all others count.
    """
    lines = _lines_of(time)
    if not lines:
        return False, ["the kernel's counts of the network connections are not known"]
    name, whole = slowest.name, next(each for each in time.members if each.name == slowest.name)
    under_way = max((_divide_by_rounds(whole, line.busy) for ends, line in lines.items() if name in ends), default=0.0)
    apart = bool(slowest.host) and all(each.host != slowest.host for each in others)
    evidence = f"per round, data is under way for {_format_seconds(under_way)} on its busiest line"
    found = find_slow_ends(lines) == (name,) or (apart and under_way >= ON_ONE_LINE * excess)
    return found, [evidence, *_list_rates(lines)]


# ---- all workers


def _find_data_cause(time: JobTime, workers: Sequence[MemberTotals], explained: float) -> TimeFinding | None:
    share = median(each.share("data") for each in workers)
    disk = median(each.times.machine.disk / each.after_start for each in workers)
    cause = "disk" if disk >= EXPLAINS * share else "data"
    evidence = [f"of their time, workers wait {share:.0%} for data, and {disk:.0%} for a disk"]
    return TimeFinding(
        cause, share, (), f"all workers wait for data: {_WHY[cause]}", tuple(evidence), _advise(cause, None)
    )


def _find_cpu_cause(time: JobTime, workers: Sequence[MemberTotals], explained: float) -> TimeFinding | None:
    share = min(each.times.machine.cpu_wait / each.after_start for each in workers)
    evidence = f"each worker's thread waits for a CPU in at least {share:.0%} of its time (the kernel's count)"
    return TimeFinding(
        "cpu", share, (), "all workers wait for CPUs that other processes use", (evidence,), _advise("cpu", None)
    )


def _exchange(time: JobTime, workers: Sequence[MemberTotals], explained: float) -> TimeFinding | None:
    """Return the finding that the exchange itself is slow: what one slow worker does not explain."""
    whole = sum(each.share("communication") + each.share("waiting") for each in workers) / len(workers)
    whole -= sum(_read_client_waits(each) / each.after_start for each in workers) / len(workers)
    cost = whole - explained
    if cost < LEAST_COST:
        return None
    seconds = sum(
        each.parts.get("communication", 0.0) + each.parts.get("waiting", 0.0) - _read_client_waits(each)
        for each in workers
    ) / len(workers)
    evidence = [f"of their time, workers communicate or wait for each other in {whole:.0%}"]
    lines = _lines_of(time)
    under_way = max((line.busy for line in lines.values()), default=0.0)
    if under_way >= ON_LINES * seconds:
        ends = find_slow_ends(lines)
        evidence += [
            f"data is under way on the busiest line for {under_way:.2f} s of {seconds:.2f} s",
            *_list_rates(lines),
        ]
        one = next((each for each in time.members if ends == (each.name,)), None)
        return TimeFinding(
            "network", cost, ends, _summarize_network(ends, time), tuple(evidence), _advise("network", one)
        )
    busy = {each.name: each.share("compute") + each.share("communication") for each in time.servers if each.counted > 0}
    server = max(busy, key=lambda name: busy[name], default="")
    if server and busy[server] >= BUSY:
        evidence.append(f"{server} works in {busy[server]:.0%} of its time")
        return TimeFinding(
            "servers",
            cost,
            (server,),
            f"workers wait for {server}, which is busy",
            tuple(evidence),
            _advise("servers", None),
        )
    return TimeFinding(
        "exchange", cost, (), "the exchange between workers takes long", tuple(evidence), _advise("exchange", None)
    )


def _find_client_cause(time: JobTime, workers: Sequence[MemberTotals], explained: float) -> TimeFinding | None:
    cost = sum(map(_read_client_waits, workers)) / sum(each.after_start for each in workers)
    evidence = f"in {cost:.0%} of the time after the start, the job waits for clients to join, or for their replies"
    return TimeFinding("clients", cost, (), _WHY["clients"], (evidence,), _advise("clients", None))


def _read_client_waits(worker: MemberTotals) -> float:
    """Return the seconds for which a worker has waited for real clients."""
    return worker.times.waits.get(CLIENTS, 0.0)


def _make_outside_rule(
    part: str, more: tuple[str, ...] = ()
) -> Callable[[JobTime, Sequence[MemberTotals], float], TimeFinding | None]:
    """Return the rule for time outside of rounds: of `part`, and of the parts `more` that belong to it."""

    def rule(time: JobTime, workers: Sequence[MemberTotals], explained: float) -> TimeFinding | None:
        whole = sum(each.after_start for each in workers)
        shares = {name: sum(each.parts.get(name, 0.0) for each in workers) / whole for name in (part, *more)}
        cost = sum(shares.values()) - (explained if part == "idle" else 0.0)
        evidence = tuple(
            f"{share:.0%} of the time after the start is {name}" for name, share in shares.items() if share
        )
        if part == "recovery" and _as_planned(time):
            return TimeFinding(part, cost, (), _WHY_CHANGED, evidence, _ADVICE_CHANGED)
        return TimeFinding(part, cost, (), _WHY[part], evidence, _advise(part, None))

    return rule


def _as_planned(time: JobTime) -> bool:
    """Return whether the workers have changed, and none of the job's members has died."""
    changed = any(event.kind == CHANGED for event in time.events)
    return changed and not any(event.lost or event.kind in FAILED for event in time.events)


def _start(time: JobTime) -> tuple[TimeFinding, ...]:
    share = time.shares.get("start", 0.0)
    if share < LEAST_START:
        return ()
    evidence = (f"{share:.0%} of all time is start, which happens once",)
    return (TimeFinding("start", share, (), _WHY["start"], evidence, _advise("start", None)),)


_RULES = (
    _find_data_cause,
    _find_cpu_cause,
    _exchange,
    _find_client_cause,
    _make_outside_rule("evaluation"),
    _make_outside_rule("checkpoint"),
    _make_outside_rule("recovery", ("again",)),
    _make_outside_rule("idle"),
)


# ---- lines


def _lines_of(time: JobTime) -> dict[Line, LineFacts]:
    """Return the lines between members, by (the member that sends, the member that receives)."""
    known = {each.name for each in time.members}
    found = {(each.name, peer): line for each in time.members for peer, line in each.times.lines.items()}
    return {ends: line for ends, line in found.items() if ends[1] in known}


def rates_of(lines: Mapping[Line, LineFacts]) -> dict[Line, float]:
    """Return the bytes per second of each line while data was under way. Lines with too little traffic are left out."""
    return {
        ends: line.bytes / line.busy
        for ends, line in lines.items()
        if line.bytes >= LEAST_BYTES and line.busy >= LEAST_BUSY
    }


def find_slow_ends(lines: Mapping[Line, LineFacts]) -> tuple[str, ...]:
    """Return the members whose line is slow.

    A member is slow if its fastest line, in either direction, is slower than the fastest line of every other member. If
    there is none, return the two ends of the slowest line if it is slower than all others, else ().
    """
    rates = rates_of(lines)
    ends = sorted({end for line in rates for end in line})
    if len(ends) == 2:
        return tuple(ends)
    best = {end: max(rate for line, rate in rates.items() if end in line) for end in ends}
    ranked = sorted(ends, key=lambda end: best[end])
    if len(ranked) > 2 and best[ranked[0]] < SLOWER * best[ranked[1]]:
        return (ranked[0],)
    ordered = sorted(rates, key=lambda line: rates[line])
    if len(ordered) > 1 and rates[ordered[0]] < SLOWER * rates[ordered[1]]:
        return ordered[0]
    return ()


def _list_rates(lines: Mapping[Line, LineFacts]) -> list[str]:
    rates = rates_of(lines)
    ordered = sorted(rates, key=lambda line: rates[line])
    found = []
    for line in ordered if len(ordered) <= 6 else [*ordered[:3], *ordered[-2:]]:
        facts = lines[line]
        again = f", {facts.retransmits} segments sent again" if facts.retransmits else ""
        found.append(f"{line[0]} sends to {line[1]} at {rates[line] / 1e6:.3g} MB/s{again}")
    return found


def _summarize_network(ends: tuple[str, ...], time: JobTime) -> str:
    if len(ends) == 1:
        member = next(each for each in time.members if each.name == ends[0])
        return f"the network line of {_name_with_host(member)} is slow: every line to and from it is"
    if ends:
        return f"the network line between {ends[0]} and {ends[1]} is slow"
    return "the network limits the exchange, on all lines alike"


# ---- words

_PARTS = ("compute", "data", "communication")
_MEASURED: dict[str, tuple[Callable[[MemberTotals], float], str]] = {  # seconds of a worker's thread per round
    "cpu": (lambda each: _divide_by_rounds(each, each.times.machine.cpu_wait), "waiting for a CPU"),
    "disk": (lambda each: _divide_by_rounds(each, each.times.machine.disk), "waiting for a disk"),
    "code": (lambda each: _divide_by_rounds(each, each.times.machine.cpu), "on a CPU"),
}
_WHY = {
    "cpu": "it waits for a CPU that other processes use",
    "disk": "it waits for a disk",
    "data": "its batches are not ready in time",
    "network": "its network line is slow",
    "exchange": "it communicates longer, but no network line is measured to be the cause",
    "code": "it computes longer, on a CPU",
    "blocked": "its code neither uses a CPU nor waits for one (it sleeps, or waits for a lock, a device or a call)",
    "clients": "the job waits for clients, which train elsewhere",
    "start": "the start takes a large part of the time",
    "evaluation": "evaluations take a large part of the time",
    "checkpoint": "copying and writing states takes a large part of the time",
    "recovery": "failures and the rounds that were repeated after them take a large part of the time",
    "idle": "workers have nothing to do",
}
_WHY_CHANGED = "changes of the number of workers take a large part of the time; no worker has failed"
_ADVICE_CHANGED = (
    "change the workers less often: a longer elastic.cooldown, or fewer changes in elastic.replay; and if workers wait "
    "for newcomers to start: a service keeps processes ready with `rayps serve --warm N`"
)
_ADVICE_ONE = {  # for one worker, where it differs
    "exchange": "look at what else runs on {host}; or exchange less often: larger batches, accumulate=, or local_sgd"
}
_ADVICE = {
    "cpu": "end or move the other processes on {host}, or reserve more CPUs for each worker: resources={{'cpu': 2}} "
    "(--cpus-per-worker 2)",
    "disk": "put the data of {host} on a faster disk or into memory, or let processes read ahead: data().loaded_by(2) "
    "with a larger prefetch",
    "data": "let processes on {host} read ahead: data().loaded_by(2), or more of them and a larger prefetch",
    "network": "look at the network of {host}; or send less: compression='int8' in the strategy, larger batches, or "
    "local_sgd, which exchanges every few rounds",
    "code": "give {host} a processor as fast as the others', or do not wait for it: parameter_server:staleness=4 (or "
    "none)",
    "blocked": "look what loss() and the model do on {host}: `rayps train --profile DIR` writes a trace of it; or do "
    "not wait for it: parameter_server:staleness=4 (or none)",
    "servers": "use more servers: shards=2 (or servers=, for a server group)",
    "exchange": "exchange less often: larger batches, accumulate=, or local_sgd",
    "clients": "`rayps joined JOB` shows whom it waits for; lower `deadline` (a killed client holds a round until "
    "then), `local_epochs`, or `least` of remote(...); or use fedbuff, which waits for no single client",
    "start": "train longer in one run; a service keeps processes ready with `rayps serve --warm N`",
    "evaluation": "evaluate less often (evaluate_every) or on fewer batches (evaluation_batches)",
    "checkpoint": "save less often (checkpoint_every), or to a faster place",
    "recovery": "look at the events for the failures; save more often (checkpoint_every), so that fewer rounds repeat",
    "idle": "ask for fewer workers, or for more work for each",
}


def _advise(cause: str, member: MemberTotals | None) -> str:
    host = (
        "the workers' hosts"
        if member is None
        else f"the host of {member.name}" + (f" ({member.host})" if member.host else "")
    )
    text = _ADVICE[cause] if member is None else _ADVICE_ONE.get(cause, _ADVICE[cause])
    return text.format(host=host)


def _name_with_host(member: MemberTotals) -> str:
    return f"{member.name} on {member.host}" if member.host else member.name


def _divide_by_rounds(member: MemberTotals, seconds: float) -> float:
    return seconds / max(1, member.times.rounds)


def _find_median(measure: Callable[[MemberTotals], float], members: Sequence[MemberTotals]) -> float:
    return median(measure(each) for each in members)


def _format_seconds(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"
