"""Errors between the loop and an engine."""

from __future__ import annotations


class EngineError(RuntimeError):
    """The engine refused or failed a request, or did not come up."""


class EngineDiedError(EngineError):
    """The engine's process is gone. The message ends with the last lines of its log."""


class StaleWeightsError(EngineError):
    """Tokens were sampled at other weights than the trainer expects."""


class HandshakeError(EngineError):
    """The engine does not run what the experiment says it runs."""
