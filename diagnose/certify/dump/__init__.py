"""What an engine and a trainer have said of the same tokens, against a forward pass of the model itself."""

from diagnose.certify.dump.certify import certify_dump
from diagnose.certify.dump.page import write_page
from diagnose.certify.dump.report import DumpReport, rendered

__all__ = ["DumpReport", "certify_dump", "rendered", "write_page"]
