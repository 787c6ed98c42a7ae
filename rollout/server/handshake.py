"""The handshake before the first rollout: an engine that does not run what the experiment says is refused.

SGLang logs a plugin that fails, skips it and serves on its stock ops, healthy to look at. So the plugin is asked for a
report, which is compared with the expected one, item by item.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fp8rl.rollout.errors import HandshakeError
from fp8rl.rollout.protocol import EngineReport

_REMEDIES = {
    "role": "The engine serves another model of the run: start it with the plugin's role of this one.",
    "spec_digest": "Start the engine with the trainer's quantization spec.",
    "numerics": "Start the engine with the run's numerics section.",
    "provides": "Install the locked version of sglang.",
    "versions": "Install the locked requirements in the engine's environment.",
    "code": "Both sides must import this project from one place: end what another checkout started, and look for "
    "PYTHONPATH in the engine's environment.",
    "weight_version": "Sync the weights before sampling.",
    "row_variant_ops": "On this machine a row's result depends on its batch: exact mode cannot run here.",
    "implementation": "Trainer and engine must run on GPUs of one kind, or both on CPUs.",
    "without_deepgemm": "Set numerics.deepgemm=false, or mend it in the engine's environment.",
    "threads": "Set OMP_NUM_THREADS in the engine's environment.",
    "dtype": "Start the engine in BF16.",
    "adapter": "Start the engine with the run's adapter section.",
    "kv_cache_dtype": "Start the engine without --kv-cache-dtype.",
}


def check(expected: EngineReport, found: EngineReport) -> None:
    """Compare an engine's report with what it must say.

    Raises HandshakeError listing every difference: what was found, what was expected, what to do.
    """
    if problems := differences(expected, found):
        raise HandshakeError("the engine does not run what the experiment says:\n- " + "\n- ".join(problems))


def failed_plugin(log: str) -> HandshakeError | None:
    """Return the refusal of a server that did not come up, if its log says that SGLang skipped a plugin that failed."""
    if "Failed to load plugin" in log or "Failed to execute general plugin" in log:
        return missing_report(log)
    return None


def missing_report(log: str) -> HandshakeError:
    """Return the refusal of a server that does not answer the plugin's calls, with the log's lines on the plugin."""
    lines = log.splitlines()
    mentions = [i for i, line in enumerate(lines) if "plugin" in line.lower() or "fp8rl" in line.lower()]
    quoted = sorted({i for mention in mentions for i in range(mention, min(mention + 15, len(lines)))})[:60]
    said = "\n".join(lines[i] for i in quoted) or "(its log does not mention a plugin)"
    return HandshakeError(
        "found no report of the plugin, expected one: the plugin did not load, and SGLang serves on its stock ops. "
        "Install the distribution, so that its entry point sglang.srt.plugins is there, and correct the error in the "
        "log:\n"
        f"{said}"
    )


def differences(expected: EngineReport, found: EngineReport) -> list[str]:
    """Return one sentence for each item of the report that differs from the expected one."""
    want, have = expected.model_dump(mode="json"), found.model_dump(mode="json")
    hooks = _differ_hooks(have.pop("hooks"), want.pop("hooks"))
    return hooks + [line for name in want for line in _differ_within(name, have[name], want[name], _REMEDIES[name])]


def _differ_within(key: str, found: Any, expected: Any, remedy: str) -> list[str]:
    """Compare nested mappings leaf by leaf, so that the message names the one value that differs."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        names = sorted(expected.keys() | found.keys())
        pairs = ((f"{key}.{name}", found.get(name), expected.get(name)) for name in names)
        return [line for name, have, want in pairs for line in _differ_within(name, have, want, remedy)]
    if found == expected:
        return []
    said = "nothing" if found is None else repr(found)
    return [f"{key}: found {said}, expected {'nothing' if expected is None else repr(expected)}. {remedy}"]


def _differ_hooks(found: list[str], expected: list[str]) -> list[str]:
    missing, extra = sorted(set(expected) - set(found)), sorted(set(found) - set(expected))
    problems = []
    if missing:
        problems.append(
            f"hooks: found {len(found)} installed, expected also {', '.join(missing)}. "
            "The installed SGLang differs from the one the hooks were written for: install the locked version."
        )
    if extra:
        problems.append(f"hooks: found {', '.join(extra)}, expected no such hook. Remove the plugin that installs it.")
    return problems
