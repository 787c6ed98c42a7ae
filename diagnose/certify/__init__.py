"""The certificate of an engine: a row of a running server depends on nothing else; a dump is as near as its model."""

from fp8rl.diagnose.certify.server import ServerReport, certify_server, rendered

__all__ = ["ServerReport", "certify_server", "rendered"]
