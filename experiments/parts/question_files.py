"""Checks files of questions, before anything is submitted. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from experiments.parts.chosen_settings import MeasuredQuestions
from experiments.parts.rule_trials import declared_problems
from realsys.api import registry
from realsys.api.basics.record_names import is_hub_name
from realsys.api.basics.reward import KNOWN_FIELDS, reward_terms
from realsys.api.basics.template_args import reserved_among, unread_argument
from realsys.api.errors import CheckpointError, ConfigError, DataError
from realsys.data.sources.dataset_arguments import DROP, MathRecordsArguments

if TYPE_CHECKING:
    from realsys.data.sources.record_parts import RecordSource
    from realsys.data.sources.record_samples import RecordSample
    from realsys.data.sources.record_shape import Question

MAX_SAMPLED_QUESTIONS = (
    1000  # questions of a file whose tokens a plan counts; workers count the others
)
MOST_TOOL_CHARS = 8 << 20  # of the tools of questions that are rendered together


def absolute(path: str | None) -> str | None:
    """Returns the absolute path, valid in every worker's working directory; names on a hub as they are."""
    if path is None or is_hub_name(path):
        return path
    return os.path.realpath(os.path.expanduser(path))


def question_files(data: MathRecordsArguments) -> tuple[str, ...]:
    """Lists the files that questions are read from; a path that can't be read stands for itself."""
    found: list[str] = []
    for path in (data.path, data.eval_path):
        if path is not None:
            from realsys.data.sources.record_files import record_paths  # for those who read files

            with suppress(DataError):
                found += map(str, record_paths(path))
                continue
            found.append(path)
    return tuple(found)


def dataset_problems(
    data: MathRecordsArguments, *, batch_size: int, tokenizer_dir: str | None
) -> Iterator[ConfigError]:
    """Yields unreadable or incomplete files, too few questions, and questions over the limit. Files of a
    hub that are not here yet are not checked.

    Args:
        data: what the data sets are made with; their split is ignored.
    """
    wrong = [
        problem
        for kind, names in (("filter", data.keep), ("transform", data.transform))
        for name in names
        if (problem := registry.check(kind, name, where=_setting(kind)))
    ]
    if problem := _template_problem(data, tokenizer_dir):
        wrong.append(problem)
    yield from wrong
    if wrong:
        return
    for name, file in (("path", data.path), ("eval_path", data.eval_path)):
        if file is None or is_hub_name(file):
            continue
        try:
            yield from _file_problems(data, name, file, batch_size, tokenizer_dir)
        except DataError as error:
            yield ConfigError(error.what, where=f"task.{name}, {error.where}", fix=error.fix)
        except ConfigError as error:  # a package is missing
            yield error


def answer_problems(data: MathRecordsArguments) -> Iterator[ConfigError]:
    """Yields questions that fine-tuning could learn no answer to, of those that a plan reads."""
    for name, file in (("path", data.path), ("eval_path", data.eval_path)):
        if file is None:
            continue
        try:
            found = SampledQuestions(data, file)
            for index in range(len(found.kept)):
                question = found.question(index)
                turns = [m for m in question.messages or () if m["role"] == "assistant"]
                if not question.answer and not turns:
                    yield ConfigError(
                        "the record has no answer to learn",
                        where=f"task.{name}, {found.kept.where(index)}",
                        fix="give answers or whole conversations (messages)",
                    )
                    break
        except (DataError, ConfigError):
            continue  # told by dataset_problems


def rule_record_problems(
    data: MathRecordsArguments, expression: str, args: Mapping[str, Any]
) -> Iterator[ConfigError]:
    """Yields the first record of each file that a rule can't score, of those that a plan reads: rules with
    a ``check_record(record)`` are asked.
    """
    for rule in _rules_that_check(expression, args):
        for name, file in (("path", data.path), ("eval_path", data.eval_path)):
            if file is None or is_hub_name(file):
                continue
            found = SampledQuestions(data, file)
            for index in range(len(found.kept)):
                if problem := _check_of_rule(rule, found.scored_record(index)):
                    where = f"task.{name}, {found.kept.where(index)}"
                    yield ConfigError(problem.what, where=where, fix=problem.fix)
                    break
    if data.path is not None and not is_hub_name(data.path):
        found = SampledQuestions(data, data.path)
        if len(found.kept):
            yield from declared_problems(expression, args, found.scored_record(0))


