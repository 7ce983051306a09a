"""`python -m benchmarks NAME`, in a checkout: compare rayps with other libraries, and algorithms with each other.

`rayps bench` measures a user's own machines. These benchmarks need other libraries, which rayps does not install, need
root, or compare strategies on data sets for `benchmarks/results`. `TABLE` lists all of them.
"""

from __future__ import annotations

from rayps.bench.table import Benchmark
from rayps.cli.main import run_app
from rayps.cli.measure import make_group

NETWORK = {
    "laws": Benchmark(
        "benchmarks.network.laws:bench_laws",
        "Bytes and time beside the formulas, for each algorithm, number of workers and number of shards.\n\n"
        "Every worker and every shard has its own host: a network namespace, which needs root.",
    ),
    "shards": Benchmark(
        "benchmarks.network.shards:bench_shards",
        "Pushes and pulls with shards on several hosts.\n\n"
        "Each host has a slow link. The hosts are network namespaces, which need root.",
    ),
    "compression": Benchmark(
        "benchmarks.network.compression:bench_compression",
        "Compressed all-reduce on slow links.\n\n"
        "All-reduce without compression is measured too. The table shows which compression `auto` chooses.",
    ),
    "overlap": Benchmark(
        "benchmarks.network.overlap:bench_overlap",
        "How much of the transfer between hosts hides behind backward, by the size of the buckets.\n\n"
        "The hosts are network namespaces, which need root.",
    ),
    "causes": Benchmark(
        "benchmarks.network.causes:bench_causes",
        "Whether reports name a worker slowed in known ways.\n\n"
        "It needs root, for network namespaces and for a cgroup that limits a disk.",
    ),
}
SERVERS = {
    "rounds": Benchmark(
        "benchmarks.servers.rounds:bench_rounds",
        "Rounds a second of small jobs, where the exchange is most of a round.",
    ),
    "stragglers": Benchmark(
        "benchmarks.servers.stragglers:bench_slow_workers",
        "What slow workers cost: the time to equal accuracy, or what backup workers save.\n\n"
        "The workers train under staleness 0, 8 and none (asynchronous). With --backup b, the time of a step is "
        "measured "
        "for N workers, for N of N + b, and for N + b workers, if each gradient takes 5 times as long with probability "
        "0.1.",
        lambda values: int(values["workers"]) + int(values["backup"]),
    ),
    "staleness": Benchmark(
        "benchmarks.servers.staleness:bench_adaptive",
        "The time to equal loss with slow workers, under staleness 0, 2, 8, none (asynchronous), and auto.",
        lambda values: 0 if values["virtual"] else int(values["workers"]),
    ),
    "balance": Benchmark(
        "benchmarks.servers.balance:bench_balance",
        "Rounds of unequal workers: with equal shares of the rows, and with shares by speed.",
    ),
    "tables": Benchmark(
        "benchmarks.tables.table_batches:bench_table_batches",
        "Pulls and pushes of a sparse table's rows, beside torch's index_select and index_add_ on the same ids.",
        lambda values: int(values["workers"]) if values["calls"] or values["hot"] else 0,
    ),
}
CHANGES = {
    "elastic": Benchmark(
        "benchmarks.changes.changing_workers:bench_changes",
        "The pause of a job whose workers change: from 2 to 4, and to 2 because a node is drained.\n\n"
        "Each contender has a cluster of two nodes on this machine. Ray Train needs `pip install 'rayps[bench]'`.",
    ),
    "faults": Benchmark(
        "benchmarks.chaos.killed_servers:bench_killed_servers",
        "What faults cost: kill servers under load. With --hosts, what each kind of fault costs a job.\n\n"
        "The table shows whether each push was applied exactly once, and how long pushes waited. With --hosts it shows "
        "for each kind of fault the pause, the time that was lost until the next fault, and the useful share of "
        "the time "
        "with a fault in every 15 and in every 300 seconds; `none:host` is the noise of the machine.",
        lambda values: 0 if values["hosts"] else int(values["workers"]),
    ),
    "resize": Benchmark(
        "benchmarks.changes.resize:bench_resize",
        "Resize a group during a synchronous run.\n\n"
        "The table shows the bytes migrated, the loss of speed, and whether the result changed.",
    ),
    "jobs": Benchmark(
        "benchmarks.changes.neighbours:bench_jobs",
        "Run two jobs on one group.\n\n"
        "The table shows whether the results equal those of each job alone, how much a flood of pushes slows a "
        "job, and "
        "whether the memory of the flood is freed.",
        lambda values: 2 * int(values["workers"]) + 2 * int(values["flooders"]),
    ),
}
RUNS = {
    "start": Benchmark(
        "benchmarks.runs.start:bench_start",
        "The seconds from a call to the first training step.\n\n"
        "The workers record the times themselves. The parts of each time are shown too.",
    ),
    "sharded": Benchmark(
        "benchmarks.runs.sharded:bench_sharded",
        "Memory and checkpoints of sharded state.\n\n"
        "Workers hold slices of the state (shard=optimizer, shard=gradients) under Adam. Each run has a Ray and a "
        "process of its own.",
    ),
    "memory": Benchmark("benchmarks.runs.memory:bench_memory", "The memory of a training step, beside torch's DDP."),
    "mistakes": Benchmark(
        "benchmarks.runs.mistakes:bench_on_two_cpus",
        "Commit nine mistakes on a local Ray with two CPUs.\n\n"
        "The exit code is 1 if an error does not name the remedy, or if something is left.",
    ),
    "device": Benchmark(
        "benchmarks.gpu.device:bench_parts",
        "This machine's CPU and GPU. Needs no cluster.\n\n"
        "layers: convolutions and fully connected layers, and the copy of their input to the GPU. sum: a vector of all "
        "workers of one device, by each transport, beside the copies that it needs. step: one worker's training "
        "step in "
        "bf16 beside plain torch's. server: pushes and pulls of one worker, beside plain copies, and what a step hides "
        "of them. rows: rows of a table that a batch looks up, beside torch's EmbeddingBag.",
    ),
    "pipeline": Benchmark(
        "benchmarks.parallel.pipeline:bench_pipeline",
        "A pipeline's overhead, beyond the computation of its stages, beside torch.distributed.pipelining on gloo.",
        lambda values: int(values["stages"]),
    ),
    "tensor": Benchmark(
        "benchmarks.parallel.tensor:bench_tensor",
        "The forward and backward pass of two split layers, beside torch's DTensor on gloo and unsplit layers.",
    ),
}
ALGORITHMS = {
    "admm": Benchmark(
        "benchmarks.algorithms.admm:bench_admm",
        "ADMM and parallel SGD if a worker's rows have few labels: accuracy, bytes, and the cost of a shuffle.",
    ),
    "averaging": Benchmark(
        "benchmarks.algorithms.averaging:bench_averaging",
        "All-reduce, local SGD and DiLoCo on a character model.\n\n"
        "The table has the loss and the bytes sent, for the same number of samples.",
    ),
    "learning": Benchmark(
        "benchmarks.algorithms.learning:bench_learning",
        "Federated learning beside training in one place and each client alone, by the accuracy on digits.",
    ),
    "tasks": Benchmark(
        "benchmarks.algorithms.tasks:bench_tasks",
        "The final loss of each strategy beside that of a plain torch loop with the same seed.",
        lambda values: int(values["workers"]) + 2,  # servers too
    ),
    "parts": Benchmark(
        "benchmarks.algorithms.parts:bench_parts",
        "A small residual network as a workload beside the plain script, over seeds, with its parts one by one.",
    ),
    "privacy": Benchmark(
        "benchmarks.algorithms.privacy:bench_privacy",
        "DP-SGD of rayps and Opacus with the same parameters: accuracy, epsilon by both accountants, time.",
    ),
}
FEDERATED = {
    "federated": Benchmark(
        "benchmarks.federated.federated:bench_federated",
        "Federated rounds beside Flower's simulation engine, Apple's pfl and a plain loop on one core.",
    ),
    "client": Benchmark(
        "benchmarks.federated.client:bench_clients",
        "Seconds and memory of a client from its start until its first update has arrived, beside Flower's.",
    ),
    "uploads": Benchmark(
        "benchmarks.federated.uploads:bench_coded",
        "What real clients receive and send: bytes a round and accuracy, or seconds a round on a slow line.",
    ),
    "robust": Benchmark(
        "benchmarks.federated.robust:bench_robust",
        "The accuracy of aggregation rules with and without attackers.\n\nThe rows are divided at random, or by label.",
    ),
    "private_clients": Benchmark(
        "benchmarks.federated.private_clients:bench_private_clients",
        "Accuracy by epsilon: at the population that there is, and scaled to larger ones.",
    ),
    "secure": Benchmark(
        "benchmarks.federated.secure:bench_secure",
        "Sums under masks while clients die: exact or void, bytes and seconds, beside the papers and Flower.",
    ),
}
TABLE = NETWORK | SERVERS | CHANGES | RUNS | ALGORITHMS | FEDERATED

app = make_group(TABLE, "Measure rayps and other libraries in one run.")


def main(arguments: list[str] | None = None) -> int:
    """Run one command; return its exit code, which is 2 if an argument is wrong."""
    return run_app(app, "benchmarks", arguments)


if __name__ == "__main__":
    raise SystemExit(main())
