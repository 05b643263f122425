"""Finds what a trial's rollout workers wrote about a question's episodes, and shows it as lines.

They write a line for each question that was played, with the texts of a few (``texts``), see
docs/trial_folder.md. Texts come from policies and strangers: what a terminal would obey is escaped by the
output, and lines are indented here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from realsys.api.basics.bounded_files import bounded_lines, open_regular, parse_json
from realsys.api.errors import TrialError
from realsys.trial.records import PhaseFiles, TrialFiles

_EPISODE = re.compile(r"(?P<question>\d+-\d+(?:\.\d+)?)-(?P<index>\d+)(?:-try\d+)?")


@dataclass(frozen=True, kw_only=True)
class RolloutSample:
    """A question's episodes in a trial.

    Attributes:
        row: line of the rollout worker's log.
        logs: of its agents' episodes, by number of the episode.
    """

    attempt: int
    worker: str
    row: Mapping[str, Any]
    logs: Mapping[int, str]

    @property
    def id(self) -> str:
        """Question's id, with the number of the grant if it was given out again."""
        return _name_of(self.row)

    @property
    def episodes(self) -> Sequence[Mapping[str, Any]]:
        """Episodes with their texts; empty: this question's were not kept."""
        texts = self.row.get("texts") or {}
        if "answers" in texts:  # of a trial of before
            rewards, answers = self.row.get("rewards") or [], texts["answers"]
            spoken = [{"pieces": [{"by": "policy", "text": text}]} for text in answers]
            if len(rewards) != len(spoken):  # a text of each sequence: which episode's is not known
                return [{"reward": None, "sequences": spoken}] if spoken else []
            return [
                {"reward": reward, "sequences": [one]}
                for reward, one in zip(rewards, spoken, strict=True)
            ]
        return texts.get("episodes") or ()

    @property
    def prompt(self) -> str:
        """What all sequences begin with; empty: they have nothing in common."""
        return str((self.row.get("texts") or {}).get("prompt") or "")

    @property
    def begins(self) -> str:
        """What the first sequence begins with: the prompt, or the first text of others."""
        pieces = (
            piece
            for episode in self.episodes
            for sequence in episode.get("sequences") or ()
            for piece in sequence.get("pieces") or ()
        )
        first = (str(piece.get("text")) for piece in pieces if piece.get("by") != "policy")
        return self.prompt or next(first, "")


def rollout_samples(files: TrialFiles) -> Iterator[RolloutSample]:
    """Yields every question's line in all attempts, oldest attempt first."""
    phase = TrialFiles.phase(files.root)
    for attempt in files.all_attempts():
        rows = phase.rows_of(attempt.number)
        for path in sorted(rows.rollouts.glob("*.jsonl")):
            for row in _rows(path):
                yield RolloutSample(
                    attempt=attempt.number,
                    worker=f"rollout_worker/{path.stem}",
                    row=row,
                    logs=_logs(rows, path.stem, row),
                )


def find_samples(files: TrialFiles, name: str) -> tuple[list[RolloutSample], int | None]:
    """Returns a question's lines, and the number of the episode if ``name`` is that of one.

    Args:
        name: id of a question (``0-46``, all its grants; ``0-46.1``, one) or of an episode (``0-46-3``).
    Raises:
        TrialError: no rollout worker has written about it, or the question has fewer episodes.
    """
    found = _EPISODE.fullmatch(name)
    question, index = (found["question"], int(found["index"])) if found else (name, None)
    samples = [s for s in rollout_samples(files) if question in (s.id, str(s.row.get("id")))]
    if not samples:
        raise TrialError(
            f"no rollout worker has written about {name!r}",
            where=str(files.root),
            fix="`realsys samples TRIAL` lists the ids whose texts were kept; synchronous runs have none",
        )
    played = [len(s.row.get("rewards") or s.episodes) for s in samples]
    if index is not None and index >= max(played) > 0:
        raise TrialError(
            f"question {question} has {max(played)} episodes, and {name!r} is none of them",
            where=str(files.root),
            fix=f"ask for one of {question}-0 to {question}-{max(played) - 1}, or for {question}",
        )
    return samples, index


