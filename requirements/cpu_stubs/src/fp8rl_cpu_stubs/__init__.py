"""What the stand-ins share: they refuse to load beside CUDA, and their missing functions say so when called."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

DISTRIBUTION = "fp8rl-cpu-stubs"


def refuse_with_cuda(package: str, real_distribution: str) -> None:
    """Raise ImportError where CUDA is available: there the real package has to be installed, not its stand-in."""
    if torch.cuda.is_available():
        raise ImportError(
            f"{package} is the CPU stand-in of {DISTRIBUTION}, but CUDA is available on this machine. "
            f"Run `pip uninstall {DISTRIBUTION}` and install {real_distribution} "
            "(`pip install 'fp8rl[gpu]'` brings it), or hide the GPUs with CUDA_VISIBLE_DEVICES=''."
        )


def missing_names(module: str) -> Callable[[str], Any]:
    """A module-level `__getattr__` that gives every public name a function which raises when called."""

    def __getattr__(name: str) -> Any:
        # Private and dunder names stay absent: Python and inspection tools probe for them.
        if name.startswith("_"):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        return _missing(module, name)

    return __getattr__


def define_missing_ops(namespace: str, *names: str) -> None:
    """Give torch.ops these names, with functions that raise when called, whatever their arguments are."""
    for name in names:
        setattr(getattr(torch.ops, namespace), name, _missing(f"torch.ops.{namespace}", name))


def _missing(module: str, name: str) -> Callable[..., NoReturn]:
    def missing(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{module}.{name} does not exist on the CPU: {DISTRIBUTION} holds its name only.")

    missing.__name__ = name
    missing.__qualname__ = name
    missing.__module__ = module
    return missing
