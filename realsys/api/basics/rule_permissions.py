"""What a reward rule may do while it scores an answer, and its limits. Pure values.

    register_reward("on_topic", on_topic, network=True, env=["TOPIC_KEY"])

A dataclass may have it as an attribute or property ``permissions``, which may depend on its arguments.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from realsys.api.errors import ConfigError

CERTIFICATES = ("SSL_CERT_FILE", "SSL_CERT_DIR")  # what a rule that opens connections gets besides
LONGEST_DEADLINE_S = 600.0  # reward workers that score nothing for 15 minutes are started again


@dataclass(frozen=True, kw_only=True)
class RulePermissions:
    """Where a rule runs, what it may reach there, and the limits of one call. The default: nothing.

    Attributes:
        network: it may open connections (IPv4, IPv6).
        programs: it may start programs and processes; those that it leaves are killed.
        reads: files and folders that it reads, besides Python's packages and its own folder.
        env: environment variables that it gets, besides PATH, HOME, LANG and the like.
        trusted: it runs in the worker itself, without walls or limits, e.g. since it holds a GPU.
        contained: it runs in the worker, and texts of the policy in boxes of its own (built-in rules).
        deadline_s: limit of one call, in seconds. Of an ``async`` rule its own ``call_s`` holds.
        cpu_s: computing time of one call, in seconds.
        memory_mib: memory of one call beyond what the rule has loaded, in MiB.
    """

    network: bool = False
    programs: bool = False
    reads: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    trusted: bool = False
    contained: bool = False
    deadline_s: float = 60.0
    cpu_s: float = 30.0
    memory_mib: int = 2048

    def __post_init__(self) -> None:
        for name in ("reads", "env"):
            given = getattr(self, name)
            if isinstance(given, str) or not all(isinstance(text, str) for text in given):
                raise _error(f"{name} is {given!r}", f"give a list of texts, e.g. {name}=[…]")
            object.__setattr__(self, name, tuple(given))
        if not 0 < self.deadline_s <= LONGEST_DEADLINE_S:
            fix = f"use more than 0 and at most {LONGEST_DEADLINE_S:g} seconds"
            raise _error(f"deadline_s is {self.deadline_s:g}", fix)
        if not 0 < self.cpu_s <= LONGEST_DEADLINE_S:
            fix = f"use more than 0 and at most {LONGEST_DEADLINE_S:g} seconds"
            raise _error(f"cpu_s is {self.cpu_s:g}", fix)
        if not 16 <= self.memory_mib <= 1 << 20:
            fix = "use 16 to 1048576 MiB; a rule that needs a GPU is trusted=True"
            raise _error(f"memory_mib is {self.memory_mib}", fix)

    def deadline_of(self, num_answers: int) -> float:
        """Returns the limit of a call with so many answers, in seconds."""
        return min(self.deadline_s * num_answers, LONGEST_DEADLINE_S)

    def computing_of(self, num_answers: int) -> float:
        """Returns the computing time of a call with so many answers, in seconds."""
        return min(self.cpu_s * num_answers, LONGEST_DEADLINE_S)

    @property
    def runs_here(self) -> bool:
        """True if it runs in the process that has the answers."""
        return self.trusted or self.contained

    def declared(self) -> dict[str, Any]:
        """Returns what differs from the default, as ``register_reward`` takes it."""
        default = RulePermissions()
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) != getattr(default, f.name)
        }

    def plain(self) -> dict[str, Any]:
        """Returns it as JSON's values."""
        return {**asdict(self), "reads": list(self.reads), "env": list(self.env)}

    @classmethod
    def of_plain(cls, values: Mapping[str, Any]) -> RulePermissions:
        """Reads what ``plain`` gave."""
        return cls(**values)


def registration_line(name: str, function: str, permissions: RulePermissions) -> str:
    """Returns the line that registers a rule with these permissions."""
    words = ", ".join([_quoted(name), function, *_words(permissions)])
    return f"register_reward({words})"


def shown_permissions(permissions: RulePermissions) -> str:
    """Returns the line of a class that gives its rule these permissions."""
    return f"permissions = RulePermissions({', '.join(_words(permissions))})"


def _words(permissions: RulePermissions) -> list[str]:
    return [
        f"{key}=[{', '.join(map(_quoted, value))}]"
        if isinstance(value, tuple)
        else f"{key}={value!r}"
        for key, value in permissions.declared().items()
    ]


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _error(what: str, fix: str) -> ConfigError:
    return ConfigError(f"of a reward rule, {what}", where="register_reward(…)", fix=fix)
