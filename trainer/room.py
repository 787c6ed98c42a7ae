"""Room that a rank makes on its device while engines sample on it."""

from __future__ import annotations

from fp8rl.trainer import device
from fp8rl.trainer.inventory import buffers, optimizer_tensors
from fp8rl.trainer.trainer import Trainer


def put_aside(trainer: Trainer) -> int:
    """Move masters and moments to the host, and give up the gradients; the bytes that this frees on the device.

    Weights can still be read, sent and saved, tokens scored. Where Megatron has the optimizer on the host already
    (`trainer.optimizer.offload`), the gradients' are all.
    """
    trainer.forget_gradients()
    here = device.current().type
    state = (tensor for kind, tensor in optimizer_tensors(trainer) if kind in ("masters", "moments"))
    return trainer.optimizer.aside.leave(
        [tensor for tensor in state if tensor.device.type == here], [each.grad_data for each in buffers(trainer)]
    )


def take_back(trainer: Trainer) -> None:
    """Undo `put_aside`, but for the gradients."""
    trainer.optimizer.aside.come_back()
