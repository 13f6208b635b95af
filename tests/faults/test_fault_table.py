"""The table of faults names tests that exist, and every fault that has to be survived has its line."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TABLE = Path(__file__).with_name("README.md")
LINES = [line for line in TABLE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][1:]
NAMED = sorted({name for line in LINES for name in re.findall(r"`(tests/[\w/]+\.py::\w+)`", line)})


@pytest.mark.parametrize("name", NAMED)
def test_a_named_test_exists(name: str) -> None:
    path, _, function = name.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert function in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_every_line_has_a_test() -> None:
    assert len(LINES) > 40
    for line in LINES:
        test = line.strip("|").split("|")[-1]
        assert "::" in test or "the same" in test, line


def test_every_module_of_faults_is_named() -> None:
    modules = {path.name for path in TABLE.parent.glob("test_*.py")} - {Path(__file__).name}
    assert modules == {module for module in modules if any(f"tests/faults/{module}::" in name for name in NAMED)}
