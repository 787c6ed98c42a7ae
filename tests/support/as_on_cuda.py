"""Engines on a CPU that run as on a GPU: with SGLang's overlap schedule, and with workers that are spawned."""

from __future__ import annotations

from typing import Any

import ray

from fp8rl.rollout.engine.server import SGLangServer, arguments

PLAIN_SCHEDULE = "--disable-overlap-schedule"


def install() -> None:
    """Have every engine that is started by this process, or by actors of a Ray that it starts, run so."""
    _install_here()
    init = ray.init
    ray.init = lambda *args, **kwargs: init(  # type: ignore[assignment]
        *args, runtime_env={"worker_process_setup_hook": _install_here}, **kwargs
    )


def _install_here() -> None:
    arguments._CPU_ARGUMENTS = tuple(each for each in arguments._CPU_ARGUMENTS if each != PLAIN_SCHEDULE)
    hand_over = SGLangServer._hand_over

    def spawning(self: SGLangServer, **request: Any) -> None:
        hand_over(self, **(request | {"fork": False}))

    SGLangServer._hand_over = spawning  # type: ignore[method-assign]
