"""Teachers in the graph of a run: frozen policies whose log-probs of its answers pull the policy (pure).

actor_gen ─┬─ rew_inf ───────┬─ actor_train
           └─ <teacher>_inf ─┘
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from experiments.parts.model_files import model_problems, reader_problems
from realsys.api.dataflow import MFCDef
from realsys.api.errors import ConfigError
from realsys.api.model import ModelInterfaceAbstraction
from realsys.api.options import ModelOptions, option

ROLE = "teacher_"  # and the teacher's name


@dataclass(frozen=True, kw_only=True)
class TeacherOptions(ModelOptions):
    """A frozen policy with the tokenizer of the one that learns."""

    backend: str = option("inference", "registered backend")
    weight: float = option(1.0, "of what it teaches", gt=0)
    top_k: int = option(
        0,
        "0: the reverse KL, by the tokens that were drawn, in their advantages; above: the forward KL over "
        "its so many most probable tokens, in the loss",
        ge=0,
    )


def teacher_roles(teachers: Mapping[str, TeacherOptions]) -> tuple[str, ...]:
    """Returns the roles of the teachers, in the order of their names."""
    return tuple(ROLE + name for name in sorted(teachers))


def taught_calls(
    calls: Sequence[MFCDef],
    teachers: Mapping[str, TeacherOptions],
    make: Callable[..., MFCDef],
) -> tuple[MFCDef, ...]:
    """Adds the calls of the teachers before the policy's update, which reads what they write."""
    update = next(call for call in calls if call.name == "actor_train")
    args = update.interface_impl.args
    kept = tuple(key for key in update.input_keys if key.startswith("packed_kept_"))
    asked, read = [], list(update.input_keys)
    for name, teacher in sorted(teachers.items()):
        keys = {made: f"packed_teacher_{made}_{name}" for made in _made(teacher)}
        given = {"gen": args["gen"], "top_k": teacher.top_k}
        asked.append(
            make(
                f"{ROLE}{name}_inf",
                ROLE + name,
                "inference",
                ModelInterfaceAbstraction("teacher", given),
                input_keys=("packed_input_ids", *(() if teacher.top_k else kept)),
                output_keys=tuple(keys.values()),
                output_key_remap=keys,
            )
        )
        read += keys.values()
    weights = {
        "teachers": {f"packed_teacher_logprobs_{n}": t.weight for n, t in _by(teachers, top=False)},
        "forward_teachers": {n: t.weight for n, t in _by(teachers, top=True)},
    }
    taught = replace(
        update,
        input_keys=tuple(read),
        interface_impl=replace(update.interface_impl, args={**args, **weights}),
    )
    at = calls.index(update)
    return (*calls[:at], *asked, taught, *calls[at + 1 :])


def _made(teacher: TeacherOptions) -> tuple[str, ...]:
    return ("top_ids", "top_logprobs") if teacher.top_k else ("logprobs",)


def _by(teachers: Mapping[str, TeacherOptions], *, top: bool) -> list[tuple[str, TeacherOptions]]:
    return [(name, t) for name, t in sorted(teachers.items()) if bool(t.top_k) == top]


def teacher_problems(
    teachers: Mapping[str, TeacherOptions],
    *,
    actor_path: str | None,
    longest: int,
    trains: bool,
    needed: bool,
) -> Iterator[ConfigError]:
    """Yields teachers that can't be asked about the policy's tokens, or change nothing.

    Args:
        longest: tokens of the longest prompt and answer together.
        needed: nothing else teaches the policy.
    """
    if needed and not teachers:
        yield ConfigError(
            "with algorithm.advantage=none the score teaches nothing, and there is no teacher",
            where="algorithm.advantage and teachers",
            fix="set teachers.NAME.path=<Hugging Face directory>, or another advantage, e.g. grpo",
        )
    if teachers and not trains:
        yield ConfigError(
            "teachers have no effect: nothing trains with this schedule",
            where="teachers and schedule",
            fix="leave teachers out, or use schedule=sync",
        )
    for name, teacher in sorted(teachers.items()):
        where = f"teachers.{name}"
        if not name.isidentifier():
            yield ConfigError(
                f"{name!r} can't name a teacher", where=where, fix="use letters, digits and _"
            )
        if teacher.path is None:
            yield ConfigError(
                f"{where}.path is not given",
                where=where,
                fix=f"set {where}.path=<Hugging Face directory>",
            )
            continue
        if actor_path is None:
            yield ConfigError(
                "actor.path is not given, and a teacher needs the policy's tokenizer",
                where=f"{where} and actor.path",
                fix="set actor.path=<Hugging Face directory>",
            )
            continue
        broken = list(model_problems(teacher, where))
        yield from broken
        if not broken:
            yield from reader_problems(
                "the teacher", teacher.path, actor_path, where=where, longest=longest
            )
