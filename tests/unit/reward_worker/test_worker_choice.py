"""Which reward worker gets the next answers."""

from __future__ import annotations

from realsys.reward_worker.worker_choice import WorkerChoice


def choice(num_workers: int = 3, *, first: int = 0, limit: int = 4) -> WorkerChoice:
    return WorkerChoice(
        num_workers=num_workers, first=first, limit=limit, up=set(range(num_workers))
    )


def test_the_one_with_the_fewest_answers_gets_the_next() -> None:
    workers = choice()
    assert [workers.take(n) for n in (3, 1, 2)] == [0, 1, 2]
    assert workers.take(1) == 1
    workers.give_back(0, 3)
    assert workers.take(1) == 0


def test_of_equals_the_one_that_waited_longest_gets_them_and_processes_begin_with_others() -> None:
    workers = choice(first=1)
    order = []
    for _ in range(5):
        order.append(workers.take(1))
        workers.give_back(order[-1], 1)
    assert order == [1, 2, 0, 1, 2]


def test_nobody_gets_more_than_the_limit_but_an_idle_one_any_number() -> None:
    workers = choice(2, limit=4)
    assert [workers.take(n) for n in (6, 3)] == [0, 1]
    assert workers.take(2) is None
    assert workers.take(1) == 1
    assert workers.take(1) is None
    assert workers.describe() == "reward_worker/0 (6 answers), reward_worker/1 (4 answers)"


def test_answers_that_failed_on_one_wait_for_another_even_if_that_is_away() -> None:
    workers = choice(2)
    workers.up = {0}
    assert workers.take(1, avoid=(0,)) is None
    assert workers.candidates((0,)) == set()
    workers.up = {0, 1}
    assert workers.take(1, avoid=(0,)) == 1


def test_the_only_worker_is_asked_again() -> None:
    workers = choice(1)
    assert workers.take(1, avoid=(0,)) == 0
    workers.up = set()
    assert workers.take(1, avoid=(0,)) is None
    assert workers.describe() == "reward_worker/0 (not connected)"
