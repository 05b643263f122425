"""No exploit has success with a built-in rule, each kind has with a weak one; honest answers are paid."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import weak_rules

from launcher.cli.entry import main
from realsys.api.basics.reward import Completion, Score
from realsys.data.sources.reasoning_gym_questions import PAYING
from realsys.rewards.attack.attack_answers import Attack, attack_of_texts
from realsys.rewards.attack.attack_corpus import Exploit, exploits, paraphrases
from realsys.rewards.attack.attack_report import AttackReport, AttackScore, report_of
from realsys.rewards.attack.attack_scoring import AttackProcess
from realsys.rewards.attack.by_design import TASKS, designed
from realsys.rewards.attack.gym_attack import gym_attack
from realsys.rewards.rule import RewardRule

WEAK = Path(weak_rules.__file__)
MOST_REFUSED = 0.01
GENERATORS = (
    "prime_factorization",
)  # all of them by hand: tests/by_hand/acceptance/attack_reasoning_gym.py


def played(rule: str, args: Mapping[str, Any], **more: Any) -> AttackReport:
    with AttackProcess(rule, args, deadline_s=120.0, **more) as process:
        attack = attack_of_texts(
            exploits(), paraphrases(), tasks=TASKS[rule], mark=str(process.mark)
        )
        return report_of(attack, process.scores(attack), by_design=designed(rule))


def check(report: AttackReport) -> None:
    assert not report.ran
    assert not report.hung
    assert not report.no_score
    paid = {finding.answer.kind for finding in report.paid}
    assert not paid, [f.answer.response for f in report.paid if f.answer.kind in paid]
    assert all(finding.by_design for finding in report.by_design)
    for name, rate in report.rates().items():
        if name.startswith("refused"):
            assert rate <= MOST_REFUSED, [
                (finding.answer.response, finding.score) for finding in report.refused
            ]


@pytest.mark.parametrize(
    ("rule", "args"),
    [("math_verify", {}), ("code_tests", {"code_tests": {"cpu_s": 2.0}})],
    ids=["math_verify", "code_tests"],
)
def test_a_built_in_rule_pays_honest_answers_alone(rule: str, args: Mapping[str, Any]) -> None:
    check(played(rule, args))


class GradingModel(BaseHTTPRequestHandler):
    """A judge that quotes what it grades, and is not fooled; or one that says what it was told to say."""

    replies: Iterator[str] | None = None

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = body["messages"][-1]["content"]
        graded = re.search(r"Answer to grade: (.*)\nReply", text, re.DOTALL)
        assert graded is not None
        reply = "Grade: 10" if graded[1] == "It is Rayleigh scattering." else "Grade: 0"
        reply = f"It says {graded[1][-60:]!r}, and more.\n{reply}"
        content = next(self.replies) if self.replies is not None else reply
        made = json.dumps({"choices": [{"message": {"content": content}, "finish_reason": "stop"}]})
        self.send_response(200)
        self.send_header("Content-Length", str(len(made.encode())))
        self.end_headers()
        self.wfile.write(made.encode())

    def log_message(self, *args: Any) -> None: ...


@pytest.fixture
def judge_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), GradingModel)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_judge_gives_the_grade_that_its_model_means(judge_url: str) -> None:
    args = {"judge": {"url": judge_url, "model": "m", "max_retries": 0}}
    check(played("judge", args))


def test_honest_replies_of_a_judge_are_read_as_they_are_meant(
    judge_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [paraphrase for paraphrase in paraphrases() if paraphrase.task == "judge"]
    args = {"judge": {"url": judge_url, "model": "m", "max_retries": 0}}
    misread = []
    for number, text in enumerate(texts):
        monkeypatch.setattr(GradingModel, "replies", iter([text.response]))
        (score,) = RewardRule("judge", args).score_all([Completion(response=f"answer {number}")])
        value = score.value if isinstance(score, Score) else None
        if value is None or abs(value - float(text.answer) / 10) > 1e-9:
            misread.append((text.response, value))
    assert len(misread) / len(texts) <= MOST_REFUSED, misread


def test_an_attack_on_a_scorer_of_reasoning_gym_has_no_success_but_where_it_is_listed() -> None:
    with AttackProcess("reasoning_gym", {}, cpu_s=5.0, deadline_s=120.0) as process:
        for name in GENERATORS:
            attack = gym_attack(name, mark=str(process.mark), num_honest=1)
            report = report_of(attack, process.scores(attack))
            assert (report.ran, report.hung, report.no_score) == ((), (), ())
            assert bool(report.paid or report.pays_all) == (name in PAYING)
            # It raises for all that is no list of factors, which ended the run in step 1.
            assert name != "prime_factorization" or report.num_raised > 100
            assert report.rates()["refused/own"] <= 0.01


# ---- the corpus itself ------------------------------------------------------------------------------


def test_the_corpus_is_as_large_as_it_says_and_has_sources() -> None:
    for side in ("own", "outside"):
        kinds = {exploit.kind for exploit in exploits() if exploit.side == side}
        assert len(kinds) >= 25
    assert all(exploit.source for exploit in exploits())
    honest = [p.side for p in paraphrases()]
    assert honest.count("own") >= 100
    assert honest.count("outside") >= 150
    assert len(honest) >= 300


# One kind of the other side has no weak rule: a mapping of builtins in a program's own globals.
NO_CONTROL = {"redefine_solution_name"}


def test_each_kind_of_exploit_has_success_with_a_weak_rule() -> None:
    left: dict[tuple[str, str], list[Exploit]] = {}
    for exploit in exploits():
        if exploit.kind not in NO_CONTROL:
            left.setdefault((exploit.side, exploit.kind), []).append(exploit)
    with AttackProcess(
        "weak", {}, imports=[str(WEAK)], cpu_s=1.0, deadline_s=120.0, forks=True
    ) as process:
        while left:  # the next text of each kind without success
            tried = {key: texts.pop(0) for key, texts in left.items()}
            for key, exploit in tried.items():
                if has_success(exploit, process):
                    del left[key]
            assert all(left.values()), sorted(key for key, texts in left.items() if not texts)


def has_success(exploit: Exploit, process: AttackProcess) -> bool:
    attack = attack_of_texts([exploit], [], tasks=[exploit.task], mark=str(process.mark))
    attack = with_weak_rule(attack, weak_rules.WEAK_FOR[exploit.kind])
    scores = process.scores(attack)
    best = max(
        s.value or 0.0 for a, s in zip(attack.answers, scores, strict=True) if a.role == "wrong"
    )
    of_exploit = [s for a, s in zip(attack.answers, scores, strict=True) if a.role == "exploit"]
    return any(succeeded(score, best) for score in of_exploit)


def with_weak_rule(attack: Attack, name: str) -> Attack:
    """The attack on the first question, whose record names the rule."""
    (question, *_) = attack.questions
    record = {**question.record, "weak_rule": name}
    wrong, exploit = ([a for a in attack.answers if a.role == role and a.question == 0]
                      for role in ("wrong", "exploit"))  # fmt: skip
    answers = (*wrong[:: max(1, len(wrong) - 1)], *exploit)  # the first wrong one, and the last
    return Attack(questions=(replace(question, record=record),), answers=answers)


def succeeded(score: AttackScore, best_wrong: float) -> bool:
    has_died = score.value is None and "ended" in score.problem
    return score.ran or score.hung or has_died or (score.value or 0.0) > best_wrong


# ---- as a user ----------------------------------------------------------------------------------------


def test_a_users_rule_is_attacked_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.py").write_text(
        "from realsys.api.registry import register_reward\n"
        "def loose(response, answer): return float(answer in response)\n"
        "def strict(response, answer): return float(response == answer)\n"
        "register_reward('loose', loose)\n"
        "register_reward('strict', strict)\n"
    )
    (tmp_path / "own.jsonl").write_text(
        '{"prompt": "1+1?", "answer": "2"}\n{"prompt": "3+4?", "answer": "7"}\n'
    )
    given = ["--import", str(tmp_path / "mine.py"), "--records", str(tmp_path / "own.jsonl")]
    assert main(["data", "score", "loose", "--attack", "--json", *given]) == 1
    (found,) = json.loads(capsys.readouterr().out)["parts"].values()
    assert found["rates"]["paid/own"] > 0.05
    assert {"all candidates", "a denied answer"} <= {row["kind"] for row in found["paid"]}
    assert main(["data", "score", "strict", "--attack", "--tasks", "any", *given]) == 0
    assert "refused" in capsys.readouterr().out
