"""Whether a real client is connected to its job, and why one that was asked has sent nothing. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

# connected; sends no request, or says that it is away; has left; its token or certificate was revoked; rounds were void
# because of it (`rayps.federated.remote.blamed_clients`)
ClientState: TypeAlias = Literal["here", "away", "left", "revoked", "excluded"]
GONE: frozenset[ClientState] = frozenset({"left", "revoked", "excluded"})  # no round waits for these clients
# why an asked client has sent nothing
WHY_SILENT: Mapping[ClientState, str] = {
    "here": "deadline",
    "away": "offline",
    "left": "left",
    "revoked": "revoked",
    "excluded": "excluded",
}
