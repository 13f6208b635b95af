"""Damaged model folders are told from whole ones, and the damaged file is named."""

import json
import struct

import pytest
from transformers import AutoModelForCausalLM

from tests.tiny import tiny_llama, tiny_tokenizer
from trl.jsonl import DataFileError
from trl.model_files import check_model_files, load_tokenizer


@pytest.fixture
def folder(tmp_path):
    tiny_llama().save_pretrained(tmp_path / "model")
    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def test_a_whole_folder_passes(folder):
    check_model_files(folder)
    assert len(load_tokenizer(str(folder))) == len(tiny_tokenizer())


@pytest.mark.parametrize("share", [0, 0.001, 0.01, 0.5, 0.999])
def test_weights_cut_anywhere(folder, share):
    path = folder / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    with pytest.raises(DataFileError, match=r"model\.safetensors .*copy or download the model again"):
        check_model_files(folder)


@pytest.mark.parametrize(
    "content",
    [
        b"no weights at all, only text that is longer than a header's length",
        struct.pack("<Q", 2**63) + b"x" * 100,
        struct.pack("<Q", 2) + b"[]",
        struct.pack("<Q", 10) + b'{"a": {}  }',
        struct.pack("<Q", 9) + b'{"a": 3}  ',
    ],
)
def test_what_is_no_file_of_weights(folder, content):
    (folder / "value_head.safetensors").write_bytes(content)
    with pytest.raises(DataFileError, match=r"value_head\.safetensors"):
        check_model_files(folder)


def test_longer_than_its_header_says(folder):
    with (folder / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(DataFileError, match=r"bytes instead of"):
        check_model_files(folder)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_settings_cut_in_half(folder, name):
    content = (folder / name).read_bytes()
    (folder / name).write_bytes(content[: len(content) // 2])
    with pytest.raises(DataFileError, match=name):
        check_model_files(folder)


def test_a_shard_that_is_not_there(folder):
    lm = AutoModelForCausalLM.from_pretrained(folder)
    lm.save_pretrained(folder / "sharded", max_shard_size="100KB")
    check_model_files(folder / "sharded")
    index = json.loads((folder / "sharded" / "model.safetensors.index.json").read_text())
    shard = sorted(set(index["weight_map"].values()))[-1]
    (folder / "sharded" / shard).unlink()
    with pytest.raises(DataFileError, match=f"names {shard}, which is not there"):
        check_model_files(folder / "sharded")


def test_a_folder_without_a_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    with pytest.raises(DataFileError, match="has no tokenizer that can be loaded"):
        load_tokenizer(str(folder))
