"""Further sbatch options: which exist, and which realsys sets itself (pure data, one check).

The names are those of Slurm 22.05's `sbatch --help` and of later releases' man pages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from realsys.api.errors import ConfigError, UnknownName, did_you_mean

SBATCH_OPTIONS = tuple(
    "account acctg-freq array batch bb bbf begin chdir cluster-constraint clusters comment "
    "consolidate-segments constraint container container-id contiguous core-spec cores-per-socket "
    "cpu-freq cpus-per-gpu cpus-per-task deadline delay-boot dependency distribution error exclude "
    "exclusive export export-file extra extra-node-info get-user-env gid gpu-bind gpu-freq gpus "
    "gpus-per-node gpus-per-socket gpus-per-task gres gres-flags help hint hold ignore-pbs input "
    "job-name kill-on-invalid-dep licenses mail-type mail-user mcs-label mem mem-bind mem-per-cpu "
    "mem-per-gpu mincpus network nice no-kill no-requeue nodefile nodelist nodes ntasks "
    "ntasks-per-core ntasks-per-gpu ntasks-per-node ntasks-per-socket oom-kill-step open-mode output "
    "overcommit oversubscribe parsable partition power prefer priority profile propagate qos quiet "
    "reboot requeue reservation resv-ports segment signal sockets-per-node spread-job "
    "spread-segments stepmgr switches test-only thread-spec threads-per-core time time-min tmp "
    "tres-bind tres-per-task uid usage use-min-nodes verbose version wait wait-all-nodes wckey wrap".split()
)
# Options with a setting of their own: group settings, then cluster settings, then the command line.
_SETTINGS = dict.fromkeys(
    "partition account qos reservation constraint nodelist exclude begin deadline".split(), "{0}"
) | {
    "time": "time_limit",
    "exclusive": "slurm.exclusive in the cluster spec",
    "requeue": "--requeue on the command line, or slurm.requeue in the cluster spec",
    "no-requeue": "--no-requeue on the command line, or slurm.requeue in the cluster spec",
    "signal": "slurm.grace_seconds in the cluster spec",
    "container": "container_image",
}
# Options that follow from the plan, or would make sbatch do something other than submit the job.
_DECIDED = frozenset(
    "nodes ntasks ntasks-per-node ntasks-per-core ntasks-per-gpu ntasks-per-socket cpus-per-task "
    "cpus-per-gpu mem mem-per-cpu mem-per-gpu gres gpus gpus-per-node gpus-per-socket gpus-per-task "
    "tres-per-task distribution nodefile output error input open-mode chdir job-name comment array "
    "export export-file kill-on-invalid-dep wrap parsable test-only wait help usage version quiet uid "
    "gid container-id".split()
)


def option_name(name: str) -> str:
    """Normalises to sbatch's own spelling: ``mail_user`` and ``--mail-user`` become ``mail-user``."""
    return name.strip().removeprefix("--").replace("_", "-")


def extra_problems(
    extra: Mapping[str, str], *, where: str, dependency: bool
) -> Iterator[ConfigError]:
    """Yields options that sbatch does not have, and options that realsys sets itself.

    Args:
        dependency: the launch itself has one.
    """
    for name, value in extra.items():
        if (setting := _SETTINGS.get(name)) is not None:
            yield _refused(name, where, f"use the setting for it: {setting.format(name)}")
        elif name in _DECIDED:
            yield _refused(name, where, "leave it out: it follows from the plan")
        elif name == "dependency" and dependency:
            yield _refused(name, where, "leave it out, or leave out the dependency of this launch")
        elif name not in SBATCH_OPTIONS:
            yield UnknownName(f"sbatch has no option --{name}", where=where, fix=_nearest(name))
        elif "\n" in value:
            yield ConfigError(
                f"the value of --{name} has a line break", where=where, fix="write it in one line"
            )


def _nearest(name: str) -> str:
    hint = did_you_mean(name, SBATCH_OPTIONS)
    return hint if hint.startswith("did you mean") else "see man sbatch; use long names"


def _refused(name: str, where: str, fix: str) -> ConfigError:
    return ConfigError(f"--{name} is set by realsys itself", where=where, fix=fix)
