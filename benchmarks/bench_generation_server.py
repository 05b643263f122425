"""Measures tokens per second of generation servers over HTTPS: embedded and installed engines.

    python benchmarks/bench_generation_server.py --engines .engines embedded vllm

Requests to one small Llama through the same client and the same front; each engine in a separate process,
one after another, with two threads.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / part) for part in ("by_hand", "support"))]

from engines.real_engines import CPU  # noqa: E402
from engines.serve import KEY, server_process  # noqa: E402
from engines.small_models import make_models  # noqa: E402

from realsys.generation.http.http_client import HttpGenerationClient  # noqa: E402
from realsys.transport.generation_messages import GenerateRequest, Sampling  # noqa: E402

TIMEOUT_S = 600.0


async def measure(url: str, *, requests: int, tokens: int, rounds: int) -> list[float]:
    """Tokens per second of each round of ``requests`` at once; one round before does not count."""
    client = HttpGenerationClient(url, KEY, name="server")
    rates = []
    for r in range(rounds + 1):
        asked = [
            GenerateRequest(
                rid=f"{r}-{i}",
                input_ids=tuple(3 + (r * 7 + i * 13 + j * 5) % 300 for j in range(12)),
                sampling=Sampling(max_new_tokens=tokens, ignore_eos=True, sampling_seed=i),
            )
            for i in range(requests)
        ]
        began_s = time.perf_counter()
        results = await asyncio.gather(*(client.generate(a, timeout_s=TIMEOUT_S) for a in asked))
        rates.append(sum(len(x.output_ids) for x in results) / (time.perf_counter() - began_s))
    await client.close()
    return rates[1:]


def config_of(kind: str, model: Path, engines: Path) -> dict[str, Any]:
    """Of a server of this kind."""
    args: dict[str, Any] = {"num_threads": 2, "max_running": 64}
    if kind != "embedded":
        args = {"python": str(engines / kind / "bin/python"), **CPU[kind]}
    return {"backend_type": kind, "model_path": str(model), "backend_args": args}


def say(line: str) -> None:
    """A line of the table, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=["embedded", "sglang", "vllm"])
    parser.add_argument("--engines", type=Path, default=ROOT / ".engines")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="realsys-bench-") as folder:
        first, _ = make_models(Path(folder))
        say("| engine | requests at once | tokens/s, median | least | most |")
        say("|---|---|---|---|---|")
        for kind in args.kinds:
            config = config_of(kind, first.path, args.engines)
            with server_process(Path(folder), config) as (url, _):
                for n in args.requests:
                    rates = sorted(
                        asyncio.run(
                            measure(url, requests=n, tokens=args.tokens, rounds=args.rounds)
                        )
                    )
                    middle = rates[len(rates) // 2]
                    say(f"| {kind} | {n} | {middle:.0f} | {rates[0]:.0f} | {rates[-1]:.0f} |")


if __name__ == "__main__":
    main()
