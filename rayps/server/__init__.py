"""Talk to the shared parameters: a shard with its clock and optimizer, the loop that serves it, the worker's client."""

from rayps.server.client import Server
from rayps.server.loop import ShardLoop
from rayps.server.shard import Boundary, Shard, ShardFacts, ShardPart

__all__ = ["Boundary", "Server", "Shard", "ShardFacts", "ShardLoop", "ShardPart"]
