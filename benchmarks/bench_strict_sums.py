"""What MKL_CBWR=AUTO,STRICT costs a CPU: the same matrix products with it and without, in turns.

python benchmarks/bench_strict_sums.py    # half a minute
"""

from __future__ import annotations

import os
import subprocess
import sys

ROUNDS = 3
MEASURE = """
import time, torch
torch.set_num_threads(2)
def least(f, times=30):
    f()
    best = 9.0
    for _ in range(5):
        began = time.perf_counter()
        for _ in range(times):
            f()
        best = min(best, (time.perf_counter() - began) / times)
    return best * 1e6
for m, k, n in ((8, 128, 384), (64, 576, 1536), (512, 576, 1536), (2048, 576, 576)):
    x, w = torch.randn(m, k), torch.randn(n, k)
    print(f"{m} x {k} x {n}:{least(lambda: x @ w.t())}")
x, y = torch.randn(64, 32, 48), torch.randn(64, 48, 32)
print(f"64 times 32 x 48 x 32:{least(lambda: x @ y)}")
"""


def measured(mode: str) -> dict[str, float]:
    """Microseconds of each product in a process of its own."""
    kept = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    environment = {**kept, **({"MKL_CBWR": mode} if mode else {})}
    done = subprocess.run(
        [sys.executable, "-c", MEASURE], env=environment, capture_output=True, text=True, check=True
    )
    pairs = (line.split(":") for line in done.stdout.splitlines())
    return {name: float(value) for name, value in pairs}


def main() -> None:
    """Prints a table: the least of the rounds."""
    found: dict[str, list[dict[str, float]]] = {"": [], "AUTO,STRICT": []}
    for _ in range(ROUNDS):
        for mode, rounds in found.items():
            rounds.append(measured(mode))
    sys.stdout.write("| product | µs | µs, strict | ratio |\n|---|---:|---:|---:|\n")
    for name in found[""][0]:
        plain, strict = (min(one[name] for one in rounds) for rounds in found.values())
        sys.stdout.write(f"| {name} | {plain:.0f} | {strict:.0f} | {strict / plain:.2f} |\n")


if __name__ == "__main__":
    main()
