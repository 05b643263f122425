"""Translates exceptions that transformers raises over a model directory (pure).

Its messages address its callers: options to pass, links, long advice. Most mistakes are found by the
checks of consistency.py before anything starts; these translations are for the rest, and for
directories that were changed since.
"""

from __future__ import annotations

import re

_SAVE_AGAIN = (
    "save it as tokenizer.json where it loads: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
)
_OTHER_TYPE = "use a newer transformers, or a model type that the installed one has"

# (pattern of `Type: message`, what happened with the pattern's groups, what to do). The first match counts.
_EXPLANATIONS: tuple[tuple[str, str, str], ...] = (
    (
        r"custom code|trust_remote_code",
        "the model needs its own code, which realsys does not run",
        "use a model type that transformers itself has",
    ),
    (
        r"model type `([^`]+)` but Transformers does not recognize",
        "the installed transformers has no model_type {0!r}",
        _OTHER_TYPE,
    ),
    (
        r"Unrecognized model in|Should have a `model_type` key",
        "config.json has no model_type that transformers knows",
        _OTHER_TYPE,
    ),
    (
        r"JSONDecodeError: (.+)|not a valid JSON file",
        "one of its JSON files is invalid: {0}",
        "copy the directory again, whole",
    ),
    (
        r"ignore_mismatched_sizes|size mismatch",
        "the weights' shapes differ from config.json",
        "use the config.json that belongs to the weights",
    ),
    (
        r"(?i)sentencepiece|tiktoken|Error parsing line b",
        "its tokenizer's format must be converted with a package that is not installed, or is broken",
        _SAVE_AGAIN,
    ),
    (
        r"Couldn't instantiate the backend tokenizer|[Tt]okenizer class (\S+)",
        "the tokenizer files can't be loaded",
        _SAVE_AGAIN,
    ),
    (
        r"StrictDataclass(?:.|\n)*?Error: ([^\n]+)\s*$",
        "config.json is invalid: {0}",
        "correct config.json",
    ),
    (
        r"negative dimension (-\d+)",
        "config.json has a size below 0: {0}",
        "correct config.json",
    ),
    (
        r"KeyError: '?([^'\n]+)'?",
        "config.json or tokenizer.json has an unknown or missing name: {0!r}",
        "correct that file; `realsys plan` checks both",
    ),
)


def explain_load_error(error: Exception) -> tuple[str, str]:
    """Returns (what is wrong with the directory, what to do), each one line."""
    text = f"{type(error).__name__}: {error}"
    for pattern, what, fix in _EXPLANATIONS:
        if found := re.search(pattern, text):
            groups = [group or "a value is missing" for group in found.groups()]
            return what.format(*groups)[:300], fix
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    what = f"transformers can't load it: {type(error).__name__}: {first[:200]}"
    return what, "check the directory, or save the model again with save_pretrained"
