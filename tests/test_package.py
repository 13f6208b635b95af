"""The package itself: light imports, the clash with Hugging Face's trl, help that answers at once."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


def python(code: str, *path: Path) -> subprocess.CompletedProcess[str]:
    setup = f"import sys; sys.path[:0] = {[str(p) for p in path]!r}\n"
    return subprocess.run([sys.executable, "-c", setup + code], capture_output=True, text=True, timeout=120)


def test_import_is_light_and_names_are_there():
    done = python(
        "import trl, trl.run, trl.critic.parse, sys\n"
        "assert not {'torch', 'transformers', 'sklearn', 'matplotlib', 'openai'} & set(sys.modules), 'heavy'\n"
        "for name in trl.__all__: getattr(trl, name)\n"
        "print(trl.DISTRIBUTION)"
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "relc\n"
    assert "Hugging Face" not in done.stderr


def test_warns_when_the_other_trl_is_installed(tmp_path):
    info = tmp_path / "trl-0.11.4.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: trl\nVersion: 0.11.4\n")
    done = python("import trl", tmp_path)
    assert "Hugging Face's 'trl' 0.11.4 is installed beside 'relc'" in done.stderr
    assert "pip uninstall trl" in done.stderr


SCRIPTS = sorted(
    str(path.relative_to(ROOT)) for folder in ("examples", "eval_scripts") for path in (ROOT / folder).rglob("*.py")
)


@pytest.mark.parametrize("script", SCRIPTS)
def test_every_script_refuses_the_other_trl_and_explains(script, tmp_path):
    (tmp_path / "trl").mkdir()
    (tmp_path / "trl" / "__init__.py").write_text("__version__ = '0.11.4'\n")
    code = f"import runpy; sys.argv = ['x', '--help']; runpy.run_path({str(ROOT / script)!r}, run_name='__main__')"
    done = python(code, tmp_path)
    assert done.returncode != 0
    assert "trl" in done.stderr and "relc" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("script", SCRIPTS)
def test_help_needs_no_heavy_import(script):
    code = (
        f"import runpy; sys.argv = ['x', '--help']\n"
        f"try: runpy.run_path({str(ROOT / script)!r}, run_name='__main__')\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "assert not {'torch', 'transformers', 'sklearn', 'matplotlib'} & set(sys.modules), 'heavy'"
    )
    done = python(code)
    assert done.returncode == 0, done.stderr
    assert "--" in done.stdout
