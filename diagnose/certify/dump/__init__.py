"""The certificate of a dump: engine and trainer on the same tokens, against a forward pass of the model itself."""

from fp8rl.diagnose.certify.dump.certify import certify_dump
from fp8rl.diagnose.certify.dump.dump_report import DumpReport, rendered, write_page

__all__ = ["DumpReport", "certify_dump", "rendered", "write_page"]
