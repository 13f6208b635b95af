import subprocess
import sys
from pathlib import Path

import pytest

from trl.builtin import NotPreparedError, UnknownBuiltinError, home, is_builtin, names, resolve, resolve_model
from trl.builtin.__main__ import main
from trl.builtin.catalog import all_items, closure, find_item, locate_model


def test_other_names_pass_through() -> None:
    assert resolve_model("gpt2") == "gpt2" and resolve_model("./some/folder") == "./some/folder"
    assert is_builtin("builtin:smollm2") and not is_builtin("smollm2")


def test_home_is_an_absolute_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RELC_HOME", "~/elsewhere")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert home() == tmp_path / "elsewhere"
    monkeypatch.delenv("RELC_HOME")
    assert home() == tmp_path / ".cache" / "relc"
    monkeypatch.setenv("RELC_HOME", "relative")
    assert home() == Path.cwd() / "relative"


def test_an_unknown_name_lists_what_there_is() -> None:
    with pytest.raises(UnknownBuiltinError, match=r"builtin:smol2.*builtin:smollm2"):
        resolve_model("builtin:smol2")


def test_a_name_of_another_kind_is_refused() -> None:
    with pytest.raises(UnknownBuiltinError, match=r"'builtin:imdb' is a data set.*builtin:smollm2"):
        resolve_model("builtin:imdb")
    with pytest.raises(UnknownBuiltinError, match="builtin:imdb, builtin:rotten-tomatoes"):
        resolve("builtin:smollm2", "data set")


def test_an_unprepared_name_gives_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("RELC_HOME", str(tmp_path))
    with pytest.raises(NotPreparedError, match=r"python -m trl\.builtin prepare smollm2"):
        resolve_model("builtin:smollm2")


def test_what_an_item_needs_comes_first() -> None:
    order = [item.name for item in closure([find_item("sentiment-eval")])]
    assert order == ["imdb", "rotten-tomatoes", "sentiment-eval"]
    seen: set[str] = set()
    for item in all_items():
        assert seen.issuperset(item.needs)
        seen.add(item.name)


def test_list_and_errors_of_the_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RELC_HOME", str(tmp_path / "none"))
    assert main(["list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in names()) and shown.count("not prepared") == len(names())
    assert not (tmp_path / "none").exists()


def test_help_and_list_do_not_wait_for_torch() -> None:
    code = (
        "import sys, trl.builtin, trl.builtin.__main__ as m, trl.rewards, trl.data.sentiment, trl.data.prompts\n"
        "m.main(['list'])\n"
        "sys.exit(','.join({'torch', 'transformers', 'sklearn', 'datasets'} & set(sys.modules)) or None)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_a_folder_without_a_model_is_one_line(tmp_path):
    """Such as the run folder of a run that was killed; the public reward model's layout has weights only."""
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(OSError, match=r"holds no model .* did the run that should have written it come to its end"):
        locate_model(str(tmp_path))
    for name in ("config.json", "adapter_config.json", "pytorch_model.bin"):
        (tmp_path / name).write_text("{}")
        assert locate_model(str(tmp_path)) == str(tmp_path)
        (tmp_path / name).unlink()
