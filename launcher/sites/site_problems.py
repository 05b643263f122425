"""Checks the text of a site's description (pure).

For clusters.py, which reports problems with the lines of the file. `realsys doctor` checks the site
itself.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from urllib.parse import unquote, urlsplit

from realsys.api.cluster import ClusterSpec, EtcdSpec
from realsys.api.errors import ConfigError, collected, did_you_mean
from realsys.slurm.hostlist import expand

IMAGES = ("cpu_image", "gpu_image", "gpu_infer_image")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_JOB_ETCD = "etcd+job://"
_FILES = ("password_file", "ca_file", "cert_file", "key_file")
_PAIRS = (("user", "password_file"), ("cert_file", "key_file"))
_STORES = ("etcd", "etcd+job", "file", "memory")  # of realsys.name_resolve.open
# Options that the launcher sets for every job and step; the site file's would silently override them.
_DECIDED = frozenset(
    "nodes ntasks ntasks-per-node output error open-mode signal export chdir comment array hetjob "
    "distribution exact wait kill-on-bad-exit unbuffered input".split()
)


def cluster_problems(spec: ClusterSpec) -> Iterator[ConfigError]:
    """Yields every mistake beyond those of single fields; ``where`` begins with the option's name."""
    images = {where: getattr(spec, where) for where in IMAGES}
    if spec.container.mounts or any(image is not None for image in images.values()):
        from realsys.slurm.containers import image_problems, mount_problems

        yield from mount_problems(spec.container, file_root=spec.file_root)
        for where, image in images.items():
            yield from image_problems(spec.container, image, where=where)
    if spec.container.name and spec.container.runtime == "apptainer":
        yield ConfigError(
            "container.name is for pyxis; apptainer keeps nothing on the node",
            where="container.name",
            fix="remove it",
        )
    yield from _port_range(spec.port_range)
    yield from _interface(spec.interface)
    yield from _store(spec)
    yield from _etcd(spec)
    yield from _variables(spec)
    yield from _slurm(spec)
    yield from _paths(spec)


def missing_secrets(spec: ClusterSpec, environ: Mapping[str, str]) -> list[ConfigError]:
    """Lists the site's secrets that the launching shell does not have. Values are never read."""
    return [
        ConfigError(
            f"the environment variable {name} is not set",
            where="secrets in the cluster spec",
            fix=f"export {name}=… in this shell, or remove it from secrets",
        )
        for name in spec.secrets
        if name not in environ
    ]


def _port_range(text: str | None) -> Iterator[ConfigError]:
    if text is None:
        return
    found = re.fullmatch(r"([0-9]{1,5})-([0-9]{1,5})", text)
    low, high = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1024 <= low <= high <= 65535:
        yield ConfigError(
            f"port_range is {text!r}",
            where="port_range",
            fix="use LOW-HIGH within 1024-65535, e.g. 20000-29999",
        )


def _interface(text: str | None) -> Iterator[ConfigError]:
    """Checks a name as `ip link` shows it (at most 15 bytes), or an IPv4 subnet."""
    if text is None:
        return
    what = f"interface is {text!r}"
    if "/" in text:
        with suppress(ValueError):
            ipaddress.IPv4Network(text, strict=False)
            return
    elif re.fullmatch(r"[0-9.]+|.*:.*", text):
        what += ", the address of one host"
    elif 0 < len(text.encode()) <= 15 and not re.search(r"\s", text):
        return
    fix = "use the name of an interface (ib0) or a subnet (10.1.0.0/16)"
    yield ConfigError(what, where="interface", fix=fix)


def _store(spec: ClusterSpec) -> Iterator[ConfigError]:
    url = spec.name_resolve
    if url is None:
        return
    scheme, separator, _ = url.partition("://")
    if not separator or scheme not in _STORES:
        yield ConfigError(
            f"no name-resolution store for {url!r}",
            where="name_resolve",
            fix=f"{did_you_mean(scheme, _STORES)} Without the line, a folder in the file root is used",
        )
        return
    parts = urlsplit(url)
    if scheme == "file" and (parts.netloc or not unquote(parts.path).startswith("/")):
        yield ConfigError(
            f"{url!r} does not name an absolute folder",
            where="name_resolve",
            fix="write three slashes: file:///shared/folder",
        )
    if scheme == "memory" and spec.scheduler == "slurm":
        yield ConfigError(
            "memory:// is private to one process, but workers run on several nodes",
            where="name_resolve",
            fix="remove the line: a folder in the file root is used",
        )


