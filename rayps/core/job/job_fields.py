"""The fields of a job, each once: name, kind of value, default, help, limits, and where it may be given. Pure.

`rayps_api.schemas.JobIn`, the names that a job file may have, the help of `rayps train`, and `dashboards/src/job.ts`
(written by `scripts/write_job_fields.py`) follow from this table. `rayps.train`, `rayps.strategies.job.JobSpec` and the
command are written and typed; `tests/core/test_job_fields.py` compares them with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, Flag, auto

from rayps_client.values import Json

from rayps.core.job.code_archive import HASH
from rayps.core.job.requirements import MOST_LINES
from rayps.core.job.statement import MOST_STATEMENT_BYTES

MOST_PARAMS = 1000  # values of `params`
NAME = r"^[A-Za-z0-9]([A-Za-z0-9 _.-]{0,62}[A-Za-z0-9])?$"
GROUP_NAME = r"^[A-Za-z0-9]([A-Za-z0-9_-]{0,38}[A-Za-z0-9])?$"


class Kind(Enum):
    """What a field's value is in JSON."""

    LINE = auto()  # printable text on one line, at most 1000 letters
    TEXT = auto()  # text with the field's own limits
    WHOLE = auto()  # a whole number
    NUMBER = auto()
    FLAG = auto()  # true or false
    STRATEGY = auto()  # a name, a name with options, or a list of phases
    WORKERS = auto()  # a number, or the least and the most
    ELASTIC = auto()  # what an elastic job states beside its range of workers
    AMOUNTS = auto()  # from names to numbers
    START = auto()  # a path, or an object with a path: see `rayps.core.job.warm_start`
    VALUES = auto()  # from names to any values
    LINES = auto()  # lines of text
    VARIABLES = auto()  # environment variables, checked by `JobEnvironment`, whose errors show no value
    OBJECT = auto()  # an object of the calling program, which no JSON holds


class Where(Flag):
    """Where a field may be given."""

    JOB = auto()  # in a job's JSON: a request, a job file, `--set`, a sweep, the store
    TRAIN = auto()  # as an argument of `rayps.train`
    COMMAND = auto()  # as an option of `rayps train`


_ALL = Where.JOB | Where.TRAIN | Where.COMMAND
_LOCAL = Where.TRAIN | Where.COMMAND


@dataclass(frozen=True, slots=True)
class JobField:
    """A field of a job.

    `limits` and `examples` are those of a request, in pydantic's names. `note` describes the field in the interface's
    document. `argument` is how `rayps.train` declares it, if the annotation or the default differs from the JSON's.
    """

    name: str
    kind: Kind
    where: Where
    default: Json = None
    help: str = ""  # of the command's option; if empty, `note` says it
    note: str = ""
    limits: Mapping[str, float | str] = field(default_factory=dict)
    examples: tuple[Json, ...] = ()
    argument: str = ""

    @property
    def text(self) -> str:
        """What the field is, in one sentence or two."""
        return self.help or self.note


_COUNT = {"ge": 1, "le": 10**12}

