"""The JSON schemas of the routes of federated clients."""

from __future__ import annotations

from datetime import datetime
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field
from rayps_client.exchange.signed_orders import JOB_ID

from rayps.core.job.job_fields import NAME

JOB = f"^{JOB_ID.pattern}$"
Key = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{16,200}$")]
MOST_DAYS = 3650


class TokenIn(BaseModel):
    """The request for a token: for all clients of one job, for one client in any job, or for one client in one job."""

    model_config = ConfigDict(extra="forbid", strict=True)

    job: str | None = Field(None, min_length=1, max_length=100, description="A job's id, or the beginning of it.")
    name: str | None = Field(None, pattern=NAME, description="The client's name.")
    days: float | None = Field(
        None, gt=0, le=MOST_DAYS, allow_inf_nan=False, description="Days until the token expires; null means never."
    )


class TokenOut(BaseModel):
    """A client token's record."""

    id: str
    job: str | None
    name: str | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class NewToken(TokenOut):
    """A new client token: its record, and its text."""

    token: str = Field(description="Shown once: only a hash of it is stored.")


class TokensOut(BaseModel):
    """Tokens of clients, newest first."""

    tokens: list[TokenOut]


class KeyOut(BaseModel):
    """The public key with which a client checks the signatures of orders."""

    public_key: str = Field(description="Ed25519; its fingerprint is in the token.")
    secure: bool = Field(description="Whether the job's rounds are secure: then clients join without `samples`.")
    verify: bool = Field(description="Whether clients check each other's keys in secure rounds: each needs such keys.")
    statement: str | None = Field(None, description="The SHA-256 hash of the job's data-use statement.")


class JoinIn(BaseModel):
    """A client's request to join. `key`: a secret of the client, which identifies it when it joins again."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str | None = Field(None, pattern=NAME)
    key: Key
    samples: int | None = Field(None, ge=1, lt=2**53, description="Left out in a secure job.")
    job: str | None = Field(None, pattern=JOB, description="Needed if the token is valid for any job.")


class JoinOut(BaseModel):
    """The answer to a client that has joined."""

    job: str
    name: str
    number: int
    public_key: str = Field(description="Ed25519; its fingerprint is in the token.")
    workload: str


class WorkOut(BaseModel):
    """The answer to a client that asks for work.

    `order` is the signed text. The other fields are not signed.
    """

    kind: Literal["round", "wait", "end"]
    order: str | None = None
    signature: str | None = None
    reason: str | None = None
    status: str | None = None
    verdict: str | None = Field(None, description="Why the update of round `after` did not count.")


class ModelOut(BaseModel):
    """The answer to a client that asks for the job's newest parameters."""

    model: str = Field(description="The facts of the newest checkpoint, as signed text.")
    signature: str


class UpdateOut(BaseModel):
    """The answer to a received update."""

    serial: int
    again: bool = Field(description="Whether an earlier update of this round was received; only the first one counts.")


class StageOut(BaseModel):
    """The answer after a stage of a secure round. `answer` is the signed text."""

    kind: Literal["answer", "wait"]
    answer: str | None = None
    signature: str | None = None


class WithdrawIn(BaseModel):
    """Why a client takes no further part in a secure round."""

    model_config = ConfigDict(extra="forbid", strict=True)

    reason: str = Field(min_length=1, max_length=300)


class StatementOut(BaseModel):
    """A job's data-use statement."""

    statement: str | None


class AcceptanceFields(BaseModel):
    """A member's signed acceptance of a statement for one update."""

    model_config = ConfigDict(extra="forbid", strict=True)

    text: str = Field(min_length=2, max_length=4000, description="What was signed, as JSON.")
    certificate: str = Field(pattern=r"^[A-Za-z0-9_-]{100,12000}$", description="DER, in base64 for URLs.")
    signature: str = Field(pattern=r"^[A-Za-z0-9_-]{80,200}$")


class AcceptancesIn(BaseModel):
    """A member's acceptances for which it has no receipt, the oldest first."""

    model_config = ConfigDict(extra="forbid", strict=True)

    acceptances: list[AcceptanceFields] = Field(min_length=1, max_length=100)


class ReceiptOut(BaseModel):
    """The service's receipt for an acceptance. `receipt` is the signed text."""

    receipt: str
    signature: str


class ReceiptsOut(BaseModel):
    """Receipts, in the order of the acceptances."""

    receipts: list[ReceiptOut]


class AcceptancesOut(BaseModel):
    """A job's statement, and the record of each client, the oldest acceptance first."""

    job: str
    statement: str | None
    clients: list[list[AcceptanceFields]]


class PartOut(BaseModel):
    """How much of an update has arrived."""

    serial: int
    received: int = Field(description="The number of bytes from the update's first one on: send the rest.")


class ClientOut(BaseModel):
    """A real client of a job."""

    number: int
    name: str
    state: Literal["here", "away", "left", "revoked", "excluded", "ended"]  # ended: it was in the job until its end
    samples: int
    joined_at: datetime
    seen_seconds: float | None
    doing: str


class ClientsOut(BaseModel):
    """The real clients of a job, in the order of joining, and in `waits` what the job waits for; null for nothing.

    `ended` says how the job has ended; null if it has not.
    """

    clients: list[ClientOut]
    waits: str | None
    ended: str | None


CLIENT_FIELDS = sorted({*TokenIn.model_fields, *JoinIn.model_fields})
