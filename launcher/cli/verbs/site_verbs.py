"""The verbs for sites: clusters, doctor, image, etcd, completion.

They need no trial. ``doctor`` returns an exit status, 0 only if every check was made and passed; the others
succeed or raise.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from launcher.cli import shared_options as o
from launcher.terminal.exit_codes import ExitCode

if TYPE_CHECKING:
    from launcher.slurm.doctor.findings import Finding


def clusters(
    action: Annotated[
        str | None, o.argument("init", "Draft a site file from Slurm's configuration.")
    ] = None,
    name: Annotated[
        str | None,
        typer.Argument(metavar="NAME", help="The site's name; default: Slurm's ClusterName."),
    ] = None,
    write: Annotated[bool, o.option("--write", "Write it to your folder of site files.")] = False,
    json: o.Json = False,
) -> None:
    """List the sites available for launches; `clusters init` drafts a file for this one."""
    from launcher.terminal import output

    if action == "init":
        _init(name, write=write, json=json)
        return
    if action is not None or write:
        raise typer.BadParameter(f"no action {action!r}; use `realsys clusters init`")
    rows = list(_known())
    if json:
        output.document(clusters=rows)
        return
    columns = ("name", "scheduler", "file root", "partitions", "file")
    output.table(columns, [tuple(row[c.replace(" ", "_")] for c in columns) for row in rows])
    for row in rows:
        if row["problem"]:
            output.warn(f"{row['name']}: {row['problem']}")


def doctor(
    cluster: o.Cluster = None,
    partition: Annotated[
        str | None, o.option("--partition -p NAME", "Partition to check; default: the site's.")
    ] = None,
    gpu: Annotated[
        bool, o.option("--gpu", "Measure GPUs and the network between nodes; takes whole nodes.")
    ] = False,
    nodes: Annotated[
        int | None, o.option("--nodes -N N", "Number of nodes; default: two.", min=1)
    ] = None,
    nodelist: Annotated[
        str | None, o.option("--nodelist -w HOSTS", "These nodes, e.g. n[1-4].")
    ] = None,
    with_gloo: Annotated[
        bool, o.option("--with-gloo", "Measure on CPUs: the network only, by gloo.")
    ] = False,
    json: o.Json = False,
) -> int:
    """Check a site: Slurm, containers, shared files, clocks, ports, GPUs, packages."""
    from launcher.sites.clusters import find_cluster
    from launcher.slurm.doctor.doctor import examine
    from launcher.slurm.doctor.gpu_job import GpuProbeRequest, max_gpu_probe_s
    from launcher.terminal import output

    if not gpu and (nodes is not None or nodelist is not None or with_gloo):
        raise typer.BadParameter("--nodes, --nodelist and --with-gloo need --gpu")
    spec = find_cluster(cluster)
    probe = GpuProbeRequest(nodes=nodes, nodelist=nodelist, gloo=with_gloo) if gpu else None
    if probe is not None and spec.scheduler != "slurm" and (nodes or nodelist):
        raise typer.BadParameter("this machine is one node; --nodes and --nodelist need Slurm")
    if spec.scheduler == "slurm":
        output.say("running a small job on a compute node; waiting up to a minute for one")
    if probe is not None:
        minutes = max_gpu_probe_s(spec, partition, probe) / 60
        output.say(f"then measuring GPUs: a minute or two, {minutes:.0f} if something hangs")
    found = []
    for finding in examine(spec, partition=partition, gpu=probe):
        found.append(finding)
        if not json:
            _print_finding(finding)
    healthy = all(finding.ok for finding in found)
    if json:
        output.document(cluster=spec.name, ok=healthy, findings=found)
    return ExitCode.OK if healthy else ExitCode.RUN_FAILED


def image(
    action: Annotated[
        str,
        typer.Argument(metavar="pull|build", help="From a registry, or from containers/."),
    ],
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE|KIND",
            help="Pull: e.g. nvcr.io#nvidia/pytorch:25.05-py3. Build: control, train, sglang, vllm.",
        ),
    ],
    timeout: Annotated[float, o.option("--timeout SECONDS", "Give up after this.", min=1)] = 7200.0,
    json: o.Json = False,
    cluster: o.Cluster = None,
) -> None:
    """Store a container image as one file for all nodes of a site."""
    from launcher.sites.clusters import find_cluster
    from launcher.slurm.images.image_build import build, recipe_of
    from launcher.slurm.images.image_pull import pull
    from launcher.terminal import output

    if action == "pull":
        pulled = pull(find_cluster(cluster), source, timeout_s=timeout)
    elif action == "build":
        pulled = build(find_cluster(cluster), recipe_of(source), timeout_s=timeout)
    else:
        raise typer.BadParameter(f"no action {action!r}; use pull SOURCE or build KIND")
    if json:
        output.document(image=str(pulled.path), already=pulled.already)
        return
    output.say("it exists already:" if pulled.already else "created; name it in the site file:")
    output.data(str(pulled.path))


def etcd(
    action: Annotated[str, typer.Argument(metavar="roles", help="The only action.")],
    user: Annotated[
        str | None, o.option("--user NAME", "The launching user; default: you.")
    ] = None,
    json: o.Json = False,
    cluster: o.Cluster = None,
) -> None:
    """Print the commands that give one user exclusive access to their part of a site's etcd."""
    from launcher.sites import places
    from launcher.sites.clusters import find_cluster
    from launcher.sites.etcd_roles import roles
    from launcher.terminal import output

    if action != "roles":
        raise typer.BadParameter(f"no action {action!r}; use `realsys etcd roles`")
    spec = find_cluster(cluster)
    # The login in the site file belongs to the user of that file, who runs this command.
    login = spec.etcd.user if user is None else None
    found = roles(spec, user or places.user_name(), etcd_user=login)
    if json:
        output.document(cluster=spec.name, **vars(found))
        return
    output.say(f"to give user {found.user} access to {found.prefix} only, etcd's root runs")
    output.data(*found.commands)
    output.say(
        "and, once: etcdctl auth enable. Options of etcdctl: --user root, --cacert, --cert, --key"
    )


