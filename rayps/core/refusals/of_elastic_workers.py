"""What does not go with workers whose number changes: in step, or by leases of rows."""

from __future__ import annotations

from rayps.core.refusals.excluded_pair import ExcludedPair

IN_STEP, BY_LEASES = "elastic workers in step", "elastic workers by leases"

OF_ELASTIC_WORKERS: tuple[ExcludedPair, ...] = (
    ExcludedPair(
        "lr_scaling",
        "global_batch",
        "lr_scaling is {lr_scaling!r} and global_batch is {global_batch}: ",
        "the rows of a round do not change with the workers",
        "; leave out one of the two",
        "lr_scaling",
    ),
    ExcludedPair(
        "balance",
        "replay",
        "balance is True with replay: ",
        "the shares of rows follow measured speeds, which no log repeats",
        "; leave out one of the two",
        "balance",
    ),
    *(
        ExcludedPair(
            IN_STEP,
            other,
            "workers is a range or elastic, and under {strategy} ",
            why,
            ": give a fixed number of workers, or use all_reduce, parameter_server, local_sgd or diloco without what "
            "stands in the way",
            "workers",
        )
        for other, why in {
            "replica": "a replica is several workers",
            "backup": "a worker that is late has rows and means of its own, with backup",
            "privacy": "each worker draws rows of its own for privacy",
            "sparse tables": "the model has sparse tables",
            "real clients": "the clients are processes outside of the cluster, and the workers only combine their "
            "replies",
            "rows that workers keep": "each worker keeps its rows",
            "replicas": "the parameters are on a group of servers",
            "staleness": "workers are not in step",
            "one shared vector": "all workers share one vector in memory",
            "a loop that is not of rayps": "the loop is not one of rayps",
        }.items()
    ),
    ExcludedPair(
        "lr_scaling",
        "steps by servers",
        "lr_scaling is {lr_scaling!r}, and under {strategy} ",
        "servers step",
        ": give global_batch instead, or use all_reduce",
        "lr_scaling",
    ),
    ExcludedPair(
        "balance",
        "no mean of one batch",
        "balance is True, and under {strategy} ",
        "the workers do not average the gradients of one batch in each round",
        ": leave it out, or use all_reduce or parameter_server with staleness=0",
        "balance",
    ),
    *(
        ExcludedPair(
            name,
            "rows of clients",
            "global_batch and lr_scaling are for rows that workers share, and under {strategy} ",
            "rows belong to clients",
            ": leave them out",
            "global_batch",
        )
        for name in ("global_batch", "lr_scaling")
    ),
    ExcludedPair(
        IN_STEP,
        "phases by client and by row",
        "workers is a range, and ",
        "some phases learn by client",
        ": give a fixed number of workers",
        "workers",
    ),
    *(
        ExcludedPair(
            BY_LEASES,
            name,
            "under {strategy} workers are not in step: ",
            "each takes batch_size rows at a time, servers scale a push by 1/N with the N workers that take part, and "
            "no run is repeated exactly",
            ": leave out global_batch, lr_scaling, replay and balance, or use all_reduce",
            "elastic",
        )
        for name in ("global_batch", "lr_scaling", "replay", "balance")
    ),
    *(
        ExcludedPair(
            BY_LEASES,
            other,
            "workers is a range, and under {strategy} ",
            why,
            ": use parameter_server in one phase, or give a fixed number of workers",
            "workers",
        )
        for other, why in {
            "several phases": "the job has several phases",
            "replica": "a replica is several workers",
            "parameters that workers change": "each worker has a copy of the parameters that it has changed itself",
            "sparse tables": "the model has sparse tables",
            "staleness that moves": "the staleness bound moves",
        }.items()
    ),
    ExcludedPair(
        BY_LEASES,
        "a schedule by epoch",
        "schedule_every is 'epoch', and the number of workers may change, so that ",
        "the rounds of an epoch are not known",
        ": give a schedule by step",
        "schedule_every",
    ),
)