def _etcd(spec: ClusterSpec) -> Iterator[ConfigError]:
    """Checks the address of an etcd and its section."""
    url = spec.name_resolve or ""
    if url.startswith("etcd://"):
        from realsys.name_resolve.etcd.access import endpoints_of

        yield from _parse_problems("name_resolve", endpoints_of, url)
        yield from _etcd_section(spec.etcd)
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


def _etcd_section(etcd: EtcdSpec) -> Iterator[ConfigError]:
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


def _variables(spec: ClusterSpec) -> Iterator[ConfigError]:
    for position, name in enumerate(spec.secrets, 1):
        if not _VARIABLE.fullmatch(name):
            yield ConfigError(  # not shown: it may be the secret itself
                f"entry {position} of secrets is not the name of an environment variable",
                where="secrets",
                fix="write names, e.g. [HF_TOKEN]; values are taken from the launching shell",
            )
        elif name in spec.env_vars:
            yield ConfigError(
                f"{name} is in secrets and in env_vars",
                where="secrets",
                fix="keep it in secrets and remove its value from the file",
            )
    for name, value in spec.env_vars.items():
        if not _VARIABLE.fullmatch(name) or "\0" in value:
            yield ConfigError(
                f"env_vars sets {name!r}",
                where=f"env_vars.{name}",
                fix="use letters, digits and underscores, and a value without NUL",
            )


def _slurm(spec: ClusterSpec) -> Iterator[ConfigError]:
    for table, options in (
        ("slurm.extra_sbatch", spec.slurm.extra_sbatch),
        ("slurm.extra_srun", spec.slurm.extra_srun),
    ):
        for name in options:
            long = name.replace("_", "-").removeprefix("no-")
            if long.startswith("container-"):
                yield ConfigError(
                    f"--{long} in {table} would bypass the container: section",
                    where=f"{table}.{name}",
                    fix="use container: and the images; on sbatch it would put the supervisor inside",
                )
            elif long in _DECIDED:
                yield ConfigError(
                    f"{table} sets {name}, which the launcher sets itself",
                    where=f"{table}.{name}",
                    fix="remove it",
                )
    for name in spec.slurm.extra_srun:
        if name.replace("_", "-") in ("hint", "threads-per-core"):
            yield ConfigError(
                f"slurm.extra_srun sets {name}: steps would take more cores than their job has",
                where=f"slurm.extra_srun.{name}",
                fix="write it under slurm.extra_sbatch: steps inherit it from their job",
            )
    if spec.partitions or spec.slurm.time_limit is not None:
        yield from _times_and_hosts(spec)


def _times_and_hosts(spec: ClusterSpec) -> Iterator[ConfigError]:
    from launcher.job.time_spec import parse_time_limit

    texts: dict[str, tuple[Callable[[str], object], str | None]] = {}
    texts["slurm.time_limit"] = (parse_time_limit, spec.slurm.time_limit)
    for name, partition in spec.partitions.items():
        texts[f"partitions.{name}.default_time"] = (parse_time_limit, partition.default_time)
        texts[f"partitions.{name}.max_time"] = (parse_time_limit, partition.max_time)
        texts[f"partitions.{name}.nodelist"] = (expand, partition.nodelist)
    for where, (parse, text) in texts.items():
        if text is not None:
            yield from _parse_problems(where, parse, text)


def _parse_problems(where: str, parse: Callable[[str], object], text: str) -> Iterator[ConfigError]:
    found: list[ConfigError] = []
    with collected(found):
        parse(text)
    yield from (ConfigError(p.what, where=where, fix=p.fix) for p in found)


def _paths(spec: ClusterSpec) -> Iterator[ConfigError]:
    for where, path in (("venv", spec.venv), ("container.workdir", spec.container.workdir)):
        if path is not None and not path.startswith("/"):
            yield ConfigError(
                f"{where} is {path!r}",
                where=where,
                fix="write an absolute path, the same on all nodes",
            )
