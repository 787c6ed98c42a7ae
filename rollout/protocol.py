"""The protocol of calls to an engine's plugin over HTTP: one definition for both ends.

SGLang passes the `action` of /weights_checker to the scheduler's process as text, and its answer, a mapping of text to
text, back. A call travels as the action, in JSON behind a prefix, its answer in JSON as the one value of the mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from fp8rl.models.architecture import Role
from fp8rl.numerics.backend.dispatch import Implementation
from fp8rl.numerics.core.memory import Holding

_PREFIX = "fp8rl:"
_ANSWER = "answer"


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Commit(_Message):
    """Rebuild the GEMM operands of the weights, and name the weights `version`. Answer: Held."""

    call: Literal["commit"] = "commit"
    version: str


class MapBase(_Message):
    """Read the weights of a base (`models.base`) at this address (`numerics.core.memory`), not in the engine's own
    memory.

    They have no version until a commit. Answer: Mapped.
    """

    call: Literal["map_base"] = "map_base"
    address: str


class ReadManifest(_Message):
    """Digest the weights as they are. Answer: Held."""

    call: Literal["manifest"] = "manifest"


class Probe(_Message):
    """Run the engine's ops on a recording of the trainer's, a file that both sides see. Answer: ProbeAnswer."""

    call: Literal["probe"] = "probe"
    recording: Path


class ReadReport(_Message):
    """Report what runs in the engine. Answer: EngineReport."""

    call: Literal["report"] = "report"


class ReadInventory(_Message):
    """List what the engine holds, tensor by tensor. Answer: Inventory."""

    call: Literal["inventory"] = "inventory"


class ReadMemory(_Message):
    """Count the bytes in use. Answer: Memory."""

    call: Literal["memory"] = "memory"


class Ping(_Message):
    """Show that the scheduler lives. Answer: Pong."""

    call: Literal["ping"] = "ping"


Call = Commit | MapBase | ReadManifest | Probe | ReadReport | ReadInventory | ReadMemory | Ping
_CALLS: TypeAdapter[Call] = TypeAdapter(Annotated[Call, Field(discriminator="call")])


class Held(_Message):
    """The weights that an engine holds: digests by HF name, for quantized ones `digest@version`."""

    entries: dict[str, str]


class Mapped(_Message):
    """The base that an engine reads in place."""

    bytes: int
    """Its bytes."""


class ProbeAnswer(_Message):
    """The answer to a probe."""

    sha256: str
    """Of the file with the results, `rollout.plugin.op_probe.ANSWER`, beside the recording."""


class EngineReport(_Message):
    """The configuration and the state of an engine."""

    spec_digest: str
    """Digest of the QuantSpec."""
    numerics: dict[str, Any]
    """NumericsConfig.to_dict()."""
    hooks: tuple[str, ...]
    """Targets of the installed hooks, sorted."""
    provides: tuple[str, ...]
    """The forms of ops (`models.forms`) that the hooks compute by their definition, sorted."""
    versions: dict[str, str]
    """Versions of libraries, by name."""
    code: str
    """Digest of the packages that the engine imports (`numerics.core.files.code_digest`)."""
    weight_version: str | None
    """Of the loaded weights; None within an update."""
    row_variant_ops: tuple[str, ...] | None
    """Ops whose result depends on the batch; None in native mode, which does not look for them."""
    implementation: Implementation
    """Of the ops."""
    threads: int
    """Of the scheduler."""
    role: Role = "policy"
    """The purpose of the engine's model."""
    dtype: str = "bfloat16"
    """Of the model, as torch names it."""
    kv_cache_dtype: str = "bfloat16"
    """Of the cache."""
    without_deepgemm: str | None = None
    """The reason why products do not run on DeepGEMM, which the spec asks for; None if they do, or it does not ask."""
    adapter: dict[str, Any] | None = None
    """The run's section on adapters that stand beside the weights; None: the engine has none."""


class Inventory(_Message):
    """The tensors of one rank of an engine; see `rollout.plugin.inventory`."""

    held: tuple[Holding, ...]


class Memory(_Message):
    """Bytes of one rank of an engine."""

    weights: int
    """Of weights, with the operands that are made of them."""
    kv_cache: int
    """Of keys and values."""
    in_use: int
    """On its whole GPU, in all processes; on a CPU those of its process."""


class Pong(_Message):
    """A sign of life."""

    weight_version: str | None
    """Of the loaded weights; None within an update."""


WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"
RELEASED = (WEIGHTS, CACHE, GRAPHS)
"""The memory that an engine gives up while it sleeps, as SGLang names it."""
ADAPTER_SCALE = "adapter.scale"
"""The name, among those of tensors, under which an engine with adapters says what it multiplies them with."""
DELTA = "delta:"
"""Before the label of what a rank of an engine holds: a tensor that is sent under this name is a change of it
(`numerics.delta`)."""
LIBRARIES = ("sglang", "torch", "fp8rl")
"""The libraries whose versions are reported."""
ENGINE_PACKAGES = ("fp8rl.numerics", "fp8rl.models", "fp8rl.rollout")
"""The packages that the plugin imports."""


def to_action(call: Call) -> str:
    """Encode a call as the text that SGLang passes on."""
    return _PREFIX + call.model_dump_json()


def from_action(action: str) -> Call | None:
    """Decode the call in an action; None if it is one of SGLang's own."""
    return _CALLS.validate_json(action.removeprefix(_PREFIX)) if action.startswith(_PREFIX) else None


def to_checksums(answer: _Message) -> dict[str, str]:
    """Encode an answer as the mapping that SGLang passes back."""
    return {_ANSWER: answer.model_dump_json()}


def from_checksums(checksums: Mapping[str, str]) -> str:
    """Return the JSON of an answer."""
    return checksums[_ANSWER]
