"""Measures long prompts: how soon they are read, who waits for that, their text on the event loop.

``GOMP_SPINCOUNT=2000 python benchmarks/bench_long_prompts.py [--parts prefill beside stream turns]``, as
workers and ``realsys serve`` are started. Weights are random.

*prefill*: a prompt until its first token, read in pieces as a server does, against one forward pass of
transformers with the same threads, dtype and torch's fused attention; in turn. *beside*: requests of 20
tokens, one after another at random moments, while a server's engine reads long prompts; each one's wait
against the time that a long prompt takes alone, read in pieces, and read whole, as before. *stream*: CPU
time of decoding one streamed answer, and of decoding all of it anew with each token, as before. *turns*:
a turn of a long conversation, behind an answer and begun anew, and the longest time that the event loop
stood still meanwhile.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from chat_families import FAMILIES  # noqa: E402
from scripted_policy import END, scripted  # noqa: E402

from realsys.api.model import GenerationHyperparameters  # noqa: E402
from realsys.generation.embedded_settings import EmbeddedSettings  # noqa: E402
from realsys.generation.engine.continuous import ContinuousEngine  # noqa: E402
from realsys.generation.engine.engine_requests import GenerationRequest  # noqa: E402
from realsys.generation.http.served_engine import FetchedWeights  # noqa: E402
from realsys.generation.served_engines.embedded import EmbeddedEngine  # noqa: E402
from realsys.rollout.conversation import large_texts  # noqa: E402
from realsys.rollout.conversation.chat_messages import ChatMessage, ChatRequest  # noqa: E402
from realsys.rollout.conversation.growing_answer import GrowingAnswer, GrowingText  # noqa: E402
from realsys.transport.generation_messages import (  # noqa: E402
    GenerateRequest,
    Sampling,
    WeightSource,
)

SHORT = 20  # tokens
SHAPES = {  # width, MLP, layers, heads, key heads, vocabulary
    "tiny": (32, 64, 2, 4, 2, 49_152),
    "ppo-math": (128, 384, 4, 4, 2, 512),
    "SmolLM2's, 3 layers": (576, 1536, 3, 9, 3, 49_152),
}
TICK_S = 0.001


def say(line: str) -> None:
    """A line of the result."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def llama(name: str) -> Any:
    """Random weights of that shape."""
    width, mlp, layers, heads, kv_heads, vocabulary = SHAPES[name]
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=mlp,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        max_position_embeddings=1 << 17,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def prompt_of(num_tokens: int, seed: int = 1) -> tuple[int, ...]:
    """Random, of small ids."""
    draw = random.Random(seed)
    return tuple(draw.randrange(3, 500) for _ in range(num_tokens))


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and CPU time of one call."""
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - wall_s, time.process_time() - cpu_s


def prefill(num_tokens: int, rounds: int) -> None:
    """One line a shape and length."""
    sizes = [
        ("tiny", num_tokens),
        ("ppo-math", num_tokens // 2),
        ("SmolLM2's, 3 layers", num_tokens // 5),
    ]
    for name, length in sizes:
        module, prompt = llama(name), prompt_of(length)
        ids = torch.tensor([prompt])
        engine = ContinuousEngine(module, read_tokens=1024, prefix_bytes=0)

        def ours(engine: ContinuousEngine = engine, prompt: Sequence[int] = prompt) -> None:
            gconfig = GenerationHyperparameters(max_new_tokens=1)
            engine.submit(
                GenerationRequest(rid="long", prompt=tuple(prompt), gconfig=gconfig, seed=1)
            )
            while engine.num_running or engine.num_waiting:
                engine.step()

        @torch.inference_mode()
        def theirs(module: Any = module, ids: torch.Tensor = ids) -> None:
            module(input_ids=ids, use_cache=True, logits_to_keep=1)

        times = [(seconds(theirs), seconds(ours)) for _ in range(rounds + 1)][1:]
        wall = [b[0] / a[0] for a, b in times]
        best = min(b[0] for _, b in times) / min(a[0] for a, _ in times)
        cpu = min(b[1] for _, b in times) / min(a[1] for a, _ in times)
        say(
            f"prefill {name}, {length} tokens: transformers {min(a[0] for a, _ in times):.2f} s; "
            f"times that: best {best:.2f}, median of rounds {statistics.median(wall):.2f}, "
            f"processor time {cpu:.2f}"
        )


def no_weights(source: WeightSource) -> FetchedWeights:
    """None come."""
    raise AssertionError(source)


async def answer_s(engine: EmbeddedEngine, rid: str, prompt: tuple[int, ...]) -> float:
    """Seconds to the only token of an answer."""
    begin = time.perf_counter()
    request = GenerateRequest(rid=rid, input_ids=prompt, sampling=Sampling(max_new_tokens=1))
    async with aclosing(engine.generate(request, stream=False)) as answers:  # type: ignore[type-var]
        async for _ in answers:
            pass
    return time.perf_counter() - begin


async def beside(num_tokens: int, count: int) -> None:
    """One line for pieces, one for whole texts."""
    for name, read_tokens in (("in pieces", None), ("whole, as before", 1 << 30)):
        settings = EmbeddedSettings(read_tokens=read_tokens, prefix_bytes=0)
        engine = EmbeddedEngine(
            llama("tiny"), eos_token_ids=(), pad_token_id=0, settings=settings, fetch=no_weights
        )
        await engine.start()
        await answer_s(engine, "warm", prompt_of(num_tokens))
        alone_s = await answer_s(engine, "alone", prompt_of(num_tokens))
        idle_s = statistics.median(
            [await answer_s(engine, "idle", prompt_of(SHORT)) for _ in range(9)]
        )
        draw, waits, longs = random.Random(1), list[float](), list[float]()
        while len(waits) < count:
            long = asyncio.create_task(answer_s(engine, "long", prompt_of(num_tokens)), name="long")
            await asyncio.sleep(draw.uniform(0, alone_s / 4))
            while len(waits) < count and not long.done():
                waits.append(await answer_s(engine, "short", prompt_of(SHORT, len(waits))))
                await asyncio.sleep(draw.uniform(0, alone_s / 10))
            longs.append(await long)
        await engine.close()
        waits.sort()
        say(
            f"beside, {name}: a request of {SHORT} tokens waits {waits[len(waits) // 2] / alone_s:.3f} "
            f"of what {num_tokens} tokens take alone, at most {waits[-1] / alone_s:.3f}; "
            f"idle {idle_s / alone_s:.4f}; the long one takes {statistics.median(longs) / alone_s:.2f} "
            f"of it ({count} requests)"
        )


def stream() -> None:
    """CPU time to decode one streamed answer."""
    tokenizer = FAMILIES["chatml"].tokenizer
    text = "the quick brown fox jumps over the lazy dog and so on, 12345 numbers (x + y) = z\n"
    ids = tokenizer(text * 800).input_ids

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    for num in (1000, 2000, 4000, 8000):
        answer, growing = GrowingAnswer(), GrowingText(decode)

        def read(num: int = num, answer: Any = answer, growing: Any = growing) -> None:
            for count in range(1, num + 1):
                if answer.is_due(count):
                    growing.of(ids[:count])

        def every(num: int = num) -> None:
            for count in range(1, num + 1, 20):  # a twentieth of the tokens
                decode(ids[:count])

        own_s, every_s = seconds(read)[1], 20 * seconds(every)[1]
        say(f"stream of {num} tokens: {own_s:.3f} s CPU; anew with each token {every_s:.2f} s")


async def turns() -> None:
    """Milliseconds of a turn, and the longest pause of the loop."""
    text = "the quick brown fox jumps over the lazy dog, 12345 (x + y) = z\n" * 30
    for where, least in (("beside the loop", large_texts.LARGE), ("on it, as before", 1 << 60)):
        large_texts.LARGE = least
        for num in (20, 100, 400):
            messages = [ChatMessage(role="user", content=text)]
            for i in range(num):
                messages.append(ChatMessage(role="assistant", content=f"{i} " + text[:300]))
                messages.append(ChatMessage(role="user", content=text))
            session, _ = scripted(*[f"yes{END}"] * 8)
            found = []
            for _ in range(2):  # begun anew; behind its answer
                taken_s, pause_s, message = await watched(session, messages)
                found.append((taken_s, pause_s))
                messages = [*messages, message, ChatMessage(role="user", content=text)]
            (anew, its), (behind, own) = found
            say(
                f"{num} turns, {sum(len(m.content) for m in messages) // 1000} kB, {where}: anew "
                f"{anew * 1000:.0f} ms, loop stood still {its * 1000:.0f}; behind {behind * 1000:.0f} ms, "
                f"{own * 1000:.0f}"
            )


async def watched(
    session: Any, messages: Sequence[ChatMessage]
) -> tuple[float, float, ChatMessage]:
    """Seconds of one request, the loop's longest pause, and the reply."""
    pauses, over = [0.0], asyncio.Event()

    async def ticker() -> None:
        last = time.perf_counter()
        while not over.is_set():
            await asyncio.sleep(TICK_S)
            now = time.perf_counter()
            pauses.append(now - last - TICK_S)
            last = now

    ticking = asyncio.create_task(ticker(), name="ticker")
    await asyncio.sleep(0.05)
    pauses.clear()
    begin = time.perf_counter()
    async with session.call(ChatRequest(messages=tuple(messages))) as live:
        result = await live.result()
        live.read()
    taken_s = time.perf_counter() - begin
    await asyncio.sleep(2 * TICK_S)
    over.set()
    await ticking
    return taken_s, max(pauses), result.replies[0].message


def main() -> None:
    """Prints a line for each measurement."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", default=["prefill", "beside", "stream", "turns"])
    parser.add_argument("--tokens", type=int, default=20_000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--short", type=int, default=20, help="requests beside long ones")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if "prefill" in arguments.parts:
        prefill(arguments.tokens, arguments.rounds)
    if "beside" in arguments.parts:
        asyncio.run(beside(arguments.tokens, arguments.short))
    if "stream" in arguments.parts:
        stream()
    if "turns" in arguments.parts:
        asyncio.run(turns())


if __name__ == "__main__":
    main()
