"""What a product of a few rows with a matrix takes that comes from memory, by its bits.

    python benchmarks/bench_product.py --outs 1536 --columns 2048

One thread; as many copies of the matrix in turn as do not fit into a cache. The least of several
rounds, microseconds, and behind it GB/s of weights.
"""

from __future__ import annotations

import argparse
import time

import numpy as np

from trimmoe.models.compiled.calls import multiply
from trimmoe.models.compiled.lanes import LANES
from trimmoe.models.compiled.quantise import pack_bits, placed
from trimmoe.models.compiled.tables import record

_BITS = (2, 3, 4, 8)
_ROWS = (1, 2, 4, 8, 32)
_ROUNDS = 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--outs", type=int, default=1536)
    parser.add_argument("--columns", type=int, default=2048)
    parser.add_argument("--cache-mb", type=float, default=64.0)
    options = parser.parse_args()
    rng, shape = np.random.default_rng(0), (options.outs, options.columns)
    weights = rng.standard_normal(shape).astype(np.float32)
    print(f"| rows | {' | '.join(f'{bits} bits' for bits in _BITS)} |")
    print("|---" * (1 + len(_BITS)) + "|")
    cells: dict[int, list[str]] = {rows: [] for rows in _ROWS}
    for bits in _BITS:
        one = pack_bits([weights], bits)
        matrices = [placed([one])[0] for _ in range(int(options.cache_mb * 1e6 / one.nbytes) + 1)]
        records = [record(each) for each in matrices]
        for rows in _ROWS:
            x = rng.standard_normal((rows, options.columns)).astype(np.float32)
            out = np.empty((rows, -(-options.outs // LANES) * LANES), dtype=np.float32)
            taken_s = []
            for _ in range(_ROUNDS):
                began_s = time.perf_counter()
                for each in records:
                    multiply(each, x, rows, out, 1)
                taken_s.append((time.perf_counter() - began_s) / len(records))
            least_s = min(taken_s)
            cells[rows].append(f"{least_s * 1e6:.0f} ({one.nbytes / least_s / 1e9:.1f})")
    for rows, found in cells.items():
        print(f"| {rows} | {' | '.join(found)} |")


if __name__ == "__main__":
    main()
