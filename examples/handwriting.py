"""Handwriting of 40 people: learn it together, keep a model for each, and read what one of them draws.

    python examples/handwriting.py
    python examples/handwriting.py --strategy ditto:fraction=0.5,local_epochs=3,batch_size=10,lam=0.05
    python examples/handwriting.py --writer writer-07 --draw seven.png

1. A model is trained on digits of nobody's in particular.
2. 40 writers (`data/make_handwriting.py`) train it on, each with 100 images of its own. Their images and, under fedper,
   the last layer of each (`private=head`) stay with them.
   Beside it, federated averaging trains one model for all.
3. On one writer's device, the writer's model is trained on for a few epochs with plain torch.
4. It reads a digit that this writer draws.

What to expect after 10 rounds, of the writers' test images: accuracy 0.76 by the model of all, and 0.88 by each
writer's own. Two writers of three write a 1 as others write a 7, or so with 4 and 9 or 3 and 8: no single model can
know. The drawn digit is unlike all that was learned: of the 26 writers with a habit, 11 have a model that reads it as
they mean it.
"""

import argparse
import copy
import importlib.util
import tempfile
from collections import OrderedDict
from itertools import pairwise
from pathlib import Path

import torch
from digits import FOLDER, Digits
from torch import nn

import rayps

HANDWRITING = FOLDER / "handwriting"
ALL = "fedavg:fraction=0.5,local_epochs=5,batch_size=10"
STROKES = {  # of a digit, as points of 28 x 28: x to the right, y down
    1: [[(10, 9), (14, 5), (14, 23)]],
    3: [[(9, 6), (18, 6), (13, 13), (18, 17), (15, 22), (9, 22)]],
    4: [[(16, 23), (16, 5), (8, 16), (20, 16)]],
    7: [[(8, 6), (19, 6), (12, 23)]],
    8: [
        [(14, 13), (10, 10), (10, 7), (14, 4), (18, 7), (18, 10), (14, 13)],
        [(14, 13), (9, 17), (9, 21), (14, 24), (19, 21), (19, 17), (14, 13)],
    ],
    9: [[(18, 9), (14, 5), (10, 9), (14, 13), (18, 9), (17, 23)]],
}


def make_data():
    """Load `data/make_handwriting.py`, and write its files if they are missing."""
    spec = importlib.util.spec_from_file_location("make_handwriting", FOLDER / "make_handwriting.py")
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    if not (HANDWRITING / "writers_test.parquet").exists():
        made.make(HANDWRITING)
    return made


class Base(Digits):
    """Digits of nobody's in particular."""

    def __init__(self):
        self.folder = HANDWRITING  # kept with the workload, which travels to the workers without this file

    def model(self):
        """The network of `digits.py`, whose last layer has the name `head`."""
        *features, head = super().model()
        return nn.Sequential(OrderedDict(features=nn.Sequential(*features), head=head))

    def data(self):
        """4,000 images."""
        return self._rows("base")

    def evaluation_data(self):
        """40 images of each writer."""
        return self._rows("writers_test", batch_size=250, client="writer")

    def _rows(self, name, **options):
        path = self.folder / f"{name}.parquet"
        return rayps.data.parquet(path, features="pixels", label="digit", scale=1 / 255, **options)


class Handwriting(Base):
    """The digits of 40 writers, each with 100 images."""

    def data(self):
        """A client's rows are a writer's."""
        return self._rows("writers", client="writer")

    def optimizer(self, params):
        """A client's; each begins a round with a fresh one."""
        return torch.optim.SGD(params, lr=0.03)


def tuned(work, model, name, epochs=5):
    """Train a copy of a writer's model on the writer's rows, as a device does it: without rayps, batch by batch."""
    model, clients = copy.deepcopy(model).train(), work.data().clients
    rows, draw = torch.from_numpy(clients.rows(clients.find(name))), torch.Generator().manual_seed(0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(epochs):
        for some in rows[torch.randperm(len(rows), generator=draw)].split(10):
            optimizer.zero_grad()
            work.loss(model, clients.batch(some.numpy())).backward()
            optimizer.step()
    return model.eval()


@torch.no_grad()
def accuracy(work, model, name):
    """On a writer's test images."""
    clients = work.evaluation_data().clients
    return float(work.evaluate(model, clients.batch(clients.rows(clients.find(name))))["accuracy"])


def drawn(digit):
    """Return an image [1, 784] of a digit, drawn with a round pen along its strokes."""
    y, x = torch.meshgrid(torch.arange(28.0), torch.arange(28.0), indexing="ij")
    ink = torch.zeros(28, 28)
    for stroke in STROKES[digit]:
        for (ax, ay), (bx, by) in pairwise(stroke):
            along = (((x - ax) * (bx - ax) + (y - ay) * (by - ay)) / ((bx - ax) ** 2 + (by - ay) ** 2)).clamp(0, 1)
            far = torch.hypot(x - ax - along * (bx - ax), y - ay - along * (by - ay))
            ink = torch.maximum(ink, (1.8 - far).clamp(0, 1))
    return ink.view(1, -1)


def from_png(path):
    """Return an image [1, 784] of a file: dark ink on white paper, of any size."""
    from PIL import Image

    paper = Image.open(path).convert("L").resize((28, 28))
    return 1 - torch.tensor(list(paper.getdata()), dtype=torch.float32).view(1, -1) / 255


def shown(image):
    """Return an image as text."""
    shades = " .:*#"
    rows = image.view(28, 28)[::2]  # letters are twice as high as wide
    return "\n".join("".join(shades[min(4, int(value * 5))] for value in row) for row in rows.tolist())


@torch.no_grad()
def read(model, image):
    """Return which digit a model finds in an image."""
    return int(model((image - 0.13) / 0.31).argmax())


def main():
    """Pre-train, federate by writer, fine-tune one writer's model, and read a digit with it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", default="fedper:private=head,fraction=0.5,local_epochs=5,batch_size=10")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--writer", default="writer-07")
    parser.add_argument("--draw", metavar="FILE.png", help="read this picture, as if the writer had drawn it")
    asked = parser.parse_args()
    people = {who.name: who for who in make_data().writers()}
    if asked.writer not in people:
        parser.error(f"there is no writer {asked.writer!r}: they are writer-00 to writer-{len(people) - 1}")
    work, options = Handwriting(), {"workers": asked.workers}
    with tempfile.TemporaryDirectory() as folder:
        base = rayps.train(Base(), epochs=3, **options).save(Path(folder) / "base")
        shared, result = (
            rayps.train(work, strategy=strategy, epochs=asked.rounds, start_from=base, **options)
            for strategy in (ALL, asked.strategy)
        )
    whole, found = shared.model(), (shared.metrics["accuracy"], result.metrics["personal_accuracy"])
    print("all writers: accuracy {:.3f} by the model of all, {:.3f} by each writer's own".format(*found))

    own = result.client(asked.writer).model()
    mine = tuned(work, own, asked.writer)
    steps = {"the model of all": whole, "its own": own, "its own, tuned on the device": mine}
    measured = [f"{accuracy(work, model, asked.writer):.3f} by {name}" for name, model in steps.items()]
    print(f"{asked.writer}: {', '.join(measured)}")

    who = people[asked.writer]
    meant, shape = who.habit or (7, 7)
    image = from_png(asked.draw) if asked.draw else who.images(drawn(shape))
    print(shown(image))
    print(
        f"the model of all reads {read(whole, image)}, the model of {who.name} reads {read(mine, image)}"
        + ("" if asked.draw else f"; the writer means {meant}")
    )


if __name__ == "__main__":
    main()
