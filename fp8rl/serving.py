"""A trained model behind OpenAI's API, in the numerics that it was trained in."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from fp8rl.models import load_architecture
from fp8rl.models.adapters import AdapterSection
from fp8rl.models.architecture import Model
from fp8rl.models.checkpoint.peft import read_adapter, read_config
from fp8rl.models.checkpoint.reading import check_stored
from fp8rl.models.hub import model_directory
from fp8rl.numerics.config import Mode, NumericsConfig
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.reading import check_path, read_json
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment import read_resolved
from fp8rl.rl.experiment.preconditions import read_model
from fp8rl.rl.experiment.preconditions.tokenizer import check_chat_template, load_tokenizer
from fp8rl.rl.experiment.sections import NumericsSection
from fp8rl.rl.record.run_dir import RunDir
from fp8rl.rl.run.engines.serving import engine_adapter, expected_report
from fp8rl.rollout.config import RolloutSection
from fp8rl.rollout.environments.recording import parsers
from fp8rl.rollout.protocol import check_report
from fp8rl.rollout.server.arguments import ServedChats, has_cuda
from fp8rl.rollout.server.client import EngineClient
from fp8rl.rollout.server.server import SGLangServer
from fp8rl.rollout.types import LOOPBACK, Endpoint
from fp8rl.weight_sync.bridge import send_and_verify
from fp8rl.weight_sync.frozen import scale_of
from fp8rl.weight_sync.manifest import Recorder, Sent, SyncError, some_of
from fp8rl.weight_sync.served import convert_checkpoint
from fp8rl.weight_sync.transports.tensor import TensorTransport

LONGEST = 32768
"""Sequence that an engine of a model directory has room for, if the model does."""


@dataclass(frozen=True)
class Served:
    """A model and how it is to be computed. path: a Hugging Face directory in BF16. name: what clients call it.

    adapter: what stands beside the weights. tool_parser: the format in which the model calls tools. chat_template:
    arguments of its chat template. architecture: a user's file that has the model's; None: it is one of ours.
    """

    path: Path
    name: str
    numerics: NumericsConfig
    rollout: RolloutSection
    adapter: StoredAdapter | None = None
    tool_parser: str | None = None
    chat_template: Mapping[str, Any] = field(default_factory=dict)
    architecture: str | None = None

    @property
    def base_name(self) -> str | None:
        """The name of the model without its adapter, for clients."""
        return f"{self.name}-base" if self.adapter is not None else None


@dataclass(frozen=True)
class StoredAdapter:
    """An adapter as a run leaves it. path: a directory in PEFT's format."""

    path: Path
    config: AdapterSection


def read_served(subject: Path, mode: Mode, preset: str, architecture: str | None = None) -> Served:
    """The trained model of a run, as the run computed; or a model directory in this mode and preset, whose architecture
    may be in a user's file.

    Raises:
        UserError: it is neither, or the run has no trained model yet.
    """
    check_path(subject, "RUN|MODEL")
    files = RunDir(subject.absolute())
    if not files.experiment.is_file():
        subject = model_directory(str(subject), None, "RUN|MODEL")
        _refuse_converted(subject)
        if architecture is not None:
            load_architecture(architecture, "--architecture")
        sizes = _check_model(subject).sizes
        side = "fp8" if QuantSpec.preset(preset).quantized else "bf16"
        section = NumericsSection.model_validate({"mode": mode, "preset": preset, "trainer": side, "rollout": side})
        rollout = RolloutSection(context_length=min(sizes.max_positions, LONGEST))
        return Served(subject, files.name, section.config(tp=1), rollout, architecture=architecture)
    experiment = read_resolved(files.experiment)
    beside = engine_adapter(experiment)
    if not (files.model if beside is None else files.adapter).is_dir():
        raise user_error(
            "RUN|MODEL",
            found=f"{subject}, a run without {'model' if beside is None else 'adapter'}/",
            expected="a finished run",
            remedy=f"Finish it with fp8rl train {files.experiment} --resume, or give the directory of a model.",
        )
    path = files.model if beside is None else experiment.model.directory
    adapter = None if beside is None else StoredAdapter(files.adapter, beside)
    definition = _check_model(path)
    if adapter is not None:
        read_config(adapter.path, definition, "RUN|MODEL")
    harness = experiment.environment.harness
    return Served(
        path,
        files.name,
        experiment.numerics_config(),
        experiment.rollout,
        adapter,
        None if harness is None else harness.tool_parser,
        experiment.data.chat_template,
        experiment.model.architecture,
    )


