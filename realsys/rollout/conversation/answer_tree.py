"""The answers of a conversation as a tree, with the tokens that were sampled (pure).

An agent sends its whole conversation with each request. Where that begins with one that the policy has
answered, the new answer continues the tokens of the old; where an agent has edited, cut or forked its
history, a branch begins::

    prompt ─ answer 1 ─ observation ─ answer 2 ─ observation ─ answer 3     leaf
                   └─ other observation ─ answer 4                          leaf
    other prompt ─ answer 5                                                 leaf

Training sees one sequence a leaf. An answer that several leaves share is trained in the first one of
them; in the others it is context.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace

from realsys.api.agent import Answer, Trajectory
from realsys.api.basics.thoughts import THINK
from realsys.rollout.agents.transcript import Transcript
from realsys.rollout.conversation.chat_messages import ChatMessage


@dataclass(eq=False, kw_only=True)
class AnswerNode:
    """One answer of the policy.

    Attributes:
        id: as the client knows it.
        observed: tokens between the former answer of the branch, or its beginning, and this one.
        message: the answer as the client got it.
        num_messages: of the conversation, this one among them.
        delivered: the client got it. An answer that nobody has read is not trained on, unless its branch
            goes on.
        reward: of this answer alone; None: none was set.
        was_left: its client left its stream, so it ends with what had been written.
        is_rest: it goes on with its parent's text, which a client had or has for the whole.
        content_of: tokens of the whole answer → the content that a stream has of them; None: it was not
            streamed.
    """

    id: str
    parent: AnswerNode | None
    observed: tuple[int, ...]
    answer: Answer
    message: ChatMessage
    num_messages: int = 0
    delivered: bool = False
    reward: float | None = None
    was_left: bool = False
    is_rest: bool = False
    content_of: Callable[[Sequence[int]], str] | None = None
    children: list[AnswerNode] = field(default_factory=list)

    @property
    def scored_answer(self) -> Answer:
        """The answer as an environment gets it with the message's content: where there are thoughts and
        nothing behind them, it says so."""
        message, answer = self.message, self.whole_answer
        if message.reasoning and not message.content and not message.tool_calls:
            return replace(answer, opened=answer.opened or THINK[0])
        return answer

    @property
    def whole_answer(self) -> Answer:
        """The answer that the message is of, with the parts that a client had got of it before."""
        answer, node = self.answer, self
        while node.is_rest and node.parent is not None:
            node = node.parent
            answer = node.answer.joined(answer)
        return answer

    @property
    def line(self) -> list[AnswerNode]:
        """The answers from the branch's beginning to this one."""
        nodes, node = [], self
        while True:
            nodes.append(node)
            if node.parent is None:
                return nodes[::-1]
            node = node.parent

    @property
    def tokens(self) -> list[int]:
        """All tokens of the branch up to the answer's last."""
        return [t for node in self.line for t in (*node.observed, *node.answer.tokens)]

    @property
    def prompt(self) -> list[int]:
        """All tokens of the branch before the answer."""
        return [*(self.parent.tokens if self.parent is not None else ()), *self.observed]

    def num_tokens_of(self, content: str) -> int:
        """Returns how many of the answer's tokens make up ``content``, with which a stream of it began; 0:
        none began so, or it is the whole answer.
        """
        of, tokens = self.content_of, self.answer.tokens
        if (
            of is None
            or self.is_rest
            or not content
            or not self.message.content.startswith(content)
        ):
            return 0
        reaches = range(len(tokens))
        count = bisect_left(reaches, True, key=lambda n: of(tokens[:n])[: len(content)] == content)
        is_part = count < len(tokens) and of(tokens[:count]).strip() == content.strip()
        return count if is_part else 0


