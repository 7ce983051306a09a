"""`python -m benchmarks COMMAND`, in a checkout: compare rayps with other libraries, and algorithms with each other.

`rayps bench` measures the user's machines. These benchmarks need other libraries, which rayps does not install, or
compare strategies on data sets for `docs/benchmarks.md`.
"""

from __future__ import annotations

import typer

from benchmarks.cli_admm import admm
from benchmarks.cli_averaging import averaging
from benchmarks.cli_client import client
from benchmarks.cli_federated import federated
from benchmarks.cli_laws import laws
from benchmarks.cli_learning import learning
from benchmarks.cli_mistakes import mistakes
from benchmarks.cli_parallel import pipeline, tensor
from benchmarks.cli_parts import parts
from benchmarks.cli_privacy import privacy
from benchmarks.cli_private_clients import private_clients
from benchmarks.cli_robust import robust
from benchmarks.cli_rounds import rounds
from benchmarks.cli_secure import secure
from benchmarks.cli_tasks import tasks
from benchmarks.cli_uploads import uploads
from rayps.cli.main import run_app

app = typer.Typer(no_args_is_help=True, help="Measure rayps and other libraries in one run.")
PRIVATE = (privacy, private_clients, secure)
FEDERATED = (federated, client, uploads, robust)
for command in (
    laws,
    admm,
    averaging,
    learning,
    *FEDERATED,
    *PRIVATE,
    pipeline,
    tensor,
    tasks,
    parts,
    mistakes,
    rounds,
):
    app.command()(command)


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit code, which is 2 if an argument is wrong."""
    return run_app(app, "benchmarks", arguments)


if __name__ == "__main__":
    raise SystemExit(main())
