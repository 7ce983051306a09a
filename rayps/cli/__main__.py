"""The program `rayps`. Ctrl-C ends it with exit code 130, even while its modules are being imported."""

from __future__ import annotations

import sys


def main() -> int:
    """Run the command that the program's arguments name; return the exit code."""
    try:
        from rayps.cli.main import main as run
    except KeyboardInterrupt:
        sys.stderr.write("rayps: interrupted\n")
        return 130
    return run()


if __name__ == "__main__":
    raise SystemExit(main())
