"""What does not go together: each pair of features once, with the reason. Pure.

Those that refuse collect the features of a job that they know, and ask this table: a topology those of its options, a
job's specification those of the job too, the check before a run those of the workload, its model and its data. A pair
that is missing here is allowed. `docs/limits.md` shows the table, and a test compares the two.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from rayps_client.errors import ConfigError
from rayps_client.values import Json

# the features of a job that are given, each with its value, and `strategy`, the strategy's name
Features = Mapping[str, Json]


@dataclass(frozen=True, slots=True)
class ExcludedPair:
    """Two features of a job that exclude each other. `says`, `why` and `way` in a row are the text of the error.

    The names of features in braces stand for their values.
    """

    one: str
    other: str
    says: str
    why: str
    way: str
    field: str  # which option the error names

    def error(self, given: Features) -> ConfigError:
        """Return the error for a job with these features."""
        return ConfigError((self.says + self.why + self.way).format_map(given), field=self.field)


def _exclude(one: str, rows: dict[str, tuple[str, str, str]], field: str = "") -> Iterator[ExcludedPair]:
    """Yield the pairs of one feature with others; of each others' name: what the error says, why, and the way out."""
    for other, (says, why, way) in rows.items():
        yield ExcludedPair(one, other, says, why, way, field or one)


def _leave_out(one: str, what: str, rows: dict[str, str]) -> Iterator[ExcludedPair]:
    """Yield pairs of which one may be left out: `one` is called `what`. From the other's name to the reason."""
    for other, why in rows.items():
        says = f"{what} cannot be combined with {other} {{{other}}}: "
        yield ExcludedPair(one, other, says, why, f"; leave out {other}, or {one}", one)


_NO_COPY = "; leave average out, or use all_reduce, local_sgd, parameter_server or a federated strategy"
_BACKUP = "backup workers cannot be combined with "
_PRIVACY = "privacy cannot be combined with "
_NO_AVERAGE = "average is {average}, and {strategy} cannot average: "
_ROWS_ALONE = "the gradients of single rows are computed together"

