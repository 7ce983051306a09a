"""Tokens of federated clients. A token allows its holder only to take part in one job, or under one name."""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import asdict, dataclass

import sqlalchemy as sa
from rayps_client.errors import ConfigError, NotFound
from rayps_client.exchange.signed_orders import ClientToken, Key
from rayps_client.values import JsonObject

from rayps.service.store import Store

_table = sa.Table(
    "client_tokens",
    sa.MetaData(),
    *[
        sa.Column(name, kind)
        for name, kind in {
            "id": sa.String,
            "hash": sa.String,
            "job_id": sa.String,
            "name": sa.String,
            "created_at": sa.Float,
            "expires_at": sa.Float,
            "revoked_at": sa.Float,
        }.items()
    ],
)


@dataclass(frozen=True, slots=True)
class Grant:
    """The rights of a client's token. The token itself is not stored, only its hash."""

    id: str
    job: str | None  # the job's id; None means any job
    name: str | None  # the client's name; None means any name
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def to_dict(self) -> JsonObject:
        """Return the grant as JSON-ready data."""
        return asdict(self)


class ClientTokens:
    """Create, list and revoke the tokens of federated clients. `key`: the service's key pair, which signs orders."""

    def __init__(self, store: Store, key: Key) -> None:
        self._store, self.key = store, key

    async def create(self, job: str | None, name: str | None, expires_at: float | None = None) -> tuple[Grant, str]:
        """Create a token that expires at `expires_at` (None means never); return its grant and its text.

        The text is not stored.

        Raises:
            ConfigError: neither a job nor a client's name is given.
        """
        if job is None and name is None:
            raise ConfigError("a client token needs a job, a client's name, or both: give job or name", field="job")
        token, now = ClientToken.create(job, self.key, name), time.time()
        grant = Grant(secrets.token_hex(4), job, name, now, expires_at, None)
        async with self._store.writing() as tx:
            await tx.execute(
                _table.insert().values(
                    id=grant.id,
                    hash=_hash(token.secret),
                    job_id=job,
                    name=name,
                    created_at=now,
                    expires_at=grant.expires_at,
                )
            )
        return grant, str(token)

    async def grant(self, text: str) -> Grant | None:
        """Return the rights of the token `text`, or None if the token is unknown, revoked or expired."""
        try:
            secret = ClientToken.read(text).secret
        except ConfigError:
            return None
        now = time.time()
        found = await self._find(
            _table.c.hash == _hash(secret),
            _table.c.revoked_at.is_(None),
            sa.or_(_table.c.expires_at.is_(None), _table.c.expires_at > now),
        )
        return found[0] if found else None

    async def all(self, job: str | None = None) -> list[Grant]:
        """List the tokens, newest first. With `job`, list only the tokens that are valid for this job."""
        mine = () if job is None else (sa.or_(_table.c.job_id == job, _table.c.job_id.is_(None)),)
        return await self._find(*mine)

    async def revoke(self, token_id: str) -> Grant:
        """Revoke a token at once; revoking it again changes nothing.

        Raises:
            NotFound: no token has that id.
        """
        async with self._store.writing() as tx:
            await tx.execute(
                _table.update()
                .where(_table.c.id == token_id, _table.c.revoked_at.is_(None))
                .values(revoked_at=time.time())
            )
        return await self.get(token_id)

    async def get(self, token_id: str) -> Grant:
        """Return the grant of the token with this id. Raises NotFound if there is no such token."""
        found = await self._find(_table.c.id == token_id)
        if not found:
            raise NotFound(f"there is no token {token_id[:100]!r}: `rayps token ls` lists them", status=404)
        return found[0]

    async def _find(self, *where: sa.ColumnElement[bool]) -> list[Grant]:
        query = _table.select().where(*where).order_by(_table.c.created_at.desc())
        async with self._store.reading() as tx:
            return [
                Grant(row.id, row.job_id, row.name, row.created_at, row.expires_at, row.revoked_at)
                for row in await tx.execute(query)
            ]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
