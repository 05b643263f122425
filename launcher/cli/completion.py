"""Answers Tab completion from a generated table and the runs folder, without typer or network.

`realsys completion bash` prints a script that calls `realsys __complete WORD…` with the words after
`realsys` up to the cursor, the last one being completed. The answer may be wrong or empty, but is never
slow and never an error, because completion can't report one.
"""

from __future__ import annotations

import os

from launcher.cli import front_page
from launcher.sites import places
from launcher.submit import setting_table

SCRIPTS = {
    "bash": """\
_realsys() {
    local IFS=$'\\n'
    COMPREPLY=($(realsys __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null))
    [[ ${#COMPREPLY[@]} -eq 1 && $COMPREPLY == *[.=] ]] && compopt -o nospace 2>/dev/null
}
complete -o default -o bashdefault -F _realsys realsys
""",
    "zsh": """\
#compdef realsys
_realsys() {
    local -a found
    found=("${(@f)$(realsys __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}")
    if [[ -z "$found[1]" ]]; then _files; return; fi
    compadd -S '' -- "${(@M)found:#*[.=]}"
    compadd -- "${(@)found:#*[.=]}"
}
compdef _realsys realsys
""",
    "fish": """\
complete -c realsys -a '(realsys __complete (commandline -opc)[2..] (commandline -ct) 2>/dev/null)'
""",
}
TAKES_EXPERIMENT = ("launch", "plan", "graph", "schema")
TAKES_TRIAL = (
    *("status", "watch", "logs", "stop", "resume", "wait", "show", "graph", "report"),
    *("explain", "exec", "tell", "scale", "replay", "rescore", "audit", "rm", "samples"),
    *("serve", "chat", "eval"),
)
TAKES_SETTINGS = ("launch", "plan", "resume", "show", "data")
TAKES_WORKER = ("logs", "exec", "tell")


def candidates(words: list[str]) -> list[str]:
    """Lists the completions of the last of ``words``, sorted."""
    *before, partial = _rejoined(words) or [""]
    kept = 0 if partial == "".join(words[-1:]) else partial.index("=") + 1
    found = {c for c in _possible(before, partial) if c.startswith(partial)}
    return sorted(c[kept:] for c in found)


def _rejoined(words: list[str]) -> list[str]:
    """Words of which bash has made three, ``a``, ``=`` and ``b``: it completes the last alone."""
    whole: list[str] = []
    for previous, word in zip(["", *words], words, strict=False):
        if whole and "=" in (previous, word):
            whole[-1] += word
        else:
            whole.append(word)
    return whole


def _possible(before: list[str], partial: str) -> list[str]:
    if not before:
        return [*front_page.VERBS, "--help", "--version"]
    verb, previous = before[0], before[-1]
    if partial.startswith("-"):
        return list(front_page.VERBS.get(verb, ()))
    if previous == "--cluster":
        return list(places.spec_files())
    if verb == "show" and previous == "--config":
        return experiments()
    if previous in ("--trial", "--config", "--import", "--out", "--timeout", "--grace"):
        return []  # the shell offers files
    if verb in TAKES_SETTINGS and (found := settings(before[1:], partial)):
        return found
    position = len([word for word in before[1:] if not word.startswith("-")])
    if verb == "completion":
        return list(SCRIPTS)
    if verb in TAKES_WORKER and position == 1:
        return workers(before[1])
    if position and not (verb == "data" and position == 1):
        return []
    if verb == "data":
        return (experiments() if before[-1] == "show" else []) if position else ["score", "show"]
    names = experiments() if verb in TAKES_EXPERIMENT else []
    return names + (trials() if verb in TAKES_TRIAL else [])


def settings(before: list[str], partial: str) -> list[str]:
    """Lists the next parts of names, or the values, of settings of the experiment named first."""
    for word in before:
        if known := setting_table.recall(word.partition("/")[0]):
            name, equals, _ = partial.partition("=")
            if equals:
                return [f"{name}={value}" for value in known.get(name, ())]
            ends = ((name, name.find(".", len(partial)) + 1) for name in known)
            return [name[:end] if end else f"{name}=" for name, end in ends]
    return []


def experiments() -> list[str]:
    """Lists built-in experiments and those that were run before."""
    return [*front_page.EXPERIMENTS, *{name.partition("/")[0] for name in trials()}]


def trials() -> list[str]:
    """Lists ``experiment/trial`` of every trial of this user."""
    found = []
    for runs in _runs_folders():
        for experiment in _folders(runs):
            inside = os.path.join(runs, experiment)
            found += [f"{experiment}/{trial}" for trial in _folders(inside)]
    return found


def workers(trial: str) -> list[str]:
    """Lists workers that have a log in the trial's last attempt."""
    for runs in _runs_folders():
        attempts = os.path.join(runs, trial, "attempts")
        for attempt in _folders(attempts)[-1:]:
            logs = _entries(os.path.join(attempts, attempt, "logs"))
            return ["/".join(log[:-4].rsplit("-", 1)) for log in logs if log.endswith(".log")]
    return []


def _runs_folders() -> list[str]:
    user = places.user_name()
    roots = places.guess_file_roots()
    # As realsys.trial.folders.own_root names them.
    own = [os.path.join(root, f"realsys-{user}") for root in roots]
    return [os.path.join(root, "runs", user) for root in (*roots, *own)]


def _folders(path: str) -> list[str]:
    return [name for name in _entries(path) if os.path.isdir(os.path.join(path, name))]


def _entries(path: str) -> list[str]:
    try:
        return sorted(os.listdir(path))
    except OSError:
        return []