def _check_of_rule(rule: Any, record: Mapping[str, Any]) -> DataError | None:
    try:
        rule.check_record(record)
    except DataError as error:
        return error
    except Exception as error:  # a user's code may raise anything
        what = f"check_record of {type(rule).__name__} raised {type(error).__name__}: {error}"
        return DataError(what, where="", fix="let it raise DataError for a record it can't score")
    return None


def _rules_that_check(expression: str, args: Mapping[str, Any]) -> Iterator[Any]:
    """Makes them; what is wrong with names and arguments, other checks tell."""
    with suppress(ConfigError):
        for name, _ in reward_terms(expression):
            if name in KNOWN_FIELDS:  # no import for nothing
                continue
            rule = registry.find("reward", name)
            if isinstance(rule, type) and hasattr(rule, "check_record"):
                with suppress(ConfigError, TypeError):
                    yield rule(**registry.read_arguments("reward", name, args.get(name, {})))


def _setting(kind: str) -> str:
    return "task.keep" if kind == "filter" else "task.transform"


def _template_problem(data: MathRecordsArguments, tokenizer_dir: str | None) -> ConfigError | None:
    """Returns what is wrong with settings of the chat template."""
    if reserved := reserved_among(data.template_args):
        return ConfigError(
            f"{reserved} is given to the template by realsys itself",
            where="task.template_args",
            fix="leave it out",
        )
    setting = "task.system" if data.system is not None else "task.template_args"
    if tokenizer_dir is None or (data.system is None and not data.template_args):
        return None
    from realsys.models.prompt_lengths import chat_template

    try:
        template = chat_template(Path(tokenizer_dir).expanduser())
    except CheckpointError:
        return None  # reported by the check of the directory
    if template is not None:
        return _unread_argument(data, Path(tokenizer_dir).expanduser())
    return ConfigError(
        "the tokenizer has no chat template",
        where=f"{setting} and {tokenizer_dir}",
        fix="use an instruction-tuned model, or leave the setting out",
    )


def _unread_argument(data: MathRecordsArguments, root: Path) -> ConfigError | None:
    from realsys.models.prompt_lengths import names_read

    if not data.template_args:
        return None
    try:
        return unread_argument(names_read(root), data.template_args, where="task.template_args")
    except CheckpointError:  # reported by the check of the directory
        return None


class SampledQuestions:
    """The records of a file that a plan reads, after filters and transforms."""

    def __init__(self, data: MathRecordsArguments, file: str) -> None:
        from realsys.data.sources.chosen_records import chosen_records
        from realsys.data.sources.record_samples import sample_records

        self._data = data
        self.sample: RecordSample = sample_records(Path(file).expanduser())
        self.kept: RecordSource = chosen_records(
            self.sample.records, keep=data.keep, transform=data.transform, name=file
        )
        self.num_dropped = len(self.sample.records) - len(self.kept)

    @property
    def total(self) -> int:
        """Questions of the file that filters keep; about, unless all records were read."""
        return self.sample.total * len(self.kept) // len(self.sample.records)

    def question(self, index: int) -> Question:
        """Raises DataError: the record lacks what is asked or known."""
        from realsys.data.sources.record_shape import question_of

        where = self.kept.where(index)
        needed = self._data.needs_answer
        return question_of(self.kept[index], self._data.columns, where, needs_answer=needed)

    def scored_record(self, index: int) -> dict[str, Any]:
        """Returns a record as rules get it: whole, with prompt and known answer."""
        from realsys.data.sources.record_shape import final_answer

        found = self.question(index)
        answer = found.answer or ""
        known = answer if self._data.whole_answers else final_answer(answer)
        return {**found.record, "prompt": found.prompt, "answer": known}

    def lengths(self) -> list[int]:
        """Counts the characters of all questions that were read."""
        from realsys.data.sources.record_shape import prompt_texts

        everything = range(len(self.kept))
        asked = [self.question(i) for i in everything]
        return [sum(map(len, prompt_texts(q.prompt))) + len(repr(q.tools)) for q in asked]

    def tokens(self, chosen: Sequence[int], tokenizer_dir: str | Path) -> list[int] | None:
        """Counts the prompt tokens of the questions at ``chosen``, as ``prompt_lengths`` does."""
        from realsys.models.prompt_lengths import prompt_lengths

        asked = [self.question(i) for i in chosen]
        counted: list[int] = []
        while asked:
            chars = 0
            part: list[Question] = []
            while asked and (not part or chars < MOST_TOOL_CHARS):
                part.append(asked.pop(0))
                chars += len(repr(part[-1].tools))
            found = prompt_lengths(
                Path(tokenizer_dir).expanduser(),
                [question.prompt for question in part],
                system=self._data.system,
                template_args=self._data.template_args,
                marks_as_text=self._data.marks_as_text,
                tools=[question.tools for question in part],
            )
            if found is None:
                return None
            counted += found
        return counted


