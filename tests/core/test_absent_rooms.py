"""What asks for a room that is absent is refused with its name."""

import pytest
from rayps_client.errors import ConfigError

from rayps.core import rooms


def test_a_room_that_is_absent_is_named(monkeypatch):
    monkeypatch.setitem(rooms.FACES, "wide models", "rayps.absent.face:FACE")
    with pytest.raises(ConfigError, match=r"wide models are in rayps\.absent, which this installation of rayps lacks"):
        rooms.face_of("wide models")
