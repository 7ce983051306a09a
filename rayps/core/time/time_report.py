"""The report of a job's time as JSON data: what `rayps report`, the REST interface and the dashboard show. Pure."""

from __future__ import annotations

from rayps_client.values import JsonObject

from rayps.core.time.goodput import JobTime
from rayps.core.time.time_account import PARTS
from rayps.core.time.time_verdict import reach_verdict

# one colour for each part of the account, for pictures; the dashboard has the same
COLOURS = {
    "compute": "#2e8b57",
    "data": "#d98c1f",
    "communication": "#3b7dd8",
    "waiting": "#c94f4f",
    "evaluation": "#7d5fb2",
    "checkpoint": "#5f8f9f",
    "start": "#8a8f98",
    "recovery": "#a33a7a",
    "again": "#e0568f",
    "idle": "#c9ced6",
}


def report_of(time: JobTime, name: str = "") -> JsonObject:
    """Return the report of a job called `name`: its time (see `JobTime.to_json`), the verdict, and the parts' order."""
    return {"name": name, "parts": list(PARTS), "verdict": reach_verdict(time).to_json(), **time.to_json()}
