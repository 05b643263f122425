"""What transformers raises over a model's directory, said for those who did not call it (pure).

Its messages are written for its callers: options to pass, links, advice of many lines. Most mistakes are
found by our own look at a directory (whole.py) before anything starts; these are for the rest, and for
directories that were changed since.
"""

from __future__ import annotations

import re

_SAVE_AGAIN = (
    "save it as tokenizer.json where it loads: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
)
_OTHER_TYPE = "use a newer transformers, or a model of a type that this one has"

# Pattern of `Type: message`; what happened, with the pattern's groups; what to do. The first one counts.
_WORDS: tuple[tuple[str, str, str], ...] = (
    (
        r"custom code|trust_remote_code",
        "it brings code of its own, which is not run here",
        "use a model of a type that transformers itself has",
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
        "one of its JSON files is none: {0}",
        "copy the directory again, whole",
    ),
    (
        r"ignore_mismatched_sizes|size mismatch",
        "its weights have other shapes than config.json says",
        "put the config.json there that belongs to the weights",
    ),
    (
        r"(?i)sentencepiece|tiktoken",
        "its tokenizer is in a format that has to be converted, with a package that is not here",
        _SAVE_AGAIN,
    ),
    (
        r"Couldn't instantiate the backend tokenizer|[Tt]okenizer class (\S+)",
        "no tokenizer can be made of its files",
        _SAVE_AGAIN,
    ),
    (
        r"StrictDataclass(?:.|\n)*?Error: ([^\n]+)\s*$",
        "config.json can't be so: {0}",
        "correct config.json",
    ),
    (
        r"negative dimension (-\d+)",
        "config.json has a size below 0: {0}",
        "correct config.json",
    ),
    (
        r"KeyError: '?([^'\n]+)'?",
        "config.json or tokenizer.json names, or lacks, {0!r}",
        "correct the one that does; `realsys plan` looks at both",
    ),
)


def in_our_words(error: Exception) -> tuple[str, str]:
    """(what is wrong with the directory, what to do), each one line."""
    said = f"{type(error).__name__}: {error}"
    for pattern, what, fix in _WORDS:
        if found := re.search(pattern, said):
            groups = [group or "a value is missing" for group in found.groups()]
            return what.format(*groups)[:300], fix
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    told = f"transformers can't load it: {type(error).__name__}: {first[:200]}"
    return told, "check the directory, or save the model again with save_pretrained"
