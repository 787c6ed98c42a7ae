"""What the pages name is there: each path of the repository, each module, and each link to another page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fp8rl
from rl.record.metric_rows import METRICS
from tests.support.paths import ROOT

OWN = ("README.md", "CONTRIBUTING.md", "AGENTS.md", "CHANGELOG.md", "examples/README.md")
PAGES = [*(ROOT / name for name in OWN), *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = "numerics models rollout trainer weight_sync rl diagnose studies fp8rl"
FOLDERS += " examples docs bench tests requirements launch"
SECTIONS = {"numerics", "rollout", "trainer"}
"""Folders that are sections of a spec too: what follows a dot there may be a key."""
ELSEWHERE = {"models/Qwen3-30B-A3B"}
"""Paths of a reader's own."""
PATH = re.compile(rf"(?:{'|'.join(FOLDERS.split())})/[\w./-]*")
MODULE = re.compile(rf"(?:{'|'.join(FOLDERS.split())})(?:\.\w+)+")


@pytest.mark.parametrize("page", [page for page in PAGES if page.name != "log.md"], ids=lambda page: page.name)
def test_every_path_and_module_that_a_page_names_is_there(page: Path) -> None:
    """A path in capitals, such as `studies/NAME`, is one to be made; the log speaks of the past."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    named = re.findall(r"`([^`\s]+)`", text)
    paths = [name for name in named if PATH.fullmatch(name) and not re.search(r"[A-Z]{3}|_N\b", name)]
    paths = [name for name in paths if name not in {*METRICS, *ELSEWHERE}]
    modules = [name for name in named if MODULE.fullmatch(name) and not name.endswith((".yaml", ".py", ".json"))]
    modules = [name for name in modules if name.partition(".")[0] not in SECTIONS]
    missing = [name for name in paths if not any((base / name).exists() for base in (ROOT, page.parent))]
    missing += [name for name in modules if not _is_module(name)]
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=lambda page: f"{page.parent.name}/{page.name}")
def test_every_link_leads_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    inside = [link.partition("#")[0] for link in links if "://" not in link]
    assert not [link for link in inside if link and not (page.parent / link).exists()]


def _is_module(name: str) -> bool:
    """Whether it is a module, or a name in one."""
    parts = name.split(".")
    if parts[0] == "fp8rl" and parts[1] in fp8rl.__all__:
        return True
    places = [ROOT.joinpath(*parts[:end]) for end in (len(parts), len(parts) - 1)]
    whole, above = ((place / "__init__.py").exists() or place.with_suffix(".py").exists() for place in places)
    return whole or (above and len(parts) > 2)
