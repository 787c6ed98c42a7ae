"""Defines the calls to an engine's plugin over HTTP, for the client and the plugin.

SGLang passes the `action` of /weights_checker, a text, to the scheduler's process. It passes the scheduler's answer
back, a mapping of text to text. A call (`plugin.lifecycle.CALLS`) is sent as the action: a prefix, then its name and
arguments in JSON. Its answer, in JSON, or the text of an error is the only value of the mapping.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import to_json

from fp8rl.models.architecture import Role
from fp8rl.numerics import kv
from fp8rl.numerics.backend.implementation import Implementation
from fp8rl.rollout.types import EngineError, HandshakeError

_PREFIX = "fp8rl:"
_ANSWER, _ERROR = "answer", "error"


class Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineReport(Message):
    """The configuration and the state of an engine."""

    spec_digest: str
    numerics: dict[str, Any]
    """NumericsConfig.to_dict()."""
    hooks: tuple[str, ...]
    """Targets of the installed hooks, sorted."""
    versions: dict[str, str]
    """Versions of libraries, by name."""
    code: str
    """Digest of the packages that the engine imports (`numerics.core.files.code_digest`)."""
    weight_version: str | None
    """Version of the loaded weights. None during an update."""
    row_variant_ops: tuple[str, ...] | None
    """Ops whose result for a row depends on the batch. None in native mode, which does not look for them."""
    implementation: Implementation
    """How the engine computes its ops."""
    threads: int
    """Number of torch's threads in the scheduler's process."""
    role: Role = "policy"
    """The purpose of the engine's model in the run."""
    dtype: str = "bfloat16"
    """Dtype of the model, as torch names it."""
    kv_cache_dtype: str = "bfloat16"
    """Dtype of the KV cache, as torch names it."""
    without_deepgemm: str | None = None
    """Why products do not run on DeepGEMM although the spec requires it. None if they do, or need not."""
    adapter: dict[str, Any] | None = None
    """The run's `adapter` section. None: the engine has no adapters."""


class Memory(Message):
    """Memory of one rank of an engine, in bytes."""

    weights: int
    """Bytes of weights, and of the operands that are made from them."""
    kv_cache: int
    """Bytes of keys and values, and of the states of linear attention."""
    in_use: int
    """Bytes in use on the rank's GPU, by all processes. On a CPU: bytes of the rank's process."""


WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"
RELEASED = (WEIGHTS, CACHE, GRAPHS)
"""SGLang's names of the memory that an engine releases while it sleeps."""
ADAPTER_SCALE = "adapter.scale"
"""The name of the scale of an engine's adapters, among the names of digests."""
DELTA = "delta:"
"""The prefix of the name of a tensor that is sent as a change (`numerics.delta`). The rest of the name is the label,
in the rank of the engine, of the tensor that changes."""
LIBRARIES = ("sglang", "torch", "fp8rl")
"""The libraries whose versions an engine reports."""
ENGINE_PACKAGES = ("fp8rl.numerics", "fp8rl.models", "fp8rl.rollout")
"""The packages that the plugin imports."""


def to_action(call: str, **arguments: Any) -> str:
    """Encode a call as the text that SGLang passes on."""
    return _PREFIX + json.dumps([call, arguments])


def from_action(action: str) -> tuple[str, dict[str, Any]] | None:
    """Decode the name and the arguments of the call in an action. None if the action is one of SGLang's own."""
    if not action.startswith(_PREFIX):
        return None
    call, arguments = json.loads(action.removeprefix(_PREFIX))
    return call, arguments


def to_checksums(answer: Any) -> dict[str, str]:
    """Encode an answer, or an error in its place, as the mapping that SGLang passes back."""
    if isinstance(answer, Exception):
        return {_ERROR: f"{type(answer).__name__}: {answer}"}
    return {_ANSWER: to_json(answer).decode()}


def from_checksums(checksums: Mapping[str, str]) -> str:
    """Return the JSON of an answer. Raises EngineError: it is an error."""
    if (error := checksums.get(_ERROR)) is not None:
        raise EngineError(f"the engine's plugin: {error}")
    return checksums[_ANSWER]


