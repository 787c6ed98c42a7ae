"""What an engine and a trainer have said of the same tokens, against a forward pass of the model itself."""

from fp8rl.diagnose.certify.dump.certify import certify_dump
from fp8rl.diagnose.certify.dump.page import write_page
from fp8rl.diagnose.certify.dump.report import DumpReport, rendered

__all__ = ["DumpReport", "certify_dump", "rendered", "write_page"]
