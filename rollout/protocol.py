"""What an engine's plugin is asked over HTTP, and what it answers: one definition for both ends.

SGLang passes the `action` of /weights_checker to the scheduler's process as text, and its answer, a mapping of text to
text, back. A call travels as the action, in JSON behind a prefix, its answer in JSON as the one value of the mapping.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from fp8rl.models.architecture import Role
from fp8rl.numerics.backend.implementation import Implementation
from fp8rl.numerics.holdings import Holding

_PREFIX = "fp8rl:"
_ANSWER = "answer"


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Commit(_Message):
    """Refresh all that is made of the weights, and name them `version`. Answer: Held."""

    call: Literal["commit"] = "commit"
    version: str


class MapBase(_Message):
    """Hold the weights of a base (`models.base`) in the memory at this address (`numerics.io.shared`), and not in the
    engine's own; they have no version until a commit. Answer: Mapped."""

    call: Literal["map_base"] = "map_base"
    address: str


class ReadManifest(_Message):
    """Digest the weights as they are. Answer: Held."""

    call: Literal["manifest"] = "manifest"


class Probe(_Message):
    """Run the engine's ops on a recording of the trainer's, a file that both sides see. Answer: Probed."""

    call: Literal["probe"] = "probe"
    recording: Path


class ReadReport(_Message):
    """Say what runs in the engine. Answer: Report."""

    call: Literal["report"] = "report"


class ReadInventory(_Message):
    """Say what the engine holds, tensor by tensor. Answer: Inventory."""

    call: Literal["inventory"] = "inventory"


class ReadMemory(_Message):
    """Say how many bytes are in use. Answer: Memory."""

    call: Literal["memory"] = "memory"


class Ping(_Message):
    """Say that the scheduler lives. Answer: Pong."""

    call: Literal["ping"] = "ping"


Call = Commit | MapBase | ReadManifest | Probe | ReadReport | ReadInventory | ReadMemory | Ping
_CALLS: TypeAdapter[Call] = TypeAdapter(Annotated[Call, Field(discriminator="call")])


class Held(_Message):
    """The weights that an engine holds: digests by HF name, of what is quantized `digest@version`."""

    entries: dict[str, str]


class Mapped(_Message):
    """bytes: of the base that an engine reads where it is."""

    bytes: int


class ProbeAnswer(_Message):
    """sha256: of the file that answers the probe, `rollout.plugin.op_probe.ANSWER`, beside the recording."""

    sha256: str


class EngineReport(_Message):
    """What runs in an engine.

    Attributes:
        role: what the engine's model is there for.
        spec_digest: of the QuantSpec. numerics: NumericsConfig.to_dict().
        hooks: targets of the installed hooks, sorted. provides: the forms of ops (`models.forms`) that they compute by
            their definition, sorted.
        versions: of libraries, by name. code: digest of the packages that the engine imports (`numerics.io.code`).
        weight_version: of the loaded weights; None within an update.
        row_variant_ops: those whose result depends on the batch; None in native mode, which does not look for them.
        implementation: of the ops. without_deepgemm: why products do not run on DeepGEMM, which the spec asks for; None
            if they do, or it does not ask. threads: of the scheduler.
        dtype, kv_cache_dtype: of the model and of the cache, as torch names them.
        adapter: the run's section on adapters that stand beside the weights; None: the engine has none.
    """

    spec_digest: str
    numerics: dict[str, Any]
    hooks: tuple[str, ...]
    provides: tuple[str, ...]
    versions: dict[str, str]
    code: str
    weight_version: str | None
    row_variant_ops: tuple[str, ...] | None
    implementation: Implementation
    threads: int
    role: Role = "policy"
    dtype: str = "bfloat16"
    kv_cache_dtype: str = "bfloat16"
    without_deepgemm: str | None = None
    adapter: dict[str, Any] | None = None


class Inventory(_Message):
    """held: what one rank of an engine holds; see `rollout.plugin.inventory`."""

    held: tuple[Holding, ...]


class Memory(_Message):
    """Bytes of one rank of an engine.

    weights: with what is made of them. kv_cache: of keys and values. in_use: on its whole GPU, whoever uses them; on a
    CPU of its process.
    """

    weights: int
    kv_cache: int
    in_use: int


class Pong(_Message):
    """weight_version: of the loaded weights; None within an update."""

    weight_version: str | None


WEIGHTS, CACHE, GRAPHS = "weights", "kv_cache", "cuda_graph"
RELEASED = (WEIGHTS, CACHE, GRAPHS)
"""What an engine gives up while it sleeps, as SGLang names it."""
ADAPTER_SCALE = "adapter.scale"
"""The name, among those of tensors, under which an engine with adapters says what it multiplies them with."""
DELTA = "delta:"
"""Before the label of what a rank of an engine holds: a tensor that is sent under this name is a change of it
(`numerics.delta`)."""
LIBRARIES = ("sglang", "torch", "fp8rl")
"""Whose versions are reported."""
ENGINE_PACKAGES = ("fp8rl.numerics", "fp8rl.models", "fp8rl.rollout")
"""What the plugin imports."""


def to_action(call: Call) -> str:
    """A call as the text that SGLang passes on."""
    return _PREFIX + call.model_dump_json()


def from_action(action: str) -> Call | None:
    """The call in an action; None if it is one of SGLang's own."""
    return _CALLS.validate_json(action.removeprefix(_PREFIX)) if action.startswith(_PREFIX) else None


def to_checksums(answer: _Message) -> dict[str, str]:
    """An answer as the mapping that SGLang passes back."""
    return {_ANSWER: answer.model_dump_json()}


def from_checksums(checksums: Mapping[str, str]) -> str:
    """The JSON of an answer."""
    return checksums[_ANSWER]