def _file_problems(
    data: MathRecordsArguments, name: str, file: str, batch_size: int, tokenizer_dir: str | None
) -> Iterator[ConfigError]:
    """Raises DataError: a record that was read is faulty."""
    found = SampledQuestions(data, file)
    lengths = found.lengths()
    spare = data.eval_size if data.eval_path is None else 0
    if name == "eval_path" and found.total < data.eval_size:
        yield ConfigError(
            f"{found.total} held-out questions are fewer than task.eval_size={data.eval_size}",
            where=f"task.{name}, {file}",
            fix=f"set task.eval_size={found.total}, or give more questions",
        )
    elif name == "path" and found.total - spare < batch_size:
        yield ConfigError(
            f"{found.total} questions are too few: {batch_size} per batch"
            + (f" and {spare} held out" if spare else ""),
            where=f"task.{name}, {file}",
            fix="lower train_bs_n_seqs or task.eval_size, or give more questions",
        )
    if tokenizer_dir is not None:
        yield from _length_problems(data, found, lengths, file, tokenizer_dir)


def _length_problems(
    data: MathRecordsArguments,
    found: SampledQuestions,
    lengths: list[int],
    path: str,
    tokenizer_dir: str,
) -> Iterator[ConfigError]:
    """Yields the longest question over the limit, counted with the chat template."""
    from realsys.models.prompt_lengths import chat_template

    chosen, limit = sample_of(lengths), data.max_prompt_len
    root = Path(tokenizer_dir).expanduser()
    try:
        texts = [isinstance(found.question(i).prompt, str) for i in chosen]
        if chat_template(root) is None and not all(texts):
            yield ConfigError(
                "the tokenizer has no chat template, and the questions are messages",
                where=f"{path} and {tokenizer_dir}",
                fix="use an instruction-tuned model, or give prompts as plain text",
            )
            return
        counted = found.tokens(chosen, root)
    except CheckpointError as error:
        if data.system is not None or data.template_args or data.columns.messages:
            yield ConfigError(error.what, where=error.where, fix=error.fix)
        return  # else reported by the check of the directory
    if not counted:
        return
    longest, record = max(zip(counted, chosen, strict=True), key=lambda pair: pair[0])
    if longest > limit and data.long_prompts == DROP:
        if min(counted) > limit:
            yield ConfigError(
                f"all questions that were counted are longer than {limit} tokens",
                where=f"task.max_prompt_len and {path}",
                fix=f"raise task.max_prompt_len, to {longest} for all of them",
            )
    elif longest > limit:
        sampled = "" if len(chosen) == found.total else f" sampled from {found.total}"
        named = (
            f"record {record + 1}"
            if found.sample.is_whole
            else f"that of {found.kept.where(record)}"
        )
        yield ConfigError(
            f"{sum(n > limit for n in counted)} of {len(chosen)} questions{sampled} are longer than "
            f"{limit} tokens; {named} has {longest}",
            where=f"task.max_prompt_len and {path}",
            fix=f"raise task.max_prompt_len to {longest}, or set task.long_prompts=drop",
        )


