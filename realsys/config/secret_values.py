"""Finds what looks like a secret in settings and in a site's description (pure).

What is found is refused before anything is written: a plan can be read by others, and is kept. Known by the
name under which it stands, or by its shape. Values are never shown.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

ENVIRONMENTS = frozenset({"env_vars", "env", "environment"})  # tables of environment variables
# Names that end so, whatever their value, and names of which a number is no secret.
_ALWAYS = re.compile(r"(SECRET|PASSWORD|PASSWD|PASSPHRASE|_PWD|CREDENTIALS?)S?$")
_USUALLY = re.compile(r"(TOKEN|API_?KEY|(^|_)KEY|(^|_)PAT)S?$")
_HARMLESS = frozenset({"GPG_KEY", "LS_KEY", "SORT_KEY", "CACHE_KEY"})  # GPG_KEY: of Python's images
# Settings of these names, as servers of others have them; ours name a variable (api_key_env) or a file.
_SETTINGS = frozenset(
    "api_key apikey api-key password passwd secret client_secret access_token auth_token hf_token "
    "bearer_token".split()
)
_SHAPES = {
    "a token of Hugging Face": r"hf_[A-Za-z0-9]{16,}",
    "an API key": r"sk-[A-Za-z0-9_-]{16,}",
    "a token of GitHub": r"gh[pousr]_[A-Za-z0-9]{20,}|github_pat_[A-Za-z0-9_]{20,}",
    "a token of GitLab": r"glpat-[A-Za-z0-9_-]{16,}",
    "a token of Slack": r"xox[abeprs]-[A-Za-z0-9-]{10,}",
    "a key of AWS": r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Z0-9])",
    "a key of Google": r"AIza[A-Za-z0-9_-]{35}",
    "a key of NVIDIA": r"nvapi-[A-Za-z0-9_-]{20,}",
    "a key of Groq": r"gsk_[A-Za-z0-9]{20,}",
    "a token of a package index": r"pypi-[A-Za-z0-9_-]{40,}|npm_[A-Za-z0-9]{30,}",
    "a token of a vault": r"hvs\.[A-Za-z0-9_-]{20,}",
    "a JSON web token": r"eyJ[A-Za-z0-9_-]{10,}\.eyJ[A-Za-z0-9_-]{10,}\.",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY",
}
_SHAPE = re.compile(r"(?<![A-Za-z0-9_-])(?:" + "|".join(f"({s})" for s in _SHAPES.values()) + ")")
_USER_OF_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.-]{0,20}://[^/\s:@?#]*:([^/\s@?#]+)@")
_OPTION = re.compile(r"--(?:api[-_]?key|[a-z-]{0,20}token|password|passwd|secret)[= ]+(\S+)")
_ASSIGNED = re.compile(r"(?:^|[\s;&])([A-Z][A-Z0-9_]+)=([^\s;&]+)")
_PATH = re.compile(r"(?:~|\.{1,2})?/[\w.@+-]*(?:/[\w.@+-]*)+")
# Who reads it takes the value from there; a scheme of a header may stand before it.
_NAMED = re.compile(r"(?:[A-Za-z-]{1,20} )?(?:env:[A-Za-z_]\w*|file:[\w.~/@+ -]+)", re.ASCII)
_NUMBER = re.compile(r"(?:0x[0-9a-fA-F]+|[0-9]{1,9}|true|false|yes|no|on|off|none)", re.I)
_WANDB_KEY = re.compile(r"[0-9a-f]{40}")


def secret_variable(name: str, value: str) -> bool:
    """Returns whether an environment variable holds a secret, by its name.

    >>> secret_variable("HF_TOKEN", "x"), secret_variable("TOKENIZERS_PARALLELISM", "x")
    (True, False)
    >>> secret_variable("SSL_KEY", "/etc/ssl/own.key"), secret_variable("NCCL_IB_PKEY", "0x8001")
    (False, False)
    """
    upper = name.upper()
    if upper in _HARMLESS or _is_reference(value) or _PATH.fullmatch(value):
        return False
    if _ALWAYS.search(upper):
        return True
    return bool(_USUALLY.search(upper)) and not _NUMBER.fullmatch(value)


def secret_text(text: str) -> str | None:
    """Returns what kind of secret a text holds, by its shape; None: none that is known.

    >>> secret_text("https://ada:pass@host/v1")
    'a URL with a password'
    >>> secret_text("risk-averse-and-long-enough") is None
    True
    """
    if (found := _SHAPE.search(text)) is not None:
        return list(_SHAPES)[found.lastindex - 1 if found.lastindex else 0]
    if (url := _USER_OF_URL.search(text)) is not None and not _is_reference(url[1]):
        return "a URL with a password"
    if (option := _OPTION.search(text)) is not None and not _is_harmless(option[1]):
        return "an option with a key or password"
    for name, value in _ASSIGNED.findall(text):
        if secret_variable(name, value.strip("\"'")):
            return f"the variable {name}"
    return None


def secret_places(tree: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Yields (dotted path, what it holds) of all secrets in JSON values."""
    if isinstance(tree, Mapping):
        is_environment = path.rpartition(".")[2] in ENVIRONMENTS
        for name, value in tree.items():
            at = f"{path}.{name}" if path else str(name)
            if isinstance(value, str) and _is_named_secret(str(name), value, is_environment):
                yield at, "a secret, by its name"
            else:
                yield from secret_places(value, at)
    elif isinstance(tree, list | tuple):
        for number, value in enumerate(tree):
            yield from secret_places(value, f"{path}[{number}]")
    elif isinstance(tree, str):
        kind = secret_text(tree)
        if kind is None and "wandb" in path.lower() and _WANDB_KEY.fullmatch(tree):
            kind = "a key of wandb"
        if kind is not None:
            yield path, kind


def _is_named_secret(name: str, value: str, is_environment: bool) -> bool:
    if is_environment:
        return secret_variable(name, value)
    return name.lower() in _SETTINGS and not _is_reference(value)


def _is_harmless(value: str) -> bool:
    return _is_reference(value) or bool(_PATH.fullmatch(value) or _NUMBER.fullmatch(value))


def _is_reference(value: str) -> bool:
    """Whether a shell, or who reads ``env:NAME``, would put something else in its place. An empty one holds
    nothing.
    """
    held = value.strip("\"'")
    return held.startswith(("$", "`", "{")) or not held or bool(_NAMED.fullmatch(held))
