"""Measures how long weight updates pause real SGLang and vLLM servers, from memory and from a folder.

    python benchmarks/bench_engine_weights.py --engines .engines sglang vllm

A Llama with random weights, on the CPU; while a server answers, it loads the weights of two models in
turn: from its front's memory, then from a folder. ``cold``: the folder's pages are evicted first, as if
another host had written it. Writing is timed separately, because trainers write the folder first;
fetching from trainers' memory is measured by bench_weight_sync.py.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / part) for part in ("by_hand", "support"))]

from engines.real_engines import CPU  # noqa: E402
from engines.serve import HELD, KEY, server_process  # noqa: E402

from realsys.generation.http.http_client import HttpGenerationClient  # noqa: E402
from realsys.models.hf import save_hf  # noqa: E402
from realsys.transport.generation_messages import (  # noqa: E402
    GenerateRequest,
    Sampling,
    WeightPart,
    WeightSource,
    WeightsTaken,
)

TIMEOUT_S = 600.0
WAYS = ("memory", "folder", "folder, cold")


def make_models(folder: Path, *, layers: int, width: int) -> tuple[list[Path], int, float]:
    """Two of them; bytes of one, and how long writing one took."""
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=width,
        intermediate_size=width * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 128,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        dtype="float32",
    )
    paths, seconds = [folder / f"model-{seed}" for seed in (1, 2)], []
    for seed, path in enumerate(paths):
        torch.manual_seed(seed)
        module = LlamaForCausalLM(config)
        began_s = time.perf_counter()
        save_hf(module, None, path)
        seconds.append(time.perf_counter() - began_s)
    return paths, sum(x.nbytes for x in module.state_dict().values()), min(seconds)


def drop_pages(folder: Path) -> None:
    """Has the kernel forget what it has read of these files."""
    for file in folder.iterdir():
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


async def measure(url: str, paths: list[Path], rounds: int) -> dict[str, list[WeightsTaken]]:
    """Updates by each way in turn, beside one answer; the first round does not count."""
    client = HttpGenerationClient(url, KEY, name="server")
    asked = GenerateRequest(
        rid="beside", input_ids=(5, 9), sampling=Sampling(max_new_tokens=4000, ignore_eos=True)
    )
    answering = asyncio.create_task(client.generate(asked, timeout_s=TIMEOUT_S))
    taken: dict[str, list[WeightsTaken]] = {way: [] for way in WAYS}
    version = 0
    for number in range(rounds + 1):
        for way in WAYS:
            version += 1
            path = paths[version % 2]
            if way.endswith("cold"):
                drop_pages(path)
            source = WeightSource(version=version, path=str(path))
            if way == "memory":
                part = WeightPart(endpoint=HELD, name=str(path))
                source = WeightSource(version=version, parts=(part,))
            done = await client.update_weights(source, timeout_s=TIMEOUT_S)
            taken[way] += [done] if number else []
    await client.abort(every=True)
    await answering
    await client.close()
    return taken


def say(line: str) -> None:
    """A line of the table, at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kinds", nargs="+", choices=["sglang", "vllm"])
    parser.add_argument("--engines", type=Path, default=ROOT / ".engines")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="realsys-bench-") as folder:
        paths, size, written_s = make_models(Path(folder), layers=args.layers, width=args.width)
        say(f"{size / 1e6:.0f} MB in float32; a folder is written in {written_s:.2f} s")
        say(
            "| engine | new weights from | whole update, s, median | stands still, s, median | most |"
        )
        say("|---|---|---|---|---|")
        for kind in args.kinds:
            python = str(args.engines / kind / "bin/python")
            config: dict[str, Any] = {
                "backend_type": kind,
                "model_path": str(paths[0]),
                "backend_args": {"python": python, **CPU[kind]},
            }
            held = [str(path) for path in paths]
            with server_process(Path(folder), config, held=held) as (url, _):
                taken = asyncio.run(measure(url, paths, args.rounds))
            for way, done in taken.items():
                whole = statistics.median(x.seconds for x in done)
                still = sorted(x.paused_s for x in done)
                middle = statistics.median(still)
                say(f"| {kind} | {way} | {whole:.2f} | {middle:.2f} | {still[-1]:.2f} |")


if __name__ == "__main__":
    main()
