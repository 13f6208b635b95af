"""A resumed job must notice that a model's folder holds another model now."""

from pathlib import Path

import pytest

from tests.tiny import perturb_weights, tiny_gpt2, tiny_tokenizer
from trl.fingerprint import model_version


def test_the_version_changes_with_weights_and_tokenizer_and_with_nothing_else(tmp_path: Path) -> None:
    model = tiny_gpt2()
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    first = model_version(str(tmp_path))
    assert len(first) == 16
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    (tmp_path / "README.md").write_text("a card")
    assert model_version(str(tmp_path)) == first
    perturb_weights(model, 1)
    model.save_pretrained(tmp_path)
    second = model_version(str(tmp_path))
    assert second != first
    tiny_tokenizer(300).save_pretrained(tmp_path)
    assert model_version(str(tmp_path)) not in (first, second)


@pytest.mark.builtin
def test_names_that_are_no_folder_here_have_the_commit_they_were_loaded_from_or_none(tmp_path: Path) -> None:
    assert model_version("nobody/nothing") == ""
    assert model_version("builtin:sentiment-eval") == model_version("builtin:sentiment-eval")
    assert model_version("builtin:sentiment-eval") != model_version("builtin:smollm2")
