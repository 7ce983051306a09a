"""What `make demo` runs: start the service, submit the digits, follow them, leave the dashboard open.

python examples/demo.py [--stop]
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from rayps_client.errors import RaypsError
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn

from rayps.service.client import Client
from rayps.service.settings import Settings

HERE = Path(__file__).resolve().parent
STATE = HERE.parent / ".rayps"
console = Console(highlight=False)


def main() -> int:
    """Train the digits through the job service, or end what an earlier demo left running."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--stop", action="store_true", help="end the service that a demo left running")
    parser.add_argument("--strategy", default="parameter_server:staleness=3,shards=2")
    parser.add_argument("--port", type=int, default=int(os.environ.get("RAYPS_PORT", "8420")))
    args = parser.parse_args()
    os.environ["RAYPS_STATE_DIR"] = str(STATE)
    if args.stop:
        return stop()
    try:
        return demo(args.strategy, args.port)
    except RaypsError as error:
        console.print(f"error: {error}", style="red", markup=False)
        return error.exit_code


def demo(strategy: str, port: int) -> int:
    """Submit, follow, and say where to look."""
    client = serve(port)
    job = client.submit(
        "digits.py:Digits", working_dir=HERE, strategy=strategy, workers=4, epochs=5, name="digits-demo"
    )
    console.print(f"submitted {job.id}: 4 workers, {strategy}", soft_wrap=True)
    console.print(f"dashboard: {address(client)}\n", soft_wrap=True)
    follow(job)
    job.wait()
    if job.status != "SUCCEEDED":
        console.print(f"the job ended as {job.status}: {job.refresh()}", style="red")
        return 1
    accuracy = job.result["accuracy"]
    console.print(f"[green]trained[/green]: {accuracy:.1%} of the test images are read right")
    console.print(f"dashboard: {address(client)}\n(opens once; `make stop` ends the service)", soft_wrap=True)
    return 0


def address(client: Client) -> str:
    """An address that opens the dashboard; its code goes to a terminal only, since a log may have other readers."""
    if console.is_terminal and sys.stdout.isatty():
        return client.page_address()
    return f"{client.url}/ (an address that opens it: RAYPS_STATE_DIR={STATE} rayps open)"


def serve(port: int) -> Client:
    """The demo's own service, started if it does not run yet."""
    if running():
        return Client()
    STATE.mkdir(mode=0o700, exist_ok=True)
    log = STATE / "service.log"
    with log.open("a") as file:
        command = [sys.executable, "-m", "rayps.cli", "serve", "--port", str(port)]
        process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True)
    with console.status("starting the service and its Ray ..."):
        while not running():
            if process.poll() is not None:
                console.print(f"the service did not start; {log} ends with:", style="red")
                console.print("\n".join(log.read_text().splitlines()[-3:]), markup=False)
                raise SystemExit(process.returncode)
            time.sleep(0.1)
    return Client()


def running() -> bool:
    """Whether the demo's service answers."""
    if not Settings.read().service_file.exists():
        return False
    try:
        Client().jobs(limit=1)
    except RaypsError:
        return False
    return True


def follow(job) -> None:
    """Show the job's progress until it ends."""
    columns = (TextColumn("{task.description:12}"), BarColumn(), TextColumn("{task.fields[facts]}"))
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("waiting", total=None, facts="")
        for topic, data in job.follow():
            if topic != "job" or not data.get("progress"):
                continue
            now = data["progress"]
            loss, speed = now.get("loss"), now.get("samples_per_second")
            facts = (f"loss {loss:.3f}  " if loss is not None else "") + (f"{speed:,.0f} images/s" if speed else "")
            bar.update(
                task,
                total=now.get("rounds"),
                completed=now.get("round", 0),
                facts=facts,
                description=data["status"].lower(),
            )


def stop() -> int:
    """End the demo's service and its Ray."""
    import json

    if not running():  # the process of an old service.json may be another program's now
        console.print("no demo service is running")
        return 0
    pid = json.loads(Settings.read().service_file.read_text())["pid"]
    os.kill(pid, signal.SIGTERM)
    for _ in range(300):
        if not Path(f"/proc/{pid}").exists():
            break
        time.sleep(0.1)
    console.print("the demo's service has ended")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
