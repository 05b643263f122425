"""Builds the etcdctl commands that give one user exclusive access to that user's keys in a site's etcd
(pure).

For site_verbs.py. An administrator runs them; realsys never changes etcd's users itself.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from realsys.api.cluster import ClusterSpec
from realsys.api.errors import ConfigError
from realsys.name_resolve.etcd.access import endpoints_of
from realsys.name_resolve.key_table import PREFIX, segment


@dataclass(frozen=True, kw_only=True)
class Roles:
    """One user's role, key prefix and commands.

    Attributes:
        role: the role of this site and user; other sites have other roles.
        prefix: keys that begin with it can be read and written; no others.
        user: etcd's user name; the site file's if it names one.
        commands: for a shell, in order.
    """

    role: str
    prefix: str
    user: str
    commands: tuple[str, ...]


def roles(spec: ClusterSpec, user: str, *, etcd_user: str | None = None) -> Roles:
    """Builds the role and commands.

    ``user`` launches trials, as in their keys; ``etcd_user`` logs in, if different.

    Raises:
        ConfigError: the site has no etcd of its own, or a name can't be part of a key.
    """
    url = spec.name_resolve or ""
    if not url.startswith("etcd://"):
        job = url.startswith("etcd+job://")
        raise ConfigError(
            f"site {spec.name!r} has no etcd with users: its name_resolve is {url}",
            where="name_resolve in the cluster spec",
            fix="nothing is needed: each job has an etcd that only its user can access"
            if job
            else "name the site's etcd: name_resolve: etcd://host:2379",
        )
    site, name = segment(spec.name, what="name of the site"), segment(user, what="user")
    login = etcd_user or user
    role = f"realsys-{site}-{name}"
    prefix = f"/{PREFIX}/{site}/{name}/"  # with the slash: no permission for user10 with user1
    by_certificate = spec.etcd.cert_file is not None and spec.etcd.password_file is None
    no_password = ["--no-password"] if by_certificate else []
    etcdctl = ["etcdctl", f"--endpoints={_endpoints(spec, url)}"]
    words = (
        ["role", "add", role],
        ["role", "grant-permission", "--prefix=true", role, "readwrite", prefix],
        ["user", "add", login, *no_password],
        ["user", "grant-role", login, role],
    )
    commands = tuple(shlex.join([*etcdctl, *command]) for command in words)
    return Roles(role=role, prefix=prefix, user=login, commands=commands)


def _endpoints(spec: ClusterSpec, url: str) -> str:
    scheme = "https" if spec.etcd.ca_file or spec.etcd.cert_file else "http"
    return ",".join(f"{scheme}://{endpoint}" for endpoint in endpoints_of(url))
