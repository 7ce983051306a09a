"""Suggest a known name for a misspelt one: `rayps_client.spelling`."""

from __future__ import annotations

from rayps_client.spelling import near

__all__ = ["near"]
