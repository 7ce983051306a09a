"""A ring and a parameter server between Ray actors of one's own: no workload, no driver, no strategy.

    python examples/own_actors.py

What to expect: a ring adds the actors' vectors, and everyone gets 6. A parameter server with staleness 1 takes 5 pushes
of -1 from each of 4 actors, scales each by 1/4 and subtracts it: everyone ends at 5.
"""

import os
import secrets

import ray
import torch

import rayps

WORKERS = 4
ROUNDS = 5


@ray.remote(num_cpus=0)
class Peer:
    """An actor such as you have already."""

    def __init__(self, rank):
        self.rank = rank

    def add(self):
        """Talk among equals."""
        ring = rayps.Ring.join("adding", self.rank, WORKERS)
        try:
            return ring.sum(torch.full((3,), float(self.rank))).tolist()
        finally:
            ring.close()

    def push(self, group):
        """Talk to the shared parameters."""
        server = group.join(self.rank)
        for _ in range(ROUNDS):
            server.pull()
            server.push(torch.full((3,), -1.0))
        server.close()

    def read(self, group):
        """The parameters once everyone has pushed."""
        server = group.join(self.rank)
        try:
            return server.read().tolist()
        finally:
            server.close()


def main():
    """Start the peers on a Ray of this process."""
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))  # or Ray writes one that all users can read
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        peers = [Peer.remote(rank) for rank in range(WORKERS)]
        print("ring:  ", ray.get([peer.add.remote() for peer in peers]))
        with rayps.ServerGroup(torch.zeros(3), shards=2, staleness=1, workers=WORKERS) as group:
            ray.get([peer.push.remote(group) for peer in peers])
            print("server:", ray.get([peer.read.remote(group) for peer in peers]))
    finally:
        ray.shutdown()


if __name__ == "__main__":
    main()
