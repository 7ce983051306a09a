"""The JSON forms of the routes of users' tokens."""

from __future__ import annotations

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from rayps_api.schemas import NAME
from rayps_api.schemas_clients import MOST_DAYS


class UserTokenIn(BaseModel):
    """A token for a user, who may do everything with it."""

    model_config = ConfigDict(extra="forbid", strict=True)

    name: str = Field(pattern=NAME, description="Whose it is, or what for.")
    days: float | None = Field(None, gt=0, le=MOST_DAYS, allow_inf_nan=False, description="null = until revoked.")


class UserTokenOut(BaseModel):
    """What is known of a user's token."""

    id: str
    name: str = Field(description="`local`: the service's own, in the file `token` of its state directory.")
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None


class NewUserToken(UserTokenOut):
    """A token that has just been made."""

    token: str = Field(description="Shown once: only a hash of it is kept.")


class UserTokensOut(BaseModel):
    """Tokens of users, newest first."""

    tokens: list[UserTokenOut]


TOKEN_FIELDS = sorted(UserTokenIn.model_fields)
