"""Flower's SecAgg+ as a contender of `python -m benchmarks secure`: a script for its own environment.

The script imports nothing from rayps. `python secure_flower.py CONFIG OUT` runs one round of Flower's older workflow
`SecAggPlusWorkflow` in its simulation, the only place in which Flower 1.42 offers it. Clients do not train: they add
0.01 to the parameters. Bytes are those of Flower's messages as its protocol buffers; `dying` clients fail before their
masked vector.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

DIES = "collect_masked_vectors"  # the stage in which clients fail


def make_client_app(config: dict[str, Any]) -> Any:
    """Return Flower's client app with SecAgg+ and, around it, a count of each message's bytes and CPU seconds."""
    client: Any = importlib.import_module("flwr.client")
    secagg: Any = importlib.import_module("flwr.client.mod").secaggplus_mod
    serde: Any = importlib.import_module("flwr.common.serde")

    class Adds(client.NumPyClient):  # type: ignore[misc]
        def fit(self, parameters: Any, _: Any) -> Any:
            return [each + np.float32(0.01) for each in parameters], 20, {}

    def counted(message: Any, context: Any, call_next: Any) -> Any:
        node = int(context.node_config["partition-id"])
        size = _count_bytes(serde, message.content)
        began = time.process_time()
        stage = message.content.config_records.get("secaggplus_configs", None)
        stage_name = "" if stage is None else str(stage.get("stage", ""))
        if node < config["dying"] and stage_name == DIES:
            raise RuntimeError("this client fails before its masked vector")
        reply = call_next(message, context)
        line = [node, stage_name, _count_bytes(serde, reply.content), size, time.process_time() - began]
        with Path(config["costs"]).open("a") as file:
            file.write(json.dumps(line) + "\n")
        return reply

    return client.ClientApp(client_fn=lambda context: Adds().to_client(), mods=[counted, secagg])


def _count_bytes(serde: Any, content: Any) -> int:
    change = getattr(serde, "recorddict_to_proto", None) or serde.recordset_to_proto
    return int(change(content).ByteSize())


def make_server_app(config: dict[str, Any], found: dict[str, Any]) -> Any:
    """Return Flower's server app: one round with SecAgg+. `found` gets its seconds and whether the model changed."""
    server: Any = importlib.import_module("flwr.server")
    workflow: Any = importlib.import_module("flwr.server.workflow")
    common: Any = importlib.import_module("flwr.common")
    strategies: Any = importlib.import_module("flwr.server.strategy")
    app = server.ServerApp()
    start = common.ndarrays_to_parameters([np.zeros(config["size"], dtype=np.float32)])

    class Kept(strategies.FedAvg):  # type: ignore[misc]
        def aggregate_fit(self, server_round: int, results: Any, failures: Any) -> Any:
            merged = super().aggregate_fit(server_round, results, failures)
            if merged[0] is not None:
                found["mean"] = float(common.parameters_to_ndarrays(merged[0])[0].mean())
            return merged

    @app.main()  # type: ignore[untyped-decorator]
    def main(grid: Any, context: Any) -> None:
        clients = config["clients"]
        strategy = Kept(
            fraction_evaluate=0.0, min_fit_clients=clients, min_available_clients=clients, initial_parameters=start
        )
        legacy = server.LegacyContext(context=context, config=server.ServerConfig(num_rounds=1), strategy=strategy)
        fit = workflow.SecAggPlusWorkflow(config["neighbours"] + 1, (config["neighbours"] + 1) // 2 + 1, timeout=60.0)

        def timed(grid: Any, context: Any) -> None:
            began = time.monotonic()
            fit(grid, context)
            found["round_s"] = time.monotonic() - began

        workflow.DefaultWorkflow(fit_workflow=timed)(grid, legacy)

    return app


def main() -> None:
    """Run the simulation, and write medians' inputs: each client's bytes and seconds."""
    config, out = json.loads(sys.argv[1]), Path(sys.argv[2])
    config["costs"], found = str(out.with_name("costs")), dict[str, Any]()
    importlib.import_module("flwr.simulation").run_simulation(
        server_app=make_server_app(config, found),
        client_app=make_client_app(config),
        num_supernodes=config["clients"],
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 2}},
    )
    sent, received, cpu = dict[int, int](), dict[int, int](), dict[int, float]()
    stages = set()
    for line in Path(config["costs"]).read_text().splitlines():
        node, stage, out_bytes, in_bytes, seconds = json.loads(line)
        stages.add(stage)
        sent[node] = sent.get(node, 0) + out_bytes
        received[node] = received.get(node, 0) + in_bytes
        cpu[node] = cpu.get(node, 0.0) + seconds
    alive = [node for node in sent if node >= config["dying"]]
    numbers = {
        "sent": [sent[node] for node in alive],
        "received": [received[node] for node in alive],
        "cpu": [cpu[node] for node in alive],
        "round_s": found.get("round_s", 0.0),
        "changed": "mean" in found and abs(found["mean"] - 0.01) < 1e-3,
        "stages": sorted(stages),
    }
    out.write_text(json.dumps(numbers))


if __name__ == "__main__":
    main()
