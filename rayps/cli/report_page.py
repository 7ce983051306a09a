"""The report of a job's time as one HTML page that needs no other file and no network. Pure.

The pictures are SVG in the page: a bar for each member, in which each part of its time has a colour, and a timeline of
the job with its events.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import Any

from rayps_client.values import JsonObject

from rayps.core.time.time_report import COLOURS

_WIDTH, _LABEL, _BAR, _GAP = 960, 110, 22, 8  # of the pictures, in pixels: the picture, names, a bar, between bars
_STYLE = """
:root { color-scheme: light dark; --ink: #1c2430; --soft: #667080; --line: #d8dde5; --back: #ffffff; --box: #f4f6f9; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6e9ee; --soft: #9aa4b2; --line: #39414d; --back: #14181e; --box: #1d232b; }
}
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--back); margin: 2rem auto;
  max-width: 62rem; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
.verdict { background: var(--box); border-left: 4px solid #c94f4f; padding: .8rem 1rem; }
.verdict p { margin: .3rem 0; } .soft { color: var(--soft); } .number { font-size: 2.2rem; font-weight: 600; }
table { border-collapse: collapse; width: 100%; } td, th { padding: .25rem .6rem; text-align: right;
  border-bottom: 1px solid var(--line); font-variant-numeric: tabular-nums; }
td:first-child, th:first-child { text-align: left; } svg { width: 100%; height: auto; } svg text { fill: var(--ink);
  font: 12px system-ui, sans-serif; } .legend span { display: inline-block; margin-right: 1rem; }
.legend i { display: inline-block; width: .8em; height: .8em; margin-right: .3em; vertical-align: -.05em; }
"""


def write_page(report: JsonObject) -> str:
    """Return the page of a report, which is the result of `rayps.core.time.time_report.report_of`."""
    found: Any = report
    name = escape(str(found["name"]) or "a job")
    parts = [part for part in found["parts"] if part in COLOURS]
    used = [part for part in parts if any(each["parts"].get(part) for each in found["members"])]
    sections = [
        f"<h1>Where the time of {name} went</h1>",
        _write_headline(found),
        _write_verdict(found["verdict"]),
        "<h2>Each worker and server</h2>",
        _write_legend(used),
        _draw_bars(found["members"], used),
        "<h2>Over time</h2>",
        _draw_timeline(found, used),
        "<h2>Seconds by part</h2>",
        _write_seconds(found["members"], used),
        _waits(found["members"]),
        _write_machines(found["members"]),
        _write_network_lines(found["members"]),
        _write_events(found),
    ]
    head = f'<meta charset="utf-8"><title>Time of {name}</title><style>{_STYLE}</style>'
    return f"<!doctype html><html lang=en><head>{head}</head><body>{''.join(sections)}</body></html>\n"


def _write_headline(report: Any) -> str:
    goodput = report["goodput"]
    number = "no data" if goodput is None else f"{goodput:.1%}"
    workers = sum(each["kind"] == "worker" for each in report["members"])
    servers = len(report["members"]) - workers
    also = f" and {servers} server{'s'[: servers != 1]}" if servers else ""
    return (
        f"<p><span class=number>{number}</span> <span class=soft>goodput: the share of the time of {workers} "
        f"worker{'s'[: workers != 1]}{also} that was useful, over {_format_duration(report['seconds'])}</span></p>"
    )


def _write_verdict(verdict: Any) -> str:
    rows = [f"<p><b>{escape(_capitalize(verdict['summary']))}</b></p>"]
    for at, finding in enumerate(verdict["findings"]):
        if at == 1:
            rows.append("<p class=soft>Other causes, by their cost:</p>")
        if at:
            rows.append(f"<p><b>{escape(_capitalize(finding['summary']))}</b> ({finding['cost']:.0%})</p>")
        else:
            rows.append(f"<p>This costs {finding['cost']:.0%} of the workers' time.</p>")
        rows.append("<ul>" + "".join(f"<li>{escape(_capitalize(each))}</li>" for each in finding["evidence"]) + "</ul>")
        rows.append(f"<p>What to change: {escape(finding['advice'])}.</p>")
    return f"<div class=verdict>{''.join(rows)}</div>"


def _write_legend(parts: Sequence[str]) -> str:
    marks = "".join(f'<span><i style="background:{COLOURS[part]}"></i>{part}</span>' for part in parts)
    return f"<p class=legend>{marks}</p>"


def _draw_bars(members: Sequence[Any], parts: Sequence[str]) -> str:
    """Return a picture with one bar for each member, from 0 to all of its time."""
    rows = []
    for at, member in enumerate(members):
        y, x = at * (_BAR + _GAP), float(_LABEL)
        rows.append(_draw_text(0, y + 15, member["name"]))
        whole = sum(member["parts"].values()) or 1.0
        for part in parts:
            share = member["parts"].get(part, 0.0) / whole
            width = share * (_WIDTH - _LABEL)
            if width > 0:
                words = f"{member['name']}: {part} {_format_duration(member['parts'][part])} ({share:.1%})"
                rows.append(_draw_box(x, y, width, COLOURS[part], words))
            x += width
    return _write_picture(rows, len(members) * (_BAR + _GAP))


def _draw_timeline(report: Any, parts: Sequence[str]) -> str:
    """Return a picture with one row for each member: from left to right the time, from top to bottom the shares."""
    slices = report["timeline"]
    begin = min((each[0]["begin"] for each in slices.values() if each), default=0.0)
    end = max((each[-1]["end"] for each in slices.values() if each), default=begin + 1.0)
    scale = (_WIDTH - _LABEL) / max(1e-9, end - begin)
    rows, height = [], 2 * _BAR
    for at, (name, found) in enumerate(slices.items()):
        top = at * (height + _GAP)
        rows.append(_draw_text(0, top + 15, name))
        for each in found:
            x, width = _LABEL + (each["begin"] - begin) * scale, (each["end"] - each["begin"]) * scale
            whole, y = sum(each["parts"].values()) or 1.0, float(top)
            for part in parts:
                share = each["parts"].get(part, 0.0) / whole
                if share > 0:
                    words = f"{name}, {each['begin'] - begin:.0f} s: {part} {share:.0%}"
                    rows.append(_draw_box(x, y, max(0.5, width), COLOURS[part], words, height * share))
                y += height * share
    bottom = len(slices) * (height + _GAP)
    for event in report["events"]:
        if begin <= event["time"] <= end and event["event"] not in ("phase", "checkpoint", "placed"):
            x = _LABEL + (event["time"] - begin) * scale
            words = escape(f"{event['event']}: {event['message']}")
            rows.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{bottom}" stroke="currentColor" stroke-dasharray="3 3">'
                f"<title>{words}</title></line>"
            )
    rows += [
        _draw_text(_LABEL, bottom + 14, "0 s"),
        _draw_text(_WIDTH - 60, bottom + 14, _format_duration(end - begin)),
    ]
    return _write_picture(rows, bottom + 20)


def _write_seconds(members: Sequence[Any], parts: Sequence[str]) -> str:
    rows = [
        [member["name"], f"{member['wall']:.2f}", *(f"{member['parts'].get(part, 0.0):.2f}" for part in parts)]
        for member in members
    ]
    return _write_table(["", "all", *parts], rows)


def _waits(members: Sequence[Any]) -> str:
    rows = [
        [member["name"], peer or "not known", f"{seconds:.2f}"]
        for member in members
        for peer, seconds in sorted(member["waits"].items(), key=lambda each: -float(each[1]))
        if seconds >= 0.005
    ]
    return "<h2>Who waited for whom</h2>" + _write_table(["", "for", "seconds"], rows) if rows else ""


def _write_machines(members: Sequence[Any]) -> str:
    rows = []
    for member in [each for each in members if each["kind"] == "worker"]:
        waits = member["machine"]
        numbers = [f"{waits[key]:.2f}" for key in ("cpu", "cpu_wait", "disk")]
        rows.append([member["name"], member["host"], *numbers, f"{waits['read_bytes'] / 1e6:.1f}", member["rounds"]])
    if not rows:
        return ""
    sampled = any(each["machine"]["sampled"] for each in members)
    how = "sampled ten times a second" if sampled else "counted by the kernel"
    heads = ["", "host", "s on a CPU", "s waiting for a CPU", "s waiting for a disk", "MB read from disks", "rounds"]
    note = f"<p class=soft>Of the thread that trains, by the kernel's schedstat; waits for a disk are {how}.</p>"
    return "<h2>What the machine did</h2>" + _write_table(heads, rows) + note


def _write_network_lines(members: Sequence[Any]) -> str:
    rows = []
    for member in members:
        for peer, line in member["lines"].items():
            rate = f"{line['bytes'] / line['busy'] / 1e6:.3g}" if line["busy"] > 0 else ""
            numbers = [f"{line['bytes'] / 1e6:.2f}", f"{line['busy']:.2f}", rate]
            rows.append([member["name"], peer, *numbers, line["retransmits"], f"{1000 * line['rtt']:.2f}"])
    heads = ["from", "to", "MB sent", "s under way", "MB/s", "sent again", "round trip in ms"]
    return "<h2>Network lines</h2>" + _write_table(heads, rows) if rows else ""


def _write_events(report: Any) -> str:
    if not report["events"]:
        return ""
    begin = min((each["began"] for each in report["members"]), default=0.0)
    rows = [[f"{each['time'] - begin:.1f} s", each["event"], each["message"]] for each in report["events"]]
    return "<h2>Events</h2>" + _write_table(["after", "event", ""], rows)


def _write_table(heads: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    head = "".join(f"<th>{escape(each)}</th>" for each in heads)
    body = "".join("<tr>" + "".join(f"<td>{escape(str(cell))}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _write_picture(rows: Sequence[str], height: float) -> str:
    return f'<svg viewBox="0 0 {_WIDTH} {max(1, int(height))}" role="img">{"".join(rows)}</svg>'


def _draw_box(x: float, y: float, width: float, colour: str, words: str, height: float = _BAR) -> str:
    place = f'x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{height:.2f}"'
    return f'<rect {place} fill="{colour}"><title>{escape(words)}</title></rect>'


def _draw_text(x: float, y: float, words: object) -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}">{escape(str(words))}</text>'


def _capitalize(words: str) -> str:
    return words[:1].upper() + words[1:]


def _format_duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"
