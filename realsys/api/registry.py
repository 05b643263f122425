"""Plug-ins by name: interfaces, backends, models, data sets, agents, environments, rewards, experiments.

Built-ins are listed as ``"module:attribute"`` text, so that a login node can check a name without
importing torch; the module is imported when the object is made. Users register their own objects
with the ``register_*`` functions from a file given by ``--import`` or from an entry point of the
group ``realsys.plugins`` (an entry point is imported once, by ``load_plugins``).
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import importlib
import importlib.util
import itertools
import os
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict, Unpack

from realsys.api.basics import plugin_table
from realsys.api.basics.choice import register_kind as register_kind
from realsys.api.basics.plugin_table import BUILTIN as BUILTIN
from realsys.api.basics.plugin_table import check as check
from realsys.api.basics.plugin_table import find as find
from realsys.api.basics.plugin_table import load
from realsys.api.basics.plugin_table import names as names
from realsys.api.basics.plugin_table import register as register
from realsys.api.basics.rule_permissions import RulePermissions
from realsys.api.errors import ConfigError
from realsys.api.model import (
    DatasetAbstraction,
    ModelAbstraction,
    ModelBackend,
    ModelBackendAbstraction,
    ModelInterface,
    ModelInterfaceAbstraction,
)
from realsys.api.plain import from_plain, to_plain

# What the arguments of these built-ins are read into: their classes inherit it, but are modules with torch.
ARGUMENTS: dict[str, dict[str, str]] = {
    "agent": {
        "chat": "realsys.rollout.runners.agent_arguments:ChatArguments",
        "command": "realsys.rollout.runners.agent_arguments:CommandArguments",
        "external": "realsys.rollout.runners.agent_arguments:ExternalArguments",
        "harbor": "realsys.rollout.runners.agent_arguments:HarborArguments",
        "harbor_command": "realsys.rollout.runners.agent_arguments:HarborCommandArguments",
        "nemo_gym": "realsys.rollout.runners.agent_arguments:NemoGymArguments",
        "python": "realsys.rollout.runners.agent_arguments:PythonArguments",
        "verifiers": "realsys.rollout.runners.agent_arguments:VerifiersArguments",
    },
    "environment": {
        "gymnasium": "realsys.rollout.environments.environment_arguments:GymnasiumArguments",
        "mcp": "realsys.rollout.environments.environment_arguments:MCPArguments",
        "openenv": "realsys.rollout.environments.environment_arguments:OpenEnvArguments",
    },
    "interface": {
        "ppo_actor": "realsys.interfaces.interface_arguments:PPOActorArguments",
        "ppo_critic": "realsys.interfaces.interface_arguments:PPOCriticArguments",
        "direct_preference": "realsys.interfaces.interface_arguments:DirectPreferenceArguments",
        "math_reward": "realsys.interfaces.interface_arguments:MathRewardArguments",
        "preference": "realsys.interfaces.interface_arguments:PreferenceArguments",
        "reward_model": "realsys.interfaces.interface_arguments:RewardModelArguments",
        "rollout_end": "realsys.api.registry:NoArguments",
        "sft": "realsys.api.registry:NoArguments",
        "teacher": "realsys.interfaces.interface_arguments:TeacherArguments",
    },
    "backend": {
        "fsdp": "realsys.backends.backend_arguments:FSDPArguments",
        "inference": "realsys.backends.backend_arguments:InferenceArguments",
        "megatron": "realsys.backends.backend_arguments:MegatronArguments",
    },
    "model": {
        "hf_causal_lm": "realsys.models.model_arguments:HFModelArguments",
        "hf_critic": "realsys.models.model_arguments:HFModelArguments",
        "tiny_llama": "realsys.models.model_arguments:TinyLlamaArguments",
        "tokenizer_only": "realsys.models.model_arguments:TokenizerArguments",
    },
    "dataset": {
        "math_prompts": "realsys.data.sources.dataset_arguments:MathRecordsArguments",
        "math_sft": "realsys.data.sources.dataset_arguments:MathSFTArguments",
        "mixture": "realsys.data.sources.dataset_arguments:MixtureArguments",
        "preference_pairs": "realsys.data.sources.dataset_arguments:PreferencePairsArguments",
        "rollout_dump": "realsys.data.sources.dataset_arguments:RolloutDumpArguments",
    },
}
# What the process that makes it gives besides.
CONTEXT: dict[str, tuple[str, ...]] = {
    "model": ("name", "device", "topology", "rank", "groups", "base_seed", "filled"),
    "dataset": ("tokenizer", "seed"),
}
_OF_FILES = "realsys_import_"  # begins the names of modules that are files given by --import
_CONTENT, _REGISTERED = "__realsys_content__", "__realsys_registered__"  # kept in these modules
CORRECT_SCORE = 1.0  # score of a correct answer, unless its rule sets another


class DeclaredPermissions(TypedDict, total=False):
    """Fields of ``RulePermissions``, as ``register_reward`` takes them."""

    network: bool
    programs: bool
    reads: Sequence[str]
    env: Sequence[str]
    trusted: bool
    deadline_s: float
    cpu_s: float
    memory_mib: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class RewardOptions:
    """How a rule is called and read, see ``register_reward``.

    Attributes:
        permissions: what it may do while it scores, and its limits.
        source: module, or file ending in ``.py``, that registers it when it is imported; None: a built-in,
            or one registered where no other process can repeat it (a test, a notebook).
    """

    right: float = CORRECT_SCORE
    batched: bool = False
    permissions: RulePermissions = dataclasses.field(default_factory=RulePermissions)
    source: str | None = None


# Of built-in rules that are functions, or that run the texts of answers in boxes of their own.
_CONTAINED = RewardOptions(permissions=RulePermissions(contained=True))
_BUILT_IN_REWARDS = {
    "code_tests": _CONTAINED,
    "harbor": _CONTAINED,
    "math_verify": _CONTAINED,
    "reasoning_gym": RewardOptions(permissions=RulePermissions(cpu_s=10.0)),
    "verifiers": _CONTAINED,
}
_reward_options: dict[str, RewardOptions] = {}
_imported: list[str] = []  # by ``load_plugins``, in order
_entry_points: list[str] = []  # modules of entry points, in order


@dataclasses.dataclass(frozen=True)
class NoArguments:
    """Arguments of a plug-in that takes none."""


def arguments_class(kind: str, name: str) -> type | None:
    """Returns the dataclass whose fields are the arguments of a plug-in; loads no torch for a built-in.

    A registered class names it in its attribute ``Arguments``, or is itself one. None: only the plug-in
    knows what it takes (a function, ``Arguments = None``, a class with an ``__init__`` of its own or with
    types that only type checkers see).

    Raises:
        UnknownName: no such plug-in.
    """
    if text := ARGUMENTS.get(kind, {}).get(name):
        return load(text)  # type: ignore[no-any-return]
    made_by = find(kind, name)
    named = getattr(made_by, "Arguments", made_by)
    if not isinstance(named, type):
        return None
    maker = next(base for base in named.__mro__ if "__init__" in vars(base))
    if maker is object:
        has_new = any("__new__" in vars(base) for base in named.__mro__[:-1])
        return None if has_new else NoArguments
    if not getattr(vars(maker).get("__dataclass_params__"), "init", False):
        return None
    try:
        argument_types(named)
    except (NameError, AttributeError, TypeError):  # types that only type checkers see
        return None
    return named


@functools.cache
def argument_types(fields_of: type) -> Mapping[str, Any]:
    """Returns the types that arguments are read into, by name; Any: of a type that no plan can hold."""
    hints = typing.get_type_hints(fields_of)
    names = [f.name for f in dataclasses.fields(fields_of) if f.init]
    names += [name for name, kind in hints.items() if isinstance(kind, dataclasses.InitVar)]
    return {name: hints[name] if _is_plain_type(hints[name]) else Any for name in names}


def _is_plain_type(kind: Any) -> bool:
    """True for a type whose values ``from_plain`` reads."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Literal or kind in (Any, object):
        return True
    if origin in (types.UnionType, typing.Union):
        return all(map(_is_plain_type, inner))
    made = origin or kind
    if made in (list, tuple, set, frozenset, Sequence) or (
        isinstance(made, type) and issubclass(made, Mapping)
    ):
        return all(one is ... or _is_plain_type(one) for one in inner)
    plain = (str, int, float, bool, types.NoneType)
    return made in plain or (
        isinstance(made, type) and (issubclass(made, enum.Enum) or dataclasses.is_dataclass(made))
    )


