"""Answer what a request asks for and its route does not have, in place of ignoring it.

An unknown query parameter is refused, so that a misspelt `limitt=2` does not look like a limit. A precondition
(`If-Match`, `If-Unmodified-Since`) is refused, because no route has versions to compare.
"""

from __future__ import annotations

import difflib

from fastapi import HTTPException, Request
from fastapi.dependencies.models import Dependant
from rayps_client.errors import ConfigError

PRECONDITIONS = ("If-Match", "If-Unmodified-Since")


def refuse_ignored(request: Request) -> None:
    """Refuse a request that has a query parameter or a precondition which its route would ignore.

    Every router of the app depends on it.

    Raises:
        ConfigError: a query parameter is unknown.
        HTTPException: the request has a precondition (status 412).
    """
    given = list(dict.fromkeys(request.query_params.keys()))
    known = sorted(parameters_of(request.scope["route"].dependant)) if given else []
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            what = f"the parameters are {', '.join(known)}" if known else "it has none"
            hint = f"did you mean {near[0]!r}?" if near else what
            raise ConfigError(
                f"{request.url.path[:200]} has no query parameter {name[:100]!r}: {hint}", field=name[:100]
            )
    for header in PRECONDITIONS:
        if header in request.headers:
            raise HTTPException(412, f"{header} cannot be met, because the service gives its resources no versions")


def parameters_of(dependant: Dependant) -> set[str]:
    """Return the names of the query parameters of a route's function and of those on which it depends."""
    own = {str(field.alias) for field in dependant.query_params}
    return own.union(*(parameters_of(each) for each in dependant.dependencies))
