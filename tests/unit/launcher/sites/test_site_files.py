from __future__ import annotations

import dataclasses
from pathlib import Path

import golden
import pytest

from launcher.sites import places
from launcher.sites.clusters import find_cluster, read_spec, write_spec
from launcher.sites.places import spec_files
from launcher.sites.site_problems import cluster_problems, missing_secrets
from launcher.slurm.discovery.discover import Discovered, gpus_of, site_from_output
from launcher.slurm.discovery.site_yaml import scalar, site_yaml
from realsys.api.cluster import ClusterSpec, ContainerSpec, EtcdSpec, PartitionSpec, SlurmSpec
from realsys.api.errors import ConfigError, ConfigErrors
from realsys.config.option_tree import rows
from realsys.config.overrides import apply_overrides
from realsys.config.settings import read_words, read_yaml

SHIPPED = sorted((Path(__file__).parents[4] / "cluster_specs").glob("*.yaml"))
CONFIG = """\
Configuration data as of 2026-11-21T09:59:58
AccountingStorageType   = accounting_storage/slurmdbd
ClusterName             = lab
PlugStackConfig         = (null)
SLURM_VERSION           = 22.05.8
"""
NODES = """\
main*|2|64|1000000|gpu:h200:8(S:0-3)|rack1,ib|infinite|1-infinite|n[1-2]|2:16:2
main*|1|64|990000|gpu:h200:8(S:0,2)|rack2,ib|infinite|1-infinite|n3|2:16:2
main*|1|32|200000|(null)|(null)|infinite|1-infinite|n4|2:16:1
debug|1|32|200000|(null)|(null)|30:00|1-2|n4|2:16:1
cloud|0|8|100|(null)|(null)|infinite|1-infinite||1:8:1
slurm_load_partitions: something else
"""


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("XDG_CONFIG_HOME", "XDG_STATE_HOME", "REALSYS_CLUSTER", "REALSYS_FILE_ROOT"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def problems_of(tmp_path: Path, text: str) -> dict[str, ConfigError]:
    """What is wrong with a site file, by its sentence."""
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_spec(path)
    error = caught.value
    return {p.what: p for p in (error.problems if isinstance(error, ConfigErrors) else [error])}


def test_a_table_of_partitions(tmp_path: Path) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(
        "partitions:\n  gpu: {cpus: 64, gpus: 8, features: [a, b]}\n  gpu.large:\n    cpus: 96\n"
        "  bare:\npartitions.cpu.cpus: 4\n"
    )
    assert read_spec(path).partitions == {
        "gpu": PartitionSpec(cpus=64, gpus=8, features=("a", "b")),
        "gpu.large": PartitionSpec(cpus=96),
        "bare": PartitionSpec(),
        "cpu": PartitionSpec(cpus=4),
    }


def test_all_mistakes_in_a_table_with_their_lines(tmp_path: Path) -> None:
    text = (
        "partitions:\n  gpu:\n    cpus: 0\n    gpsu: 8\n    zzz: 1\n    gpus: many\n  bad: 7\n"
        "slurm:\n  partiton: gpu\n"
    )
    found = problems_of(tmp_path, text)
    where = str(tmp_path / "site.yaml")
    assert {what: (p.where, p.fix) for what, p in found.items()} == {
        "no option called 'partitions.gpu.gpsu'": (
            f"{where}:4",
            "did you mean 'partitions.gpu.gpus'?",
        ),
        "no option called 'partitions.gpu.zzz'": (
            f"{where}:5",
            "partitions.gpu has nodes, cpus, threads_per_core, memory_mib, gpus, gpu_type, gpu_memory_gib, "
            "nodelist, features, default_time, max_time, max_nodes",
        ),
        "partitions.gpu.gpus is 'many'": (f"partitions.gpu.gpus, {where}:6", "use a whole number"),
        "partitions.bad is a group of options, not a value": (
            f"partitions.bad, {where}:7",
            "set its members: partitions.bad.nodes, partitions.bad.cpus, "
            "partitions.bad.threads_per_core, partitions.bad.memory_mib, …",
        ),
        "no option called 'slurm.partiton'": (
            f"{where}:9",
            "did you mean 'slurm.partition' or 'partitions'?",
        ),
        "partitions.gpu.cpus is 0": (f"partitions.gpu.cpus, {where}:3", "use 1 or more"),
    }


def test_settings_of_an_entry_join_and_keep_the_others() -> None:
    words = ["partitions={a: {cpus: 4}, b: {}}", "partitions.a.gpus=8"]
    problems: list[ConfigError] = []
    applied = apply_overrides(ClusterSpec(), read_words(words, problems))
    assert (problems, applied.problems) == ([], [])
    assert applied.options.partitions == {"a": PartitionSpec(cpus=4, gpus=8), "b": PartitionSpec()}


def test_a_table_is_no_value() -> None:
    applied = apply_overrides(ClusterSpec(), read_words(["partitions=5"], []))
    (problem,) = applied.problems
    assert problem.fix == "use a table"


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_shipped_site_files_are_right(path: Path) -> None:
    spec = read_spec(path)
    assert spec.name == path.stem
    assert list(cluster_problems(spec)) == []


def test_there_is_an_example_of_each_kind() -> None:
    kinds = {read_spec(p).container.runtime for p in SHIPPED if p.stem.startswith("example_")}
    assert kinds == {"none", "pyxis", "apptainer"}
    stores = {(read_spec(p).name_resolve or "").partition("://")[0] for p in SHIPPED}
    assert stores == {"file", "etcd", "etcd+job"}


def test_an_example_is_not_launched_on(home: Path) -> None:
    assert list(spec_files()) == ["local"]
    with golden.raises(ConfigError) as caught:
        find_cluster("example_pyxis")
    assert f"{home}/.config/realsys/clusters/NAME.yaml" in caught.value.fix


def test_a_copied_example_is_a_site(home: Path) -> None:
    write_spec("example_mine", "file_root: /f\n")
    assert find_cluster("example_mine").file_root == "/f"


def test_a_site_file_is_never_written_over(home: Path) -> None:
    assert write_spec("mine", "file_root: /f\n") == home / ".config/realsys/clusters/mine.yaml"
    with golden.raises(ConfigError):
        write_spec("mine", "file_root: /g\n")
    assert find_cluster("mine").file_root == "/f"


@pytest.mark.parametrize("name", ["", "a/b", ".x", "-x", "a b", "../x"])
def test_names_that_are_no_file(name: str) -> None:
    with golden.raises(ConfigError):
        write_spec(name, "")


@pytest.mark.parametrize(
    ("line", "where", "what"),
    [
        ("port_range: 20000", "port_range", "port_range is '20000'"),
        ("port_range: 30000-20000", "port_range", "port_range is '30000-20000'"),
        ("port_range: 80-90", "port_range", "port_range is '80-90'"),
        ("port_range: 60000-70000", "port_range", "port_range is '60000-70000'"),
        ("interface: 10.1.0.0/99", "interface", "interface is '10.1.0.0/99'"),
        ("interface: 10.1.2.3", "interface", "interface is '10.1.2.3', the address of one host"),
        ("interface: much-too-long-name", "interface", "interface is 'much-too-long-name'"),
        ("name_resolve: fil:///x", "name_resolve", "no name-resolution store for 'fil:///x'"),
        ("name_resolve: /x", "name_resolve", "no name-resolution store for '/x'"),
        ("name_resolve: etc://h:1", "name_resolve", "no name-resolution store for 'etc://h:1'"),
        (
            "name_resolve: etcd://me:pw@h",
            "name_resolve",
            "'me:pw@h' in 'etcd://me:pw@h' is not host:port",
        ),
        (
            "name_resolve: etcd+job://h:1",
            "name_resolve",
            "'etcd+job://h:1' names a host, but a job's etcd always runs on its own first node",
        ),
        (
            "name_resolve: file://x/y",
            "name_resolve",
            "'file://x/y' does not name an absolute folder",
        ),
        (
            "cpu_image: /x.sqsh",
            "cpu_image",
            "image '/x.sqsh' is named, and no container runtime is set",
        ),
        ("container.mounts: [/a]", "container.mounts", "'/a' is no mount"),
        ("venv: env", "venv", "venv is 'env'"),
        (
            "secrets: [hf_abcdef-0123]",
            "secrets",
            "entry 1 of secrets is not the name of an environment variable",
        ),
        ("env_vars: {A-B: 1}", "env_vars.A-B", "env_vars sets 'A-B'"),
        (
            "slurm.extra_sbatch: {container-image: x}",
            "slurm.extra_sbatch.container-image",
            "--container-image in slurm.extra_sbatch would bypass the container: section",
        ),
        (
            "slurm.extra_srun: {ntasks: 4}",
            "slurm.extra_srun.ntasks",
            "slurm.extra_srun sets ntasks, which the launcher sets itself",
        ),
    ],
)
def test_mistakes_that_only_the_whole_shows(
    tmp_path: Path, line: str, where: str, what: str
) -> None:
    found = problems_of(tmp_path, f"# a comment\n{line}\n")
    assert list(found) == [what]
    assert found[what].where == f"{where}, {tmp_path / 'site.yaml'}:2"


def test_bad_times_and_hostlists(tmp_path: Path) -> None:
    text = "slurm.time_limit: 1h\npartitions.p:\n  max_time: soon\n  nodelist: n[3-1]\n"
    wheres = [p.where.partition(",")[0] for p in problems_of(tmp_path, text).values()]
    assert wheres == ["slurm.time_limit", "partitions.p.max_time", "partitions.p.nodelist"]


@pytest.mark.parametrize(
    "url",
    ["etcd://h", "etcd://h:1,h2:2379", "etcd://10.0.0.1", "etcd://[::1]:2379,h", "etcd+job://"],
)
def test_addresses_of_an_etcd(url: str) -> None:
    assert list(cluster_problems(ClusterSpec(name_resolve=url))) == []


def test_an_etcd_section_that_cant_be_right(tmp_path: Path) -> None:
    text = (
        "name_resolve: etcd://h\netcd:\n  user: me\n  cert_file: cert.pem\n  key_file: ~/key.pem\n"
    )
    found = problems_of(tmp_path, text)
    assert {p.where.partition(",")[0]: what for what, p in found.items()} == {
        "etcd.user": "the etcd section has only one of user and password_file",
        "etcd.cert_file": "etcd.cert_file is 'cert.pem'",
    }
    assert found["etcd.cert_file is 'cert.pem'"].where.endswith("site.yaml:4")


def test_a_password_is_never_sent_in_the_clear() -> None:
    section = EtcdSpec(user="me", password_file="~/pw")
    spec = ClusterSpec(name_resolve="etcd://h", etcd=section)
    assert [p.where for p in cluster_problems(spec)] == ["etcd.password_file"]
    section = dataclasses.replace(section, ca_file="/etc/etcd/ca.pem")
    assert list(cluster_problems(dataclasses.replace(spec, etcd=section))) == []


@pytest.mark.parametrize("url", [None, "file:///f", "etcd+job://"])
def test_a_section_without_the_etcd_that_it_is_for(url: str | None) -> None:
    spec = ClusterSpec(name_resolve=url, etcd=EtcdSpec(ca_file="/etc/etcd/ca.pem"))
    assert [p.where for p in cluster_problems(spec)] == ["etcd"]


def test_memory_is_no_store_of_several_nodes() -> None:
    spec = ClusterSpec(scheduler="slurm", name_resolve="memory://x")
    assert [p.where for p in cluster_problems(spec)] == ["name_resolve"]
    assert list(cluster_problems(ClusterSpec(name_resolve="memory://x"))) == []


def test_a_secret_stays_out_of_messages_and_of_env_vars(tmp_path: Path) -> None:
    found = problems_of(tmp_path, "secrets: [hf-abcdef]\n")
    assert not any("abcdef" in str(p) for p in found.values())
    spec = ClusterSpec(secrets=("TOKEN",), env_vars={"TOKEN": "x"})
    golden.check([p.what for p in cluster_problems(spec)])


def test_secrets_are_names_that_the_shell_has() -> None:
    spec = ClusterSpec(secrets=("A", "B"))
    assert missing_secrets(spec, {"A": "", "B": "x"}) == []
    golden.check([p.what for p in missing_secrets(spec, {"A": "x"})])


def test_a_name_of_a_container_is_for_pyxis() -> None:
    container = ContainerSpec(runtime="apptainer", name="kept")
    assert [
        p.where for p in cluster_problems(ClusterSpec(file_root="/f", container=container))
    ] == ["container.name"]


def test_home_is_expanded_in_venv(home: Path) -> None:
    write_spec("mine", "venv: ~/venv\n")
    assert find_cluster("mine").venv == f"{home}/venv"


@pytest.mark.parametrize(
    ("gres", "found"),
    [
        ("(null)", (None, 0)),
        ("", (None, 0)),
        ("gpu:8", (None, 8)),
        ("gpu:h100:8(S:0-3)", ("h100", 8)),
        ("gpu:h100:8(S:0,2),nvme:1", ("h100", 8)),
        ("nvme:1,gpu:a100_1g.5gb:7", ("a100_1g.5gb", 7)),
        ("gpu:a100:2(S:0),gpu:a100:2(S:1)", ("a100", 4)),
        ("gpu:a100:2,gpu:v100:2", (None, 4)),
        ("gpu:0", (None, 0)),
        ("shard:8", (None, 0)),
    ],
)
def test_gpus_in_sinfos_words(gres: str, found: tuple[str | None, int]) -> None:
    assert gpus_of(gres) == found


def lab(runtime: str = "none") -> Discovered:
    return site_from_output(CONFIG, NODES, runtime=runtime)


def test_a_site_from_what_slurm_says() -> None:
    assert lab("pyxis").spec == ClusterSpec(
        name="lab",
        scheduler="slurm",
        container=ContainerSpec(runtime="pyxis"),
        slurm=SlurmSpec(partition="main", accounting=True),
        partitions={
            "main": PartitionSpec(
                nodes=3,
                cpus=64,
                threads_per_core=2,
                memory_mib=990000,
                gpus=8,
                gpu_type="h200",
                nodelist="n[1-3]",
                features=("rack1", "ib", "rack2"),
            ),
            "debug": PartitionSpec(
                nodes=1,
                cpus=32,
                threads_per_core=1,
                memory_mib=200000,
                nodelist="n4",
                max_time="30:00",
                max_nodes=2,
            ),
        },
    )
    assert lab().version == "22.05.8"


def test_no_accounting_and_no_default_partition() -> None:
    config = CONFIG.replace("slurmdbd", "none")
    slurm = site_from_output(
        config, NODES.replace("main*", "main"), runtime="none", name="x"
    ).spec.slurm
    assert (slurm.partition, slurm.accounting) == (None, False)


@pytest.mark.parametrize("runtime", ["none", "pyxis", "apptainer"])
def test_the_written_file_reads_back_the_same(home: Path, runtime: str) -> None:
    found = lab(runtime)
    path = write_spec("lab", site_yaml(found))
    problems: list[ConfigError] = []
    applied = apply_overrides(ClusterSpec(), read_yaml(path, problems))
    assert (problems, applied.problems) == ([], [])
    assert applied.options == found.spec
    assert find_cluster("lab").partitions == found.spec.partitions
    assert f"{home}/.local/share/realsys" in places.guess_file_roots()


def test_the_file_shows_nodes_that_differ() -> None:
    text = site_yaml(lab())
    assert (
        "    # * 2 × 64 CPUs, 1000000 MiB, 8 × h200: n[1-2]\n"
        "    # * 1 × 64 CPUs, 990000 MiB, 8 × h200: n3\n"
        "    #   1 × 32 CPUs, 200000 MiB: n4\n"
        "    nodes: 3\n" in text
    )


@pytest.mark.parametrize(
    "value",
    ["n[1-3]", "1-00:00:00", "a: b", "#x", "no", "none", "null", "ünï", "'q'", "a\\b", "~/x"],
)
def test_any_text_can_be_written(tmp_path: Path, value: str) -> None:
    path = tmp_path / "x.yaml"
    path.write_text(f"slurm.constraint: {scalar(value)}\n")
    assert read_spec(path).slurm.constraint == value


def test_the_page_tells_every_option() -> None:
    page = (Path(__file__).parents[4] / "docs/site_files.md").read_text()
    options = [row.path for row in rows(ClusterSpec()) if not row.section]
    options += [f.name for f in dataclasses.fields(PartitionSpec)]
    assert [name for name in options if f"`{name}`" not in page and name != "partitions"] == []


def test_every_field_of_a_partition_is_written() -> None:
    """A new one must be thought of in site_yaml.py."""
    names = {f.name for f in dataclasses.fields(PartitionSpec)}
    assert names == {
        "nodes", "cpus", "threads_per_core", "memory_mib", "gpus", "gpu_type", "nodelist",
        "features", "default_time", "max_time", "max_nodes",
        "gpu_memory_gib",  # Slurm does not know it; of the usual types we do
    }  # fmt: skip
