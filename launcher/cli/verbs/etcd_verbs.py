"""The verb for a site's etcd: etcd roles."""

from __future__ import annotations

from typing import Annotated

import typer

from launcher.cli import shared_options as o
from launcher.terminal.exit_codes import ExitCode


def etcd(
    action: Annotated[str, typer.Argument(metavar="roles", help="The only action.")],
    user: Annotated[
        str | None, typer.Option("--user", metavar="NAME", help="The launching user; default: you.")
    ] = None,
    json: o.Json = False,
    cluster: o.Cluster = None,
) -> int:
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
        return ExitCode.OK
    output.say(f"to give user {found.user} access to {found.prefix} only, etcd's root runs")
    for command in found.commands:
        output.data(command)
    output.say(
        "and, once: etcdctl auth enable. Options of etcdctl: --user root, --cacert, --cert, --key"
    )
    return ExitCode.OK
