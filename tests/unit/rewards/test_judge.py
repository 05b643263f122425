"""A judge behind a URL, on loopback: grades, retries, limits, cache, errors. Real HTTP."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from realsys.api.basics.reward import Completion, Score
from realsys.api.errors import ConfigError, RewardError
from realsys.rewards import judge as judge_module
from realsys.rewards.judge import Judge
from realsys.rewards.rule import RewardRule


class Server:
    """Replies in order from ``replies``: a text, or a status; then the last for ever."""

    def __init__(self) -> None:
        self.replies: list[Any] = ["7"]
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.running = self.most = 0
        self.wait_s = 0.0
        self.gathers = 0  # nobody is answered before so many were there at a time
        self._lock = threading.Condition()
        server = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                with server._lock:
                    server.seen.append(body)
                    server.keys.append(self.headers.get("Authorization"))
                    server.running += 1
                    server.most = max(server.most, server.running)
                    server._lock.notify_all()
                    server._lock.wait_for(lambda: server.most >= server.gathers, 60)
                    reply = server.replies.pop(0) if len(server.replies) > 1 else server.replies[0]
                time.sleep(server.wait_s)
                with server._lock:
                    server.running -= 1
                status = reply if isinstance(reply, int) else 200
                raw = (
                    reply
                    if isinstance(reply, bytes)
                    else json.dumps(
                        {
                            "choices": [{"message": {"content": str(reply)}}],
                            "usage": {"total_tokens": 12},
                        }
                    ).encode()
                )
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                if status == 429:
                    self.send_header("Retry-After", "0")
                self.end_headers()
                self.wfile.write(raw)

            def log_message(self, *_: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._http.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._http.server_port}/v1/"

    def close(self) -> None:
        self._http.shutdown()
        self._http.server_close()
        self._thread.join()


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(judge_module, "_FIRST_WAIT_S", 0.01)
    made = Server()
    yield made
    made.close()


def asked(
    judge: Judge, response: str = "a{x}", prompt: str = "p", answer: str = "4"
) -> dict[str, float]:
    return asyncio.run(judge(prompt=prompt, response=response, answer=answer))


def test_the_last_number_over_out_of_is_the_score(server: Server, monkeypatch: Any) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.replies = ["from 0 to 10 I say: 7.5"]
    judge = Judge(url=server.url, model="m", api_key_env="JUDGE_KEY")
    assert asked(judge) == {"reward": 0.75, "judge_tokens": 12.0, "judge_cached": 0.0}
    (body,) = server.seen
    text = body["messages"][0]["content"]
    assert "Answer to grade: a{x}" in text
    asked(judge, response="none", prompt="say {response} or {answer}")
    assert "Question: say {response} or {answer}\n" in server.seen.pop()["messages"][0]["content"]
    assert "Known answer: 4" in text
    assert (body["model"], body["temperature"]) == ("m", 0)
    assert set(server.keys) == {"Bearer secret"}
    assert "secret" not in repr(judge)


def test_an_equal_answer_is_graded_once(server: Server) -> None:
    judge = Judge(url=server.url, model="m")
    asked(judge)
    assert asked(judge) == {"reward": 0.7, "judge_tokens": 0.0, "judge_cached": 1.0}
    assert len(server.seen) == 1


def test_what_passes_is_tried_again(server: Server) -> None:
    server.replies = [429, 500, b"not json", b'{"choices": []}', "no idea", "3"]
    assert asked(Judge(url=server.url, model="m", max_retries=5))["reward"] == 0.3
    assert len(server.seen) == 6


def test_no_grade_after_all_retries_sets_aside_and_never_scores_0(server: Server) -> None:
    server.replies = [503]
    with pytest.raises(RewardError, match="no grade in 2 requests; the last: HTTP 503"):
        asked(Judge(url=server.url, model="m", max_retries=1))
    server.replies = [401]
    with pytest.raises(RewardError, match="refuses: HTTP 401"):
        asked(Judge(url=server.url, model="m"))
    server.replies, server.wait_s = ["1"], 0.5
    with pytest.raises(RewardError, match="TimeoutError"):
        asked(Judge(url=server.url, model="m", max_retries=0, timeout_s=0.1))
    server.close()
    with pytest.raises(RewardError, match="no grade in 1 requests"):
        asked(Judge(url=server.url, model="m", max_retries=0))


def test_at_most_so_many_at_once_and_a_minute(server: Server) -> None:
    server.wait_s, server.gathers = 0.05, 3
    arguments = {"url": server.url, "model": "m", "at_once": 3}
    rule = RewardRule("judge", {"judge": arguments})
    texts = [Completion(response=str(i), record={"prompt": "p"}) for i in range(12)]
    found = rule.score_all(texts)
    assert [r.value for r in found if isinstance(r, Score)] == [0.7] * 12
    assert server.most == 3
    began_s = time.monotonic()
    slow = RewardRule("judge", {"judge": {**arguments, "per_minute": 600}})
    slow.score_all(texts[:5])
    assert time.monotonic() - began_s >= 4 * 0.1


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match="no url"):
        Judge(model="m")
    with pytest.raises(ConfigError, match="does not show it the answer"):
        Judge(url="http://x", model="m", question="grade!")
