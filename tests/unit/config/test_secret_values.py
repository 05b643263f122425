"""What looks like a secret is found wherever it would get into a plan, and other values are left alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from launcher.sites.clusters import find_cluster
from launcher.submit.planning import default_experiment, experiments
from realsys.api.plain import to_plain
from realsys.config.secret_values import secret_places, secret_text, secret_variable

ROOT = Path(__file__).parents[3]
LETTERS = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7bC0eF3hI6"  # made up, as long as real ones


@pytest.mark.parametrize(
    "name",
    "HF_TOKEN OPENAI_API_KEY WANDB_API_KEY AWS_SECRET_ACCESS_KEY AWS_SESSION_TOKEN MY_SECRET PGPASSWORD "
    "DB_PASSWORD MYSQL_PWD SSH_PASSPHRASE SERVICE_CREDENTIALS OPENAI_APIKEY hf_token GITHUB_PAT "
    "KEY".split(),
)
def test_a_variable_is_secret_by_its_name(name: str) -> None:
    assert secret_variable(name, "anything")
    tree = {"scheduling": {"model_worker": {"env_vars": {"A": "b", name: "anything"}}}}
    assert [path for path, _ in secret_places(tree)] == [f"scheduling.model_worker.env_vars.{name}"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("TOKENIZERS_PARALLELISM", "false"),
        ("HF_HUB_DISABLE_IMPLICIT_TOKEN", "1"),
        ("NCCL_IB_PKEY", "0x8001"),
        ("NCCL_SOCKET_IFNAME", "eth0"),
        ("SSL_KEY", "/etc/ssl/private/own.key"),
        ("GOOGLE_APPLICATION_CREDENTIALS", "~/keys/google.json"),
        ("AWS_WEB_IDENTITY_TOKEN_FILE", "/var/run/token"),
        ("KEYBOARD", "de"),
        ("MONKEY_ISLAND", "x"),
        ("MAX_TOKENS", "4096"),
        ("GPG_KEY", "A035C8C19219BA821ECEA86B64E628F8D684696D"),
        ("HF_TOKEN", ""),
        ("HF_TOKEN", "$HF_TOKEN"),
        ("OMP_NUM_THREADS", "4"),
    ],
)
def test_a_variable_of_another_name_or_a_path_is_none(name: str, value: str) -> None:
    assert not secret_variable(name, value)
    assert list(secret_places({"env_vars": {name: value}})) == []


@pytest.mark.parametrize(
    "text",
    [
        f"hf_{LETTERS}",
        f"sk-{LETTERS}",
        f"sk-ant-api03-{LETTERS}",
        f"sk-proj-{LETTERS}",
        f"ghp_{LETTERS}",
        f"github_pat_{LETTERS}",
        f"glpat-{LETTERS[:20]}",
        f"xoxb-12345678-{LETTERS}",
        "AKIAIOSFODNN7EXAMPLE",
        f"nvapi-{LETTERS}",
        "-----BEGIN RSA PRIVATE KEY-----\nMIIE",
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0NTY3ODkwIn0.abc",
        f"Authorization: Bearer sk-{LETTERS}",
        "https://ada:secret@judge.example:8000/v1",
        "etcd://realsys:hunter2@etcd1:2379",
        "python agent.py --api-key abcdefgh",
        "vllm serve --hf-token=abcdefgh --port 1",
        "export WANDB_API_KEY=abcdef",
        "cd x; OPENAI_API_KEY='abc' python agent.py",
    ],
)
@pytest.mark.parametrize(
    "place", [{"system": None}, {"extra": [None]}, {"server_args": {"x": None}}]
)
def test_a_text_is_secret_by_its_shape_wherever_it_stands(text: str, place: dict[str, Any]) -> None:
    assert secret_text(text) is not None
    filled = {k: [text] if v == [None] else {"x": text} if v else text for k, v in place.items()}
    ((path, kind),) = secret_places({"task": filled})
    assert path.startswith("task.")
    assert LETTERS[:8] not in kind


@pytest.mark.parametrize(
    "text",
    [
        "hf:openai/gsm8k/main",
        "hf_models/llama",
        "/data/risk-averse-and-long-enough-a-name",
        "task-of-sk-and-others",
        "https://judge.example:8000/v1",
        "https://$USER:$PASSWORD@judge.example/v1",
        "file:///shared/runs",
        "ssh://git@github.com/x/y",
        "python agent.py --api-key $KEY",
        "python agent.py --tokens 100 --token-budget 5",
        "export HF_TOKEN=$(cat ~/.token)",
        "export HF_HOME=/scratch/hf",
        "export HF_TOKEN_PATH=/home/ada/.token",
        "9fceb02d0ae598e95dc970b74767f19372d61af8",
        "<|eos_token|>",
        "x" * 100_000,
        "a://" * 10_000,
    ],
)
def test_another_text_is_none(text: str) -> None:
    assert secret_text(text) is None
    assert list(secret_places({"task": {"pad_token": text, "key": text}})) == []


def test_settings_that_are_keys_are_found_and_names_of_variables_are_not() -> None:
    tree = {
        "schedule": {"server_args": {"api_key": "abc", "api-key": "abc"}},
        "judge": {"api_key_env": "JUDGE_KEY", "api_key": None, "password_file": "/home/ada/p"},
        "headers": {"api-key": "env:MY_KEY", "API_KEY": "file:~/key"},
        "wandb": {"project": "0123456789abcdef" * 2 + "01234567"},
    }
    found = [path for path, _ in secret_places(tree)]
    assert found == [
        "schedule.server_args.api_key",
        "schedule.server_args.api-key",
        "wandb.project",
    ]


@pytest.mark.parametrize(
    ("value", "is_secret"),
    [
        ("env:MY_KEY", False),
        ("Bearer env:MY_KEY", False),
        ("file:~/.keys/search", False),
        ("Token file:/shared/my key", False),
        ("$MY_KEY", False),
        ("env:hunter2-hunter2", True),
        ("env:", True),
        ("Bearer hunter2 env:MY_KEY", True),
        ("env:MY_KEY hunter2", True),
        ("file:///db?password=hunter2", True),
        ("file:", True),
        ("Bearer hunter2", True),
    ],
)
def test_a_value_is_named_by_a_variable_or_a_file_and_nothing_else(value, is_secret) -> None:
    assert bool(list(secret_places({"args": {"api_key": value}}))) == is_secret
    assert bool(list(secret_places({"env": {"SEARCH_API_KEY": value}}))) == is_secret


def test_no_experiment_and_no_example_of_a_site_holds_one() -> None:
    for name, _ in experiments():
        assert list(secret_places(to_plain(default_experiment(name)))) == [], name
    for file in (ROOT / "cluster_specs").glob("*.yaml"):
        assert list(secret_places(to_plain(find_cluster(str(file))))) == [], file
