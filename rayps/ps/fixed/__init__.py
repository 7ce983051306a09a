"""Talk to the shared parameters: a shard with its clock and optimizer, the loop that serves it, the worker's client."""

from rayps.ps.fixed.client import Server
from rayps.ps.fixed.loop import ShardLoop
from rayps.ps.fixed.shard import Shard, ShardFacts, ShardPart

__all__ = ["Server", "Shard", "ShardFacts", "ShardLoop", "ShardPart"]
