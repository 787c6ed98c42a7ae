"""Starts a trainer rank. It gets a device and ops, and joins a gloo (CPU) or NCCL (GPU) world that Megatron splits."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from fp8rl.numerics.backend import implementation
from fp8rl.numerics.backend.compiler import enable_compiler
from fp8rl.numerics.backend.cuda_toolkit import use_toolkit
from fp8rl.numerics.config import NumericsConfig
from fp8rl.numerics.core.process import LOOPBACK
from fp8rl.trainer import device
from fp8rl.trainer.config import TrainerSection
from fp8rl.trainer.distributed.layout import Layout
from fp8rl.trainer.megatron import patches, te_runtime
from fp8rl.trainer.megatron.lowering import lower

TIMEOUT = timedelta(minutes=10)
TURN = timedelta(minutes=5)


def start(rank: int, numerics: NumericsConfig) -> None:
    """Choose the device and the ops' implementation, and set TransformerEngine's environment variables. Call this
    before the process imports Megatron. Raises UserError: TransformerEngine is installed and cannot run this spec."""
    te_runtime.prepare(lower(numerics, device.has_transformer_engine()))
    here = device.claim(rank)
    if here == device.CPU:
        enable_compiler()  # on a GPU the compiled code would divide approximately, and kernels do its work
    else:
        use_toolkit()
    implementation.choose(here, numerics.spec)


def initialize(config: TrainerSection, rank: int = 0, store: dist.Store | None = None, host: str = LOOPBACK) -> Layout:
    """Join the world and build Megatron's process groups.

    Args:
        store: the store through which ranks find each other. None for a single rank.
        host: this node's address. If it is a loopback address, gloo listens on loopback.
    """
    patches.install()
    from megatron.core import parallel_state, tensor_parallel

    torch.set_num_threads(1)
    here = device.claim(rank)
    if host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    # Not bound to a device: a bound world is what torch splits later groups from, and SGLang's group with the engines
    # would wait for ranks of this world that have no part in it.
    dist.init_process_group(
        device.collectives(here),
        store=store or dist.HashStore(),
        rank=rank,
        world_size=config.world_size,
        timeout=TIMEOUT,
    )
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=config.tp,
        pipeline_model_parallel_size=config.pp,
        context_parallel_size=config.cp,
        expert_model_parallel_size=config.ep,
        expert_tensor_parallel_size=1,
        create_gloo_process_groups=False,
    )
    # No layer draws random numbers; Megatron's embedding only asks for the named states to exist.
    tensor_parallel.model_parallel_cuda_manual_seed(0)
    layout = Layout.of(rank, config)
    found = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_data_parallel_rank(with_context_parallel=True),
        parallel_state.get_context_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_data_parallel_rank(),
    )
    expected = (layout.tp_rank, layout.pp_rank, layout.dp_rank, layout.cp_rank, layout.ep_rank, layout.expert_dp_rank)
    assert found == expected, f"found Megatron's places {found} of rank {rank}, expected {expected}"
    return layout


@contextmanager
def in_turn(what: str, patience: timedelta = TURN) -> Iterator[None]:
    """Let one rank at a time run the block, in the order of arrival.

    what: the name of the queue, also in messages.

    Raises TimeoutError: the rank before this one has not left the block within `patience`. The message names that rank.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        yield
        return
    queue = dist.PrefixStore(what, dist.distributed_c10d._get_default_store())
    place = queue.add("places", 1)
    queue.set(f"rank/{place}", str(dist.get_rank()))
    try:
        if place > 1:
            before, left = f"rank/{place - 1}", f"left/{place - 1}"
            try:
                queue.wait([left], patience)
            except dist.DistStoreError as error:
                rank, seconds = queue.get(before).decode(), patience.total_seconds()
                raise TimeoutError(
                    f"{what}: found trainer rank {rank} still busy after {seconds:g} s, expected it to finish"
                ) from error
            for key in (left, before):
                queue.delete_key(key)
        yield
    finally:
        queue.set(f"left/{place}", "")


def shutdown() -> None:
    """Leave the world."""
    from megatron.core import parallel_state

    if dist.is_initialized():
        parallel_state.destroy_model_parallel()
        dist.destroy_process_group()


def open_store(host: str, world_size: int) -> dist.TCPStore:
    """Open the store through which ranks find each other. It listens only on `host`, on a free port (`.port`)."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.bind((host, 0))
    listener.listen()
    port = listener.getsockname()[1]
    return dist.TCPStore(
        host,
        port,
        world_size,
        is_master=True,
        timeout=TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def join_store(host: str, port: int, world_size: int) -> dist.TCPStore:
    """Connect to the store that rank 0 has opened at `host:port`."""
    return dist.TCPStore(host, port, world_size, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