def measured_questions(data: MathRecordsArguments, tokenizer_dir: str) -> MeasuredQuestions | None:
    """Returns the numbers of questions and the length of the longest, of those that a plan reads; None if
    they can't be read or counted, which other checks report.
    """
    try:
        files = [
            SampledQuestions(data, file) for file in (data.path, data.eval_path) if file is not None
        ]
        counted, exact = [0], True
        for found in files:
            chosen = sample_of(found.lengths())
            exact &= len(chosen) == found.total
            counted += found.tokens(chosen, tokenizer_dir) or []
    except (ConfigError, DataError, CheckpointError, ZeroDivisionError):
        return None
    if not files or not max(counted):
        return None
    held_out = None if data.eval_path is None else files[-1].total
    return MeasuredQuestions(
        longest=max(counted), exact=exact, total=files[0].total, held_out=held_out
    )


def count_questions(data: MathRecordsArguments) -> int | None:
    """Counts the questions of ``path`` that are trained on, about if a plan reads only some; None: they are
    not here yet, or can't be read, which other checks report.
    """
    if data.path is None or is_hub_name(data.path):
        return None
    try:
        total = SampledQuestions(data, data.path).total
    except (ConfigError, DataError, ZeroDivisionError):
        return None
    return max(0, total - (data.eval_size if data.eval_path is None else 0)) or None


def sampled_warnings(data: MathRecordsArguments, tokenizer_dir: str | None) -> Iterator[str]:
    """Reports how many questions of large files a plan has read and counted the tokens of, and how many
    records filters drop.
    """
    paths = [path for path in (data.path, data.eval_path) if path is not None]
    for path in dict.fromkeys(path for path in paths if not is_hub_name(path)):
        found = SampledQuestions(data, path)
        read, total = len(found.sample.records), found.sample.total
        about = "" if found.sample.is_exact else "about "
        if data.keep:
            yield (
                f"filters ({', '.join(data.keep)}) drop {found.num_dropped:,} of "
                + (f"{total:,} records" if found.sample.is_whole else f"{read:,} records read")
                + f" of {path}"
            )
        if data.long_prompts == DROP and tokenizer_dir is not None:
            yield from _dropped(data, found, path, tokenizer_dir)
        if not found.sample.is_whole:
            yield (
                f"{read:,} of {about}{total:,} records of {path} were read, from its beginning"
                + ", its end and between" * found.sample.is_spread
                + "; a worker reads the others"
            )
        elif tokenizer_dir is not None and len(found.kept) > MAX_SAMPLED_QUESTIONS:
            num_sampled = len(sample_of(found.lengths()))
            yield (
                f"{num_sampled:,} of {len(found.kept):,} questions of {path} were counted in tokens, the "
                "longest texts among them; a worker counts the others before step 1"
            )


def _dropped(
    data: MathRecordsArguments, found: SampledQuestions, path: str, tokenizer_dir: str
) -> Iterator[str]:
    """Reports how many of the questions that were counted are too long."""
    chosen = sample_of(found.lengths())
    with suppress(CheckpointError):  # reported by the check of the directory
        counted = found.tokens(chosen, tokenizer_dir)
        if long := sum(length > data.max_prompt_len for length in counted or ()):
            yield (
                f"{long:,} of {len(chosen):,} questions of {path} are longer than "
                f"{data.max_prompt_len} tokens and are left out (task.long_prompts)"
            )


def sample_of(lengths: Sequence[int], *, most: int | None = None) -> list[int]:
    """Selects positions of at most ``most`` texts, the longest and an even spread; None: of
    MAX_SAMPLED_QUESTIONS.
    """
    most = most or MAX_SAMPLED_QUESTIONS
    if len(lengths) <= most:
        return list(range(len(lengths)))
    half = most // 2
    longest = sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True)[:half]
    spread = [i * len(lengths) // half for i in range(half)]
    return sorted({*longest, *spread})
