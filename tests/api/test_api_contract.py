"""The REST interface against its own OpenAPI: whatever the schema allows, and some that it does not, is answered
as the schema says."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from required_module import required
from service_site import Site

WITHOUT_END = "/api/v1/stream"


@pytest.fixture
def schemathesis():  # type: ignore[no-untyped-def]
    """The package, which takes seconds to load: not while each process of the tests collects them."""
    found = required("schemathesis")
    found.serializer("application/x-tar")(_tar)
    return found


def _tar(ctx, value) -> bytes:  # type: ignore[no-untyped-def]
    """An archive is bytes, and is sent as it is."""
    return value if isinstance(value, bytes) else str(value).encode()


def test_every_answer_is_as_the_schema_says(tmp_path: Path, schemathesis) -> None:  # type: ignore[no-untyped-def]
    site = Site(tmp_path)
    try:
        site.add(name="one")
        schema = schemathesis.openapi.from_dict(site.http.get("/openapi.json").json())
        operations = [found.ok() for found in schema.get_all_operations()]
        tried = {f"{one.method.upper()} {one.path}" for one in operations if one.path != WITHOUT_END}
        assert {
            "POST /api/v1/jobs",
            "GET /api/v1/jobs/{job_id}/metrics",
            "PATCH /api/v1/server-groups/{name}",
            "POST /api/v1/server-groups/{name}/drain",
        } <= tried
        for operation in operations:
            if operation.path != WITHOUT_END:
                _try(site, operation, schemathesis)
    finally:
        site.close()


def _try(site: Site, operation, schemathesis) -> None:  # type: ignore[no-untyped-def]
    checks = required("schemathesis.specs.openapi.checks")

    @settings(max_examples=12, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=operation.as_strategy())
    def once(case) -> None:  # type: ignore[no-untyped-def]
        site.app.state.failures.clear()  # a check asks without a token, and expects 401 and not yet 429
        # a job may be refused for more than a schema can say, such as a file that is not there: with 422, as it says
        excluded = [checks.positive_data_acceptance]
        if operation.path == "/readyz":
            excluded.append(schemathesis.checks.not_a_server_error)  # 503 is what it has to say here
        case.call_and_validate(
            base_url=site.url, headers={"Authorization": f"Bearer {site.token}"}, excluded_checks=excluded
        )

    once()
