"""What stands beside the code says what the code says: the site, the hooks, the citation, the launch templates."""

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from fp8rl.cli import COMMANDS
from lab.mutations import copy_checkout, run_tests
from tests.support.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LAUNCH = sorted((ROOT / "examples/launch").iterdir())


def test_the_site_has_every_page_with_a_title_by_word() -> None:
    text = (ROOT / "docs/hooks/mkdocs.yml").read_text()
    sections: list[dict[str, list[dict[str, str]]]] = yaml.safe_load(text)["nav"]
    entries = [entry for section in sections for pages in section.values() for entry in pages]
    titles = {page: title for entry in entries for title, page in entry.items()}
    listed = list(titles)
    assert (titles["plan.md"], titles["gpu.md"]) == ("Plan", "GPU")
    assignments = ast.parse((ROOT / "docs/hooks/pages.py").read_text()).body
    (outside,) = [ast.literal_eval(each.value) for each in assignments if _assigns(each, "OUTSIDE")]
    assert all((ROOT / place).is_file() for place in outside)
    assert sorted(listed) == sorted([*outside.values(), *(page.name for page in (ROOT / "docs").glob("*.md"))])


def test_a_commit_is_checked_by_what_lint_runs() -> None:
    hooks = [hook["entry"] for repo in _yaml(".pre-commit-config.yaml")["repos"] for hook in repo["hooks"]]
    dry = subprocess.run(["make", "--dry-run", "lint"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    linted = [line.removesuffix(" .") for line in dry.splitlines() if re.match(r"\.venv/bin/(ruff|mypy)", line)]
    assert hooks == linted and len(hooks) == 3


@pytest.mark.slow
def test_nothing_needs_the_links_at_the_top(tmp_path: Path) -> None:
    """Four links lead a reader into fp8rl/. In a copy without them, lint and tests of the copy pass."""
    copy_checkout(tmp_path)
    links = {str(path.relative_to(tmp_path)): str(path.readlink()) for path in tmp_path.rglob("*") if path.is_symlink()}
    assert links == {name: f"fp8rl/{name}" for name in ("rl", "rollout", "trainer", "weight_sync")}
    for link in links:
        (tmp_path / link).unlink()
    assert subprocess.run([sys.executable, "-m", "ruff", "check", "--no-cache", "."], cwd=tmp_path).returncode == 0
    below = "tests/test_architecture.py::test_everything_is_imported_below_fp8rl"
    assert run_tests(tmp_path, [below, "tests/test_docs.py"])


def test_the_citation_is_of_this_version() -> None:
    citation = _yaml("CITATION.cff")
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert f"({PROJECT['version']})" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("file", LAUNCH, ids=lambda path: path.name)
def test_launch_templates_name_what_there_is(file: Path) -> None:
    text = file.read_text()
    commands = {command.__name__ for group in COMMANDS.values() for command in group}
    assert set(re.findall(r"^ *(?:exec )?fp8rl (\w+)", text, re.MULTILINE)) <= commands
    named = re.findall(r"\b(?:examples|docs)/[\w./]+\b", text)
    assert named and all((ROOT / name).is_file() for name in named)
    if file.suffix in {".sh", ".sbatch"}:
        assert subprocess.run(["bash", "-n", str(file)], check=False).returncode == 0
        assert file.stat().st_mode & 0o111


def test_kuberay_runs_the_ray_of_the_image() -> None:
    cluster = _yaml("examples/launch/kuberay.yaml")["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}" in (ROOT / "requirements/gpu.txt").read_text().splitlines()
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    assert all(group["template"]["spec"]["containers"][0]["image"] == "fp8rl:latest" for group in groups)


def test_a_node_without_a_spec_says_what_it_needs() -> None:
    run = subprocess.run([ROOT / "examples/launch/node.sh", "0", "1"], capture_output=True, text=True, check=False)
    assert run.returncode == 2 and "expected at least 4: RANK NODES HEAD SPEC" in run.stderr


def _yaml(name: str) -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((ROOT / name).read_text())
    return read


def _assigns(statement: ast.stmt, name: str) -> bool:
    return isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == name