TABLE = (
    JobField(
        "workload",
        Kind.LINE,
        Where.JOB,
        help="file.py:Class or module:Class of a Workload.",
        examples=("examples/digits.py:Digits",),
    ),
    JobField(
        "run",
        Kind.LINE,
        Where.JOB,
        note="A function, in place of a workload.",
        examples=("examples/port_plain.py:train_fn",),
    ),
    JobField(
        "strategy",
        Kind.STRATEGY,
        _ALL,
        "all_reduce",
        "How the workers learn together: all_reduce, or parameter_server:staleness=3,shards=2 (none = asynchronous); a "
        "model larger than a worker: all_reduce:replica=pipeline(stages=4,micro_batches=8).",
        examples=({"name": "parameter_server", "staleness": 3},),
        argument="StrategySpec = 'all_reduce'",
    ),
    JobField(
        "workers",
        Kind.WORKERS,
        _ALL,
        1,
        "The number of workers, or the least and the most: 2..8.",
        "A number, or the least and the most of an elastic job.",
        examples=(4, [2, 8]),
        argument="int | tuple[int, int] = 1",
    ),
    JobField(
        "elastic",
        Kind.ELASTIC,
        _ALL,
        help="An option of elastic workers: cooldown, gain, lr_scaling, replay; or balance=true.",
        argument="Mapping[str, Json] | None = None",
    ),
    JobField(
        "epochs",
        Kind.WHOLE,
        _ALL,
        help="Passes through the data (default 1, if --steps is not given).",
        limits={"ge": 1, "le": 10**9},
    ),
    JobField(
        "steps",
        Kind.WHOLE,
        _ALL,
        help="Batches per worker (rounds under a federated strategy); give it instead of --epochs.",
        limits=_COUNT,
    ),
    JobField("seed", Kind.WHOLE, _ALL, 0, "Seed of parameters and shuffling.", limits={"ge": 0, "lt": 2**63}),
    JobField(
        "resources",
        Kind.AMOUNTS,
        Where.JOB | Where.TRAIN,
        {"cpu": 1.0},
        "What each worker reserves: cpu, gpu, memory in bytes.",
        argument="dict[str, float] | None = None",
    ),
    JobField("working_dir", Kind.LINE, Where.JOB, help="The folder of the user's files on the service's machine."),
    JobField("checkpoint_every", Kind.WHOLE, _ALL, help="Rounds between two checkpoints.", limits=_COUNT),
    JobField(
        "evaluate_every", Kind.WHOLE, _ALL, help="Rounds between two evaluations (default: an epoch).", limits=_COUNT
    ),
    JobField(
        "keep_checkpoints",
        Kind.WHOLE,
        _ALL,
        2,
        "How many of the newest checkpoints are kept.",
        limits={"ge": 1, "le": 10**6},
    ),
    JobField(
        "max_failures", Kind.WHOLE, _ALL, 3, "How many deaths of actors the run survives.", limits={"ge": 0, "le": 1000}
    ),
    JobField(
        "timeout",
        Kind.NUMBER,
        _ALL,
        60.0,
        "A process that does not answer for this time counts as dead, and so does one in which a call of your code "
        "takes longer; the first call of each method has at least 180 s.",
        "Seconds; of a job with `run`, the default is 600.",
        {"gt": 0, "le": 86400.0},
    ),
    JobField(
        "resume",
        Kind.LINE,
        _ALL,
        help="Resume from the newest checkpoint in DIR.",
        argument="bool | str | Path = False",
    ),
    JobField("name", Kind.TEXT, Where.JOB | Where.TRAIN, help="The job's name.", limits={"pattern": NAME}),
    JobField(
        "server_group",
        Kind.TEXT,
        _ALL,
        help="Store the parameters on this server group of the cluster at --address.",
        limits={"pattern": GROUP_NAME},
    ),
    JobField("branch", Kind.LINE, _ALL, help="Start with the parameters of another space of the server group."),
    JobField(
        "start_from",
        Kind.START,
        _ALL,
        help="Start with the parameters of a safetensors file, a model's folder or a checkpoint; with options: "
        "'{path: PATH, strict: false}'.",
        examples=("base.safetensors",),
        argument="str | Path | JsonObject | None = None",
    ),
    JobField(
        "profile",
        Kind.FLAG,
        _ALL,
        False,
        "Write a trace of a few rounds of each worker into this folder.",
        argument="str | Path | None = None",
    ),
    JobField(
        "quota",
        Kind.AMOUNTS,
        Where.JOB | Where.TRAIN,
        help="The job's limits on its server group: bytes, and operations per second.",
        examples=({"bytes": 1e9, "operations": 500},),
    ),
    JobField(
        "params",
        Kind.VALUES,
        Where.JOB | Where.TRAIN,
        {},
        note="Values by name: of the fields of the workload's class, or of the function's arguments.",
        limits={"max_length": MOST_PARAMS},
        examples=({"lr": 0.3, "layers": [64, 32], "compile": {"mode": "max-autotune"}},),
        argument="Mapping[str, Json] | None = None",
    ),
    JobField(
        "code",
        Kind.TEXT,
        Where.JOB,
        help="The SHA-256 of the uploaded archive of the working directory.",
        limits={"pattern": HASH},
    ),
    JobField(
        "requirements",
        Kind.LINES,
        Where.JOB,
        help="Packages that the job's processes need, one on each line.",
        limits={"max_length": MOST_LINES},
        examples=(["einops==0.8.1"],),
    ),
    JobField(
        "env",
        Kind.VARIABLES,
        Where.JOB,
        note="Environment variables of the job's processes: a text; @ and the path of a file of the service's "
        "machine; or null, the service's own variable. Answers have the names only.",
        examples=({"NCCL_DEBUG": "INFO", "HF_TOKEN": "@/run/secrets/hf", "WANDB_API_KEY": None},),
    ),
    JobField(
        "statement",
        Kind.TEXT,
        Where.JOB,
        note="The data-use statement for real clients.",
        limits={"min_length": 1, "max_length": MOST_STATEMENT_BYTES},
    ),
    JobField(
        "checkpoint",
        Kind.LINE,
        _LOCAL,
        help="Save checkpoints in this folder, or at this URL (s3://...).",
        argument="str | Path | None = None",
    ),
    JobField(
        "ledger",
        Kind.LINE,
        _LOCAL,
        help="Share the ledger of private releases in this folder.",
        argument="str | Path | None = None",
    ),
    JobField(
        "address", Kind.LINE, _LOCAL, help="Join this Ray cluster; auto: the cluster of RAY_ADDRESS or of this machine."
    ),
    JobField("dry_run", Kind.FLAG, _LOCAL, False, "Try three rounds of everything, and show what the run would do."),
    JobField("global_batch", Kind.WHOLE, _LOCAL, help="Rows of a round over all workers, whatever their number."),
    JobField(
        "balance",
        Kind.FLAG,
        Where.TRAIN,
        False,
        "Whether faster workers take more of a round's rows; of a job's JSON, a field of elastic.",
    ),
    JobField(
        "progress",
        Kind.OBJECT,
        Where.TRAIN,
        help="Whether progress is shown, or a function that is called with it.",
        argument="bool | Callable[[ProgressRecord], None] = True",
    ),
    JobField(
        "callbacks",
        Kind.OBJECT,
        Where.TRAIN,
        help="Objects of rayps.Callback, called while the run trains.",
        argument="Sequence[Callback] = ()",
    ),
    JobField(
        "cluster",
        Kind.OBJECT,
        Where.TRAIN,
        help="Where actors are started; by default a Ray.",
        argument="Cluster | None = None",
    ),
)

BY_NAME = {each.name: each for each in TABLE}
JOB_FIELDS = tuple(each for each in TABLE if Where.JOB in each.where)  # in the order of the interface's document
FIELDS = frozenset(each.name for each in JOB_FIELDS)  # the names of a job's fields, as users give them
