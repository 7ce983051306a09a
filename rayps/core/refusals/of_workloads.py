"""What a workload, its model or its data excludes: known when the workload is built, in the check before a run."""

from __future__ import annotations

from rayps.core.refusals.excluded_pair import ExcludedPair, exclude
from rayps.core.refusals.of_topologies import BACKUP, PRIVACY

# features of a workload, its data and its model: nobody knows them before the workload is built
OF_A_WORKLOAD = frozenset(
    {
        "a schedule by epoch",
        "accumulate",
        "an evaluation of training data",
        "average",
        "checkpoint_activations",
        "clip_norm",
        "compile",
        "data without a length",
        "epochs of data without a length",
        "fp16",
        "loaded_by",
        "nothing on servers",
        "precision",
        "rows or a loop of its own",
        "rows without numbers",
        "sparse tables",
        "sync_batchnorm",
        "tables beside a ring",
        "vectors of the whole model",
    }
)
_NO_COPY = "; leave average out, or use all_reduce, local_sgd, parameter_server or a federated strategy"
_NO_AVERAGE = "average is {average}, and {strategy} cannot average: "
_ROWS_ALONE = "the gradients of single rows are computed together"

OF_WORKLOADS: tuple[ExcludedPair, ...] = (
    # a job and its model
    ExcludedPair(
        "sparse tables",
        "no servers for tables",
        "the model has sparse tables ({sparse tables}), and {strategy} ",
        "has no servers for them",
        ": use the strategy hybrid, or parameter_server",
        "strategy",
    ),
    ExcludedPair(
        "server_group",
        "nothing on servers",
        "server_group is {server_group!r}, and {strategy} without sparse tables ",
        "needs no servers",
        ": leave out server_group, or use parameter_server",
        "server_group",
    ),
    *exclude(
        "privacy",
        {
            "sparse tables": (
                PRIVACY + "sparse tables: ",
                "which rows of a table a batch looks up is visible",
                "; use dense embeddings, or leave out privacy",
            ),
            "clip_norm": (
                PRIVACY + "clip_norm: ",
                "privacy clips the gradient of each row",
                "; set clip_norm to None, or leave out privacy",
            ),
            "server_group": (
                PRIVACY + "server_group: ",
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
    ExcludedPair(
        "clip_norm",
        "steps of plain SGD",
        "{strategy} assumes steps of plain SGD, but ",
        "the workload has clip_norm={clip_norm:g}",
        ": leave clip_norm out",
        "strategy",
    ),
    ExcludedPair(
        "privacy of any kind",
        "checkpoints behind a URL",
        "checkpoint is {checkpoints behind a URL!r}, and the ledger of private releases ",
        "cannot be appended to there",
        ": give a local folder for the ledger (ledger=DIR, --ledger DIR) or for both (checkpoint=DIR, --checkpoint "
        "DIR), or start the job by the service, which has a folder",
        "checkpoint",
    ),
    *exclude(
        "backup at servers",
        {
            "sparse tables": (BACKUP + "sparse tables: ", "a late worker's rows are on servers", "; leave out backup"),
            "server_group": (
                BACKUP + "server group {server_group!r}: ",
                "the members of a round are known to fixed servers only",
                "; leave out the group, or backup",
            ),
            "branch": (
                BACKUP + "branch {branch!r}: ",
                "the members of a round are known to fixed servers only",
                "; leave out the group, or backup",
            ),
        },
        "backup",
    ),
    *exclude(
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
    ExcludedPair(
        "slices of parameters",
        "sparse tables",
        "the model has sparse tables, ",
        "whose rows are on servers already",
        ": leave out shard='parameters'",
        "shard",
    ),
    ExcludedPair(
        "compile",
        "slices of parameters",
        "compile is {compile!r}, and shard is 'parameters', ",
        "which is not compiled here",
        ": set compile to False, or use shard='gradients' or shard='optimizer'",
        "compile",
    ),
    ExcludedPair(
        "fp16",
        "slices of parameters",
        "precision is 'fp16', and shard is 'parameters', for which ",
        "steps that fp16 skips are not implemented",
        ": set precision to 'bf16', which skips no step, or use shard='gradients' or shard='optimizer'",
        "precision",
    ),
    *exclude(
        "sync_batchnorm",
        {
            "no ring of whole models": (
                "sync_batchnorm needs workers that average each gradient over a ring, each with the whole model, and ",
                "{strategy} has none",
                ": use all_reduce or hybrid, or sync_batchnorm=False (each worker's statistics are then those of its "
                "own batches)",
            ),
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
    *exclude(
        "backup",
        {
            "data without a length": (
                BACKUP + "data without a length, ",
                "whose batches no worker can read again",
                ": give data with a length, or leave out backup",
            ),
            "loaded_by": (
                BACKUP + "loaded_by, because ",
                "which batch a worker reads next is known only after each step",
                ": leave out loaded_by, or leave out backup",
            ),
            "sync_batchnorm": (
                BACKUP + "sync_batchnorm, ",
                "for which each layer waits for all workers",
                ": set sync_batchnorm to False, or leave out backup",
            ),
            "rows of workers": (
                BACKUP,
                "rows that belong to workers",
                ": use a strategy whose rows are Reshuffled(), or leave out backup",
            ),
            "a loop of its own": (
                BACKUP + "the loop {a loop of its own}, ",
                "which waits for all workers",
                ": leave out `loop`, or leave out backup",
            ),
        },
    ),
    *exclude(
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
    *exclude(
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
            "privacy", name, PRIVACY + f"{name}={{{name}!r}} of the workload, because ", _ROWS_ALONE, f": {way}", name
        )
        for name, way in {
            "accumulate": "multiply batch_size by it, and give physical_batch, the rows that are in memory at once",
            "compile": "set compile to False",
            "checkpoint_activations": "give a smaller physical_batch for memory",
        }.items()
    ),
    *exclude(
        "privacy",
        {
            "rows without numbers": (
                PRIVACY + "rows of {rows without numbers}, which ",
                "cannot be drawn by number",
                ": use rayps.data.tensors, dataset or table, or leave out privacy",
            ),
            "loaded_by": (
                PRIVACY + "loaded_by, because ",
                "which rows a worker reads next is drawn in each step",
                ": leave it out, or leave out privacy",
            ),
            "an evaluation of training data": (
                PRIVACY + "an evaluation on the training data, ",
                "whose metrics have no noise",
                ": define evaluation_data() with rows that are public, or leave out privacy",
            ),
            "rows or a loop of its own": (
                "{strategy} has privacy, and rows or a loop of its own, for which ",
                "nothing says which rows a step draws",
                ": leave out `rows` and `loop`, or privacy",
            ),
        },
    ),
    ExcludedPair(
        "a schedule by epoch",
        "data without a length",
        "schedule_every is 'epoch', and the data has no length, so that ",
        "the rounds of an epoch are not known",
        ": give a schedule by step",
        "schedule_every",
    ),
    ExcludedPair(
        "data without a length",
        "tables beside a ring",
        "the data has no length, and {strategy} with sparse tables ",
        "cannot return to a position in it after a death",
        ": use parameter_server with steps=, or data with a length",
        "strategy",
    ),
    *(
        ExcludedPair(
            "epochs of data without a length",
            other,
            "the data has no length, and {strategy} ",
            why,
            ": give steps= (batches of each worker) instead of epochs, or use all_reduce or local_sgd",
            "steps",
        )
        for other, why in {
            "a division of the run": "divides the rounds of a run",
            "workers that end alone": "lets each worker reach the end of its data alone",
        }.items()
    ),
)
