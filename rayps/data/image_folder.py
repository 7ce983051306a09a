"""Images in one folder for each class as a data source. Pillow decodes them, and is imported when it is needed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from os import PathLike
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from rayps_client.errors import ConfigError, DataError, first_line
from rayps_client.rows import batch_size_of, drop_last_of

from rayps.data.base import Batch, Data
from rayps.data.clients import GivenClients, checked_client
from rayps.data.memory import InMemory
from rayps.data.partition_rules import Ints
from rayps.data.unsupported import refuse_ray_data

SUFFIXES = (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")


class Image(Protocol):
    """What is needed of a `PIL.Image.Image`."""

    @property
    def size(self) -> tuple[int, int]:
        """The width and the height in pixels."""

    def convert(self, mode: str) -> Image:
        """Return the image in another mode, such as "RGB"."""

    def resize(self, size: tuple[int, int]) -> Image:
        """Return the image with another width and height."""


class _Pillow(Protocol):
    def open(self, path: str) -> Any:
        """Open an image file; a context manager."""


Transform = Callable[[Image], torch.Tensor]


class ImageFolder(InMemory):
    """A data source: the images below one folder for each class. A pickled object has the path of the folder only.

    `classes` are the names of the class folders, sorted; the label of an image is the index of its class.
    """

    separate_rows = True

    def __init__(
        self,
        folder: Path,
        *,
        size: tuple[int, int] | None,
        grayscale: bool,
        transform: Transform | None,
        batch_size: int,
        shuffle: bool,
        drop_last: bool,
        client: GivenClients,
    ) -> None:
        self.client = checked_client(client)
        self.batch_size, self.drop_last = batch_size_of(batch_size), drop_last_of(drop_last)
        self.shuffle = shuffle
        self._folder = folder
        self._size = size
        self._grayscale = grayscale
        self._transform = transform
        self._found: tuple[tuple[str, ...], list[str], NDArray[np.int64]] | None = None
        self._empty: torch.Tensor | None = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_found": None, "_empty": None, "_clients": None}

    def check(self) -> None:
        """List the folder and decode the first image.

        Raises:
            ConfigError: Pillow is not installed.
            DataError: there is no folder, class or image, or the first image cannot be decoded.
        """
        self._found = None
        self._image(0)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the classes, sorted; the label of an image is the index of its class."""
        return self._listed()[0]

    def rows(self) -> int:
        """Return the number of images."""
        return len(self._listed()[1])

    def _listed(self) -> tuple[tuple[str, ...], list[str], NDArray[np.int64]]:
        if self._found is None:
            if not self._folder.is_dir():
                raise DataError(f"{self._folder}: there is no such directory", file=str(self._folder))
            classes = sorted(one.name for one in self._folder.iterdir() if one.is_dir() and one.name[0] not in "._")
            files: list[str] = []
            labels: list[int] = []
            for label, name in enumerate(classes):
                inside = sorted(
                    str(file) for file in (self._folder / name).rglob("*") if file.suffix.lower() in SUFFIXES
                )
                if not inside:
                    raise DataError(
                        f"{self._folder / name}: the class has no image ({', '.join(SUFFIXES)}): remove the folder",
                        file=str(self._folder / name),
                    )
                files += inside
                labels += [label] * len(inside)
            if not files:
                raise DataError(
                    f"{self._folder}: there is no folder for a class: put the images into FOLDER/CLASS/NAME.png",
                    file=str(self._folder),
                )
            self._found = tuple(classes), files, np.array(labels, dtype=np.int64)
        return self._found

    def _labels(self) -> NDArray[np.generic]:
        return self._listed()[2]

    def _take(self, rows: Ints) -> Batch:
        labels = torch.from_numpy(self._listed()[2][rows])
        images = [self._image(row) for row in rows.tolist()]
        for row, image in zip(rows.tolist(), images, strict=True):
            if image.shape != images[0].shape:
                file, other = self._listed()[1][row], self._listed()[1][int(rows[0])]
                raise DataError(
                    f"{file}: the image is {list(image.shape)}, but {other} is {list(images[0].shape)}: give "
                    "size=(HEIGHT, WIDTH)",
                    file=file,
                    row=row,
                )
        if not images:
            if self._empty is None:
                self._empty = self._image(0)[None][:0]
            return Batch(self._empty, labels, 0)
        return Batch(torch.stack(images), labels, len(rows))

    def _image(self, row: int) -> torch.Tensor:
        file, opened = self._listed()[1][row], pillow()
        try:
            with opened.open(file) as found:
                image: Image = found.convert("L" if self._grayscale else "RGB")
        except Exception as error:  # decoders raise errors of many classes
            raise DataError(
                f"{file}: the image cannot be decoded: {first_line(error)[:200]}\nreplace or remove the file",
                file=file,
                row=row,
            ) from error
        if self._size is not None and image.size != self._size[::-1]:
            image = image.resize(self._size[::-1])
        if self._transform is None:
            pixels = np.array(image, dtype=np.float32) / np.float32(255)
            return torch.from_numpy(
                pixels[None] if self._grayscale else np.ascontiguousarray(pixels.transpose(2, 0, 1))
            )
        try:
            made = self._transform(image)
        except Exception as error:
            raise DataError(f"{file}: transform failed: {type(error).__name__}: {error}", file=file, row=row) from error
        if not isinstance(made, torch.Tensor):
            raise DataError(f"{file}: transform returned {type(made).__name__}: return a tensor", file=file, row=row)
        return made


def pillow() -> _Pillow:
    """Return Pillow's module `PIL.Image`. Raises ConfigError if Pillow is not installed."""
    try:
        return cast(_Pillow, importlib.import_module("PIL.Image"))
    except ImportError as error:
        raise ConfigError(
            "rayps.data.images needs Pillow on every host: pip install 'rayps[images]'", field="images"
        ) from error


def images(
    folder: str | PathLike[str],
    *,
    size: int | tuple[int, int] | None = None,
    grayscale: bool = False,
    transform: Transform | None = None,
    batch_size: int = 32,
    shuffle: bool = True,
    drop_last: bool = False,
    client: GivenClients = None,
) -> Data:
    """Use the images in FOLDER/CLASS/..., decoded by Pillow for each batch. The label is the index of the class.

    `Batch.x` is [images, 3, height, width], float32 from 0 to 1, or [images, 1, height, width] with `grayscale`.
    `Batch.y` is int64. Classes and files are taken in the order of their names.

    - `size`: the height and width in pixels, or one number for both; None if all images have one size.
    - `transform`: a function of a Pillow image that returns a tensor, in place of the conversion above. It runs after
      `size` and `grayscale`, and must be picklable.
    - `drop_last`, and `client`: a rule or an id for each image, as in `rayps.data.tensors`.

    The folder must exist on all hosts; only its path travels. Install Pillow by pip install 'rayps[images]'.

    Raises:
        ConfigError: an option is invalid.
        DataError: it is no path. `check()` and the batches raise errors that name the file.

    Example:
        rayps.data.images("flowers", size=64)
    """
    refuse_ray_data("images", folder)
    wanted = (size, size) if isinstance(size, int) else size
    if wanted is not None and (len(wanted) != 2 or any(not isinstance(n, int) or n < 1 for n in wanted)):
        raise ConfigError(f"size is {size!r}: give the height and width in pixels", field="size")
    return ImageFolder(
        Path(folder).expanduser().absolute(),
        size=None if wanted is None else (wanted[0], wanted[1]),
        grayscale=grayscale,
        transform=transform,
        batch_size=batch_size,
        shuffle=shuffle,
        drop_last=drop_last,
        client=client,
    )