def completion(
    shell: Annotated[str, typer.Argument(metavar="bash|zsh|fish", help="Your shell.")],
) -> None:
    """Print a script that makes Tab complete verbs, experiments, trials and workers."""
    from launcher.cli.completion import SCRIPTS

    if shell not in SCRIPTS:
        raise typer.BadParameter(f"no completion for {shell!r}; use one of {', '.join(SCRIPTS)}")
    sys.stdout.write(SCRIPTS[shell])


def _known() -> list[dict[str, str]]:
    """Lists one row per site; a site file with mistakes is listed with them."""
    from launcher.sites import places
    from launcher.sites.clusters import read_spec
    from realsys.api.errors import ConfigError

    rows = []
    for name, path in sorted(places.spec_files().items()):
        row = {"name": name, "scheduler": "?", "file_root": "?", "partitions": "", "problem": ""}
        try:
            spec = read_spec(Path(path))
        except ConfigError as error:
            row["problem"] = f"{error.what}; see realsys doctor --cluster {name}"
        else:
            row |= {"scheduler": spec.scheduler, "file_root": spec.file_root}
            row["partitions"] = ", ".join(spec.partitions)
        rows.append({**row, "file": path})
    return rows


def _init(name: str | None, *, write: bool, json: bool) -> None:
    from launcher.sites.clusters import new_spec_file, write_spec
    from launcher.slurm.discovery.discover import discover_site
    from launcher.slurm.discovery.site_yaml import site_yaml
    from launcher.terminal import output

    if write and name is not None:
        new_spec_file(name)  # before Slurm is queried
    found = discover_site(name)
    text = site_yaml(found)
    path = write_spec(found.spec.name, text) if write else None
    if json:
        output.document(cluster=found.spec, yaml=text, file=None if path is None else str(path))
    elif path is None:
        output.data(text.rstrip())
        output.say("not written; --write stores it in your folder of site files")
    else:
        then = f"realsys doctor --cluster {found.spec.name}"
        output.say(f"written; fill in the lines marked EDIT, then: {then}")
        output.data(str(path))


def _print_finding(finding: Finding) -> None:
    from launcher.terminal import output

    word = {True: "ok", False: "BAD", None: "?"}[finding.ok]
    output.data(f"{word:<4} {finding.name:<24} {finding.what}")
    if not finding.ok:
        output.data(f"{'':<5}{'':<24} fix: {finding.fix}")
