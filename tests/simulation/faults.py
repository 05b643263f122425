"""What goes wrong in a schedule, drawn from its seed. Every fault heals.

``alone`` schedules have one small fault, and a stricter promise (invariants.py). Others mix faults, and
lay traps: a process is stopped, and meanwhile superseded, between a check and what the check allowed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from .supervisor import supervise
from .trial import Trial
from .world import Node, Process

LAST_BEGIN_S = 45.0
LONG_PAUSE_S = 5.0  # from here a process that stands still may be taken for lost
MASTER_POINTS = ("look", "adopt", "resumed", "load", "take_over", "step", "point")
CHECKPOINT_POINTS = ("checkpoint", "checkpoint allowed", "rename", "prune")
TRAPS = (
    *(("master_worker", name) for name in (*MASTER_POINTS, *CHECKPOINT_POINTS, "save", "done")),
    *(("supervisor", name) for name in ("listed", "claim", "claimed", "taken", "end")),
    *(("heartbeat model_worker", "leave"), ("heartbeat model_worker", "gone")),
)


@dataclass
class Plan:
    """``alone`` names the only fault, "" in a mix."""

    alone: str = ""
    cut: tuple[Node, float, str] | None = None  # of a "cut" alone: node, when, which way


def plan_faults(trial: Trial, seed: int) -> Plan:
    """Schedules the faults."""
    world, chance = trial.world, trial.world.random
    kind = seed % 10
    if kind == 0:
        seconds, refuses = chance.uniform(0.1, 10.0), chance.random() < 0.5
        _at(trial, chance.uniform(0.0, 40.0), lambda: outage(trial, seconds, refuses=refuses))
        return Plan(alone="outage")
    if kind == 1:
        seconds = chance.uniform(0.1, LONG_PAUSE_S)
        _at(trial, chance.uniform(0.0, 40.0), lambda: pause_somebody(trial, seconds))
        return Plan(alone="pause")
    if kind == 2:
        plan = Plan(alone="cut")
        seconds, way = chance.uniform(40.0, 60.0), chance.choice(("both", "requests", "replies"))

        def cut_one() -> None:
            if node := _worker_node(trial):
                plan.cut = (node, world.now, way)
                cut(trial, node, seconds, way=way, isolates=True)

        _at(trial, chance.uniform(6.0, 15.0), cut_one)
        return plan
    if kind == 3:
        _lay_chain(trial)
        return Plan()
    for _ in range(chance.randint(1, 2)):
        _lay_trap(trial)
    for _ in range(chance.randint(0 if kind < 6 else 1, 3)):
        _at(trial, chance.uniform(0.0, LAST_BEGIN_S), chance.choice(MIX)(trial))
    return Plan()


def _at(trial: Trial, when: float, action: Callable[[], None]) -> None:
    trial.world.after(when, action)


# ---- single faults ------------------------------------------------------------------------------


def outage(trial: Trial, seconds: float, *, refuses: bool) -> None:
    how = "refuses" if refuses else "swallows"
    trial.world.say(f"FAULT the store is away for {seconds:.1f} s ({how})")
    trial.world.stop_store(seconds, refuses=refuses)


def cut(trial: Trial, node: Node, seconds: float, *, way: str, isolates: bool) -> None:
    until = trial.world.now + seconds
    trial.world.say(
        f"FAULT {node.name} cut from the store ({way}, isolated={isolates}) {seconds:.1f} s"
    )
    if way in ("both", "requests"):
        node.requests_cut_until = max(node.requests_cut_until, until)
    if way in ("both", "replies"):
        node.replies_cut_until = max(node.replies_cut_until, until)
    if isolates:
        node.isolated_until = max(node.isolated_until, until)
    for process in _living(trial):
        if process.node is node:
            _harness(trial, "cut_off", process)


def pause(trial: Trial, process: Process, seconds: float) -> None:
    trial.world.say(f"FAULT {process.name}.{process.attempt} stopped for {seconds:.1f} s")
    trial.world.pause(process, seconds)
    if seconds > LONG_PAUSE_S:
        _harness(trial, "hung", process)


def pause_somebody(trial: Trial, seconds: float) -> None:
    if living := _living(trial):
        pause(trial, trial.world.random.choice(living), seconds)


def crash(trial: Trial, process: Process) -> None:
    _harness(trial, "died", process)
    trial.world.say(f"FAULT {process.name}.{process.attempt} killed")
    trial.world.end(process, -9)


def crash_node(trial: Trial, node: Node, seconds: float) -> None:
    trial.world.say(f"FAULT {node.name} is down for {seconds:.1f} s")
    node.down = True
    trial.world.after(seconds, setattr, node, "down", False)
    for process in _living(trial):
        if process.node is node:
            _harness(trial, "died", process)
            trial.world.end(process, -9)


def noise(trial: Trial, seconds: float, loss: float, duplicate: float, extra_s: float) -> None:
    world = trial.world
    world.say(
        f"FAULT loss {loss:.2f} duplicates {duplicate:.2f} delay {extra_s:.2f}: {seconds:.1f} s"
    )
    world.noise = (loss, duplicate, extra_s)
    world.after(seconds, setattr, world, "noise", None)
    if loss > 0.05 or extra_s > 0.3:
        for process in _living(trial):
            _harness(trial, "cut_off", process)


def _harness(trial: Trial, op: str, process: Process) -> None:
    trial.note(op, process, worker=process.name.removeprefix("heartbeat "))


# ---- mixes --------------------------------------------------------------------------------------


def _some_outage(trial: Trial) -> Callable[[], None]:
    chance = trial.world.random
    seconds, refuses = 0.1 * 600 ** chance.random(), chance.random() < 0.5
    return lambda: outage(trial, seconds, refuses=refuses)


def _some_pause(trial: Trial) -> Callable[[], None]:
    seconds = 0.1 * 400 ** trial.world.random.random()
    return lambda: pause_somebody(trial, seconds)


def _some_crash(trial: Trial) -> Callable[[], None]:
    def act() -> None:
        if living := _living(trial):
            crash(trial, trial.world.random.choice(living))

    return act


def _some_node_crash(trial: Trial) -> Callable[[], None]:
    chance = trial.world.random
    seconds = chance.uniform(20.0, 60.0)

    def act() -> None:
        if living := _living(trial):
            crash_node(trial, chance.choice(living).node, seconds)

    return act


def _some_cut(trial: Trial) -> Callable[[], None]:
    chance = trial.world.random
    seconds, way = chance.uniform(2.0, 60.0), chance.choice(("both", "requests", "replies"))
    isolates = chance.random() < 0.6

    def act() -> None:
        if living := _living(trial):
            cut(trial, chance.choice(living).node, seconds, way=way, isolates=isolates)

    return act


def _some_noise(trial: Trial) -> Callable[[], None]:
    chance = trial.world.random
    heavy = chance.random() < 0.5
    loss = chance.uniform(0.0, 0.5 if heavy else 0.05)
    extra_s = chance.uniform(0.0, 3.0 if heavy else 0.3)
    seconds, duplicate = chance.uniform(1.0, 20.0), chance.uniform(0.0, 0.3)
    return lambda: noise(trial, seconds, loss, duplicate, extra_s)


def _lost_leases(trial: Trial) -> Callable[[], None]:
    def act() -> None:
        trial.world.say("FAULT the store loses all leases")
        trial.world.lose_leases()

    return act


def _some_requeue(trial: Trial) -> Callable[[], None]:
    kills = trial.world.random.random() < 0.5
    return lambda: trial.requeue(supervise, kills=kills)


MIX = (
    *(_some_outage, _some_pause, _some_crash, _some_node_crash, _some_cut, _some_noise),
    *(_lost_leases, _some_requeue),
)


def _lay_trap(trial: Trial) -> None:
    """At a point of the code: the process, or all of its node, stands still; perhaps cut off; perhaps
    superseded by then."""
    world, chance = trial.world, trial.world.random
    seconds, whole_node = chance.uniform(1.0, 40.0), chance.random() < 0.5
    superseded, cut_off = chance.random() < 0.7, chance.random() < 0.3
    kind, name = chance.choice(TRAPS)

    def trap(process: Process) -> None:
        _stop(trial, process, seconds, whole_node=whole_node)
        if cut_off:
            cut(trial, process.node, seconds * 1.5, way="both", isolates=True)
        if superseded:
            delay_s = chance.uniform(0.1, 0.8) * seconds
            world.after(delay_s, lambda: trial.requeue(supervise, kills=False))

    trial.traps[kind, name, chance.choice((1, 1, 1, 2, 2, 3, 4))] = trap
    if name == "gone":
        _at(trial, chance.uniform(5.0, 30.0), _lost_leases(trial))


def _lay_chain(trial: Trial) -> None:
    """One attempt stands still and is superseded; the next one stands still where it has just begun,
    and is superseded; the first one goes on at about that moment."""
    world, chance = trial.world, trial.world.random
    first_s, second_s = chance.uniform(2.0, 12.0), chance.uniform(10.0, 40.0)
    gap_s = chance.uniform(-1.0, 3.0)  # from the first one's going on to the third one's beginning
    name = chance.choice(("step", "point", *CHECKPOINT_POINTS))
    then = chance.choice(("look", "adopt", "resumed", "resumed", "take_over", "taken"))

    def first(process: Process) -> None:
        wakes = world.now + first_s
        trial.traps[_who(then), then, 2] = lambda other: second(other, wakes)
        cut(trial, process.node, first_s, way="both", isolates=True)
        _stop(trial, process, first_s, whole_node=True)
        world.after(0.5, lambda: trial.requeue(supervise, kills=False))

    def second(process: Process, wakes: float) -> None:
        cut(trial, process.node, second_s, way="both", isolates=True)
        _stop(trial, process, second_s, whole_node=True)
        delay_s = max(0.1, wakes + gap_s - world.now)
        world.after(delay_s, lambda: trial.requeue(supervise, kills=False))

    trial.traps["master_worker", name, chance.randint(1, 3)] = first


def _who(point: str) -> str:
    return "supervisor" if point == "taken" else "master_worker"


def _stop(trial: Trial, process: Process, seconds: float, *, whole_node: bool) -> None:
    for other in _living(trial):
        if other is process or (whole_node and other.node is process.node):
            pause(trial, other, seconds)


def _living(trial: Trial) -> list[Process]:
    return [process for process in trial.world.processes if process.alive]


def _worker_node(trial: Trial) -> Node | None:
    """A node of the running job without its supervisor, all of whose workers have registered."""
    supervisor = trial.jobs[-1][0]
    mine = [
        r for r in trial.history if r["op"] == "registered" and r["attempt"] == supervisor.attempt
    ]
    registered = {row["worker"] for row in mine}
    mains = [p for p in trial.jobs[-1][1:] if not p.name.startswith("heartbeat ") and p.alive]
    if supervisor.attempt == 0 or not {p.name for p in mains} <= registered:
        return None
    nodes = [p.node for p in mains if p.node is not supervisor.node]
    return trial.world.random.choice(nodes) if nodes else None
