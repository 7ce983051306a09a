"""`python -m benchmarks COMMAND`: rayps beside other libraries, and algorithms beside each other, from a checkout.

`rayps bench` measures a user's own machines; what stands here needs peers that rayps does not install, or compares
strategies on data sets for `docs/benchmarks.md`.
"""

from __future__ import annotations

import typer

from benchmarks.cli_admm import admm
from benchmarks.cli_averaging import averaging
from benchmarks.cli_federated import federated
from benchmarks.cli_laws import laws
from benchmarks.cli_learning import learning
from benchmarks.cli_parallel import pipeline, tensor
from benchmarks.cli_robust import robust
from rayps.cli.main import run_app

app = typer.Typer(no_args_is_help=True, help="Measure rayps beside its peers, in one run.")
for command in (laws, admm, averaging, learning, federated, robust, pipeline, tensor):
    app.command()(command)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit code: 2 for a mistake in the arguments."""
    return run_app(app, "benchmarks", arguments)


if __name__ == "__main__":
    raise SystemExit(main())
