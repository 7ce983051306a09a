"""What does not go together in `dp(...)`, and which of its options are for clients only, or for rows only."""

from __future__ import annotations

from rayps.core.refusals.excluded_pair import ExcludedPair, exclude, exclude_each

_FIELD = "privacy"
# of `dp(...)`: options of which only clients have any, by the name of their feature
OF_CLIENTS_ONLY = {
    "clip": "an adaptive clip",
    "mechanism": "tree noise",
    "noise_by": "noise of clients",
    "sampling": "sampling of clients",
    "bit_noise": "bit_noise",
    "divisor": "divisor",
    "restart": "restart",
}
_NO_BOUND = "privacy cannot be proven under {strategy}: "
_OTHERS = "; use fedavg, fedprox or a server optimizer (fedavgm, fedadam, ...)"
_STATES = (
    "The checkpoints of simulated clients have these states without noise, and thereby say who took part, so privacy "
    "cannot be proven"
)
_KEEP = "; or let real clients keep their states (clients=remote)"

OF_PRIVACY: tuple[ExcludedPair, ...] = (
    ExcludedPair(
        "a budget without noise",
        "no rounds",
        "privacy has epsilon={epsilon:g} and no rounds: give rounds, ",
        "for which the noise is found",
        " (dp(epsilon={epsilon:g},rounds=100)), or noise_multiplier",
        _FIELD,
    ),
    ExcludedPair(
        "noise_multiplier",
        "rounds",
        "privacy has noise_multiplier={noise_multiplier:g} and rounds={rounds}: ",
        "rounds is only for finding the noise",
        "; leave one of them out",
        _FIELD,
    ),
    *(
        ExcludedPair(
            "tree noise",
            name,
            f"privacy has mechanism=tree and {given}: ",
            "tree noise needs a constant clip, and its proof uses no sampling",
            "; leave it out",
            _FIELD,
        )
        for name, given in {
            "an adaptive clip": "clip=adaptive",
            "a sample of clients": "sampling={a sample of clients}",
        }.items()
    ),
    ExcludedPair(
        "an adaptive clip",
        "samples of a fixed size",
        "privacy has clip=adaptive and sampling=fixed: ",
        "adaptive clipping is charged for poisson sampling or none",
        "; give sampling=poisson",
        _FIELD,
    ),
    ExcludedPair(
        "honest",
        "noise of the server",
        "privacy has honest={honest:g}, the fraction of clients that add their share of the noise, but ",
        "the server adds it",
        ": give noise_by=clients, or leave honest out",
        _FIELD,
    ),
    *(
        ExcludedPair(
            "noise of clients",
            name,
            f"privacy has noise_by=clients and {given}: ",
            why,
            "; leave one of them out",
            _FIELD,
        )
        for name, given, why in (
            ("tree noise", "mechanism=tree", "the noise of a tree is drawn by one party, which keeps its key"),
            ("an adaptive clip", "clip=adaptive", "a client's numbers are written in steps of a constant clip"),
            ("seeded noise", "noise=seeded", "clients draw their noise in secret only"),
            ("a sample of clients", "sampling={a sample of clients}", "clients are no random sample"),
        )
    ),
    # rows
    *(
        ExcludedPair(
            "privacy of rows",
            feature,
            f"privacy has {option}={{{feature}}}, which is for clients, and ",
            "the unit here is a row",
            ": leave it out (rows are drawn independently, with constant clip and independent noise), or use a "
            "federated strategy",
            _FIELD,
        )
        for option, feature in OF_CLIENTS_ONLY.items()
    ),
    # clients
    *(
        ExcludedPair("privacy of clients", name, _NO_BOUND, why, _OTHERS, _FIELD)
        for name, why in {
            "asynchronous rounds": "how old updates are, and how often a client takes part, depends on the clients' "
            "speeds",
            "sums without a bound": "its clients also send {sums without a bound}, which has no clip",
        }.items()
    ),
    *(
        ExcludedPair(
            "privacy of clients", name, f"{{{name}}} stores a state of each client. ", _STATES, f": {way}{_KEEP}", field
        )
        for name, way, field in (
            ("private layers of simulated clients", "leave private out", "private"),
            (
                "buffers of simulated clients",
                "leave buffers out, and use no BatchNorm, but layers that normalize each row alone",
                "buffers",
            ),
            ("states of simulated clients", _OTHERS.removeprefix("; "), _FIELD),
        )
    ),
    *(
        ExcludedPair("privacy of clients", name, says, why, way, name)
        for name, (says, why, way) in {
            "finetune": (
                "finetune measures models on the clients' rows without noise, ",
                "which would void the claim of privacy",
                ": leave finetune out, and fine-tune where the rows are",
            ),
            "rule": (
                "rule is {rule!r}, but privacy adds noise to a sum, and a robust rule is none: ",
                "how much one client changes its result is not known",
                ". Leave rule out: the clip already bounds each client",
            ),
            "clip": (
                "clip is {clip:g} beside privacy, ",
                "which has a clip of its own",
                ": write privacy=dp(clip={clip:g},...) and leave clip out",
            ),
        }.items()
    ),
    ExcludedPair(
        "client_evaluation",
        "tree noise",
        "client_evaluation=true asks clients in each evaluation, but ",
        "tree noise assumes that each takes part once in a tree",
        ": leave it out, and evaluate where the rows are (rayps personal), or give sampling=all",
        "client_evaluation",
    ),
    *exclude_each(
        ("min_replies", "enough", "over_selection", "attack", "report"),
        "privacy of clients",
        "[it] is {[it]!r}: ",
        "what a private round does or says must not depend on how many clients reply, or on what single clients send",
        "; leave [it] out",
    ),
    ExcludedPair(
        "privacy of clients",
        "physical_batch",
        "privacy has physical_batch={physical_batch}, ",
        "which is for the privacy of rows (all_reduce, parameter_server)",
        "; {strategy} protects clients: leave it out",
        _FIELD,
    ),
    ExcludedPair(
        "noise of clients",
        "no secure",
        "privacy has noise_by=clients, but a client's share of the noise does not protect it: ",
        "only the sum under masks has enough",
        ". Give secure=secagg(clip=...,max_weight=1) and clients=remote too, or leave noise_by out",
        _FIELD,
    ),
    ExcludedPair(
        "real clients",
        "a sample of clients",
        "privacy has sampling={a sample of clients}, but ",
        "real clients come and go as they like, so no round is a random sample of them",
        ": give mechanism=tree (noise for clients that cannot be sampled), or sampling=all (no amplification)",
        _FIELD,
    ),
    *exclude_each(
        ("available", "deadline"),
        "a claim for samples",
        "[it] is {[it]!r}: ",
        "clients that come and go, or are late, are no random sample, which privacy with {a claim for samples} assumes",
        "; leave [it] out, or give privacy sampling=all",
    ),
    # statistics
    *exclude(
        "statistics",
        {
            "a clip of privacy": (
                "privacy has clip={a clip of privacy}, but ",
                "a client's vector is scaled to a norm of 1",
                ": leave clip out",
            ),
            "tree noise": (
                "privacy has mechanism=tree, which is for many rounds, and ",
                "a statistic is one release",
                ": leave mechanism out",
            ),
        },
        _FIELD,
    ),
    ExcludedPair(
        "no rows_per_client",
        "private answers of rows",
        "by is rows and the job is private: give rows_per_client, the most rows that a client counts for, because ",
        "one client's contribution must be bounded",
        "",
        "rows_per_client",
    ),
)
