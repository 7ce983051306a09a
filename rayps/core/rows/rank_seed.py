"""The seed of each rank's random numbers, the same for a workload and for a loop of the user's own."""

from __future__ import annotations

import hashlib
import struct

_APART = 1_000_003  # difference between the seeds of one rank in two jobs with consecutive seeds; above any world size


def derive_seed_after(seed: int, rank: int, round: int) -> int:
    """Return the seed of `rank` from `round` on, in a job whose workers may change. It depends on no earlier round."""
    first = derive_rank_seed(seed, rank)
    return (first * _APART + round) % 2**63 if round else first


def derive_rank_seed(seed: int, rank: int) -> int:
    """Return the seed of `rank` in a job with this seed, such as for `torch.manual_seed`."""
    return seed * _APART + rank


def derive_block_seed(seed: int, epoch: int, block: int, *, read: bool) -> int:
    """Return the seed with which a block's rows are read or, if not `read`, learned from, by whichever worker."""
    words = [seed % 2**64, epoch, block, int(read)]
    return int.from_bytes(hashlib.blake2b(struct.pack("<QQQQ", *words), digest_size=8).digest(), "little") >> 1
