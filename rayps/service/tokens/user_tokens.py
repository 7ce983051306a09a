"""Tokens of users: the service's own token, in the file `token` of the state directory, and named tokens.

A token gives full access: its holder can run code as the service's user. The store has only a hash of the token, and
the beginning of the hash is the token's id. Revoking or rotating a token also ends all browser sessions and login
codes, because the store does not know which of them were made with that token.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import sqlalchemy as sa
from rayps_client.errors import ConfigError, Conflict, NotFound
from sqlalchemy.ext.asyncio import AsyncConnection

from rayps.service.settings import private_write
from rayps.service.store import Store

LOCAL = "local"  # accepted in place of the id of the service's own token
_ID = 12  # letters of a token's hash that are its id
_OWN, _USER, _SESSION = "bearer", "user", "session"  # the kinds of tokens in the store's table
_table = sa.Table(
    "tokens",
    sa.MetaData(),
    *[
        sa.Column(name, kind)
        for name, kind in {
            "hash": sa.String,
            "kind": sa.String,
            "created_at": sa.Float,
            "expires_at": sa.Float,
            "revoked_at": sa.Float,
            "name": sa.String,
        }.items()
    ],
)
_codes = sa.Table("login_codes", sa.MetaData(), sa.Column("hash", sa.String))


TokenRow = sa.Row[tuple[str, str, float, float | None, float | None, str | None]]  # as the table's columns


@dataclass(frozen=True, slots=True)
class UserToken:
    """The record of a token, without the token itself. Times are seconds since the epoch."""

    id: str
    name: str
    created_at: float
    expires_at: float | None
    revoked_at: float | None

    def to_dict(self) -> dict[str, str | float | None]:
        """Return the record as JSON data."""
        return asdict(self)


class UserTokens:
    """Create, list, rotate and revoke the tokens of users, whose records are in the store."""

    def __init__(self, store: Store, file: Path) -> None:
        self._store, self._file = store, file

    async def service_token(self) -> tuple[str, bool]:
        """Return the service's own token, and whether it was created now because the file was missing or invalid.

        Every earlier own token is revoked. To replace a leaked token, delete the file and restart the service.
        """
        text = self._file.read_text(encoding="utf-8").strip() if self._file.exists() else ""
        made = not (text and await self._store.accepts_secret(text))
        if made:
            text = _draw_secret()
        earlier = (_table.c.kind == _OWN, _table.c.hash != _hash(text), _table.c.revoked_at.is_(None))
        async with self._store.reading() as tx:
            leaked = (await tx.execute(_table.select().where(*earlier))).first() is not None
        if made or leaked:  # otherwise write nothing, because the disk may be full
            async with self._store.writing() as tx:
                await tx.execute(_table.update().where(*earlier).values(revoked_at=time.time()))
                if made:
                    await _add(tx, text, _OWN, LOCAL, None)
                if leaked:
                    await _end_sessions(tx)
        if made:
            private_write(self._file, text)
        self._file.chmod(0o600)
        return text, made

    async def create(self, name: str, expires_at: float | None = None) -> tuple[UserToken, str]:
        """Create a token that expires at `expires_at` (None means never); return its record and its text.

        The text is not stored.

        Raises:
            ConfigError: the name is reserved for the service's own token.
        """
        if name == LOCAL:
            raise ConfigError(
                f"name is {name!r}, which is reserved for the service's own token: give another name", field="name"
            )
        text = _draw_secret()
        async with self._store.writing() as tx:
            await _add(tx, text, _USER, name, expires_at)
        return await self.find(_make_id(text)), text

    async def all(self) -> list[UserToken]:
        """List all tokens, including revoked and expired ones, newest first."""
        return [found for _, found in await self._read_rows()]

    async def find(self, token_id: str) -> UserToken:
        """Return the token with this id. The id `local` means the service's own token.

        Raises:
            NotFound: there is no token with this id.
        """
        return (await self._find(token_id))[1]

    async def rotate(self, token_id: str) -> tuple[UserToken, str]:
        """Replace a token by a new one with the same name and expiry, and revoke the old token at once.

        A new text of the service's own token is also written to the file.

        Raises:
            NotFound: there is no token with this id.
            Conflict: the token was revoked or has expired.
        """
        row, found = await self._find(token_id)
        text = _draw_secret()
        async with self._store.writing() as tx:
            await _revoke(tx, row.hash, found)
            await _add(tx, text, row.kind, found.name, found.expires_at)
        if row.kind == _OWN:
            private_write(self._file, text)
        return await self.find(_make_id(text)), text

    async def revoke(self, token_id: str) -> UserToken:
        """Revoke a token at once.

        Raises:
            NotFound: there is no token with this id.
            Conflict: the token is the service's own, or was revoked or has expired already.
        """
        row, found = await self._find(token_id)
        if row.kind == _OWN and found.revoked_at is None:
            raise Conflict(
                f"token {found.id} is the service's own, which the command line uses: replace it with "
                f"`rayps token rotate {LOCAL}`",
                status=409,
            )
        async with self._store.writing() as tx:
            await _revoke(tx, row.hash, found)
        return await self.find(found.id)

    async def _find(self, token_id: str) -> tuple[TokenRow, UserToken]:
        for row, found in await self._read_rows():
            own = token_id == LOCAL and row.kind == _OWN and found.revoked_at is None
            if own or found.id == token_id:
                return row, found
        raise NotFound(f"there is no token {token_id[:100]!r}: `rayps token ls` lists them", status=404)

    async def _read_rows(self) -> list[tuple[TokenRow, UserToken]]:
        query = _table.select().where(_table.c.kind != _SESSION).order_by(_table.c.created_at.desc())
        async with self._store.reading() as tx:
            return [
                (
                    row,
                    UserToken(
                        row.hash[:_ID],
                        LOCAL if row.kind == _OWN else row.name or "",
                        row.created_at,
                        row.expires_at,
                        row.revoked_at,
                    ),
                )
                for row in await tx.execute(query)
            ]


async def _add(tx: AsyncConnection, text: str, kind: str, name: str, expires_at: float | None) -> None:
    await tx.execute(
        _table.insert().values(hash=_hash(text), kind=kind, name=name, created_at=time.time(), expires_at=expires_at)
    )


async def _revoke(tx: AsyncConnection, hashed: str, found: UserToken) -> None:
    now = time.time()
    done = await tx.execute(
        _table.update()
        .where(
            _table.c.hash == hashed,
            _table.c.revoked_at.is_(None),
            sa.or_(_table.c.expires_at.is_(None), _table.c.expires_at > now),
        )
        .values(revoked_at=now)
    )
    if done.rowcount != 1:
        raise Conflict(
            f"token {found.id} ({found.name}) was revoked or has expired: create another with "
            "`rayps token create --user NAME`",
            status=409,
        )
    await _end_sessions(tx)


async def _end_sessions(tx: AsyncConnection) -> None:
    await tx.execute(
        _table.update().where(_table.c.kind == _SESSION, _table.c.revoked_at.is_(None)).values(revoked_at=time.time())
    )
    await tx.execute(_codes.delete())


def _draw_secret() -> str:
    return f"rps_{secrets.token_urlsafe(32)}"


def _make_id(text: str) -> str:
    return _hash(text)[:_ID]


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