def present_arguments(kind: str, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments by their present names: a plan may be of before they were renamed."""
    renamed = getattr(arguments_class(kind, name), "renamed", dict)
    return dict(renamed(args))


def read_arguments(kind: str, name: str, args: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a plug-in, each as its field's type: a table as the dataclass declared.

    Raises:
        ConfigError: the value of one is of another type.
    """
    read, fields_of = present_arguments(kind, name, args), arguments_class(kind, name)
    for key, type_ in (argument_types(fields_of) if fields_of else {}).items():
        if key in read and type_ is not Any:
            read[key] = from_plain(type_, to_plain(read[key]), where=f"{kind} {name!r}, {key}")
    return read


def _make(
    kind: str, type_: str, args: Mapping[str, Any], context: Mapping[str, Any] | None = None
) -> Any:
    factory = find(kind, type_)
    args = {**read_arguments(kind, type_, args), **(context or {})}
    try:
        return factory(**args)
    except TypeError as error:
        if error.__traceback__ is None or error.__traceback__.tb_next is not None:
            raise  # raised inside the function: the arguments fit
        raise ConfigError(
            f"{kind} {type_!r} does not take these arguments: {error}",
            where=f"{kind} abstraction args {sorted(args)}",
            fix="use the arguments (fields) that it declares",
        ) from error


def register_interface(name: str, cls: type[ModelInterface]) -> None:
    """Makes ``ModelInterfaceAbstraction(name, args)`` mean ``cls(**args)``."""
    register("interface", name, cls)


def make_interface(cfg: ModelInterfaceAbstraction) -> ModelInterface:
    """Makes the interface that ``cfg`` describes."""
    return _make("interface", cfg.type_, cfg.args)  # type: ignore[no-any-return]


def register_backend(name: str, cls: type[ModelBackend]) -> None:
    """Makes ``ModelBackendAbstraction(name, args)`` mean ``cls(**args)``."""
    register("backend", name, cls)


def make_backend(cfg: ModelBackendAbstraction) -> ModelBackend:
    """Makes the backend that ``cfg`` describes."""
    return _make("backend", cfg.type_, cfg.args)  # type: ignore[no-any-return]


def register_model(name: str, factory: Callable[..., Any]) -> None:
    """Makes ``ModelAbstraction(name, args)`` mean ``factory(name=…, device=…, **args)`` → Model."""
    register("model", name, factory)


def make_model(cfg: ModelAbstraction, **context: Any) -> Any:
    """Makes the model that ``cfg`` describes; ``context`` is name, device, … of this process."""
    return _make("model", cfg.type_, cfg.args, context)


def register_dataset(name: str, cls: Callable[..., Any]) -> None:
    """Makes ``DatasetAbstraction(name, args)`` mean ``cls(tokenizer=…, seed=…, **args)``."""
    register("dataset", name, cls)


def make_dataset(cfg: DatasetAbstraction, **context: Any) -> Any:
    """Makes the data set that ``cfg`` describes."""
    return _make("dataset", cfg.type_, cfg.args, context)


def register_agent(name: str, cls: Callable[..., Any]) -> None:
    """Registers an agent class."""
    register("agent", name, cls)


def make_agent(name: str, **args: Any) -> Any:
    """Makes the agent registered under ``name``."""
    return _make("agent", name, args)


def register_environment(name: str, cls: Callable[..., Any]) -> None:
    """Registers an environment class."""
    register("environment", name, cls)


def make_environment(name: str, **args: Any) -> Any:
    """Makes the environment registered under ``name``."""
    return _make("environment", name, args)


def register_reward(
    name: str,
    rule: Callable[..., Any],
    *,
    right: float = CORRECT_SCORE,
    batched: bool = False,
    **permissions: Unpack[DeclaredPermissions],
) -> None:
    """Registers a reward rule: what it looks at and may return stands in realsys.api.basics.reward.

    Each answer is scored in a process of its own, which may read Python's packages and the folder of the
    rule's file, and nothing else (docs/rewards.md): what more it needs is declared.

    Args:
        rule: a function, blocking or ``async``; or a dataclass, whose fields are the rule's arguments and
            whose instances are called.
        right: lowest score of a correct answer, by which accuracy is counted; a rule that returns a part
            ``correct`` decides itself.
        batched: it gets a list of each field, and returns a list.
        permissions: fields of ``RulePermissions``: ``network=True``, ``programs=True``, ``reads=[…]``,
            ``env=[…]``; limits of a call ``deadline_s``, ``cpu_s``, ``memory_mib``; or ``trusted=True``.
            Those of a class with an attribute or property ``permissions`` come first.
    Raises:
        ConfigError: another object has that name; a permission is of another type or range.
    """
    may = RulePermissions.of_plain(permissions)
    register("reward", name, rule)
    _reward_options[name] = RewardOptions(
        right=right, batched=batched, permissions=may, source=_registering_module()
    )


def _registering_module() -> str | None:
    """Returns the module that is being imported, as another process could import it; None: none is."""
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_name != "<module>":
        frame = frame.f_back  # type: ignore[assignment]
    names = frame.f_globals if frame is not None else {}
    name, file = names.get("__name__", "__main__"), names.get("__file__")
    if name.startswith(_OF_FILES) and file:
        return str(file)
    return (
        None if name == "__main__" or getattr(names.get("__spec__"), "name", "") != name else name
    )


def find_reward(name: str) -> Callable[..., Any]:
    """Returns the reward rule registered under ``name``."""
    return find("reward", name)  # type: ignore[no-any-return]


def make_reward(name: str, **args: Any) -> Callable[..., Any]:
    """Makes the rule that is a dataclass with these arguments."""
    return _make("reward", name, args)  # type: ignore[no-any-return]


def imported_plugins() -> tuple[str, ...]:
    """Returns the files and modules that ``load_plugins`` has imported here, in order."""
    return tuple(_imported)


def entry_point_modules() -> tuple[str, ...]:
    """Returns the modules of installed plug-ins that ``load_plugins`` has imported here, in order."""
    return tuple(_entry_points)


def reward_permissions(name: str, rule: Any) -> RulePermissions:
    """Returns what a rule may do: its own ``permissions``, as made with its arguments, else as registered.

    Raises:
        ConfigError: they are no ``RulePermissions``.
    """
    found = getattr(rule, "permissions", None)
    if found is None:
        return reward_options(name).permissions
    if not isinstance(found, RulePermissions):
        raise ConfigError(
            f"permissions of reward rule {name!r} are {found!r:.100}",
            where=f"class of reward {name!r}",
            fix="give realsys.api.basics.rule_permissions.RulePermissions(…), also as a property",
        )
    if found.contained and name not in plugin_table.BUILTIN["reward"]:
        raise ConfigError(
            f"permissions of reward rule {name!r} say contained=True, which only built-in rules may",
            where=f"class of reward {name!r}",
            fix="say trusted=True, of which a plan and the status tell, or leave it out",
        )
    return found


def reward_options(name: str) -> RewardOptions:
    """Returns how the rule ``name`` is called and read."""
    return _reward_options.get(name) or _BUILT_IN_REWARDS.get(name) or RewardOptions()


def register_filter(name: str, function: Callable[[dict[str, Any]], bool]) -> None:
    """Registers a filter of records: ``function(record)`` → whether to keep it."""
    register("filter", name, function)


def register_transform(name: str, function: Callable[[dict[str, Any]], Mapping[str, Any]]) -> None:
    """Registers a transform of records: ``function(record)`` → the record to use in its place."""
    register("transform", name, function)


def register_experiment(name: str, recipe: Callable[[], Any]) -> None:
    """Makes ``realsys launch NAME`` run what ``recipe`` makes.

    Args:
        recipe: an experiment's class (a frozen dataclass, see realsys.api.experiment), or a function
            without arguments that returns an instance, whose values then are the defaults.
    """
    register("experiment", name, recipe)


def make_experiment(name: str, **options: Any) -> Any:
    """Makes the experiment registered under ``name`` with these options."""
    return _make("experiment", name, {}, options)


def load_plugins(imports: Iterable[str] = (), *, if_changed: bool = False) -> None:
    """Imports the entry points of group ``realsys.plugins`` and the files or modules in ``imports``.

    Args:
        if_changed: also those files that were imported before and have another content now, in place of
            what they registered then: for a launcher that lives long, never for a worker.
    Raises:
        ConfigError: an import fails; carries the reason.
    """
    files = (f for folder in sys.path for f in Path(folder).glob("*-info/entry_points.txt"))
    if any(b"realsys.plugins" in file.read_bytes() for file in files if os.access(file, os.R_OK)):
        import importlib.metadata  # which takes much longer than this look

        for point in importlib.metadata.entry_points(group="realsys.plugins"):
            module = point.value.partition(":")[0]
            _import(module, origin=f"entry point {point.name!r}")
            if module not in _entry_points:
                _entry_points.append(module)
    for name in imports:
        _import(name, origin=f"--import {name}", if_changed=if_changed)
        if name not in _imported:
            _imported.append(name)


def _import(name: str, *, origin: str, if_changed: bool = False) -> None:
    before = {kind: dict(table) for kind, table in plugin_table.registered.items()}
    options = dict(_reward_options)
    try:
        if name.endswith(".py"):
            _import_file(Path(name).resolve(), if_changed=if_changed)
        else:
            importlib.import_module(name)
    except (Exception, SystemExit) as error:  # user code may raise anything
        for kind, table in before.items():  # a plug-in is registered whole or not at all
            plugin_table.registered[kind].clear()
            plugin_table.registered[kind].update(table)
        _reward_options.clear()
        _reward_options.update(options)
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"importing it failed: {type(error).__name__}: {error}{_line_of(error)}",
            where=origin,
            fix="repair the file, or give a path ending in .py or an importable module name",
        ) from error


