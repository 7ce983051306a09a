"""The JSON schemas of the routes of users' tokens."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from rayps.core.job.job_fields import NAME
from rayps_api.schemas_clients import MOST_DAYS


class UserTokenIn(BaseModel):
    """The request for a token that gives a user full access."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=NAME, description="The token's holder or purpose.")
    days: float | None = Field(
        None, gt=0, le=MOST_DAYS, allow_inf_nan=False, description="Days until the token expires; null means never."
    )


class UserTokenOut(BaseModel):
    """A user token's record."""

    id: str
    name: str = Field(description="`local`: the service's own token, in the file `token` of its state directory.")
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class NewUserToken(UserTokenOut):
    """A new user token: its record, and its text."""

    token: str = Field(description="Shown once: only a hash of it is stored.")


class UserTokensOut(BaseModel):
    """Tokens of users, newest first."""

    tokens: list[UserTokenOut]


TOKEN_FIELDS = sorted(UserTokenIn.model_fields)
