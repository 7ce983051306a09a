"""The store: legal moves only, a lost race changes nothing, and it survives a restart."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

import pytest
from rayps_client.errors import ConfigError, Conflict, NotFound

from rayps.core.job.job_status import MOVES, Status
from rayps.service.store import Store
from rayps.service.tokens.user_tokens import UserTokens
from rayps.strategies.job import JobSpec

T = TypeVar("T")
SPEC = JobSpec(workload="digits:Digits", epochs=1)


def run(path: Path, body: Callable[[Store], Awaitable[T]]) -> T:
    async def inside() -> T:
        store = await Store.open(path / "s.db")
        try:
            return await body(store)
        finally:
            await store.close()

    return asyncio.run(inside())


def test_a_job_survives_a_restart_with_its_events(tmp_path: Path) -> None:
    async def first(store: Store) -> str:
        job, created = await store.add(SPEC, name="digits")
        assert created and job.status is Status.QUEUED
        await store.change_status(job.id, Status.STARTING, message="started", attempt=1, attempt_at=5.0)
        return job.id

    async def second(store: Store, job_id: str) -> None:
        job = await store.get(job_id)
        assert (job.status, job.attempt, job.spec) == (Status.STARTING, 1, SPEC)
        assert [e["kind"] for e in await store.events(job_id)] == ["queued", "starting"]
        seq = (await store.events(job_id))[0]["seq"]
        assert [e["kind"] for e in await store.events(job_id, after=seq)] == ["starting"]
        assert [await store.add_event(job_id, "revoked", who) for who in "aab"] == [True, False, True]
        assert [e["message"] for e in await store.events(job_id) if e["kind"] == "revoked"] == ["a", "b"]

    job_id = run(tmp_path, first)
    run(tmp_path, lambda s: second(s, job_id))
    assert (tmp_path / "s.db").stat().st_mode & 0o777 == 0o600


def test_every_move_is_held_to_the_table(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        for old in Status:
            for new in Status:
                job, _ = await store.add(SPEC, name="x")
                async with store._writer.begin() as tx:
                    await tx.exec_driver_sql("UPDATE jobs SET status=? WHERE id=?", (old.value, job.id))
                if new in MOVES[old]:
                    assert (await store.change_status(job.id, new, message="")).status is new
                else:
                    with pytest.raises(Conflict):
                        await store.change_status(job.id, new, message="", attempt=7)
                    kept = await store.get(job.id)
                    assert (kept.status, kept.attempt, len(await store.events(job.id))) == (old, 0, 1)

    run(tmp_path, body)


def test_a_lost_race_raises_and_changes_nothing(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        job, _ = await store.add(SPEC, name="x")
        results = await asyncio.gather(
            *[store.change_status(job.id, Status.STARTING, old=Status.QUEUED, message="", attempt=i) for i in range(8)],
            return_exceptions=True,
        )
        won = [r for r in results if not isinstance(r, BaseException)]
        assert len(won) == 1 and sum(isinstance(r, Conflict) for r in results) == 7
        assert (await store.get(job.id)).attempt == won[0].attempt
        await store.change_status(job.id, Status.FAILED, message="first word")
        with pytest.raises(Conflict, match="FAILED"):
            await store.change_status(job.id, Status.SUCCEEDED, message="second word")
        with pytest.raises(Conflict):
            await store.begin_attempt(job.id, attempt=9, message="", kind="restarted")
        await store.set_reason(job.id, "no more words")
        assert (await store.get(job.id)).reason is None

    run(tmp_path, body)


def test_an_idempotency_key_makes_one_job(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        made = await asyncio.gather(*[store.add(SPEC, name="x", key="k") for _ in range(20)])
        assert len({job.id for job, _ in made}) == 1 and sum(created for _, created in made) == 1
        with pytest.raises(ConfigError, match="another job"):
            await store.add(JobSpec(workload="b:B"), name="x", key="k")
        assert len(await store.page()) == 1

    run(tmp_path, body)


def test_pages_are_newest_first_without_overlap(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        ids = [(await store.add(SPEC, name=f"j{i}", now=100.0))[0].id for i in range(7)]
        assert ids == sorted(ids) and len(ids[0]) == 26
        seen: list[str] = []
        before = None
        while page := await store.page(limit=3, before=before):
            seen += [job.id for job in page]
            before = seen[-1]
        assert seen == ids[::-1]
        await store.change_status(ids[2], Status.FAILED, message="")
        assert [j.id for j in await store.page(status=[Status.FAILED])] == [ids[2]]
        assert len(await store.unfinished()) == 6 and await store.counts() == {"QUEUED": 6, "FAILED": 1}

    run(tmp_path, body)


def test_stop_is_a_wish_once_and_refused_at_the_end(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        job, _ = await store.add(SPEC, name="x")
        assert (await store.request_stop(job.id, now=3.0)).stop_requested_at == 3.0
        assert (await store.request_stop(job.id, now=9.0)).stop_requested_at == 3.0
        await store.change_status(job.id, Status.STOPPED, message="")
        with pytest.raises(Conflict):
            await store.request_stop(job.id)
        with pytest.raises(NotFound):
            await store.request_stop("nobody")

    run(tmp_path, body)


def test_tokens_are_stored_hashed_and_codes_work_once(tmp_path: Path) -> None:
    file = tmp_path / "token"

    async def body(store: Store) -> str:
        token, new = await UserTokens(store, file).service_token()
        assert new and token.startswith("rps_") and file.stat().st_mode & 0o777 == 0o600
        assert await UserTokens(store, file).service_token() == (token, False)
        assert (
            await store.accepts_secret(token)
            and not await store.accepts_secret(token + "x")
            and not await store.accepts_secret("")
        )
        code = await store.login_code(now=1000.0)
        assert await store.login(code, now=1000.0 + 301) is None
        code = await store.login_code(now=2000.0)
        session = await store.login(code, now=2001.0)
        assert session is not None and await store.accepts_secret(session, now=2002.0)
        assert not await store.accepts_secret(session, now=2001.0 + 31 * 86400)
        assert await store.login(code, now=2001.0) is None
        await store.revoke(session)
        assert not await store.accepts_secret(session, now=2002.0)
        return token

    token = run(tmp_path, body)
    for name in tmp_path.glob("s.db*"):
        assert token.encode() not in name.read_bytes()
    file.write_text("rps_of_another_store")
    again, new = run(tmp_path, lambda s: UserTokens(s, file).service_token())
    assert new and again != token


@pytest.mark.parametrize(
    "make", [lambda p: p.write_bytes(b"this is no database " * 100), lambda p: p.mkdir(), lambda p: _other(p, "9999")]
)
def test_a_file_that_is_no_store_is_refused(tmp_path: Path, make: Callable[[Path], None]) -> None:
    make(tmp_path / "s.db")
    with pytest.raises(ConfigError, match="RAYPS_STATE_DIR") as caught:
        run(tmp_path, _nothing)
    assert len(str(caught.value).splitlines()) <= 3


def _other(path: Path, schema: str) -> None:
    with sqlite3.connect(path) as db:
        db.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
        db.execute("INSERT INTO alembic_version VALUES (?)", (schema,))


@pytest.mark.parametrize("schema", ["0001", "0005", "2"])
def test_the_store_of_another_version_is_refused_in_a_sentence(tmp_path: Path, schema: str) -> None:
    _other(tmp_path / "s.db", schema)
    with pytest.raises(ConfigError, match=f"another version of rayps wrote it, with schema {schema}, and .* schema 1"):
        run(tmp_path, _nothing)
    with sqlite3.connect(tmp_path / "s.db") as db:  # nothing was written
        assert [name for (name,) in db.execute("SELECT name FROM sqlite_master")] == ["alembic_version"]


async def _nothing(_: Store) -> None:
    raise AssertionError("opened")


def test_the_beginning_of_an_id_is_enough_where_it_is_one_jobs(tmp_path: Path) -> None:
    async def body(store: Store) -> None:
        first, _ = await store.add(SPEC, name="early", now=1e9)
        second, _ = await store.add(SPEC, name="late", now=1.7e9)
        third, _ = await store.add(SPEC, name="later", now=1.7e9)
        for text in (first.id, first.id[:4], first.id[:9].lower()):
            assert (await store.find(text)).id == first.id
        assert (await store.find(third.id)).id == third.id
        with pytest.raises(ConfigError) as caught:
            await store.find(second.id[:8])
        assert second.id in str(caught.value) and third.id in str(caught.value) and "later" in str(caught.value)
        with pytest.raises(NotFound, match="at least 4 letters"):
            await store.find(first.id[:3])
        for text in ("", "%___", "____", first.id + "0", "../../..", "ÄÖÜß", "x" * 500):
            with pytest.raises(NotFound):
                await store.find(text)

    run(tmp_path, body)
