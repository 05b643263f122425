"""Sequences of a conversation with branches, token by token."""

from __future__ import annotations

from dataclasses import replace

from realsys.api.agent import Answer
from realsys.rollout.conversation.answer_tree import AnswerNode, AnswerTree, sequences
from realsys.rollout.conversation.chat_messages import ChatMessage

SAID = ChatMessage(role="assistant", content="x")


class HandTree:
    """A tree whose answers are written as their tokens: answer ``n`` is [10 n, 10 n + 1]."""

    def __init__(self) -> None:
        self.tree = AnswerTree()

    def add(
        self,
        number: int,
        parent: AnswerNode | None = None,
        *,
        read: bool = True,
        stopped: bool = True,
        key: bytes = b"",
        kept: bool = False,
    ) -> AnswerNode:
        answer = Answer(
            tokens=(10 * number, 10 * number + 1),
            logprobs=(-float(number), -number - 0.5),
            versions=(number, number + 1),
            stopped=stopped,
            kept=(b"a", b"b") if kept else (),
        )
        node = AnswerNode(
            id=str(number),
            parent=parent,
            observed=(100 + number,),
            answer=answer,
            message=SAID,
            delivered=read,
        )
        self.tree.add(node, key or str(number).encode())
        return node


def test_a_line_is_one_sequence_without_what_was_only_observed_at_its_end() -> None:
    hand = HandTree()
    hand.add(2, hand.add(1), stopped=False)
    (made,) = sequences(hand.tree, reward=0.5)
    assert made.tokens == (101, 10, 11, 102, 20, 21)
    assert made.from_policy == (False, True, True, False, True, True)
    assert made.logprobs == (0.0, -1.0, -1.5, 0.0, -2.0, -2.5)
    assert made.versions == (-1, 1, 2, -1, 2, 3)
    assert (made.reward, made.truncated, made.kept) == (0.5, True, ())


def test_a_prompt_is_all_that_stands_before_an_answer() -> None:
    hand = HandTree()
    first = hand.add(1)
    second = hand.add(2, first)
    assert (first.prompt, second.prompt) == ([101], [101, 10, 11, 102])
    assert second.tokens == [101, 10, 11, 102, 20, 21]


def test_a_shared_answer_is_trained_in_the_first_branch_and_context_in_the_second() -> None:
    hand = HandTree()
    first = hand.add(1)
    hand.add(2, first)
    hand.add(3, first)
    one, two = sequences(hand.tree, reward=1.0)
    assert (one.tokens, two.tokens) == ((101, 10, 11, 102, 20, 21), (101, 10, 11, 103, 30, 31))
    assert one.from_policy == (False, True, True, False, True, True)
    assert two.from_policy == (False, False, False, False, True, True)
    assert two.logprobs == (0.0, 0.0, 0.0, 0.0, -3.0, -3.5)
    assert two.versions == (-1, -1, -1, -1, 3, 4)


def test_what_nobody_has_read_is_in_no_sequence_unless_its_branch_went_on() -> None:
    hand = HandTree()
    first = hand.add(1, read=False)
    assert sequences(hand.tree, reward=1.0) == []
    assert hand.tree.num_unread() == 1
    hand.add(2, first, read=False)
    assert sequences(hand.tree, reward=1.0) == []
    hand.add(3, first)
    (made,) = sequences(hand.tree, reward=1.0)
    assert made.tokens == (101, 10, 11, 103, 30, 31)
    assert all(made.from_policy[i] for i in (1, 2, 4, 5))
    assert hand.tree.num_unread() == 1


def test_a_read_answer_whose_continuation_was_not_read_is_a_leaf() -> None:
    hand = HandTree()
    hand.add(2, hand.add(1), read=False)
    (made,) = sequences(hand.tree, reward=1.0)
    assert made.tokens == (101, 10, 11)


def test_a_rewarded_answer_ends_a_sequence_and_is_context_behind_it() -> None:
    hand = HandTree()
    first = hand.add(1)
    second = hand.add(2, first)
    hand.add(3, second)
    first.reward, second.reward = 5.0, 6.0
    one, two, three = sequences(hand.tree, reward=0.5)
    assert [s.reward for s in (one, two, three)] == [5.0, 6.0, 0.5]
    assert one.tokens == (101, 10, 11)
    assert two.tokens == (101, 10, 11, 102, 20, 21)
    assert two.from_policy == (False, False, False, False, True, True)
    assert three.from_policy == (*[False] * 7, True, True)


def test_an_answer_without_reward_goes_with_the_first_that_continues_it() -> None:
    hand = HandTree()
    second = hand.add(2, hand.add(1))
    second.reward = 6.0
    (made,) = sequences(hand.tree, reward=0.5)
    assert (made.reward, sum(made.from_policy)) == (6.0, 4)


def test_a_reward_of_what_nobody_has_read_makes_no_sequence() -> None:
    hand = HandTree()
    hand.add(1, read=False).reward = 1.0
    hand.add(2)
    (made,) = sequences(hand.tree, reward=0.5)
    assert made.tokens == (102, 20, 21)


def test_kept_sets_stand_on_trained_tokens_only() -> None:
    hand = HandTree()
    first = hand.add(1, kept=True)
    hand.add(2, first, kept=True)
    hand.add(3, first, kept=True)
    one, two = sequences(hand.tree, reward=1.0)
    assert one.kept == (b"", b"a", b"b", b"", b"a", b"b")
    assert two.kept == (b"", b"", b"", b"", b"a", b"b")


def test_the_longest_known_beginning_is_continued_by_the_newest_answer_that_was_read() -> None:
    hand = HandTree()
    short = hand.add(1, key=b"1")
    old, new, unread = (hand.add(n, short, key=b"3", read=n != 4) for n in (2, 3, 4))
    tree = hand.tree
    assert tree.longest([b"", b"1", b"2", b"3", b"4"], [SAID] * 4) == (new, 3)
    assert tree.longest([b"", b"1", b"2"], [SAID] * 2) == (short, 1)
    assert tree.longest([b"", b"x"], [SAID]) is None
    assert tree.longest([b"3"], []) is None  # no message is no beginning
    old.delivered = new.delivered = False
    assert tree.longest([b"", b"", b"3"], [SAID] * 2) == (unread, 2)


def test_of_answers_with_one_key_the_one_that_is_sent_letter_for_letter_goes_on() -> None:
    hand = HandTree()
    texts = {1: ("x", "one"), 2: ("x", "two"), 3: ("x ", "")}
    nodes = {n: hand.add(n, key=b"1", read=n < 3) for n in texts}
    for number, (content, reasoning) in texts.items():
        nodes[number].message = replace(SAID, content=content, reasoning=reasoning)

    def goes_on(content: str, reasoning: str = "") -> AnswerNode:
        sent = replace(SAID, content=content, reasoning=reasoning)
        found = hand.tree.longest([b"", b"1"], [sent])
        assert found is not None
        return found[0]

    assert goes_on("x", "one") is nodes[1]
    assert goes_on("x", "two") is goes_on("x") is nodes[2]
    assert goes_on("x ") is nodes[2]  # nobody has read the third
    for node in nodes.values():
        node.delivered = False
    assert goes_on("x ") is goes_on(" x") is nodes[3]
    assert goes_on("x") is nodes[2]


def test_a_node_has_the_tokens_of_its_branch() -> None:
    hand = HandTree()
    assert hand.add(2, hand.add(1)).tokens == [101, 10, 11, 102, 20, 21]
