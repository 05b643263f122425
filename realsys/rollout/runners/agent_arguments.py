"""Arguments of the agents behind the endpoint, which a plan checks without loading them. No torch,
no aiohttp.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from realsys.api.basics.template_args import reserved_among
from realsys.api.errors import ConfigError, raise_all
from realsys.api.options import option, value_range_problems
from realsys.rollout.conversation.form_choice import check_form
from realsys.rollout.conversation.renderer_choice import check_renderer
from realsys.rollout.environments.environment_arguments import check_url


@dataclass(eq=False, kw_only=True)
class ConversationArguments:
    """Arguments of every agent that speaks to the policy in messages.

    Attributes:
        match: how equal messages must be for a conversation to go on, see message_matching.py.
        keep_thoughts: thoughts of earlier answers stay in the conversation where the chat template
            would drop them; else such a request begins a branch.
        form: how the policy writes thoughts and tool calls, see form_choice.py: one of ANSWER_FORMS, or a
            family whose calls the package renderers reads; empty: as the renderer's family or the chat
            template shows.
        renderer: what turns messages into tokens: ``template``, or a family of the package renderers, see
            package_renderer.py.
        template, template_args: a chat template in place of the tokenizer's, its text or a file where the
            command is given; arguments for it.
        marks_as_text: in whose texts the template's marks are text, see marks_as_text.py.
    """

    timeout_s: float = option(1800.0, "longest episode, before it is scored", unit="seconds", gt=0)
    match: Literal["strict", "tools", "content"] = "tools"
    keep_thoughts: bool = True
    form: str = ""
    renderer: str = "template"
    template: str = ""
    template_args: Mapping[str, Any] = field(default_factory=dict)
    marks_as_text: Literal["tools", "all", "none"] = "tools"
    max_calls: int = option(1000, "most requests of an episode", ge=1)

    def __post_init__(self) -> None:
        for problem in value_range_problems(type(self), vars(self), path="task.agent_args."):
            raise problem
        where = "task.agent_args.renderer"
        check_renderer(self.renderer, template=bool(self.template), where=where)
        check_form(self.form, where="task.agent_args.form")
        if reserved := reserved_among(self.template_args):
            raise ConfigError(
                f"{reserved} is given to the template by realsys itself",
                where="task.agent_args.template_args",
                fix="leave it out",
            )
        if self.template and not any(mark in self.template for mark in ("{{", "{%")):
            raise ConfigError(
                f"{self.template[:80]!r} is no chat template, and no file here",
                where="task.agent_args.template",
                fix="name a file that is here, or give a template's text",
            )


@dataclass(eq=False, kw_only=True)
class EndpointArguments(ConversationArguments):
    """Arguments of every agent behind the endpoint.

    Attributes:
        failed_reward: of an episode whose agent failed after the policy had answered; one that failed
            before is an error, and the question is answered anew.
        with_answer: the task that the agent is given holds the record's answer.
        roles: of an episode with several speakers: each has a key, a conversation and a reward of its own.
        schema: requests for answers that follow a JSON schema: refused, answered as others are, or held to
            it, and then to ``tool_choice`` too, by the embedded engine.
        unserved: requests with pictures, sounds, files, and tools that are no functions: refused, or served
            without them.
        listen: on the loopback interface by HTTP, or on the node's address by HTTPS; none: HTTPS where
            clients come from outside and there are other nodes.
    """

    starting_at_once: int = option(
        8, "episodes that may be between their start and their first request", ge=1
    )
    failed_reward: float = 0.0
    with_answer: bool = False
    roles: tuple[str, ...] = ()
    schema: Literal["refuse", "ignore", "enforce"] = "refuse"
    unserved: Literal["refuse", "drop"] = option(
        "refuse",
        "what becomes of pictures, sounds, files and tools that are no functions in an agent's requests: "
        "refuse answers with status 400, drop leaves them out (a short text stands for a picture)",
    )
    listen: Literal["loopback", "https"] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if len(set(self.roles)) < len(self.roles) or not all(map(str.isidentifier, self.roles)):
            raise ConfigError(
                f"roles are {list(self.roles)}",
                where="task.agent_args.roles",
                fix="use different names of letters, digits and _",
            )


@dataclass(eq=False, kw_only=True)
class ExternalArguments(EndpointArguments):
    """Arguments of ``agent=external``."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.roles:
            raise ConfigError(
                "a client from outside has one conversation with the policy in an episode",
                where="task.agent_args.roles",
                fix="leave it out, or use agent python or command",
            )


def variables(env: Mapping[str, Any]) -> dict[str, str]:
    """Returns environment variables as text.

    Raises:
        ConfigErrors: values that may have been written otherwise than they were read.
    """
    texts = {k: str(v) for k, v in env.items() if isinstance(v, str) or type(v) is int}
    raise_all(
        ConfigError(
            f"the value of variable {name} is {value!r:.80}, which is no text",
            where=f"task.agent_args.env.{name}",
            fix=f"write {name}: {_quoted(value)!r}",
        )
        for name, value in env.items()
        if name not in texts
    )
    return texts


def _quoted(value: Any) -> str:
    """Returns what was probably meant."""
    return "" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


