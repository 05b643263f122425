"""Access rules of partitions, node states and the user's accounts, as Slurm reports them (pure, except
ask_facts).

For `realsys clusters init` and `realsys doctor`: who may use a partition and whether it starts jobs,
which nodes are unavailable and why, how much of a node's memory is reserved for the system, and which
accounts and QOS the user has.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from launcher.slurm.query.states import NODE_IS_OUT
from launcher.slurm.query.waiting import one_line
from launcher.slurm.slurm_commands import failure_text, run_slurm
from realsys.api.errors import ClusterError, ConfigError
from realsys.slurm.hostlist import expand

_ANY = ("ALL", "(null)", "N/A", "NONE", "UNLIMITED", "")
_ACCOUNT_FIELDS = ("Account", "Partition", "QOS", "DefaultQOS", "DefaultAccount")


@dataclass(frozen=True, kw_only=True)
class PartitionFacts:
    """One line of `scontrol show partition --oneliner`. Empty or None: no such limit."""

    state: str = "UP"
    allow_accounts: tuple[str, ...] = ()
    deny_accounts: tuple[str, ...] = ()
    allow_qos: tuple[str, ...] = ()
    deny_qos: tuple[str, ...] = ()
    default_time: str | None = None
    max_mib_per_node: int | None = None
    max_mib_per_cpu: int | None = None

    def access_problems(self, account: str | None, qos: str | None) -> Iterator[str]:
        """Yields the reasons why jobs of this account and QOS never start here; None means unknown and is
        not checked.
        """
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

    cpus: int | None = None  # available to jobs, if cores are reserved for the system
    system_mib: int = 0  # reserved for the system: MemSpecLimit
    state: str = ""
    reason: str = ""  # why it is down or drained, as entered by an administrator

    @property
    def is_out(self) -> bool:
        """Whether the node starts no jobs at present (down, drained, in maintenance)."""
        return bool(NODE_IS_OUT.search(self.state))


@dataclass(frozen=True, kw_only=True)
class Account:
    """One of the user's associations in Slurm's accounting."""

    name: str
    partition: str = ""  # empty: all partitions
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    is_default: bool = False


@dataclass(frozen=True, kw_only=True)
class SiteFacts:
    """Facts about partitions, nodes and accounts.

    ``accounts`` is None if accounting could not be queried.
    """

    partitions: Mapping[str, PartitionFacts] = field(default_factory=dict)
    nodes: Mapping[str, NodeFacts] = field(default_factory=dict)
    accounts: tuple[Account, ...] | None = None
    enforces_accounts: bool = False  # Slurm refuses jobs under accounts that the user does not have

    def unavailable(self, hosts: Iterable[str]) -> dict[str, str]:
        """Selects the hosts that start no jobs: name → ``DRAIN: bad fan``."""
        found = ((host, self.nodes.get(host)) for host in hosts)
        return {
            host: f"{node.state}{node.reason and f': {node.reason}'}"
            for host, node in found
            if node is not None and node.is_out
        }

    @property
    def default_account(self) -> Account | None:
        """The account of jobs submitted without --account; None if there is none or it is unknown."""
        mine = [a for a in self.accounts or () if a.is_default and not a.partition]
        return mine[0] if mine else None


def ask_facts(user: str, *, accounting: bool) -> SiteFacts:
    """Queries the Slurm programs on PATH; facts they do not report are left out.

    Raises:
        ClusterError: the controller does not answer.
    """
    partitions = slurm_output(["scontrol", "show", "partition", "--oneliner"])
    nodes = slurm_output(["scontrol", "show", "node", "--oneliner"])
    accounts = None
    if accounting:
        argv = ["sacctmgr", "--noheader", "--parsable2", "show", "user", user, "withassoc"]
        try:
            accounts = slurm_output([*argv, f"format={','.join(_ACCOUNT_FIELDS)}"])
        except ClusterError:  # slurmdbd is unreachable or refuses; the accounting check reports it
            accounts = None
    return site_facts(partitions, nodes, accounts)


def site_facts(partitions: str, nodes: str, accounts: str | None) -> SiteFacts:
    """Parses the output of the three programs (pure)."""
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
    """Expands a host list; empty if it cannot be parsed."""
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


def slurm_output(argv: list[str]) -> str:
    """Runs a Slurm program and returns its output. Raises ClusterError if it fails."""
    done = run_slurm(argv, timeout_s=20)
    if done.returncode != 0:
        raise ClusterError(
            f"{argv[0]} failed: {failure_text(done)}",
            where=" ".join(argv),
            fix="run it in this shell; if it still fails, ask the site's administrators",
        )
    return done.stdout
