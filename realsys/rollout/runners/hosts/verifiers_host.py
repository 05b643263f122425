"""Runs rollouts of an environment of verifiers; standard library, verifiers and openai only.

``python verifiers_host.py play ENVIRONMENT ARGUMENTS``           as function_host.py does functions
``python verifiers_host.py export ENVIRONMENT ARGUMENTS FOLDER LIMIT``    writes its tasks as records

ARGUMENTS is a JSON object. An environment that has ``load_environment`` is of verifiers before 0.4; others
are tasksets of 0.4 (``verifiers.v1``), whose arguments are the fields of an ``EnvConfig``.
"""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import os
import sys
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Protocol

ROW = "verifiers"  # field of a record: the environment's own row, or task
SPLITS = ("train", "eval")
RENEW_AFTER = 200  # episodes; verifiers 0.4 keeps a client for each as long as it serves
_OURS = ("reward", "rewards", "answer")  # names that mean something else in a result
Row = dict[str, Any]


class UnusableEnvironment(Exception):
    """The environment can't be trained on here; says why, and what to do."""


class HostedEnvironment(Protocol):
    """An environment of either kind."""

    def rows(self, split: str) -> Iterable[tuple[Row, str, Any]]:
        """Yields each task with its question as text and the known answer, None if it has none."""

    async def play(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one rollout; returns its reward and figures. Raises what went wrong."""

    async def close(self) -> None:
        """Frees what it holds."""


def open_environment(name: str, arguments: Mapping[str, Any]) -> HostedEnvironment:
    """Loads an environment by its name; an owner before ``/`` and a version behind ``@`` are left out.

    Raises:
        UnusableEnvironment: this verifiers is of the other kind, or the environment needs what is not here.
        Also whatever loading it raises.
    """
    verifiers = importlib.import_module("verifiers")
    module = _module_of(name)
    version = getattr(verifiers, "__version__", "?")
    found = _has_loader(module)
    if not found:
        try:
            v1 = importlib.import_module("verifiers.v1")
            resolved = v1.resolve_env_config
        except (ImportError, AttributeError):
            lacks = "is not installed" if found is None else "has no load_environment"
            raise UnusableEnvironment(
                f"{name} {lacks} beside verifiers {version}, which knows no tasksets of 0.4"
            ) from None
        return TasksetEnvironment(v1, resolved(taskset_config(v1, name, arguments)))
    load = getattr(verifiers, "load_environment", None)
    if load is None:
        raise UnusableEnvironment(
            f"{name} has load_environment, which verifiers {version} does not read any more; "
            "install 'verifiers<0.4' for it"
        )
    return ClassicEnvironment(load(name, **arguments))


def _module_of(name: str) -> str:
    return name.rpartition("/")[2].partition("@")[0].replace("-", "_")


def _beside() -> Any:
    """Returns function_host.py, which is beside this file, whether that is run or imported."""
    return importlib.import_module(
        ".function_host" if __package__ else "function_host", __package__
    )


def _has_loader(module: str) -> bool | None:
    """Returns whether a module has ``load_environment``; None: there is no such module."""
    try:
        return hasattr(importlib.import_module(module), "load_environment")
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        return None  # it may be one of verifiers' own tasksets


# ---- before 0.4 ---------------------------------------------------------------------------------


class ClassicEnvironment:
    """An environment of verifiers before 0.4, from 0.1.11 on."""

    def __init__(self, environment: Any) -> None:
        if getattr(environment, "requires_group_rollouts", False):
            raise UnusableEnvironment(
                "its rubric scores groups of rollouts together; only environments whose rollouts are "
                "scored each by itself can be trained on"
            )
        self._environment = environment
        self._chat = importlib.import_module("verifiers.clients").OpenAIChatCompletionsClient

    def rows(self, split: str) -> Iterator[tuple[Row, str, Any]]:
        """Yields the rows of its data set, as its own evaluation takes them."""
        environment = self._environment
        if split == "eval" and not _has_eval(environment):
            return
        data = environment.get_dataset() if split == "train" else environment.get_eval_dataset()
        for row in data:
            yield dict(row), messages_text(row.get("prompt") or ""), row.get("answer")

    async def play(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Runs one rollout by its own client of Chat Completions, and scores it by its rubric."""
        openai = importlib.import_module("openai")
        async with openai.AsyncOpenAI(base_url=order["base_url"], api_key=order["key"]) as client:
            output = await self._environment.run_rollout(
                row_of(order), self._chat(client), order["model"], {}
            )
        if output.get("error"):
            raise RuntimeError(f"the environment reports {output['error']}")
        return result_of(
            output["reward"], output.get("metrics") or {}, cut=bool(output.get("is_truncated"))
        )

    async def close(self) -> None:
        """Runs its handlers of the end."""
        await self._environment._teardown()


def _has_eval(environment: Any) -> bool:
    environment.build_eval_dataset()
    return environment.eval_dataset is not None


# ---- 0.4 ----------------------------------------------------------------------------------------


@dataclass(eq=False)
class _Serving:
    """An environment of 0.4 that is ready for episodes, in a task of its own."""

    environment: Any
    task: asyncio.Task[None] | None = None
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    unused: asyncio.Event = field(default_factory=asyncio.Event)
    started: int = 0
    running: int = 0

    async def serve(self) -> None:
        """Keeps it ready until nobody uses it."""
        try:
            async with self.environment.serving():
                self.ready.set()
                await self.unused.wait()
        finally:
            self.ready.set()


class TasksetEnvironment:
    """A taskset of verifiers 0.4 and the harness that plays it."""

    def __init__(self, v1: Any, config: Any) -> None:
        self._v1, self._config = v1, config
        self._environment = v1.load_environment(config)
        task = v1.task_type(config.taskset.id)
        self._task, self._data = task, task.data_type()
        self._role = policy_role(v1, config)
        self._serving: _Serving | None = None
        self._ending: set[asyncio.Task[None]] = set()

    def rows(self, split: str) -> Iterator[tuple[Row, str, Any]]:
        """Yields the data of its tasks; it has no split for evaluation."""
        if split == "eval":
            return
        for task in self._environment.taskset:
            data = task.data
            text = messages_text([data.system_prompt or "", data.prompt_text])
            yield (
                data.model_dump(mode="json", exclude_none=True),
                text,
                getattr(data, "answer", None),
            )

    async def play(self, order: Mapping[str, Any]) -> dict[str, Any]:
        """Plays one episode; all that its harness asks goes through verifiers' own interception."""
        task = self._task(self._data.model_validate(row_of(order)), self._config.taskset.task)
        client = self._v1.EvalClientConfig(
            base_url=order["session_url"], api_key_var="REALSYS_NO_KEY"
        )
        context = self._v1.ModelContext(model=order["model"], client=client)
        async with self._used() as environment:
            episode = await environment.run_episode(task, context)
        traces = [trace for trace in episode.traces if trace.agent.name == self._role]
        failed = [e for t in episode.traces if not t.ok for e in t.errors] + list(episode.errors)
        if not episode.ok or not traces:
            why = f"{failed[-1].type}: {failed[-1].message}" if failed else "it has no trace"
            raise RuntimeError(f"the environment reports {why}")
        return result_of(
            sum(trace.reward for trace in traces) / len(traces),
            {
                **{name: reward.value for name, reward in traces[-1].rewards.items() if reward},
                **traces[-1].metrics,
            },
            cut=any(trace.is_truncated for trace in traces),
        )

    @asynccontextmanager
    async def _used(self) -> AsyncIterator[Any]:
        """Gives an environment that serves; after many episodes a new one."""
        if self._serving is None or self._serving.started >= RENEW_AFTER:
            self._retire()
            self._serving = _Serving(self._v1.load_environment(self._config))
            self._serving.task = asyncio.create_task(self._serving.serve(), name="serving")
        serving = self._serving
        serving.started += 1
        serving.running += 1
        try:
            await serving.ready.wait()
            if serving.task is not None and serving.task.done():  # it could not start
                self._serving = None if self._serving is serving else self._serving
                serving.task.result()
            yield serving.environment
        finally:
            serving.running -= 1
            if serving is not self._serving and not serving.running:
                serving.unused.set()

    def _retire(self) -> None:
        """Lets the present one end when its last episode has."""
        old, self._serving = self._serving, None
        if old is not None and old.task is not None:
            self._ending.add(old.task)
            old.task.add_done_callback(self._ending.discard)
            if not old.running:
                old.unused.set()

    async def close(self) -> None:
        """Ends all that serves."""
        self._retire()
        await asyncio.gather(*self._ending, return_exceptions=True)


def taskset_config(v1: Any, name: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns an ``EnvConfig``'s fields, with defaults that need no account and run no code on this node.

    A seat whose harness executes what the policy writes must say where (``runtime``).
    """
    given = dict(arguments)
    given["taskset"] = {**given.get("taskset", {}), "id": name}
    seats = v1.resolve_env_config(json.loads(json.dumps(given)))
    default = v1.default_harness_id(name)
    for seat, config in seats:
        if not isinstance(config, v1.AgentConfig):
            continue
        own = dict(given.get(seat) or {})
        if config.harness is None and default == "bash":
            own["harness"] = {"id": "null"}
        if "runtime" not in own:
            used = own.get("harness") or {"id": default}
            ident = config.harness.id if config.harness is not None else used["id"]
            harness = v1.load_harness(v1.harness_config_type(ident).model_validate({"id": ident}))
            if harness.EXECUTES_CODE:
                raise UnusableEnvironment(
                    f"harness {ident!r} of seat {seat!r} runs what the policy writes: say where, e.g. "
                    f"task.agent_args.environment_args.{seat}.runtime.type=docker"
                )
            own["runtime"] = {"type": "subprocess"}
        given[seat] = own
    return given


def policy_role(v1: Any, config: Any) -> str:
    """Returns the seat that the policy plays. Raises UnusableEnvironment: there is none, or several."""
    seats = [n for n, c in config if isinstance(c, v1.AgentConfig) and c.client is None]
    if len(seats) != 1:
        raise UnusableEnvironment(
            f"the policy would play {len(seats)} seats ({', '.join(seats)}), and one has a reward: give "
            "the others a client and a model of their own"
        )
    return str(seats[0])


# ---- both ---------------------------------------------------------------------------------------


def row_of(order: Mapping[str, Any]) -> Row:
    """Returns the environment's row of an order. Raises ValueError: the record has none."""
    row = order["task"].get(ROW)
    if not isinstance(row, dict):
        raise ValueError(f"the record has no field {ROW!r}; records come from export_verifiers")
    return dict(row)


def messages_text(prompt: Any) -> str:
    """Returns the text of a prompt: as it is, or of its messages, one below the other."""
    if isinstance(prompt, str):
        return prompt
    texts = [part if isinstance(part, str) else _content(part.get("content")) for part in prompt]
    return "\n\n".join(text for text in texts if text)


def _content(content: Any) -> str:
    if isinstance(content, list):  # parts; pictures have no text
        return "\n".join(str(part.get("text") or "") for part in content)
    return str(content or "")


def result_of(reward: Any, figures: Mapping[str, Any], *, cut: bool) -> dict[str, Any]:
    """Returns a result for the host's line. Figures that are no finite numbers are left out; the reward is
    as it came: what becomes of one that is no finite number is decided as for a function's."""
    read = _beside()._numbers
    named = {f"{name}_" if name in _OURS else name: x for name, x in figures.items()}
    plain = {name: read.plain_number(x) for name, x in named.items() if read.is_number(x)}
    numbers = {name: x for name, x in plain.items() if math.isfinite(x)}
    return {**numbers, "truncated": float(cut), "reward": reward}


def records_of(environment: HostedEnvironment, split: str) -> Iterator[dict[str, Any]]:
    """Yields the records of a split, as ``task=verifiers`` reads them."""
    for number, (row, prompt, answer) in enumerate(environment.rows(split)):
        record: dict[str, Any] = {"prompt": prompt or "(the environment begins)", "number": number}
        if isinstance(answer, str | int | float):
            record["answer"] = str(answer)
        yield {**record, ROW: row}


def export(environment: HostedEnvironment, folder: Path, limit: int) -> dict[str, int]:
    """Writes ``train.jsonl`` and, if there are such tasks, ``eval.jsonl``; returns how many each has.

    Raises:
        TypeError: a row holds what JSON does not.
    """
    written = {}
    for split in SPLITS:
        part = folder / f"{split}.jsonl.part"
        with part.open("w", encoding="utf-8") as file:
            count = 0
            for record in islice(records_of(environment, split), limit or None):
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                count += 1
        if count:
            part.replace(folder / f"{split}.jsonl")
            written[split] = count
        else:
            part.unlink()
    return written


async def _play(name: str, arguments: Mapping[str, Any]) -> None:
    host = _beside().Host.of_this_process()
    environment = open_environment(name, arguments)
    host.use_frames_of(_module_of(name))
    try:
        await host.run(environment.play)
    finally:
        await environment.close()


def main(argv: list[str]) -> None:
    """Runs one of the two commands."""
    sys.path.append(os.getcwd())  # for environments that are not installed
    os.environ["PATH"] = os.pathsep.join(  # 0.4 starts its harnesses by uv
        [str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    )
    command, name, arguments = argv[0], argv[1], json.loads(argv[2])
    if command == "play":
        asyncio.run(_play(name, arguments))
        os._exit(0)  # threads of environments may still run
    out = sys.stdout
    sys.stdout = sys.stderr  # what environments print
    written = export(open_environment(name, arguments), Path(argv[3]), int(argv[4]))
    out.write(json.dumps(written) + "\n")


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UnusableEnvironment as problem:
        sys.exit(str(problem))