# The handshake before the first rollout: an engine that does not run what the experiment says is refused.
#
# SGLang logs a plugin that fails, skips it and serves on its stock ops, healthy to look at. So the plugin is asked for
# a report, which is compared with the expected one, item by item.

_REMEDIES = {
    "role": "The engine serves another model of the run. Start it with the expected role.",
    "spec_digest": "Start the engine with the trainer's quantization spec.",
    "numerics": "Start the engine with the run's numerics section.",
    "versions": "Install the locked requirements in the engine's environment.",
    "code": "Both sides must import this project from the same place. End programs that another checkout has started, "
    "and check PYTHONPATH in the engine's environment.",
    "weight_version": "Sync the weights before sampling.",
    "row_variant_ops": "On this machine the result of a row depends on its batch, so exact mode cannot run here.",
    "implementation": "Trainer and engine must run on GPUs of one kind, or both on CPUs.",
    "without_deepgemm": "Set numerics.deepgemm=false, or repair DeepGEMM in the engine's environment.",
    "threads": "Set OMP_NUM_THREADS in the engine's environment.",
    "dtype": "Start the engine in BF16.",
    "adapter": "Start the engine with the run's adapter section.",
    "kv_cache_dtype": kv.REMEDY,
}


def check_report(expected: EngineReport, found: EngineReport) -> None:
    """Compare an engine's report with the expected one.

    Raises HandshakeError, which lists for every difference what was found, what was expected, and what to do.
    """
    if problems := differences(expected, found):
        raise HandshakeError("the engine does not run what the experiment says:\n- " + "\n- ".join(problems))


def failed_plugin(log: str) -> HandshakeError | None:
    """Return the error for a server that did not start, if by its log a plugin has failed and SGLang has skipped it."""
    if "Failed to load plugin" in log or "Failed to execute general plugin" in log:
        return missing_report(log)
    return None


def missing_report(log: str) -> HandshakeError:
    """Return the error for a server that does not answer the plugin's calls. It quotes the log's lines on plugins."""
    lines = log.splitlines()
    mentions = [i for i, line in enumerate(lines) if "plugin" in line.lower() or "fp8rl" in line.lower()]
    quoted = sorted({i for mention in mentions for i in range(mention, min(mention + 15, len(lines)))})[:60]
    quotation = "\n".join(lines[i] for i in quoted) or "(its log does not mention a plugin)"
    return HandshakeError(
        "found no report of the plugin, expected one. SGLang serves with stock ops, because the plugin did not load. "
        "Install the distribution, which has the entry point sglang.srt.plugins, and correct the error in the log:\n"
        f"{quotation}"
    )


def differences(expected: EngineReport, found: EngineReport) -> list[str]:
    """Return a message for each item of the report that differs from the expected item."""
    want, have = expected.model_dump(mode="json"), found.model_dump(mode="json")
    found_hooks, expected_hooks = set(have.pop("hooks")), set(want.pop("hooks"))
    problems = []
    if missing := sorted(expected_hooks - found_hooks):
        problems.append(
            f"hooks: found {len(found_hooks)} installed, expected also {', '.join(missing)}. "
            "The hooks were written for another version of SGLang. Install the locked version."
        )
    if extra := sorted(found_hooks - expected_hooks):
        problems.append(f"hooks: found {', '.join(extra)}, expected no such hook. Remove the plugin that installs it.")
    return problems + [line for name in want for line in _differ_within(name, have[name], want[name], _REMEDIES[name])]


def _differ_within(key: str, found: Any, expected: Any, remedy: str) -> list[str]:
    """Compare nested mappings value by value, so that the message names the value that differs."""
    if isinstance(expected, Mapping) and isinstance(found, Mapping):
        names = sorted(expected.keys() | found.keys())
        pairs = ((f"{key}.{name}", found.get(name), expected.get(name)) for name in names)
        return [line for name, have, want in pairs for line in _differ_within(name, have, want, remedy)]
    if found == expected:
        return []
    value = "nothing" if found is None else repr(found)
    return [f"{key}: found {value}, expected {'nothing' if expected is None else repr(expected)}. {remedy}"]
