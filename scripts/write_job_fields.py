"""Write `dashboards/src/job.ts`, the type of a job's specification on the page, from the table of a job's fields.

python scripts/write_job_fields.py
"""

from pathlib import Path

from rayps.core.job.job_fields import JOB_FIELDS, JobField, Kind

FILE = Path(__file__).resolve().parent.parent / "dashboards" / "src" / "job.ts"
_KINDS = {  # in an answer: `workers` is the least number, and of `env` only the names are told
    Kind.LINE: "string",
    Kind.TEXT: "string",
    Kind.WHOLE: "number",
    Kind.NUMBER: "number",
    Kind.FLAG: "boolean",
    Kind.STRATEGY: "StrategySpec",
    Kind.WORKERS: "number",
    Kind.ELASTIC: "Record<string, unknown>",
    Kind.AMOUNTS: "Record<string, number>",
    Kind.START: "string | Record<string, unknown>",
    Kind.VALUES: "Record<string, unknown>",
    Kind.LINES: "string[]",
    Kind.VARIABLES: "string[]",
}


def page_types() -> str:
    """Return the content of the file."""
    lines = [_line(each) for each in JOB_FIELDS]
    return "\n".join(
        [
            "/* Written by scripts/write_job_fields.py from rayps/core/job/job_fields.py: change the table. */",
            'import type { StrategySpec } from "./types";',
            "",
            "/** The specification of a job, as answers have it; of `workload` and `run` one is null. */",
            "export interface JobSpec {",
            *lines,
            "}",
            "",
        ]
    )


def _line(declared: JobField) -> str:
    mark = "" if declared.name == "workload" else "?"
    null = " | null" if declared.default is None else ""
    return f"  {declared.name}{mark}: {_KINDS[declared.kind]}{null};"


if __name__ == "__main__":
    FILE.write_text(page_types(), encoding="utf-8")
