"""Files in the commands of MCP servers are found where a trial is launched, as workers run elsewhere."""

from __future__ import annotations

import pytest

from experiments.parts.agent_files import located_env_args


def test_words_that_are_files_here_get_their_whole_paths(tmp_path, monkeypatch):
    (tmp_path / "my tools.py").write_text("")
    monkeypatch.chdir(tmp_path)
    given = {"servers": ["python 'my tools.py' x", "https://host/mcp"], "allowed": ["add"]}
    made = located_env_args("mcp", given)
    assert made == {
        "servers": [f"python '{tmp_path}/my tools.py' x", "https://host/mcp"],
        "allowed": ["add"],
    }
    assert located_env_args("mcp", {"servers": "python none.py"}) == {"servers": ["python none.py"]}


@pytest.mark.parametrize(
    ("env", "args"),
    [
        ("openenv", {"url": "http://a"}),
        ("math_verify", {"servers": "x"}),
        ("mcp", {}),
        ("mcp", {"servers": ["python 'x", 3]}),
    ],
)
def test_other_arguments_stay_as_they_are(env, args):
    assert located_env_args(env, args) == args
