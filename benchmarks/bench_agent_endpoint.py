"""Measures what the agents' endpoint costs: tokens per second and latency, against direct calls, in
one run.

    python benchmarks/bench_agent_endpoint.py [--episodes 16] [--tokens 128] [--rounds 6] [--calls 300]

A generation server (embedded engine, a process of its own, HTTPS) answers episodes of three turns, all
at once: directly, as an agent of ours asks; and through the endpoint, by JSON over HTTP, with the
    conversation sent anew at
each turn. Rounds alternate. Then single calls of one token, one after another, for the latency that it
adds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), *(str(ROOT / "tests" / part) for part in ("by_hand", "support"))]

from engines.serve import KEY, server_process  # noqa: E402

from realsys.api.agent import Answer  # noqa: E402
from realsys.data.sources.arithmetic_problems import arithmetic_word_problems  # noqa: E402
from realsys.generation.http.http_client import HttpGenerationClient  # noqa: E402
from realsys.models.from_scratch.tiny_llama import build_tiny_llama  # noqa: E402
from realsys.models.hf import load_tokenizer  # noqa: E402
from realsys.rollout.conversation.answer_forms import ANSWER_FORMS  # noqa: E402
from realsys.rollout.conversation.chat_messages import ChatMessage  # noqa: E402
from realsys.rollout.conversation.chat_rendering import TemplateRenderer  # noqa: E402
from realsys.rollout.conversation.episode_session import (  # noqa: E402
    EpisodeSession,
    OnTokens,
    SessionSettings,
)
from realsys.rollout.endpoint.endpoint_app import endpoint_app  # noqa: E402
from realsys.rollout.endpoint.session_registry import SessionRegistry  # noqa: E402
from realsys.transport.generation_messages import GenerateRequest, Sampling  # noqa: E402
from realsys.transport.http_listener import HttpListener  # noqa: E402

TIMEOUT_S = 600.0
TURNS = 3
QUESTION = "Sam has 12 lemons and buys 6 more. How many does Sam have now?"
NEXT = "And how many after 3 more days of this?"


class ServerPolicy:
    """A ``SessionPolicy`` that asks one generation server for exactly ``count`` tokens."""

    def __init__(self, client: HttpGenerationClient, count: int) -> None:
        self._client, self.count, self._number = client, count, 0

    async def sample(
        self,
        tokens: Sequence[int],
        *,
        limit: int | None = None,
        stop: Sequence[str] = (),
        sampling: Mapping[str, Any] | None = None,
        on_tokens: OnTokens | None = None,
    ) -> Answer:
        del limit, stop, sampling, on_tokens
        self._number += 1
        made = await self._client.generate(
            GenerateRequest(
                rid=f"r{self._number}",
                input_ids=tuple(tokens),
                sampling=Sampling(max_new_tokens=self.count, ignore_eos=True, sampling_seed=1),
            ),
            timeout_s=TIMEOUT_S,
        )
        return Answer(
            tokens=tuple(made.output_ids),
            logprobs=tuple(made.logprobs),
            versions=tuple(made.versions),
            stopped=False,
        )


class Bench:
    """Both roads to one server."""

    def __init__(
        self, policy: ServerPolicy, settings: SessionSettings, http: aiohttp.ClientSession
    ) -> None:
        self.policy, self.settings, self.http = policy, settings, http
        self.registry = SessionRegistry()
        self.url, self._number = "", 0

    async def direct(self, turns: int = TURNS) -> int:
        """One episode by direct calls; returns its sampled tokens."""
        messages = [ChatMessage(role="user", content=QUESTION)]
        renderer, count = self.settings.renderer, 0
        tokens = list(renderer.whole(messages, ()).tokens)
        for turn in range(turns):
            answer = await self.policy.sample(tokens)
            count += len(answer.tokens)
            if turn + 1 < turns:
                messages.append(
                    ChatMessage(role="assistant", content=self.settings.decode(answer.tokens))
                )
                messages.append(ChatMessage(role="user", content=NEXT))
                more = renderer.behind(
                    messages, len(messages) - 1, (), prompt=tokens, sampled=answer.tokens
                )
                assert more is not None
                tokens += [*answer.tokens, *more.tokens]
        return count

    async def through(self, turns: int = TURNS) -> int:
        """The same through the endpoint."""
        self._number += 1
        session = EpisodeSession(id=str(self._number), policy=self.policy, settings=self.settings)
        key = self.registry.open(session)
        messages: list[dict[str, str]] = [{"role": "user", "content": QUESTION}]
        count = 0
        try:
            for _ in range(turns):
                body = {"model": "policy", "messages": messages}
                headers = {"Authorization": f"Bearer {key}"}
                at = f"{self.url}/v1/chat/completions"
                async with self.http.post(at, json=body, headers=headers) as response:
                    assert response.status == 200, await response.text()
                    answer = await response.json()
                count += answer["usage"]["completion_tokens"]
                messages.append(answer["choices"][0]["message"])
                messages.append({"role": "user", "content": NEXT})
        finally:
            self.registry.close(key)
            await session.close()
        return count


def say(line: str) -> None:
    """Prints a line at once."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


