"""Is an engine exact? A running server: does a row depend on its batch? A dump: how far is it from the model?"""

from diagnose.certify.server import certify_server
from diagnose.certify.server_report import ServerReport, rendered

__all__ = ["ServerReport", "certify_server", "rendered"]
