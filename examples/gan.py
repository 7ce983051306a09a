"""A GAN as a loop of one's own: two losses, two optimizers, a `rayps.wrap` for each pair.

    python examples/gan.py --strategy all_reduce
    python examples/gan.py --strategy parameter_server:shards=2

The data are points around 8 centres on a circle. A generator makes points from noise, a discriminator tells them from
the data. Each optimizer's step is one round of the strategy: the gradients of both models are means over all workers.
Goodfellow et al., "Generative adversarial nets", NeurIPS 2014; the task: Metz et al., "Unrolled GANs", ICLR 2017.

What to expect after 2,000 steps with 2 workers: points at all 8 centres, at least 0.65 of them within 3 standard
deviations of one. The untrained generator has less than 0.01 there.
"""

import argparse
import math

import torch
from torch import nn
from torch.nn import functional

import rayps

CENTRES = 2 * torch.tensor([[math.cos(math.pi * i / 4), math.sin(math.pi * i / 4)] for i in range(8)])
WIDTH = 0.1  # standard deviation of the points around a centre
NOISE = 8  # numbers from which a point is made


def net(inputs, outputs):
    """Two hidden layers."""
    return nn.Sequential(
        nn.Linear(inputs, 64), nn.LeakyReLU(0.2), nn.Linear(64, 64), nn.LeakyReLU(0.2), nn.Linear(64, outputs)
    )


def points(count, generator):
    """Points of the data."""
    which = torch.randint(8, (count,), generator=generator)
    return CENTRES[which] + WIDTH * torch.randn(count, 2, generator=generator)


def train_fn(steps: int = 2000, batch_size: int = 128):
    """What every worker does; returns the share of good points and the number of centres found."""
    torch.manual_seed(0)
    generator, discriminator = net(NOISE, 2), net(2, 1)
    makes = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    tells = torch.optim.Adam(discriminator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    rayps.wrap(generator, makes)
    rayps.wrap(discriminator, tells)
    random = torch.Generator().manual_seed(1 + rayps.world().rank)  # each worker has its own points
    for _ in range(steps):
        real = points(batch_size, random)
        made = generator(torch.randn(batch_size, NOISE, generator=random))
        tells.zero_grad()
        errors = functional.softplus(-discriminator(real)) + functional.softplus(discriminator(made.detach()))
        errors.mean().backward()
        tells.step()
        makes.zero_grad()
        fooled = functional.softplus(-discriminator(made)).mean()
        fooled.backward(inputs=list(generator.parameters()))  # no gradient for the discriminator
        makes.step()
        rayps.log(discriminator=errors.mean(), generator=fooled)
    return quality(generator)


@torch.no_grad()
def quality(generator, count=2000):
    """Return the share of generated points within 3 standard deviations of a centre, and how many centres have some.

    A centre counts if 1 of 100 points or more are there; an eighth is its share of the data.
    """
    made = generator(torch.randn(count, NOISE, generator=torch.Generator().manual_seed(7)))
    distance, nearest = torch.cdist(made, CENTRES).min(dim=1)
    good = distance < 3 * WIDTH
    return float(good.float().mean()), int((nearest[good].bincount(minlength=8) >= count // 100).sum())


def main():
    """Train under the strategy that is asked for, and say what came out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="all_reduce")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=2000)
    asked = parser.parse_args()
    found = rayps.run(train_fn, workers=asked.workers, strategy=asked.strategy, params={"steps": asked.steps})
    good, centres = found[0]
    print(f"good points {good:.2f}, centres {centres}  (expect 0.65 or more, and 8)")


if __name__ == "__main__":
    main()
