"""What does not go together among the options of a topology: of all_reduce, and of servers."""

from __future__ import annotations

from rayps.core.refusals.excluded_pair import ExcludedPair, exclude, leave_out

BACKUP = "backup workers cannot be combined with "
PRIVACY = "privacy cannot be combined with "

OF_TOPOLOGIES: tuple[ExcludedPair, ...] = (
    *(
        ExcludedPair(
            name,
            "replica",
            f"{name} is {{{name}!r}}, and a replica is a {{replica}} of several workers: ",
            why,
            f"; leave out {name}, or replica",
            name,
        )
        for name, why in (
            ("compression", "replicas average whole gradients, uncompressed"),
            ("bucket_mb", "replicas average their gradients after the whole batch, not in buckets"),
        )
    ),
    ExcludedPair(
        "shard_resources",
        "replicas",
        "shard_resources gives each shard {shard_resources:g} GPU and replicas is {replicas!r}: ",
        "servers of a group are on the CPU",
        "; leave out shard_resources, or replicas (fixed servers)",
        "shard_resources",
    ),
    *(
        ExcludedPair(
            name,
            "no backup",
            f"{name} is {{{name}!r}} without backup workers, where ",
            "no worker is late",
            f": give backup too, or leave out {name}",
            name,
        )
        for name in ("late_limit", "replace_late")
    ),
    ExcludedPair(
        "compression",
        "merge by the best worker",
        "compression is {compression!r} and merge is best, which ",
        "sends the best worker's parameters uncompressed",
        ": leave out compression, or give merge=mean",
        "compression",
    ),
    *(
        ExcludedPair(
            name,
            "staleness that moves",
            f"staleness is 'auto', and {what} ",
            "cannot move the bound",
            ": give 0 (synchronous), a whole number of rounds, or none (asynchronous); rayps.train with "
            "parameter_server takes 'auto'",
            "staleness",
        )
        for name, what in (
            ("hybrid", "hybrid, whose workers are in step,"),
            ("a server group without a job", "a server group without a job"),
            ("a loop of your own", "a loop of your own"),
        )
    ),
    *exclude(
        "slice_backup",
        {
            "no shard": (
                "slice_backup is True without shard: ",
                "every worker holds the whole state",
                "; give also shard='optimizer' or shard='gradients', or leave out slice_backup",
            )
        },
    ),
    *exclude(
        "shard",
        {
            "replica": (
                "shard is {shard!r} and replica is {replica}: ",
                "the workers of a replica hold parts of the model already",
                "; leave out one of them",
            ),
            "servers for tables": (
                "shard is {shard!r} with sparse tables, ",
                "whose rows are on servers already",
                ": leave out shard",
            ),
        },
    ),
    ExcludedPair(
        "slices of gradients",
        "compression",
        "shard is {shard!r} and compression is {compression!r}, which ",
        "needs the whole gradient on each worker",
        ": use shard='optimizer', or leave out compression",
        "shard",
    ),
    ExcludedPair(
        "slice_backup",
        "slices of parameters",
        "slice_backup is True and shard is 'parameters', for which ",
        "no worker holds copies",
        ": leave out slice_backup (a failure then restarts all workers from the newest checkpoint), or use "
        "shard='gradients'",
        "slice_backup",
    ),
    ExcludedPair(
        "backup",
        "staleness",
        BACKUP + "staleness {staleness}: ",
        "no worker waits for all others",
        "; give staleness=0, or leave out backup",
        "backup",
    ),
    *leave_out(
        "backup",
        "backup workers",
        {
            "replica": "the workers of a replica wait for each other",
            "compression": "a late worker has no error to feed back",
            "shard": "each worker is needed for its slice of the state",
            "replicas": "the members of a round are known to fixed servers only",
        },
    ),
    *exclude(
        "backup",
        {
            "buckets": (
                BACKUP + "bucket_mb {buckets}: ",
                "nothing is sent before the members of a step are known",
                "; leave out bucket_mb, or backup",
            ),
            "servers for tables": (
                BACKUP + "sparse tables: ",
                "a late worker's rows are on servers",
                "; use all_reduce without tables",
            ),
        },
    ),
    *leave_out(
        "privacy",
        "privacy",
        {
            "staleness": "each push would need noise of its own",
            "replica": "no worker has a row's whole gradient, and its norm",
            "compression": "what compression leaves out of a sum would be added to later sums",
            "shard": "a row's norm needs its gradient by all parameters",
            "bucket_mb": "nothing may be sent before the noise is added",
            "replicas": "the accounting is only for servers that return to a snapshot together",
            "backup": "which worker is late depends on the rows drawn, and these would be missing from the sum",
        },
    ),
)