async def rate(episode: Callable[[], Awaitable[int]], episodes: int) -> float:
    """Tokens per second of ``episodes`` at once."""
    began_s = time.perf_counter()
    counts = await asyncio.gather(*(episode() for _ in range(episodes)))
    return sum(counts) / (time.perf_counter() - began_s)


async def latencies(episode: Callable[[int], Awaitable[int]], calls: int) -> list[float]:
    """Seconds of single calls, one after another."""
    found = []
    for _ in range(calls):
        began_s = time.perf_counter()
        await episode(1)
        found.append(time.perf_counter() - began_s)
    return found


async def run(url: str, model: Path, given: argparse.Namespace) -> None:
    """Measures and prints."""
    tokenizer = load_tokenizer(model)

    def decode(tokens: Sequence[int]) -> str:
        return str(tokenizer.decode(list(tokens)))

    ends = frozenset({tokenizer.eos_token_id})
    settings = SessionSettings(
        renderer=TemplateRenderer(tokenizer, end_ids=ends),
        form=ANSWER_FORMS["plain"],
        decode=decode,
        end_ids=ends,
    )
    client = HttpGenerationClient(url, KEY, name="server")
    policy = ServerPolicy(client, given.tokens)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        bench = Bench(policy, settings, http)
        listener = await HttpListener(
            endpoint_app(bench.registry), name="endpoint", tls=False
        ).start()
        bench.url = listener.url
        rates: dict[str, list[float]] = {"direct": [], "endpoint": []}
        for number in range(given.rounds + 1):
            for name, episode in (("direct", bench.direct), ("endpoint", bench.through)):
                found = await rate(episode, given.episodes)
                if number:  # the first warms up
                    rates[name].append(found)
        ratios = [b / a for a, b in zip(rates["direct"], rates["endpoint"], strict=True)]
        say(f"{given.episodes} episodes of {TURNS} × {given.tokens} tokens, {given.rounds} rounds")
        for name, found in rates.items():
            say(f"  {name:9} {statistics.median(found):9.0f} tokens/s (median)")
        middle = statistics.median(ratios)
        say(f"  ratio     {middle:9.3f} (median of rounds; {min(ratios):.3f} to {max(ratios):.3f})")
        policy.count = 1
        await latencies(bench.direct, 20)
        direct = sorted(await latencies(bench.direct, given.calls))
        through = sorted(await latencies(bench.through, given.calls))
        for name, share in (("p50", 0.5), ("p99", 0.99)):
            place = int(share * (given.calls - 1))
            a, b = direct[place] * 1000, through[place] * 1000
            say(f"  one token {name}: direct {a:.2f} ms, endpoint {b:.2f} ms, added {b - a:.2f} ms")
        await listener.stop()
    await client.close()


def main() -> None:
    """Starts the server and measures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--calls", type=int, default=300)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="realsys-bench-") as name:
        model = Path(name) / "model"
        problems = arithmetic_word_problems(num_problems=300, seed=0, split="train")
        build_tiny_llama(
            model,
            seed=1,
            corpus=[p["prompt"] + p["answer"] for p in problems],
            hidden_size=256,
            num_layers=6,
            num_heads=8,
            num_kv_heads=4,
        )
        path = model / "config.json"  # room for the conversations
        path.write_text(
            json.dumps({**json.loads(path.read_text()), "max_position_embeddings": 1024})
        )
        args = {"num_threads": 1, "max_running": 64}
        config = {"backend_type": "embedded", "model_path": str(model), "backend_args": args}
        with server_process(Path(name), config) as (url, _):
            asyncio.run(run(url, model, given))


if __name__ == "__main__":
    main()
