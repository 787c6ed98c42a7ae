"""Serves a trained model with OpenAI's API, in the numerics that it was trained in."""

from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fp8rl.diagnose.subject import Subject, model_given
from fp8rl.models.checkpoint.padding import padded, unpadded
from fp8rl.models.checkpoint.peft import read_adapter
from fp8rl.models.checkpoint.reading import check_stored
from fp8rl.numerics.core.errors import UserError, user_error
from fp8rl.numerics.core.files import check_writable, writing
from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.numerics.spec import QuantSpec
from fp8rl.rl.experiment.preconditions import read_model
from fp8rl.rl.experiment.preconditions.tokenizer import check_chat_template, load_tokenizer
from fp8rl.rl.run.engines.serving import expected_report
from fp8rl.rollout.engine.engine import Engine
from fp8rl.rollout.engine.server.arguments import ServedChats
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.megatron.model_checks import check_layout
from fp8rl.weight_sync.frozen import scale_of
from fp8rl.weight_sync.manifest import Manifest, Recorder, SyncError
from fp8rl.weight_sync.served import convert_checkpoint
from fp8rl.weight_sync.transports.tensor import TensorTransport

_BUCKET_BYTES = 64 << 20


def check_open(host: str, api_key: str | None) -> None:
    """Check the address and the key of a server. Raises UserError: the address is not this machine's, no HTTP header
    can carry the key, or other machines could connect without a key."""
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.split() == [api_key]):
        raise user_error("--api-key", "another text", "printable ASCII without spaces", "Choose another key.")
    try:
        loopback = ipaddress.IPv4Address(host).is_loopback
        with socket.socket() as probe:
            probe.bind((host, 0))
    except (ValueError, OSError):
        raise user_error(
            "--host",
            found=host,
            expected="an IPv4 address of this machine, or 0.0.0.0 for all its addresses",
            remedy="Correct it, or leave it out: only programs on this machine can connect then.",
        ) from None
    if not loopback and api_key is None:
        raise user_error(
            "--host",
            found=host,
            expected="also an API key of your own, because other machines can reach this address",
            remedy="Set the environment variable FP8RL_API_KEY, or --api-key.",
        )


@contextmanager
def serve(
    served: Subject,
    log: Path,
    say: Callable[[str], object],
    port: int | None = None,
    host: str = LOOPBACK,
    api_key: str | None = None,
) -> Iterator[Engine]:
    """Run an engine with this model and OpenAI's endpoints below `/v1` while the block lasts.

    say: prints which kernels are compiled first. port: None takes a free port. api_key: None makes a new key.

    Raises UserError, EngineError: see `Engine.start`. HandshakeError: the engine computes in other numerics. SyncError:
    it holds other tensors than the model has.
    """
    experiment, spec = served.experiment, served.numerics.rollout_spec
    config = experiment.rollout.model_copy(update={"port": port})
    path, beside = experiment.model.directory, experiment.adapter
    with tempfile.TemporaryDirectory(prefix="fp8rl-serve-") as folder:
        checkpoint, tensors = Path(folder) / "served", {}
        definition = read_model(path, "RUN|MODEL").adapted(beside)
        if beside is not None and beside.start is not None:
            tensors = read_adapter(Path(beside.start), path, definition, "RUN|MODEL")
        recorder = Recorder(definition.tensors, config.tp)
        convert_checkpoint(path, checkpoint, spec, recorder)
        plugin = {
            "numerics": served.numerics.to_dict(),
            "adapter": beside and beside.model_dump(mode="json"),
            "base_name": served.base_name,
            "architecture": experiment.model.architecture,
        }
        chats = ServedChats(served.name, served.tool_parser, experiment.data.chat_template)
        expected = expected_report(served.numerics, beside, experiment.model.architecture)
        engine = Engine(config, log, plugin, expected, host, chats, api_key)
        with asyncio.Runner() as runner:
            runner.run(engine.start(checkpoint))
            try:
                runner.run(TensorTransport(_BUCKET_BYTES).send(recorder.watch(tensors.items()), [engine]))
                parts = [recorder.sent(), *([scale_of(beside)] if beside is not None else [])]
                manifest = Manifest.merged(0, spec, parts)
                if problems := manifest.differences(runner.run(engine.commit(0))):
                    raise SyncError(
                        f"the engine: found {len(problems)} of {len(manifest.entries)} tensors different from the "
                        "model's, expected none. Start it again:\n" + "\n".join(list(problems.values())[:20])
                    )
                yield engine
            finally:
                runner.run(engine.stop())


def convert_model(
    model: Path, out: Path, preset: str, adapter: Path | None, architecture: Path | None, note: Callable[[str], None]
) -> QuantSpec:
    """Quantize a model for a user's server, after merging `adapter` into it. Return the quantization spec.

    architecture: a user's file with the model's architecture. note: prints remarks on unusual weights.

    Raises UserError: the model, the preset or the adapter cannot be used, or `out` exists.
    """
    spec, model = QuantSpec.preset(preset), model_given(model, architecture, "MODEL")
    definition = read_model(model, "MODEL")
    check_layout(definition.shape, TrainerSection(), spec)
    check_stored(model, definition, "MODEL", say=note)
    if (model / "tokenizer.json").is_file():  # an engine needs none, and a base model no chat template
        tokenizer = load_tokenizer(model, "MODEL")
        if tokenizer.chat_template:
            check_chat_template(tokenizer, model, "MODEL")
    _check_new(out)
    with writing(out, "OUT"):
        convert_checkpoint(model, out, spec, adapter=adapter, whole=True)
    return spec


def pad_model(model: Path, out: Path, pad: bool, architecture: Path | None) -> dict[str, Any]:
    """Write a model padded to whole quantization blocks, or without its padding (pad=False). Return the changed keys of
    its config.json. Raises UserError: the model cannot be padded, has no padding to remove, or `out` exists."""
    model = model_given(model, architecture, "MODEL")
    check_stored(model, read_model(model, "MODEL"), "MODEL", say=lambda _: None)
    _check_new(out)
    spec = QuantSpec.preset("fp8_block_pow2")
    with writing(out, "OUT"):
        if pad:
            return padded(model, out, "MODEL", lambda wider: check_layout(wider.shape, TrainerSection(), spec))
        return unpadded(model, out, "MODEL")


def _check_new(out: Path) -> None:
    check_writable(out, "OUT")
    if os.path.lexists(out):
        raise UserError(f"OUT: found {out}, expected a directory that does not exist yet. Choose another one.")