def with_tools(served: Served, tool_parser: str) -> Served:
    """Let the model call tools in this format. Raises UserError: SGLang has none of that name."""
    if tool_parser not in (known := parsers()):
        raise user_error(
            "--tool-parser", found=tool_parser, expected=f"one of {', '.join(known)}", remedy="Correct it."
        )
    return replace(served, tool_parser=tool_parser)


def _check_model(path: Path) -> Model:
    """Check the files of a model directory; returns what was read of it. Raises UserError: one is missing or wrong."""
    definition = read_model(path, "RUN|MODEL")
    tokenizer = load_tokenizer(path, "RUN|MODEL")
    if tokenizer.chat_template:
        check_chat_template(tokenizer, path, "RUN|MODEL")
    check_stored(path, definition, "RUN|MODEL")
    return definition


def check_open(host: str, api_key: str | None) -> None:
    """Refuse an address that is not this machine's, a key that no header can carry, and strangers without a key.

    Raises:
        UserError: it is one of these.
    """
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.split() == [api_key]):
        raise user_error(
            "--api-key", found="another text", expected="printable ASCII without spaces", remedy="Choose another key."
        )
    try:
        loopback = ipaddress.IPv4Address(host).is_loopback
        with socket.socket() as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        raise user_error(
            "--host",
            found=host,
            expected="an IPv4 address of this machine, or 0.0.0.0 for all that it has",
            remedy="Correct it, or leave it out: only programs on this machine can connect then.",
        ) from None
    if not loopback and api_key is None:
        raise user_error(
            "--host",
            found=host,
            expected="a key of your own beside it, as other machines can reach this address",
            remedy="Set the environment variable FP8RL_API_KEY, or --api-key.",
        )


@contextmanager
def serve(
    served: Served, log: Path, port: int | None = None, host: str = LOOPBACK, api_key: str | None = None
) -> Iterator[SGLangServer]:
    """An engine with this model and OpenAI's endpoints below `/v1`, for as long as the block lasts.

    port: None takes a free one. api_key: None makes one up.

    Raises:
        UserError, EngineError: see `SGLangServer.start`. HandshakeError: it computes something else.
    """
    config = served.rollout.model_copy(update={"port": port, **({"speculation": None} if has_cuda() else {})})
    with tempfile.TemporaryDirectory(prefix="fp8rl-serve-") as folder:
        checkpoint, spec = Path(folder) / "served", served.numerics.rollout_spec
        beside = None if served.adapter is None else served.adapter.config
        definition = read_model(served.path, "RUN|MODEL").adapted(beside)
        tensors = {}
        if served.adapter is not None:
            tensors = read_adapter(served.adapter.path, served.path, definition, "RUN|MODEL")
        recorder = Recorder(definition.tensors, config.tp)
        convert_checkpoint(served.path, checkpoint, spec, recorder)
        plugin = {
            "numerics": served.numerics.to_dict(),
            "adapter": beside and beside.model_dump(mode="json"),
            "base_name": served.base_name,
            "architecture": served.architecture,
        }
        chats = ServedChats(served.name, served.tool_parser, served.chat_template)
        server = SGLangServer.start(
            checkpoint, config, log_path=log, plugin=plugin, served=chats, host=host, api_key=api_key
        )
        try:
            asyncio.run(_check(server.endpoint, served))
            if beside is not None:
                give_adapter(server.endpoint, tensors, definition, spec, recorder.sent())
            yield server
        finally:
            server.stop()


def _refuse_converted(model: Path) -> None:
    """Refuse what `fp8rl convert` has written, which is for other servers."""
    try:
        quantized = "quantization_config" in read_json(model / "config.json", "RUN|MODEL", "a Hugging Face config.json")
    except UserError:
        return  # what else is wrong is said by those who read it
    if quantized:
        raise user_error(
            "RUN|MODEL",
            found=f"{model}, whose weights are quantized",
            expected="a model in BF16, which this command quantizes itself",
            remedy="Give the directory that it was converted from. What `fp8rl convert` writes is for a server of "
            "your own: python -m sglang.launch_server --model-path ...",
        )


async def _check(endpoint: Endpoint, served: Served) -> None:
    beside = None if served.adapter is None else served.adapter.config
    async with EngineClient(endpoint) as client:
        check_report(expected_report(served.numerics, beside, served.architecture), await client.report())


# A stored adapter, brought to an engine that was started with the weights which it stands beside.

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
