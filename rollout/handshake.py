"""Before the first rollout: does the engine run what the experiment says? Anything else is refused.

SGLang logs a plugin that fails, skips it and serves on its stock ops, healthy to look at. So the plugin adds a report
to the scheduler's internal state, and this compares the report with what is expected, item by item.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.errors import HandshakeError

REPORT_KEY = "fp8rl"
"""Key of the plugin's report in an internal state of /server_info."""


@dataclass(frozen=True, kw_only=True)
class Handshake:
    """What the engine must report.

    spec_digest: of the QuantSpec that the trainer quantizes with. numerics: NumericsConfig.to_dict().
    hooks: names of the hooks that must be installed, no more and no less. versions: of libraries, by name.
    weight_version: of the loaded weights. row_invariant: outcome of the plugin's probe, which only exact mode needs and
    runs (None otherwise). implementation: of the ops, as `numerics.dispatch` chooses it. threads: of the scheduler.
    """

    spec_digest: str
    numerics: Mapping[str, Any]
    hooks: tuple[str, ...]
    versions: Mapping[str, str]
    weight_version: int
    row_invariant: bool | None = True
    implementation: str = "torch"
    threads: int = 1


def check(expected: Handshake, states: list[dict[str, Any]], log: str = "") -> None:
    """Compare the report of every scheduler with `expected`.

    states: `internal_states` of /server_info, one per scheduler. log: the server's log, quoted if a report is missing.

    Raises HandshakeError listing every difference: what was found, what was expected, what to do.
    """
    if not states:
        raise HandshakeError("the engine reports no scheduler, expected at least one. Look into its log.")
    problems = []
    for index, state in enumerate(states):
        where = f"scheduler {index}: " if len(states) > 1 else ""
        if REPORT_KEY not in state:
            raise HandshakeError(_missing_report(where, log))
        problems += [where + problem for problem in differences(expected, state[REPORT_KEY])]
    if problems:
        raise HandshakeError("the engine does not run what the experiment says:\n- " + "\n- ".join(problems))


def failed_plugin(log: str) -> HandshakeError | None:
    """The refusal of a server that did not come up, if its log says that SGLang skipped a plugin that failed."""
    if "Failed to load plugin" in log or "Failed to execute general plugin" in log:
        return HandshakeError(_missing_report("", log))
    return None


def differences(expected: Handshake, reported: Mapping[str, Any]) -> list[str]:
    """Every item of the report that is not as expected, as one sentence each."""
    problems = [
        *_differ(
            "spec_digest",
            reported.get("spec_digest"),
            expected.spec_digest,
            "Start the engine with the trainer's quantization spec.",
        ),
        *_differ_within(
            "numerics", reported.get("numerics"), expected.numerics, "Start the engine with the run's numerics section."
        ),
        *_differ_hooks(reported.get("hooks"), expected.hooks),
        *_differ_within(
            "versions",
            {name: version for name, version in (reported.get("versions") or {}).items() if name in expected.versions},
            expected.versions,
            "Install the locked requirements in the engine's environment.",
        ),
        *_differ(
            "weight_version",
            _number(reported.get("weight_version")),
            expected.weight_version,
            "Sync the weights before sampling.",
        ),
        *_differ(
            "row_invariant",
            reported.get("row_invariant"),
            expected.row_invariant,
            "On this machine a row's result depends on its batch: exact mode cannot run here.",
        ),
        *_differ(
            "implementation",
            reported.get("implementation"),
            expected.implementation,
            "Trainer and engine must run on GPUs of one kind, or both on CPUs.",
        ),
        *_differ(
            "threads", reported.get("threads"), expected.threads, "Set OMP_NUM_THREADS in the engine's environment."
        ),
    ]
    return problems


def _differ(key: str, found: Any, expected: Any, remedy: str) -> list[str]:
    if found == expected:
        return []
    return [f"{key}: found {'nothing' if found is None else repr(found)}, expected {expected!r}. {remedy}"]


def _differ_within(key: str, found: Any, expected: Any, remedy: str) -> list[str]:
    """Compare nested mappings leaf by leaf, so that the message names the one value that differs."""
    if not isinstance(expected, Mapping) or not isinstance(found, Mapping):
        return _differ(key, _plain(found), _plain(expected), remedy)
    names = sorted(expected.keys() | found.keys())
    return [
        line
        for name in names
        for line in _differ_within(f"{key}.{name}", found.get(name), expected.get(name), remedy)
        if name in expected or found.get(name) is not None
    ]


def _differ_hooks(found: Any, expected: tuple[str, ...]) -> list[str]:
    present = set(found or ())
    missing, extra = sorted(set(expected) - present), sorted(present - set(expected))
    problems = []
    if missing:
        problems.append(
            f"hooks: found {len(present)} installed, expected also {', '.join(missing)}. "
            "The installed SGLang differs from the one the hooks were written for: install the locked version."
        )
    if extra:
        problems.append(f"hooks: found {', '.join(extra)}, expected no such hook. Remove the plugin that installs it.")
    return problems


def _plain(value: Any) -> Any:
    """Tuples as JSON turns them."""
    return list(value) if isinstance(value, tuple) else value


def _number(version: Any) -> Any:
    return int(version) if isinstance(version, str) and version.isdecimal() else version


def _missing_report(where: str, log: str) -> str:
    lines = log.splitlines()
    mentions = [i for i, line in enumerate(lines) if "plugin" in line.lower() or REPORT_KEY in line.lower()]
    quoted = sorted({i for mention in mentions for i in range(mention, min(mention + 15, len(lines)))})[:60]
    said = "\n".join(lines[i] for i in quoted) or "(its log does not mention a plugin)"
    return (
        f"{where}found no {REPORT_KEY!r} report, expected one: the plugin did not load, and SGLang serves on its stock "
        f"ops. Install the distribution, so that its entry point sglang.srt.plugins is there, and mend what the log "
        f"says:\n{said}"
    )
