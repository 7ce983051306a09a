"""What does not go together among the options of federated strategies, of simulated clients and of real ones."""

from __future__ import annotations

from rayps.core.refusals.excluded_pair import ExcludedPair, exclude, exclude_each

# what says how simulated clients behave, which real ones decide themselves
OF_SIMULATED = ("attack", "dropout", "speed", "available", "enough", "over_selection")
# how replies of a round are combined, which an asynchronous strategy does by the age of each
OF_ROUNDS = ("rule", "min_replies", "enough", "over_selection")
_SECURE = "secure is {secure!r}, but "

OF_CLIENTS: tuple[ExcludedPair, ...] = (
    ExcludedPair(
        "local_epochs",
        "local_steps",
        "local_epochs is {local_epochs!r} and local_steps is {local_steps!r}: ",
        "each of them says how long a client trains",
        "; give one of them",
        "local_steps",
    ),
    *exclude_each(
        OF_SIMULATED,
        "real clients",
        "[it] is {[it]!r}, but clients is remote: ",
        "[it] is only for simulated clients",
        "; leave it out",
    ),
    ExcludedPair(
        "metric_bound",
        "metrics in the clear",
        "metric_bound is {metric_bound:g}, but ",
        "it limits the metrics of clients under masks or with noise only",
        ": give client_evaluation=true and secure=secagg(...) or privacy=dp(...), or leave it out",
        "metric_bound",
    ),
    *exclude(
        "client_evaluation",
        {
            "simulated clients": (
                "client_evaluation is true, but the clients are simulated: ",
                "evaluation_data() has their rows",
                "; leave it out",
            ),
            "asynchronous rounds": (
                "client_evaluation is true, but {strategy} ",
                "has no rounds between which all clients could evaluate",
                ": leave it out",
            ),
        },
    ),
    *exclude(
        "secure",
        {
            "asynchronous rounds": (
                _SECURE + "{strategy} is asynchronous: ",
                "masks cancel only between clients that start together, and updates of different ages have different "
                "weights",
                ": use fedavg, fedprox or fedadam",
            ),
            "simulated clients": (
                _SECURE,
                "the clients are simulated here, where each update is seen",
                ": give clients=remote",
            ),
            "rule": (_SECURE, "a robust rule compares the updates one by one", ": leave rule out"),
            "clip": (_SECURE, "it clips updates itself", ": give clip in secagg(clip=...) only"),
            "sums without a bound": (
                _SECURE,
                "{strategy} also sums vectors without a bound",
                ": use fedavg, fedprox or fedadam",
            ),
            "weights other than samples": (
                _SECURE,
                "{strategy} weights replies by other numbers than their samples",
                ": use fedavg",
            ),
            "report": (_SECURE, "a report looks at single updates", ": leave report out"),
        },
    ),
    *exclude_each(
        ("upload", "download"),
        "simulated clients",
        "[it] is {[it]!r}, but the clients are simulated, and ",
        "nothing is sent to them",
        ": give clients=remote, or leave [it] out",
    ),
    *exclude(
        "upload",
        {
            "secure": (
                "upload is {upload!r}, but secure sums need whole numbers in the same places from every client: ",
                "which elements top_k sends would be seen, int8 has scales of each client, and each client has a mask "
                "of its own",
                ". Leave upload out, and give fewer bits in secagg(bits=...)",
            )
        },
    ),
    ExcludedPair(
        "uploads by top_k",
        "asynchronous rounds",
        "upload is {upload!r}, but under {strategy} ",
        "a client may reply several times from the same round, and what top_k leaves out is stored by round",
        ": give upload=int8 or upload=mask:SHARE",
        "upload",
    ),
    *exclude_each(
        OF_ROUNDS,
        "fedbuff",
        "[it] is {[it]!r}, which fedbuff does not support: ",
        "fedbuff always waits for {fedbuff} updates and adds them, weighted by their age",
        "; leave out [it], or use fedavg",
    ),
    ExcludedPair(
        "finetune",
        "ditto",
        "finetune is {finetune!r}, but ",
        "each client of ditto already trains a personal model",
        ": leave out finetune",
        "finetune",
    ),
    ExcludedPair(
        "private",
        "vectors of the whole model",
        "{strategy} has private layers and also {vectors of the whole model}, which ",
        "would contain them",
        ": leave one of the two out",
        "private",
    ),
    *(
        ExcludedPair(
            name, "statistics", f"{name} is {{{name}!r}} under statistics: leave it out, because ", why, "", name
        )
        for name, why in {
            "rule": "a statistic is a ratio of sums",
            "clip": "the bounds of the queries bound each client already",
            "finetune": "no model is trained",
            "buffers": "there are none",
        }.items()
    ),
    ExcludedPair(
        "rows_per_client",
        "answers of clients",
        "rows_per_client is {rows_per_client}, but ",
        "by=clients counts each client once",
        ": give by=rows, or leave rows_per_client out",
        "rows_per_client",
    ),
)