@dataclass(eq=False, kw_only=True)
class CommandArguments(EndpointArguments):
    """Arguments of ``agent=command``.

    Attributes:
        command: program and arguments, as one text or a list; started without a shell.
        env: further environment variables; whole numbers are taken as text.
        keep_logs: logs of agents that ended well stay, too.
    """

    command: str | list[str] = ""
    env: Mapping[str, Any] = field(default_factory=dict)
    keep_logs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.env = variables(self.env)
        if not self.argv:
            raise ConfigError(
                "agent command has no command",
                where="task.agent_args.command",
                fix="give the program, e.g. 'task.agent_args.command=\"python my_agent.py\"'",
            )

    @property
    def argv(self) -> list[str]:
        """The command's words.

        Raises:
            ConfigError: a quotation mark is not closed.
        """
        if not isinstance(self.command, str):
            return list(self.command)
        try:
            return shlex.split(self.command)
        except ValueError as error:
            raise ConfigError(
                f"the command can't be split into words: {error}",
                where="task.agent_args.command",
                fix="close its quotation marks, or give a list",
            ) from error


@dataclass(eq=False, kw_only=True)
class HostedArguments(EndpointArguments):
    """Arguments of agents whose episodes run in processes that stay.

    Attributes:
        python: interpreter with the agent's libraries; empty: that of the worker.
        env: further environment variables of theirs; whole numbers are taken as text.
    """

    python: str = ""
    processes: int = option(1, "how many, episodes in turn", ge=1)
    blocked_s: float = option(
        60.0,
        "longest that an episode may hold up all others of its process, by code that does not await",
        unit="seconds",
        gt=0,
    )
    env: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.env = variables(self.env)


@dataclass(eq=False, kw_only=True)
class PythonArguments(HostedArguments):
    """Arguments of ``agent=python``. ``function``: ``FILE.py:NAME`` or ``MODULE:NAME``."""

    function: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        place, _, name = self.function.rpartition(":")
        if not place or not name.isidentifier():
            raise ConfigError(
                f"function is {self.function!r}",
                where="task.agent_args.function",
                fix="name it as my_agent.py:solve, or my_package.my_module:solve",
            )


@dataclass(eq=False, kw_only=True)
class VerifiersArguments(HostedArguments):
    """Arguments of ``agent=verifiers``.

    Attributes:
        environment: name of an environment that is installed in ``python``, as its own commands take it.
        environment_args: of ``load_environment``; from verifiers 0.4 on the fields of its configuration.
    """

    environment: str = ""
    environment_args: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.environment:
            raise ConfigError(
                "agent verifiers has no environment",
                where="task.agent_args.environment",
                fix="name one that is installed in task.agent_args.python",
            )
        if self.roles:
            raise ConfigError(
                "an environment of verifiers has one conversation with the policy",
                where="task.agent_args.roles",
                fix="leave it out",
            )


@dataclass(eq=False, kw_only=True)
class HarborArguments(ConversationArguments):
    """Arguments of ``agent=harbor``.

    Attributes:
        commands: as calls of a tool ``bash``, or as fenced blocks in the text; empty: calls, where the
            chat template shows tools.
        system: the system message; empty: one that says how commands are given.
        rule: arguments of the reward rule ``harbor``; the task gives its own (task.reward_args.harbor).
    """

    max_turns: int = option(
        20, "most answers of an episode; the commands of the last one are run, too", ge=1
    )
    output_chars: int = option(4000, "most that the policy is shown of one command's output", ge=1)
    commands: Literal["", "calls", "blocks"] = ""
    system: str = ""
    rule: Mapping[str, Any] = field(default_factory=dict)


@dataclass(eq=False, kw_only=True)
class HarborCommandArguments(EndpointArguments):
    """Arguments of ``agent=harbor_command``.

    Attributes:
        command: of bash, in the task's working folder; it finds the policy and the instruction by its
            environment.
        env: further environment variables; whole numbers are taken as text.
        keep_logs: logs of agents that ended well stay, too.
        rule: arguments of the reward rule ``harbor``; the task gives its own (task.reward_args.harbor).
    """

    command: str = option("", 'command of bash, e.g. mini --yolo --task "$REALSYS_INSTRUCTION"')
    env: Mapping[str, Any] = field(default_factory=dict)
    keep_logs: bool = False
    rule: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.env = variables(self.env)
        if not self.command.strip():
            raise ConfigError(
                "agent harbor_command has no command",
                where="task.agent_args.command",
                fix="give a command of bash that starts an agent which is installed on the nodes",
            )
        if self.listen == "https" or self.roles:
            raise ConfigError(
                "an agent in a box reaches the policy by the box's own loopback, as one model",
                where="task.agent_args.listen and roles",
                fix="leave both out",
            )


@dataclass(eq=False, kw_only=True)
class ChatArguments(ConversationArguments):
    """Arguments of ``agent=chat``.

    Attributes:
        system: in front of questions that have no system message of their own.
    """

    max_turns: int = option(8, "most answers of an episode", ge=1)
    system: str = option("", "system message")


@dataclass(eq=False, kw_only=True)
class NemoGymArguments(EndpointArguments):
    """Arguments of ``agent=nemo_gym``.

    Attributes:
        gym_url: of the agent's server, which has ``POST /run``.
        model_port: at which this worker's policy is, for Gym's model server.
    """

    gym_url: str = option("", "of NeMo Gym's agent server, e.g. http://127.0.0.1:8100")
    model_port: int = option(0, "port of the policy for NeMo Gym's model server", ge=0, le=65535)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_url(self.gym_url, "task.agent_args.gym_url", ("http", "https"))
        if self.listen == "https" or self.roles:
            raise ConfigError(
                "NeMo Gym's model server reaches the policy on its own node, as one model",
                where="task.agent_args.listen and roles",
                fix="leave both out",
            )
