"""Write what does not go together into `docs/limits.md`, from the table of refusals.

python scripts/write_refusals.py
"""

import re
from pathlib import Path

from rayps.core.refusals.excluded_pair import Door, ExcludedPair
from rayps.core.refusals.table import TABLE, door_of

FILE = Path(__file__).resolve().parent.parent / "docs" / "limits.md"
BEGIN, END = "<!-- written by scripts/write_refusals.py -->\n", "<!-- end -->\n"

# how what an error says ends, if the reason after it is a sentence
_BEFORE_A_SENTENCE = (
    ": ",
    "; ",
    ". ",
    "because ",
    "but ",
    ", and ",
    ", so ",
    "so that ",
    "where ",
    "under {strategy} ",
)
_DOORS = {
    Door.REQUEST | Door.TRAIN: "at once",
    Door.REQUEST: "at once",
    Door.TRAIN: "by rayps.train",
    Door.RUN: "with the workload",
}


def limits_page(text: str) -> str:
    """Return the page `text` with the table of today."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    rows = [f"| {row.one} | {row.other} | {_reason(row)} | {_DOORS[door_of(row)]} |\n" for row in TABLE]
    head = "| this | with this | because | refused |\n|---|---|---|---|\n"
    return f"{before}{BEGIN}{head}{''.join(rows)}{END}{after}"


def _reason(row: ExcludedPair) -> str:
    """Return the reason of a row: `why`, or with the words of the error before it if it is no sentence by itself."""
    said = row.why if row.says.endswith(_BEFORE_A_SENTENCE) else row.says + row.why
    return re.sub(r"\{[^}]*\}", "...", said.replace("{strategy}", "the strategy"))


if __name__ == "__main__":
    FILE.write_text(limits_page(FILE.read_text(encoding="utf-8")), encoding="utf-8")
