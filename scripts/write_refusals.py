"""Write what does not go together into `docs/limits.md`, from the table of refusals.

python scripts/write_refusals.py
"""

import re
from pathlib import Path

from rayps.core.strategy.refusals import TABLE, ExcludedPair

FILE = Path(__file__).resolve().parent.parent / "docs" / "limits.md"
BEGIN, END = "<!-- written by scripts/write_refusals.py -->\n", "<!-- end -->\n"


def limits_page(text: str) -> str:
    """Return the page `text` with the table of today."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    rows = [f"| {row.one} | {row.other} | {_reason(row)} |\n" for row in TABLE]
    return f"{before}{BEGIN}| this | with this | because |\n|---|---|---|\n{''.join(rows)}{END}{after}"


def _reason(row: ExcludedPair) -> str:
    """Return the reason of a row: `why`, or with the words of the error before it if it is no sentence by itself."""
    if row.says.endswith((": ", "because ")):
        return row.why
    return re.sub(r"\{[^}]*\}", "...", (row.says + row.why).replace("{strategy}", "the strategy"))


if __name__ == "__main__":
    FILE.write_text(limits_page(FILE.read_text(encoding="utf-8")), encoding="utf-8")
