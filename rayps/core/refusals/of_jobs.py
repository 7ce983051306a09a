"""What does not go together among the fields of a job, and with the loop of a function that it runs."""

from __future__ import annotations

from rayps.core.refusals.excluded_pair import ExcludedPair, exclude, exclude_each

_DECIDES = "the loop decides about it: make it an argument of the function and give params.{} instead"
# the fields that a job with a loop of its own does not have, and what to do instead
NOT_IN_LOOPS = {
    "epochs": _DECIDES.format("epochs"),
    "steps": _DECIDES.format("steps"),
    "checkpoint_every": "the loop decides when it calls rayps.save: give an argument of the function in params",
    "evaluate_every": "the loop decides when it evaluates: give an argument of the function in params",
    "start_from": "load the parameters in the loop: model.load_state_dict(rayps.load_state(path)) before rayps.wrap",
    "elastic": "the loop's workers are a fixed number: give workers as one number",
    "server_group": "rayps.wrap starts servers of its own; to use a running group, open rayps.ServerGroup(parameters, "
    "group=NAME, workers=...) in the function, and pull and push there",
}
# features that only a job's fields have, and those of arguments of `rayps.train` alone
OF_REQUESTS = frozenset(
    {"workload", "run", "a loop of your own", "resume", "statement", "no real clients", "no server_group"}
)
OF_ARGUMENTS = frozenset(
    {
        "dry_run",
        "ledger",
        "no address",
        "resume of the newest checkpoint",
        "no folder for checkpoints",
        "checkpoints behind a URL",
    }
)
_IN_LOOPS = "all_reduce, parameter_server, downpour, local_sgd and diloco"
_NOT_WRAPPED = "wrap cannot run {strategy}"
_USE_TRAIN = f": use rayps.train, which runs the training loop itself, or one of {_IN_LOOPS}"

OF_JOBS: tuple[ExcludedPair, ...] = (
    ExcludedPair(
        "epochs",
        "steps",
        "epochs is {epochs} and steps is {steps}: ",
        "each of them says when the run ends",
        "; give only one of them",
        "epochs",
    ),
    ExcludedPair(
        "workload",
        "run",
        "workload is {workload!r} and run is {run!r}: give one of the two: ",
        "run is for a function with a loop of its own",
        "",
        "run",
    ),
    *(
        ExcludedPair(
            name,
            "run",
            f"{name} is {{{name}!r}}, and {{run}} has a loop of its own: leave {name} out; ",
            why.partition(": ")[0],
            "".join(why.partition(": ")[1:]),
            name,
        )
        for name, why in NOT_IN_LOOPS.items()
    ),
    *exclude_each(
        ("branch", "quota"),
        "no server_group",
        "[it] was given without server_group: ",
        "it is only for jobs on a server group",
        "; give both",
    ),
    *exclude(
        "start_from",
        {
            name: (
                f"start_from and {name} were both given: ",
                f"a job starts either with the parameters of a file, or with the state that {name} names",
                "; give one of them",
            )
            for name in ("resume", "branch")
        },
    ),
    ExcludedPair(
        "statement",
        "no real clients",
        "statement was given, but ",
        "the job has no real clients to accept it",
        ": leave it out, or give a federated strategy with clients=remote",
        "statement",
    ),
    # arguments of rayps.train
    *exclude(
        "dry_run",
        {
            "resume": ("dry_run and resume were both given: ", "a dry run starts at round 0", "; give one of them"),
            "real clients": (
                "dry_run was given, and real clients have the data: ",
                "a dry run trains without them",
                "; leave out dry_run",
            ),
        },
    ),
    ExcludedPair(
        "resume of the newest checkpoint",
        "no folder for checkpoints",
        "resume=True needs checkpoint=FOLDER: ",
        "the folder in which the earlier run saved its checkpoints",
        "",
        "checkpoint",
    ),
    ExcludedPair(
        "server_group",
        "no address",
        "server_group is {server_group!r}: ",
        "the group runs on a cluster",
        "; give also address, the cluster on which the group runs",
        "address",
    ),
    ExcludedPair(
        "ledger",
        "no privacy",
        "ledger is {ledger!r}, and the run has no privacy, so ",
        "it has no releases to record",
        ": give privacy=dp(...), or leave ledger out",
        "ledger",
    ),
    # strategies in a loop of a user's own
    *exclude(
        "a loop of your own",
        {
            "several phases": (
                "wrap takes one strategy, and {several phases} were given: ",
                "to change the strategy, call wrap again in your loop",
                "",
            )
        },
        "strategy",
    ),
    ExcludedPair(
        "a loop of your own",
        "privacy of any kind",
        f"{_NOT_WRAPPED} with privacy, because ",
        "privacy clips the gradient of each row or the update of each client, and a loop of your own computes the "
        "gradient of a whole batch",
        ": use rayps.train, which runs the training loop itself, or leave out privacy",
        "privacy",
    ),
    *exclude(
        "a loop of your own",
        {
            "replica": (_NOT_WRAPPED, " with a replica of several workers", _USE_TRAIN),
            "shard": (f"{_NOT_WRAPPED} with shard, because ", "a loop of your own steps whole parameters", _USE_TRAIN),
            "backup": (
                f"{_NOT_WRAPPED} with backup, because ",
                "a loop of your own cannot give the rows of a late worker to its next step",
                _USE_TRAIN,
            ),
            "rounds of rayps alone": (f"{_NOT_WRAPPED}", "", _USE_TRAIN),
        },
        "strategy",
    ),
    ExcludedPair(
        "a loop of your own",
        "shard_resources",
        "shard_resources gives each shard {shard_resources:g} GPU, and ",
        "the servers of a loop of your own are on the CPU",
        ": leave out shard_resources, or use rayps.train",
        "shard_resources",
    ),
    ExcludedPair(
        "a loop of your own",
        "data or the end of the run",
        "wrap cannot run {strategy}, which needs the data or the end of the run, and ",
        "a loop of your own has both",
        _USE_TRAIN,
        "strategy",
    ),
)
