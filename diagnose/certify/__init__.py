"""Is an engine exact? A running server: does a row depend on its batch? A dump: how far is it from the model?"""

from fp8rl.diagnose.certify.server import ServerReport, certify_server, rendered

__all__ = ["ServerReport", "certify_server", "rendered"]
