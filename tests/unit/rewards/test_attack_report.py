"""Which answers an attack asks about, and what their scores come to, by hand."""

from __future__ import annotations

import json

from realsys.rewards.attack.attack_answers import (
    FORMS,
    Attack,
    AttackQuestion,
    attack_of_records,
    attack_of_texts,
)
from realsys.rewards.attack.attack_corpus import Exploit, Paraphrase
from realsys.rewards.attack.attack_report import AttackReport, AttackScore, report_of, shown


def exploit(response: str, **more: str) -> Exploit:
    return Exploit(kind="k", task="math", response=response, source="s", **more)  # type: ignore[arg-type]


HONEST = Paraphrase(task="math", question="1+1?", answer="#### 2", response="two: 2")


def attack_of_two() -> Attack:
    exploits = [exploit("{WRONG} or {ANSWER}", question="1+1?", answer="#### 2", wrong="3")]
    return attack_of_texts(exploits, [HONEST], tasks=["math"], mark="/m")


def report(attack: Attack, **by_role: AttackScore) -> AttackReport:
    return report_of(attack, [by_role[answer.role] for answer in attack.answers])


WRONG, RIGHT = AttackScore(value=0.1), AttackScore(value=1.0, correct=True)


def test_a_question_is_asked_with_wrong_and_right_answers_in_all_forms() -> None:
    attack = attack_of_two()
    (question,) = attack.questions
    assert (question.answer, question.wrong) == ("2", ("3",))
    roles = [answer.role for answer in attack.answers]
    assert [roles.count(role) for role in ("wrong", "right", "exploit", "honest")] == [
        len(FORMS),
        len(FORMS),
        1,
        1,
    ]
    (text,) = [answer.response for answer in attack.answers if answer.role == "exploit"]
    assert text == "3 or 2"


def test_an_exploit_is_paid_above_the_best_honest_wrong_answer() -> None:
    attack = attack_of_two()
    for value, paid in ((0.1, 0), (0.2, 1), (None, 0)):
        found = report(
            attack, wrong=WRONG, right=RIGHT, honest=RIGHT, exploit=AttackScore(value=value)
        )
        assert (len(found.paid), found.is_exploited) == (paid, bool(paid))
        assert found.rates() == {"paid/own": float(paid), "refused/own": 0.0}
    ran = report(
        attack, wrong=WRONG, right=RIGHT, honest=RIGHT, exploit=AttackScore(value=0, ran=True)
    )
    hung = report(attack, wrong=WRONG, right=RIGHT, honest=RIGHT, exploit=AttackScore(hung=True))
    assert (len(ran.ran), len(hung.hung)) == (1, 1)
    assert ran.is_exploited
    assert hung.is_exploited


def test_what_is_paid_by_design_is_listed_and_no_success() -> None:
    attack = attack_of_two()
    scores = [RIGHT if answer.role != "wrong" else WRONG for answer in attack.answers]
    found = report_of(attack, scores, by_design={"k": "it pays for form"})
    assert (found.paid, len(found.by_design), found.is_exploited) == ((), 1, False)
    assert found.to_json()["by_design"][0]["by_design"] == "it pays for form"
    json.dumps(found.to_json())


def test_a_rule_that_pays_everything_is_told() -> None:
    attack = attack_of_two()
    found = report_of(attack, [RIGHT] * len(attack.answers))
    assert (found.paid, found.pays_all, found.is_exploited) == ((), True, True)
    listed = report_of(attack, [RIGHT] * len(attack.answers), excuse="it pays any text")
    assert not listed.is_exploited


def test_an_honest_answer_is_refused_if_another_form_of_it_scores_more() -> None:
    attack = attack_of_two()
    half = AttackScore(value=0.5)
    assert report(attack, wrong=WRONG, right=RIGHT, honest=half, exploit=WRONG).refused
    # The best that there is for this rule.
    assert not report(attack, wrong=WRONG, right=half, honest=half, exploit=WRONG).refused
    assert report(attack, wrong=WRONG, right=RIGHT, honest=AttackScore(), exploit=WRONG).refused


def test_a_text_is_shown_on_one_line() -> None:
    assert shown("\\boxed{5}\n\u202e½") == "\\boxed{5}\\n\\u202e\\xbd"
    assert shown("a" * 300_000).startswith("a" * 80 + "aaaaaaaaaa … a")
    assert len(shown("\n" * 999)) < 130


def test_a_text_that_happens_to_be_right_is_no_exploit() -> None:
    question = AttackQuestion(name="q", prompt="?", answer="True", wrong=("False",))
    attack = attack_of_records([exploit("\\boxed{True}"), exploit("x")], [question], mark="/m")
    assert [a.response for a in attack.answers if a.role == "exploit"] == ["x"]


def test_a_program_has_wrong_ones_that_return_constants() -> None:
    tests = json.dumps(["assert f(1) == 0", "assert f(2) == 0"])
    asked = Exploit(
        kind="k", task="code", response="```\n```", source="s", question="?", answer=tests
    )
    attack = attack_of_texts([asked], [], tasks=["code"], mark="/m")
    wrong = [answer.response for answer in attack.answers if answer.role == "wrong"]
    assert all("def f(*given)" in text for text in wrong)
    assert not any("return 0" in text for text in wrong)  # it would be right
    assert attack.questions[0].record["tests"] == [
        {"code": "assert f(1) == 0"},
        {"code": "assert f(2) == 0"},
    ]
