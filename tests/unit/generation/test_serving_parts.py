"""The parts of a generation server that need no socket: key, settings, options, metrics, staged weights."""

from __future__ import annotations

import golden
import pytest
import torch
from torch import nn

from realsys.api.errors import ConfigError, DataError
from realsys.generation.embedded_settings import EmbeddedSettings
from realsys.generation.http.http_session import HttpSession
from realsys.generation.http.secret import bearer_key
from realsys.generation.http.served_engine import Counters
from realsys.generation.served_engines.child import failure_line, options
from realsys.generation.served_engines.staged_weights import stage
from realsys.generation.server.http_control import prometheus_text
from realsys.runtime.certificates import self_signed
from realsys.transport.curve_keys import TrialKeypairs
from realsys.transport.generation_messages import ServerInfo


def test_the_bearer_key_is_the_trials_own() -> None:
    one, other = TrialKeypairs.generate(), TrialKeypairs.generate()
    assert bearer_key(one) == bearer_key(one)
    assert bearer_key(one) != bearer_key(other)
    assert len(bearer_key(one)) == 64
    assert one.server_secret.decode() not in bearer_key(one)


def test_a_certificate_shows_no_key() -> None:
    made = self_signed("server", "127.0.0.1")
    assert "PRIVATE" not in repr(made)
    assert made.sha256 != self_signed("server", "127.0.0.1").sha256


@pytest.mark.parametrize(
    "url",
    [
        "https://h:1",
        "https://h:1#sha256=",
        "https://h:1#sha256=zz",
        "https://h:1#sha1=00",
        "http://10.0.0.1:1",
        "http://host:1",
        "ftp://127.0.0.1",
    ],
)
def test_a_url_must_say_who_the_server_is(url: str) -> None:
    with golden.raises(ConfigError):
        HttpSession(url, "key", name="s")


@pytest.mark.parametrize(
    "args",
    [
        {"max_runing": 3},
        {"max_running": 0},
        {"max_running": True},
        {"num_threads": 1.5},
        {"dtype": "float8"},
        {"kv_on_update": "drop"},
    ],
)
def test_settings_that_can_not_be_are_refused(args: dict[str, object]) -> None:
    with golden.raises(ConfigError):
        EmbeddedSettings.from_args(args)


def test_settings() -> None:
    settings = EmbeddedSettings.from_args({"max_tokens": 10, "quantize": "int8"})
    assert (settings.max_tokens, settings.max_running, settings.quantize) == (10, 64, "int8")


def test_options_of_a_child() -> None:
    args = {"tp_size": 2, "flag": True, "off": False, "none": None, "names": ["a", "b"], "zero": 0}
    assert options(args) == ["--tp-size", "2", "--flag", "--names", "a", "b", "--zero", "0"]


@pytest.mark.parametrize(
    ("log", "words"),
    [
        ("", ""),
        ("loading\n\n", "loading"),
        ("usage: api_server.py [-h]\napi_server.py: error: no such option: --dtyp\n",
         "error: no such option: --dtyp"),
        ('  File "torch/library.py", line 9\n    raise X\n'
         "RuntimeError: operator torchvision::nms does not exist\n",
         "RuntimeError: operator torchvision::nms does not exist"),
        ("(EngineCore_0 pid=8) ERROR 11-23 03:00:00 [core.py:9] ValueError: heads of 16\n"
         "(APIServer pid=7) Traceback (most recent call last):\n"
         "(APIServer pid=7) RuntimeError: Engine core failed. See root cause above. {}\n"
         "resource_tracker: there is 1 leaked object\n",
         "ValueError: heads of 16"),
    ],
)  # fmt: skip
def test_the_last_words_of_a_log_say_why_a_program_ended(log: str, words: str) -> None:
    assert failure_line(log.splitlines()) == words
    assert len(failure_line(["Error: " + "x" * 9999])) <= 400


def test_metrics_are_prometheus_text() -> None:
    info = ServerInfo(engine="embedded", model_path="m", weight_version=7, num_running=3)
    text = prometheus_text(info, Counters(generated_tokens=11, update_paused_s=0.5))
    lines = text.splitlines()
    assert 'realsys_weight_version{engine="embedded"} 7' in lines
    assert 'realsys_generated_tokens_total{engine="embedded"} 11' in lines
    assert 'realsys_weight_update_paused_seconds_total{engine="embedded"} 0.5' in lines
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(set(names)) == len(names) == len(lines) // 3


class Tied(nn.Module):
    """Two names, one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.second.weight = self.first.weight
        self.norm = nn.Parameter(torch.zeros(3))


def test_staged_weights_change_nothing_until_the_switch() -> None:
    module = Tied()
    before = module.first.weight.detach().clone()
    new = {"first.weight": torch.ones(2, 2, dtype=torch.float64), "norm": torch.full((3,), 4.0)}
    staged = stage(module, new, where="test")
    assert torch.equal(module.first.weight, before)
    staged.switch()
    assert torch.equal(module.second.weight, torch.ones(2, 2))
    assert torch.equal(module.norm, torch.full((3,), 4.0))
    stage(module, {**new, "second.weight": torch.ones(2, 2)}, where="test")  # its other name


@pytest.mark.parametrize(
    "change",
    [
        {"norm": None},
        {"bias": torch.zeros(1)},
        {"norm": torch.zeros(4)},
    ],
)
def test_weights_of_another_model_are_refused(change: dict[str, torch.Tensor | None]) -> None:
    weights = {"first.weight": torch.ones(2, 2), "norm": torch.ones(3), **change}
    with golden.raises(DataError):
        stage(Tied(), {k: v for k, v in weights.items() if v is not None}, where="test")