class AnswerTree:
    """All answers of an episode. Used by one task at a time."""

    def __init__(self) -> None:
        self.nodes: list[AnswerNode] = []  # in the order in which they were answered
        self._by_path: dict[bytes, list[AnswerNode]] = {}
        self._by_question: dict[
            bytes, list[AnswerNode]
        ] = {}  # by the path of the messages before it

    def add(
        self, node: AnswerNode, path_key: bytes | None, *, question_key: bytes | None = None
    ) -> None:
        """Adds an answer, found from now on by the key of the messages up to it; None: there are none.

        Args:
            question_key: of the messages before it, by which a part of it is found; None: it is not.
        """
        self.nodes.append(node)
        if path_key is not None:
            self._by_path.setdefault(path_key, []).append(node)
        if question_key is not None:
            self._by_question.setdefault(question_key, []).append(node)
        if node.parent is not None:
            node.parent.children.append(node)

    def remove(self, node: AnswerNode) -> None:
        """Takes out an answer that no other one continues."""
        self.nodes.remove(node)
        for found in (*self._by_path.values(), *self._by_question.values()):
            if node in found:
                found.remove(node)
        if node.parent is not None:
            node.parent.children.remove(node)

    def longest(
        self, path_keys: Sequence[bytes], messages: Sequence[ChatMessage]
    ) -> tuple[AnswerNode, int] | None:
        """Returns the last answer that these messages continue, and how many of them end with it.

        Of several answers with the same key, one that the client has got; of those, one that is letter for
        letter what it sends; of those, the newest.
        """
        for count in range(len(path_keys) - 1, 0, -1):
            if found := self._by_path.get(path_keys[count]):
                sent = messages[count - 1]
                best = max(
                    reversed(found), key=lambda n: (n.delivered, _is_as_sent(n.message, sent))
                )
                return best, count
        return None

    def shortened(
        self, path_keys: Sequence[bytes], messages: Sequence[ChatMessage], answered: int
    ) -> tuple[AnswerNode, int] | None:
        """Returns as ``longest`` the part of a streamed answer that stands in these messages for the whole,
        behind ``answered`` of them: its client had read no further. The answer is split there.
        """
        for place in range(len(messages) - 1, answered - 1, -1):
            sent = messages[place]
            if sent.role != "assistant" or sent.tool_calls:
                continue
            same = self._by_question.get(path_keys[place], [])
            for node in reversed(same):
                if node.delivered and (count := node.num_tokens_of(sent.content)):
                    first = self._split(node, count, sent.content)
                    same[same.index(node)] = first
                    self._by_path.setdefault(path_keys[place + 1], []).append(first)
                    return first, place + 1
        return None

    def _split(self, node: AnswerNode, count: int, content: str) -> AnswerNode:
        """Makes the first ``count`` tokens of an answer one of its own, with which the rest goes on."""
        first = replace(
            node,
            answer=replace(node.answer.part(0, count), stopped=True),
            message=replace(node.message, content=content, tool_calls=()),
            was_left=True,
            children=[node],
        )
        if node.parent is not None:
            siblings = node.parent.children
            siblings[siblings.index(node)] = first
        node.parent, node.observed, node.is_rest = first, (), True
        node.answer = node.answer.part(count, len(node.answer.tokens))
        self.nodes.insert(self.nodes.index(node), first)
        return first

    def leaves(self) -> list[AnswerNode]:
        """Returns the answers that end a branch and were read, in order."""
        wanted = {id(n) for node in self.nodes if node.delivered for n in node.line}
        kept = [n for n in self.nodes if id(n) in wanted]
        return [n for n in kept if not any(id(c) in wanted for c in n.children)]

    def num_unread(self) -> int:
        """Counts answers that were sampled and that no sequence has."""
        wanted = {id(n) for leaf in self.leaves() for n in leaf.line}
        return sum(id(n) not in wanted for n in self.nodes)


def _is_as_sent(message: ChatMessage, sent: ChatMessage) -> bool:
    return message.content == sent.content and sent.reasoning in ("", message.reasoning)


def sequences(tree: AnswerTree, *, reward: float) -> list[Trajectory]:
    """Returns one trajectory a leaf, each with the episode's reward, for training.

    An answer with a reward of its own ends a sequence of its own. Answers before it are context there, but
    for those that no sequence has yet: they have no reward, so they share that of the first that has one.
    """
    trained: set[int] = set()
    made: dict[int, Trajectory] = {}
    leaves = {id(node) for node in tree.leaves()}
    wanted = {id(n) for node in tree.leaves() for n in node.line}
    for node in tree.nodes:
        if id(node) in leaves or (id(node) in wanted and node.reward is not None):
            end = _last_part(node, wanted)  # made before any other sequence trains these parts
            if id(end) not in made:
                own = end.reward if end.reward is not None else reward
                made[id(end)] = _sequence(end, trained, reward=own)
    return [*made.values()]


def _last_part(node: AnswerNode, wanted: Set[int]) -> AnswerNode:
    """Returns the last of an answer's parts with the reward of ``node``: with it they are one sequence."""
    rests = [node] if node.reward is not None else []
    while rests:
        node = rests[0]
        rests = [
            child
            for child in node.children
            if child.is_rest and id(child) in wanted and child.reward == node.reward
        ]
    return node


def _sequence(leaf: AnswerNode, trained: set[int], *, reward: float) -> Trajectory:
    transcript = Transcript(())
    for node in leaf.line:
        transcript.observed(node.observed)
        if id(node) in trained:
            transcript.observed(node.answer.tokens)
        else:
            transcript.answered(node.answer)
            trained.add(id(node))
    return transcript.trajectory(reward=reward, truncated=not leaf.answer.stopped)
