"""Writes chains of two numbers as parquet in the form of many public data sets: chat messages and nested columns."""

import sys

import pyarrow
import pyarrow.parquet

rows = [
    {
        "prompt": [{"role": "user", "content": f"{a}+{b}=?"}],
        "reward_model": {"ground_truth": f"#### {a + b}"},
        "crosses_ten": a + b >= 10,
    }
    for a in range(10)
    for b in range(10)
]
pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), sys.argv[1])