def _import_file(path: Path, *, if_changed: bool) -> None:
    """Runs a plug-in's file as a module of its own, unless that was done."""
    name = _module_of_file(path)
    known = sys.modules.get(name)
    if known is not None and not if_changed:
        return
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or not path.is_file():
        raise FileNotFoundError(f"no file {path}")
    content = path.read_bytes()
    if known is not None:
        if getattr(known, _CONTENT, content) == content:
            return
        for kind, registered in getattr(known, _REGISTERED).items():
            for one in registered:
                plugin_table.registered[kind].pop(one, None)
                if kind == "reward":
                    _reward_options.pop(one, None)
    module = importlib.util.module_from_spec(spec)
    before = {kind: set(table) for kind, table in plugin_table.registered.items()}
    sys.modules[name] = module
    try:
        # Not by the loader: its byte code is that of an earlier content of this size and second.
        exec(compile(content, path, "exec", dont_inherit=True), vars(module))
    except BaseException:
        sys.modules.pop(name)
        if known is not None:
            sys.modules[name] = known
        raise
    now = {kind: set(table) - before[kind] for kind, table in plugin_table.registered.items()}
    vars(module).update({_CONTENT: content, _REGISTERED: now})


def _module_of_file(path: Path) -> str:
    """Returns the module's name of a file given by ``--import``: of its stem, and a number for all but the
    first file of that stem. Files imported in one order get the same names in every process."""
    for number in itertools.count(1):
        name = f"{_OF_FILES}{path.stem}" + (f"_{number}" if number > 1 else "")
        if getattr(sys.modules.get(name), "__file__", str(path)) == str(path):
            break
    return name


def _line_of(error: BaseException) -> str:
    """Where user code raised ``error``: the innermost line that is not of the import system."""
    at, place = error.__traceback__, ""
    while at is not None and not isinstance(error, SyntaxError):  # which names its own
        name = at.tb_frame.f_code.co_filename
        if name != __file__ and not name.startswith("<frozen"):
            place = f" ({name}, line {at.tb_lineno})"
        at = at.tb_next
    return place
