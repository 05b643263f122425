"""A judge behind a URL, on loopback: grades, retries, limits, cache, errors. Real HTTP."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import golden
import pytest
from stand_in_slurm import wait_until

from realsys.api.basics.reward import Completion, Score
from realsys.api.errors import ConfigError, RewardError, RewardServiceAway, WaitTimeout
from realsys.rewards import judge as judge_module
from realsys.rewards.judge import Judge, _NoGrade, _Reply, read_grade
from realsys.rewards.judge_places import JudgePlaces
from realsys.rewards.rule import RewardRule
from realsys.rewards.set_aside import Answered, SetAsideRecords
from realsys.rollout.environments.scoring import AnswerScoring
from realsys.rollout.worker.episode_tries import fault_of
from realsys.transport.reward_messages import result_of, scored_answer
from realsys.transport.rollout_messages import TryFault


class Server:
    """Replies in order from ``replies``, then the last for ever: a text, with how it ended, or a status."""

    def __init__(self) -> None:
        self.replies: list[Any] = ["7"]
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.running = self.most = 0
        self.wait_s = 0.0
        self.in_pieces = False  # the second one is sent when the first has been read
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
                text, finish = reply if isinstance(reply, tuple) else (str(reply), "stop")
                choice = {"message": {"content": text}, "finish_reason": finish}
                body = {"choices": [choice], "usage": {"total_tokens": 12}}
                raw = reply if isinstance(reply, bytes) else json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(raw)))
                if status == 429:
                    self.send_header("Retry-After", "0")
                self.end_headers()
                if server.in_pieces:
                    self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    self.wfile.write(raw[:20])
                    time.sleep(0.05)
                    raw = raw[20:]
                with suppress(ConnectionError):  # who asked has read enough
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


@pytest.mark.parametrize(
    ("text", "grade"),
    [
        ("7", 7.0),
        (" 7.5\n", 7.5),
        ("0", 0.0),
        ("10", 10.0),
        ("**7**", 7.0),
        ("7.5.", 7.5),
        ("7/10", 7.0),
        ("7 / 10.0", 7.0),
        ("Grade: 3", 3.0),
        ("It is right but for the 2 units of 5.\n\n**Grade:** 8/10", 8.0),
        ("Weak.\nScore: 2", 2.0),
        ("<think>The answer 42 matches 4.</think>\n\n6", 6.0),
        ("opened by the template: 9 or 8?</think>9", 9.0),
        ("Score: 3 out of 10", None),
        ("2 (out of 10)", None),
        ("7/5", None),
        ("Grade: 3. (0-10)", None),
        ("Grade: 9\nGrade: 3 of 10", None),
        ("The grade is\n7", None),
        ("95", None),
        ("100000", None),
        ("10.1", None),
        ("-5", None),
        ("1e3", None),
        ("nan", None),
        ("１０", None),
        ("3 4", None),
        ("<think>The answer 42 matches 4", None),
        ("<think>a</think>b</think>10", 10.0),
        ("no idea", None),
        ("9" * 400, None),
        ("", None),
    ],
)
def test_only_what_can_be_no_other_grade_is_read(text: str, grade: float | None) -> None:
    try:
        found = read_grade(_Reply(text=text, was_cut=False), 10.0)
    except _NoGrade:
        found = None
    assert found == grade


def test_a_reply_that_is_no_grade_is_asked_again_with_the_reason(server: Server) -> None:
    server.replies = ["95 of 100 FORGED", ("<think>maybe 4", "length"), ("4", "length"), "3"]
    judge = Judge(url=server.url, model="m", out_of=5, question="{response} of {out_of}")
    assert asked(judge) == {"reward": 0.6, "judge_tokens": 48.0, "judge_cached": 0.0}
    texts = [body["messages"][0]["content"] for body in server.seen]
    assert texts[0] == "a{x} of 5"
    assert all(text.startswith(texts[0]) and "from 0 to 5" in text for text in texts[1:])
    assert ["cut off" in text for text in texts] == [False, False, True, True]
    assert not any("FORGED" in text for text in texts)  # a quoted answer could speak to the judge


def test_a_group_with_an_unreadable_grade_is_set_aside_whole_and_not_cached(server: Server) -> None:
    arguments = {"url": server.url, "model": "m", "max_retries": 0, "at_once": 1}
    rule = RewardRule("judge", {"judge": arguments})

    def group(name: str) -> Answered:
        texts = [Completion(response=f"{name}{i}", record={"prompt": "p"}) for i in range(4)]
        return Answered(id=name, prompt=lambda: name, answers=texts)

    server.replies = ["7"] * 7 + ["100000"] * 2 + ["7"]  # of the last answer, and once more
    scores = SetAsideRecords().scores(rule, [group("a"), group("b")])
    assert scores[1] is None
    assert [score.value for score in scores[0] or ()] == [0.7] * 4
    (again,) = rule.score_all([Completion(response="b3", record={"prompt": "p"})])
    assert isinstance(again, Score)
    assert (again.value, again.parts["judge_cached"]) == (0.7, 0.0)


def test_a_body_in_two_pieces_is_one_and_one_without_end_is_none(server: Server) -> None:
    server.in_pieces = True
    assert asked(Judge(url=server.url, model="m", max_retries=0))["reward"] == 0.7
    server.replies = [b" " * (1 << 20) + b"7"]
    with golden.raises(RewardError):
        asked(Judge(url=server.url, model="m", max_retries=0))


def test_messages_and_values_reach_the_judge_as_text(server: Server) -> None:
    parts = [{"type": "text", "text": "What is 2+2?"}, {"type": "image_url", "image_url": {}}]
    prompt: Any = [{"role": "system", "content": 'Be "brief"'}, {"role": "user", "content": parts}]
    asked(Judge(url=server.url, model="m", question="{prompt}|{answer}|{response}"), prompt=prompt)
    asked(
        Judge(url=server.url, model="m", question="{answer}{response}"),
        answer={"é": [None, True]},  # type: ignore[arg-type]
    )
    first, second = (body["messages"][0]["content"] for body in server.seen)
    assert first == 'system: Be "brief"\n\nuser: What is 2+2?\n[image_url]|4|a{x}'
    assert second == '{"é": [null, true]}a{x}'


def test_the_grade_over_out_of_is_the_score(server: Server, monkeypatch: Any) -> None:
    monkeypatch.setenv("JUDGE_KEY", "secret")
    server.replies = ["from 0 to 10 I say\nGrade: 7.5"]
    judge = Judge(url=server.url, model="m", api_key_env="JUDGE_KEY")
    assert asked(judge) == {"reward": 0.75, "judge_tokens": 12.0, "judge_cached": 0.0}
    (body,) = server.seen
    text = body["messages"][0]["content"]
    golden.check(text)
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
    nested = b"[" * 100_000
    server.replies = [429, 500, b"not json", nested, b'{"choices": []}', "no idea", "3"]
    assert asked(Judge(url=server.url, model="m", max_retries=6))["reward"] == 0.3
    assert len(server.seen) == 7


def test_no_grade_after_all_retries_sets_aside_and_never_scores_0(server: Server) -> None:
    server.replies = [503]
    with golden.raises(RewardError):
        asked(Judge(url=server.url, model="m", max_retries=1))
    server.replies = [401]
    with golden.raises(RewardError):
        asked(Judge(url=server.url, model="m"))
    server.replies, server.wait_s = ["1"], 0.5
    with golden.raises(RewardError):
        asked(Judge(url=server.url, model="m", max_retries=0, timeout_s=0.1))
    server.close()
    with golden.raises(RewardError):
        asked(Judge(url=server.url, model="m", max_retries=0))


@pytest.mark.parametrize(
    ("replies", "is_away"),
    [
        ([503], True),
        ([429], True),
        (["no idea", 500], True),
        ([500, "no idea"], False),
        ([b"not json"], False),
        ([401], False),
    ],
)
def test_a_judge_that_is_away_is_told_from_one_without_a_grade(
    server: Server, replies: list[Any], is_away: bool
) -> None:
    arguments = {"url": server.url, "model": "m", "max_retries": 1}
    server.replies = list(replies)
    with pytest.raises(RewardError) as caught:
        asked(Judge(**arguments))  # type: ignore[arg-type]
    assert isinstance(caught.value, RewardServiceAway) is is_away


def test_a_judge_that_is_away_is_waited_for_where_episodes_are_played_again(server: Server) -> None:
    server.replies = [503]
    arguments = {"url": server.url, "model": "m", "max_retries": 0}
    rule = RewardRule("judge", {"judge": arguments})  # in a guard's process
    (error,) = rule.score_all([Completion(response="a", record={"prompt": "p"})])
    assert type(error) is RewardServiceAway
    assert type(result_of(scored_answer(error), "reward_worker/0")) is RewardServiceAway
    scoring = AnswerScoring("judge", {"judge": arguments})
    scoring.begin({"prompt": "p", "answer": "4"})
    with pytest.raises(WaitTimeout) as told:
        asyncio.run(scoring.score("a"))
    assert fault_of(told.value) is TryFault.AWAY
    # Where nothing is played again, the record is set aside.
    answered = Answered(id="a", prompt=lambda: "p", answers=[Completion(response="a", record={})])
    assert SetAsideRecords().scores(rule, [answered]) == [None]


@pytest.mark.thorough
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


def test_answers_are_graded_in_line(server: Server) -> None:
    rule = RewardRule("judge", {"judge": {"url": server.url, "model": "m", "at_once": 1}})
    rule.score_all([Completion(response=f"<{i}>", record={"prompt": "p"}) for i in range(40)])
    asked_for = [body["messages"][0]["content"] for body in server.seen]
    assert [f"<{i}>" in text for i, text in enumerate(asked_for)] == [True] * 40


def test_the_requests_of_two_event_loops_have_one_limit(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each loop that came after another made the limit anew."""
    judge = Judge(url=server.url, model="m", at_once=1)
    begun, over, running = threading.Event(), threading.Event(), list[int]()

    async def asked(self: Judge, text: str) -> tuple[_Reply, float]:
        running.append(1)
        most.append(len(running))
        begun.set()
        await asyncio.to_thread(over.wait, 60)
        running.pop()
        return _Reply(text="7", was_cut=False), 0.0

    most: list[int] = []
    monkeypatch.setattr(Judge, "_asked", asked)

    async def graded(*texts: str) -> None:
        await asyncio.gather(*(judge(prompt="p", response=text) for text in texts))

    loops = [threading.Thread(target=asyncio.run, args=(graded(*texts),)) for texts in ("ab", "cd")]
    loops[0].start()
    assert begun.wait(60)
    loops[1].start()
    wait_until(lambda: len(most) > 1 or judge._places.num_waiting == 3, timeout_s=60)
    over.set()
    for loop in loops:
        loop.join(60)
    assert most == [1, 1, 1, 1]
    asyncio.run(graded("e"))
    assert most[4:] == [1], "every place was given back"


def test_who_is_cancelled_in_line_keeps_no_place() -> None:
    places = JudgePlaces(1)

    async def hold(seen: list[str], name: str) -> None:
        async with places.held():
            seen.append(name)

    async def story() -> list[str]:
        seen: list[str] = []
        async with places.held():
            waiting = [asyncio.create_task(hold(seen, name)) for name in "abc"]
            await asyncio.sleep(0)
            waiting[0].cancel()
            await asyncio.sleep(0)
        waiting[1].cancel()  # its place is on the way
        await asyncio.gather(*waiting, return_exceptions=True)
        async with places.held():
            return seen

    assert asyncio.run(asyncio.wait_for(story(), 60)) == ["c"]
    assert places.num_waiting == 0


def test_mistakes_are_named() -> None:
    with golden.raises(ConfigError):
        Judge(model="m")
    with golden.raises(ConfigError):
        Judge(url="http://x", model="m", question="grade!")
