"""The routes of users' tokens. They need a bearer token, because a browser's session may not change tokens."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, HTTPException, Path, Request

from rayps.service.tokens.user_tokens import LOCAL, UserToken
from rayps_api.schemas import problems, timestamp
from rayps_api.schemas_tokens import NewUserToken, UserTokenIn, UserTokenOut, UserTokensOut
from rayps_api.service import RunningService, SentBy, Service, expiry_of, refuse_longer

router = APIRouter(prefix="/api/v1/tokens", tags=["tokens"], responses=problems(400, 401, 403, 404, 409, 413, 422))

TokenId = Annotated[
    str, Path(min_length=1, max_length=100, description="A token's id; `local` means the service's own token.")
]


def _bearer(request: Request, running: RunningService) -> Service:
    if not request.scope.get("rayps_bearer"):
        raise HTTPException(
            403,
            "tokens are created, listed and revoked with a token (Authorization: Bearer rps_...), "
            "not with a browser's session: use `rayps token`",
        )
    return running


Bearer = Annotated[Service, Depends(_bearer)]


@router.post("", status_code=201, response_model=NewUserToken)
async def create(body: UserTokenIn, running: Bearer, sender: SentBy) -> Any:
    """Create a token for a user, which lives at most as long as the token of this request.

    The answer is the only one that shows the token.
    """
    found, text = await running.user_tokens.create(body.name, expiry_of(sender, body.days))
    return {**_shown(found), "token": text}


@router.get("", response_model=UserTokensOut)
async def page(running: Bearer) -> Any:
    """List the tokens of users, newest first."""
    return {"tokens": [_shown(found) for found in await running.user_tokens.all()]}


@router.post("/{token_id}/rotate", status_code=201, response_model=NewUserToken)
async def rotate(token_id: TokenId, running: Bearer, sender: SentBy) -> Any:
    """Replace a token by a new one. The old token is revoked at once, and all browser sessions end.

    The service's own token is replaced only by itself, and one that lives longer than that of this request is not.
    """
    old = await running.user_tokens.find(token_id)
    if old.name == LOCAL and old.revoked_at is None and not sender.hash.startswith(old.id):
        raise HTTPException(
            403,
            "the service's own token is replaced only by itself: send the token in the file `token` of the service's "
            "state directory, or delete this file and restart the service",
        )
    refuse_longer(sender, old.expires_at, f"token {old.id} ({old.name})")
    found, text = await running.user_tokens.rotate(token_id)
    return {**_shown(found), "token": text}


@router.delete("/{token_id}", response_model=UserTokenOut)
async def revoke(token_id: TokenId, running: Bearer) -> Any:
    """Revoke a token at once, and end all browser sessions."""
    return _shown(await running.user_tokens.revoke(token_id))


def _shown(token: UserToken) -> dict[str, Any]:
    return {
        "id": token.id,
        "name": token.name,
        "created_at": timestamp(token.created_at),
        "expires_at": timestamp(token.expires_at),
        "revoked_at": timestamp(token.revoked_at),
    }