TABLE: tuple[ExcludedPair, ...] = (
    *_exclude(
        "slice_backup",
        {
            "no shard": (
                "slice_backup is True without shard: ",
                "every worker holds the whole state",
                "; give also shard='optimizer' or shard='gradients', or leave out slice_backup",
            )
        },
    ),
    *_exclude(
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
        _BACKUP + "staleness {staleness}: ",
        "no worker waits for all others",
        "; give staleness=0, or leave out backup",
        "backup",
    ),
    *_leave_out(
        "backup",
        "backup workers",
        {
            "replica": "the workers of a replica wait for each other",
            "compression": "a late worker has no error to feed back",
            "shard": "each worker is needed for its slice of the state",
            "replicas": "the members of a round are known to fixed servers only",
        },
    ),
    *_exclude(
        "backup",
        {
            "buckets": (
                _BACKUP + "bucket_mb {buckets}: ",
                "nothing is sent before the members of a step are known",
                "; leave out bucket_mb, or backup",
            ),
            "servers for tables": (
                _BACKUP + "sparse tables: ",
                "a late worker's rows are on servers",
                "; use all_reduce without tables",
            ),
        },
    ),
    *_leave_out(
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
    # a job and its model
    ExcludedPair(
        "sparse tables",
        "no servers for tables",
        "the model has sparse tables ({sparse tables}), and {strategy} ",
        "has no servers for them",
        ": use the strategy hybrid, or parameter_server",
        "strategy",
    ),
    *_exclude(
        "privacy",
        {
            "sparse tables": (
                _PRIVACY + "sparse tables: ",
                "which rows of a table a batch looks up is visible",
                "; use dense embeddings, or leave out privacy",
            ),
            "clip_norm": (
                _PRIVACY + "clip_norm: ",
                "privacy clips the gradient of each row",
                "; set clip_norm to None, or leave out privacy",
            ),
            "server_group": (
                _PRIVACY + "server_group: ",
                "its servers serve other jobs, and would get sums without noise",
                "; leave server_group out, or leave out privacy",
            ),
        },
    ),
    ExcludedPair(
        "replica",
        "sparse tables",
        "replica is a {replica} of several workers, and the model has sparse tables ({sparse tables}): ",
        "the workers of a replica cannot share the rows of a table",
        "; leave out replica, or use a dense embedding",
        "replica",
    ),
    ExcludedPair(
        "branch",
        "no servers",
        "branch is {branch!r}, and {strategy} ",
        "has no parameters on servers",
        ": start with parameter_server, or leave out branch",
        "branch",
    ),
    ExcludedPair(
        "clip_norm",
        "tables beside a ring",
        "clip_norm is {clip_norm!r} and {strategy} trains sparse tables: ",
        "no worker has the mean gradient of their rows, so the norm of the whole gradient is not known",
        "; use parameter_server, which clips each worker's push (dense part and rows together), or set clip_norm to "
        "None",
        "clip_norm",
    ),
    *_exclude(
        "backup at servers",
        {
            "sparse tables": (_BACKUP + "sparse tables: ", "a late worker's rows are on servers", "; leave out backup"),
            "server_group": (
                _BACKUP + "server group {server_group!r}: ",
                "the members of a round are known to fixed servers only",
                "; leave out the group, or backup",
            ),
            "branch": (
                _BACKUP + "branch {branch!r}: ",
                "the members of a round are known to fixed servers only",
                "; leave out the group, or backup",
            ),
        },
        "backup",
    ),
    *_exclude(
        "shard_resources",
        {
            "server_group": (
                "shard_resources gives each shard {shard_resources:g} GPU, and the parameters are on server group "
                "{server_group!r}: ",
                "only a job's own fixed servers can be on GPUs",
                "; leave out shard_resources, or server_group",
            ),
            "sparse tables": (
                "shard_resources gives each shard {shard_resources:g} GPU, and the parameters are on a server group, "
                "with its tables: ",
                "only a job's own fixed servers can be on GPUs",
                "; leave out shard_resources",
            ),
        },
    ),
    ExcludedPair(
        "profile",
        "privacy of any kind",
        "profile was given for a private job: ",
        "a trace has each operation of a round with its shapes, and so shows which rows or clients were drawn",
        "; leave privacy out of the strategy for the trace, on data that may be seen, or leave out profile",
        "profile",
    ),
    ExcludedPair(
        "dry_run",
        "privacy of any kind",
        "dry_run was given for a private job: ",
        "the rounds of a dry run would be releases that are in no ledger",
        "; leave privacy out of the strategy for the dry run, on data that may be seen, or leave out dry_run",
        "dry_run",
    ),
    # a workload
    *(
        ExcludedPair("average", other, _NO_AVERAGE, why, _NO_COPY, "average")
        for other, why in {
            "replica": "its workers hold parts of the model",
            "shard": "each worker holds a slice of its state",
            "one shared vector": "its workers change the parameters while one of them would read them",
            "backup at servers": "with backup workers a late worker does not pull the parameters of every step",
            "no consensus before the end": "its workers' parameters agree only at the end",
            "copies of servers' parameters": "its workers step copies of the servers' parameters",
        }.items()
    ),
    ExcludedPair(
        "compile",
        "sparse tables",
        "compile is {compile!r} and the model has sparse tables, ",
        "whose rows are on servers",
        ": compile the dense layers in model(), by layer.compile(), and set compile to False",
        "compile",
    ),
    *_exclude(
        "sync_batchnorm",
        {
            "privacy of any kind": (
                "sync_batchnorm is True, and {strategy} has privacy, which takes no BatchNorm layer, because ",
                "its statistics mix rows",
                ": set sync_batchnorm to False, and use layers that normalize each row alone (torch.nn.LayerNorm for "
                "features, GroupNorm for images); or leave out privacy",
            ),
            "accumulate": (
                "sync_batchnorm is True and accumulate is {accumulate}: ",
                "a worker may have fewer micro-batches with rows than the others, which wait for its sums",
                "; set accumulate to 1, with a larger batch_size",
            ),
            "slices of gradients": (
                "sync_batchnorm is True and shard is {shard!r}: ",
                "the sums of BatchNorm layers and those of gradients would mix during backward",
                "; use shard='optimizer', or sync_batchnorm=False",
            ),
        },
    ),
    *_exclude(
        "backup",
        {
            "data without a length": (
                _BACKUP + "data without a length, ",
                "whose batches no worker can read again",
                ": give data with a length, or leave out backup",
            ),
            "loaded_by": (
                _BACKUP + "loaded_by, because ",
                "which batch a worker reads next is known only after each step",
                ": leave out loaded_by, or leave out backup",
            ),
            "sync_batchnorm": (
                _BACKUP + "sync_batchnorm, ",
                "for which each layer waits for all workers",
                ": set sync_batchnorm to False, or leave out backup",
            ),
            "rows of workers": (
                _BACKUP,
                "rows that belong to workers",
                ": use a strategy whose rows are Reshuffled(), or leave out backup",
            ),
            "a loop of its own": (
                _BACKUP + "the loop {a loop of its own}, ",
                "which waits for all workers",
                ": leave out `loop`, or leave out backup",
            ),
        },
    ),
    *_exclude(
        "fp16",
        {
            "sparse tables": (
                "precision is 'fp16' and the model has tables, for which ",
                "steps that fp16 skips are not implemented",
                ": set precision to 'bf16', which skips no step",
            ),
            "clients": (
                "precision is 'fp16' and {strategy} trains each client for a few steps, for which ",
                "steps that fp16 skips are not implemented",
                ": set precision to 'bf16', which skips no step",
            ),
        },
        "precision",
    ),
    ExcludedPair(
        "precision",
        "tensor ranks",
        "precision is {precision!r}, which ",
        "a replica of several workers does not have here",
        ": return model.bfloat16() from model(), or set precision to None",
        "precision",
    ),
    ExcludedPair(
        "fp16",
        "parts of a model",
        "precision is {precision!r}, which ",
        "a replica of several workers does not have here",
        ": set precision to 'bf16', or set precision to None",
        "precision",
    ),
    ExcludedPair(
        "compile",
        "parts of a model",
        "compile is {compile!r} and a replica is several workers, of which ",
        "none runs the whole model",
        ": compile layers in model(), by layer.compile(), and set compile to False",
        "compile",
    ),
    ExcludedPair(
        "accumulate",
        "stages of a pipeline",
        "accumulate is {accumulate}, but ",
        "a pipeline accumulates micro-batches by itself",
        ": multiply batch_size and the pipeline's micro_batches by {accumulate}, and leave accumulate out",
        "accumulate",
    ),
    *_exclude(
        "checkpoint_activations",
        {
            "sync_batchnorm": (
                "checkpoint_activations is {checkpoint_activations!r} and sync_batchnorm is True, ",
                "whose layers would exchange their sums again in backward",
                ": set one of them to False",
            ),
            "stages of a pipeline": (
                "checkpoint_activations is {checkpoint_activations!r}, and a replica of {strategy} is several workers, "
                "which ",
                "cannot compute activations again",
                ": set checkpoint_activations to False, and raise micro_batches with schedule 1f1b for less memory",
            ),
            "tensor ranks": (
                "checkpoint_activations is {checkpoint_activations!r}, and a replica of {strategy} is several workers, "
                "which ",
                "cannot compute activations again",
                ": set checkpoint_activations to False, and use a smaller batch_size for less memory",
            ),
        },
    ),
    *(
        ExcludedPair(
            "privacy", name, _PRIVACY + f"{name}={{{name}!r}} of the workload, because ", _ROWS_ALONE, f": {way}", name
        )
        for name, way in {
            "accumulate": "multiply batch_size by it, and give physical_batch, the rows that are in memory at once",
            "compile": "set compile to False",
            "checkpoint_activations": "give a smaller physical_batch for memory",
        }.items()
    ),
)


def refuse(given: Features) -> None:
    """Refuse a job that has both features of a pair of the table.

    Raises:
        ConfigError: the text says why they exclude each other, and what to do instead.
    """
    for row in TABLE:
        if row.one in given and row.other in given:
            raise row.error(given)
