"""What Slurm says of partitions, nodes and my accounts, beyond sinfo's shapes (pure, but for ask_facts).

For `realsys clusters init` and `realsys doctor`: who may use a partition and whether it starts jobs, which
nodes are out and why, how much of a node's memory is the system's own, which accounts and QOS are mine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from launcher.slurm.query.states import NODE_IS_OUT
from launcher.slurm.query.waiting import one_line
from launcher.slurm.slurm_commands import run_slurm, said
from realsys.api.errors import ClusterError, ConfigError
from realsys.slurm.hostlist import expand

_ANY = ("ALL", "(null)", "N/A", "NONE", "UNLIMITED", "")
_ACCOUNT_FIELDS = ("Account", "Partition", "QOS", "DefaultQOS", "DefaultAccount")


@dataclass(frozen=True, kw_only=True)
class PartitionFacts:
    """One line of `scontrol show partition --oneliner`. Empty and None: no such limit."""

    state: str = "UP"
    allow_accounts: tuple[str, ...] = ()
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] = ()
    deny_qos: tuple[str, ...] = ()
    default_time: str | None = None
    max_mib_per_node: int | None = None
    max_mib_per_cpu: int | None = None

    def may_use(self, account: str | None, qos: str | None) -> Iterator[str]:
        """Why a job of this account and QOS never starts here; None: not known, and not judged."""
        for what, mine, allowed, denied in (
            ("account", account, self.allow_accounts, self.deny_accounts),
            ("QOS", qos, self.allow_qos, self.deny_qos),
        ):
            if mine and allowed and mine not in allowed:
                yield f"only {what} {', '.join(allowed)} may use it, yours is {mine}"
            if mine and mine in denied:
                yield f"{what} {mine} may not use it"


@dataclass(frozen=True, kw_only=True)
class NodeFacts:
    """One line of `scontrol show node --oneliner`."""

    cpus: int | None = None  # that jobs can have, where cores are kept for the system
    system_mib: int = 0  # kept for the system: MemSpecLimit
    state: str = ""
    reason: str = ""  # why it is down or drained, as somebody wrote it

    @property
    def is_out(self) -> bool:
        """Whether it starts no jobs now."""
        return bool(NODE_IS_OUT.search(self.state))


@dataclass(frozen=True, kw_only=True)
class Account:
    """An association of mine."""

    name: str
    partition: str = ""  # empty: all of them
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    is_default: bool = False


@dataclass(frozen=True, kw_only=True)
class SiteFacts:
    """All of it. ``accounts`` None: nobody could say."""

    partitions: Mapping[str, PartitionFacts] = field(default_factory=dict)
    nodes: Mapping[str, NodeFacts] = field(default_factory=dict)
    accounts: tuple[Account, ...] | None = None
    enforces_accounts: bool = False  # a job of an account that is not its user's is refused

    def out(self, hosts: Iterable[str]) -> dict[str, str]:
        """Those of the hosts that start no jobs: name → ``DRAIN: bad fan``."""
        found = ((host, self.nodes.get(host)) for host in hosts)
        return {
            host: f"{node.state}{node.reason and f': {node.reason}'}"
            for host, node in found
            if node is not None and node.is_out
        }

    @property
    def default_account(self) -> Account | None:
        """The one that a job without --account has; None: none, or not known."""
        mine = [a for a in self.accounts or () if a.is_default and not a.partition]
        return mine[0] if mine else None


def ask_facts(user: str, *, accounting: bool) -> SiteFacts:
    """From the programs on PATH; what they don't tell is left out.

    Raises:
        ClusterError: the controller does not answer.
    """
    partitions = said_by(["scontrol", "show", "partition", "--oneliner"])
    nodes = said_by(["scontrol", "show", "node", "--oneliner"])
    accounts = None
    if accounting:
        argv = ["sacctmgr", "--noheader", "--parsable2", "show", "user", user, "withassoc"]
        try:
            accounts = said_by([*argv, f"format={','.join(_ACCOUNT_FIELDS)}"])
        except ClusterError:  # slurmdbd is away, or tells us nothing: its own check says so
            accounts = None
    return site_facts(partitions, nodes, accounts)


def site_facts(partitions: str, nodes: str, accounts: str | None) -> SiteFacts:
    """From what the three programs print."""
    of_nodes = map(one_line, nodes.splitlines())
    of_partitions = map(one_line, partitions.splitlines())
    return SiteFacts(
        partitions={
            p["PartitionName"]: _partition(p) for p in of_partitions if "PartitionName" in p
        },
        nodes={n["NodeName"]: _node(n) for n in of_nodes if "NodeName" in n},
        accounts=None if accounts is None else tuple(_accounts(accounts)),
    )


def hosts_of(nodelist: str) -> tuple[str, ...]:
    """Its names; none of a list that can't be read."""
    try:
        return expand(nodelist)
    except ConfigError:
        return ()


def _partition(line: Mapping[str, str]) -> PartitionFacts:
    return PartitionFacts(
        state=line.get("State", "UP"),
        allow_accounts=_names(line, "AllowAccounts"),
        deny_accounts=_names(line, "DenyAccounts"),
        allow_qos=_names(line, "AllowQos"),
        deny_qos=_names(line, "DenyQos"),
        default_time=None if line.get("DefaultTime", "") in _ANY else line["DefaultTime"],
        max_mib_per_node=_number(line, "MaxMemPerNode"),
        max_mib_per_cpu=_number(line, "MaxMemPerCPU"),
    )


def _node(line: Mapping[str, str]) -> NodeFacts:
    return NodeFacts(
        cpus=_number(line, "CPUEfctv"),
        system_mib=_number(line, "MemSpecLimit") or 0,
        state=line.get("State", ""),
        reason=line.get("Reason", "").partition(" [")[0],
    )


def _accounts(text: str) -> Iterator[Account]:
    for line in text.splitlines():
        values = line.split("|")
        if len(values) == len(_ACCOUNT_FIELDS) and values[0]:
            name, partition, qos, default_qos, default = values
            yield Account(
                name=name,
                partition=partition,
                qos=tuple(filter(None, qos.split(","))),
                default_qos=default_qos,
                is_default=name == default,
            )


def _names(line: Mapping[str, str], name: str) -> tuple[str, ...]:
    text = line.get(name, "")
    return () if text in _ANY else tuple(text.split(","))


def _number(line: Mapping[str, str], name: str) -> int | None:
    text = line.get(name, "")
    return int(text) if text.isdecimal() else None


def said_by(argv: list[str]) -> str:
    """What a program prints. Raises ClusterError when it fails."""
    done = run_slurm(argv, timeout_s=20)
    if done.returncode != 0:
        raise ClusterError(
            f"{argv[0]} fails: {said(done.stderr) or done.returncode}",
            where=" ".join(argv),
            fix="try it in this shell; then ask the site's administrators",
        )
    return done.stdout