def sample_lines(sample: RolloutSample, *, index: int | None = None) -> Iterator[str]:
    """Yields a question's episodes as lines (pure). ``index``: of one episode alone."""
    row = sample.row
    facts = [str(row.get("outcome"))]
    if row.get("why"):
        facts.append(str(row["why"]))
    if rewards := row.get("rewards"):
        facts.append(f"rewards {', '.join(f'{r:g}' for r in rewards)}")
        facts.append(f"weights {row.get('oldest')} to {row.get('newest')}")
    facts += [f"{row.get('seconds')} s", sample.worker, f"attempt {sample.attempt}"]
    yield f"question {sample.id}: {' · '.join(facts)}"
    if not sample.episodes:
        yield "  its texts were not kept: schedule.dump_texts sets of how many questions they are"
    if sample.prompt:
        yield "  prompt"
        yield from _indented(sample.prompt, 4)
    for number, episode in enumerate(sample.episodes):
        if index in (None, number) or episode.get("reward", 0) is None:
            yield from _episode_lines(f"{sample.id}-{number}", episode, sample.logs.get(number, ""))


def _episode_lines(name: str, episode: Mapping[str, Any], log: str) -> Iterator[str]:
    yield ""
    reward = episode.get("reward", 0)
    if reward is None:
        yield f"question {name.rpartition('-')[0]}: its sequences, by no episode and without rewards"
    else:
        yield f"episode {name}: reward {reward:g}"
    if numbers := episode.get("numbers"):
        yield f"  {' · '.join(f'{k} {v:g}' for k, v in numbers.items())}"
    if episode.get("problem"):
        yield f"  the agent failed: {episode['problem']}"
    if log:
        yield f"  log of its agent: {log}"
    for number, answer in enumerate(episode.get("answers") or ()):
        yield f"  request {number}: {', '.join(_answer_facts(answer))}"
    sequences = episode.get("sequences") or ()
    for number, sequence in enumerate(sequences):
        if len(sequences) > 1:
            role = f"{sequence['role']}, " if sequence.get("role") else ""
            known = reward is not None
            own = f"reward {sequence.get('reward', 0):g}" if known else "its reward is not known"
            yield f"  sequence {number}: {role}{own}"
        for piece in sequence.get("pieces") or ():
            yield f"  {piece.get('by')}"
            yield from _indented(str(piece.get("text")), 4)
        if sequence.get("truncated"):
            yield "  the last answer was cut off"


def _answer_facts(answer: Mapping[str, Any]) -> Iterator[str]:
    if answer.get("role"):
        yield str(answer["role"])
    yield f"{answer.get('messages', 0)} messages"
    before = answer.get("continues")
    yield "begins a branch" if before is None else f"continues request {before}"
    yield f"{answer.get('prompt_tokens', 0)} tokens before, {answer.get('tokens', 0)} answered"
    if calls := answer.get("calls"):
        yield f"calls {', '.join(map(str, calls))}"
    if answer.get("stopped") is False:
        yield "cut off"
    if answer.get("read") is False:
        yield "not read by the agent"
    if answer.get("reward") is not None:
        yield f"reward {answer['reward']:g}"


def _indented(text: str, by: int) -> Iterator[str]:
    return (" " * by + line for line in text.split("\n"))


def _logs(rows: PhaseFiles, worker: str, row: Mapping[str, Any]) -> dict[int, str]:
    """Finds the logs of the agents of a question's episodes; of several tries the newest."""
    question = _name_of(row)
    folder = rows.root / "agents" / worker
    found: dict[int, str] = {}
    if not re.fullmatch(r"[\w.-]+", question) or not folder.is_dir():
        return found
    for path in sorted(folder.glob(f"{question}-*.log"), key=lambda p: (len(p.name), p.name)):
        if (name := _EPISODE.fullmatch(path.stem)) and name["question"] == question:
            found[int(name["index"])] = str(path)
    return found


def _name_of(row: Mapping[str, Any]) -> str:
    grant = row.get("tries") or 0
    return f"{row.get('id')}.{grant}" if grant else str(row.get("id"))


def _rows(path: Path) -> Iterable[dict[str, Any]]:
    with open_regular(path) as file:
        for line in bounded_lines(file, path):
            try:
                row = parse_json(line)
            except ValueError:  # the last one may be half written
                continue
            if isinstance(row, dict) and "id" in row:
                yield row
