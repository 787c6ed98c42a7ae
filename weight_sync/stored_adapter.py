"""A stored adapter, brought to an engine that was started with the weights which it stands beside."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from torch import Tensor

from fp8rl.models import Model
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rollout.server.client import EngineClient
from fp8rl.rollout.types import Endpoint
from fp8rl.weight_sync.adapters import scale_of
from fp8rl.weight_sync.bridge import send_and_verify
from fp8rl.weight_sync.manifest import Recorder, Sent, SyncError, some_of
from fp8rl.weight_sync.transports.tensor import TensorTransport

_BUCKET_BYTES = 64 << 20


def give_adapter(
    endpoint: Endpoint, tensors: Mapping[str, Tensor], definition: Model, spec: QuantSpec, base: Sent
) -> None:
    """Have the engine hold these adapters of a model, and see that all that it holds is right.

    definition: of the model with its adapters. base: what the engine was started with as version 0, quantized by the
        spec.

    Raises:
        SyncError: it holds something else; it does not generate.
    """
    config = definition.adapter
    assert config is not None, "a model without adapters"
    recorder = Recorder(definition.tensors, endpoint.ranks)

    async def put() -> None:
        async with EngineClient(endpoint) as engine:
            await TensorTransport(_BUCKET_BYTES).send(recorder.watch(tensors.items()), [engine], 0)

    def send() -> Sequence[Sent]:
        asyncio.run(put())
        return [base, recorder.sent(), scale_of(config)]

    manifest, report, problems = send_and_verify(send, spec, [endpoint], 0)
    if problems:
        raise SyncError(
            f"{report.mismatched_tensors} of {len(manifest.entries)} tensors are not what the engine was given: "
            f"{some_of(report.mismatched)}; it does not generate. Start it again:\n" + "\n".join(problems[:20])
        )
