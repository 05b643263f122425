"""Checks the text of a site's etcd address and its section.

For site_problems.py. `realsys doctor` checks that the files exist and that etcd accepts the login.
"""

from __future__ import annotations

from collections.abc import Iterator

from realsys.api.cluster import ClusterSpec, EtcdSpec
from realsys.api.errors import ConfigError

_JOB_ETCD = "etcd+job://"
_FILES = ("password_file", "ca_file", "cert_file", "key_file")
_PAIRS = (("user", "password_file"), ("cert_file", "key_file"))


def etcd_problems(spec: ClusterSpec) -> Iterator[ConfigError]:
    """Yields every mistake; ``where`` begins with the option's name."""
    url = spec.name_resolve or ""
    if url.startswith("etcd://"):
        yield from _address(url)
        yield from _section(spec.etcd)
        return
    if url.startswith(_JOB_ETCD) and url != _JOB_ETCD:
        yield ConfigError(
            f"{url!r} names a host, but a job's etcd always runs on its own first node",
            where="name_resolve",
            fix=f"write just {_JOB_ETCD}, or etcd://host:2379 for the site's etcd",
        )
    if spec.etcd != EtcdSpec():
        yield ConfigError(
            f"the etcd section applies to etcd://…, but name_resolve is {url or 'not set'}",
            where="etcd",
            fix="remove the section: a job's own etcd creates its certificates"
            if url.startswith(_JOB_ETCD)
            else "name the site's etcd: name_resolve: etcd://host:2379,host2:2379",
        )


def _address(url: str) -> Iterator[ConfigError]:
    from realsys.name_resolve.etcd.access import endpoints_of

    try:
        endpoints_of(url)
    except ConfigError as error:
        yield ConfigError(error.what, where="name_resolve", fix=error.fix)


def _section(etcd: EtcdSpec) -> Iterator[ConfigError]:
    for one, other in _PAIRS:
        values = {name: getattr(etcd, name) for name in (one, other)}
        if (lacks := [name for name, value in values.items() if not value]) and any(
            values.values()
        ):
            yield ConfigError(
                f"the etcd section has only one of {one} and {other}",
                where=f"etcd.{other if lacks == [one] else one}",
                fix=f"add {lacks[0]}, or remove the other",
            )
    for name in _FILES:
        path = getattr(etcd, name)
        if path is not None and not path.startswith(("/", "~/")):
            yield ConfigError(
                f"etcd.{name} is {path!r}",
                where=f"etcd.{name}",
                fix="write an absolute path (~/… works too), the same on all nodes",
            )
    if etcd.password_file and not (etcd.ca_file or etcd.cert_file):
        yield ConfigError(
            "the password would be sent over the network unencrypted",
            where="etcd.password_file",
            fix="add ca_file, the authority of etcd's certificates, or remove user and password_file "
            "on a network that you trust",
        )
