"""The real items. They are prepared once into RELC_HOME by whichever test comes first (minutes); then seconds."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

from trl.builtin import names, resolve, resolve_model
from trl.builtin.catalog import find_item, read_manifest
from trl.builtin.reviews import read_rows
from trl.builtin.smollm2 import load_gguf
from trl.builtin.store import sha256_of
from trl.builtin.wheels import locate
from trl.rewards import load_classifier

pytestmark = pytest.mark.builtin


def prepare(*arguments: str, home: Path | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"RELC_HOME": str(home)} if home else {})
    command = [sys.executable, "-m", "trl.builtin", "prepare", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550)


def prepared(*items: str) -> None:
    done = prepare(*items)
    assert done.returncode == 0, done.stderr


def test_smollm2_loads_anywhere_and_equals_the_gguf_file() -> None:
    prepared("smollm2")
    path = resolve_model("builtin:smollm2")
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    source = find_item("smollm2").source
    assert source is not None
    quantised = load_gguf(locate(source))
    assert model.dtype == torch.float32 and "quantization_config" not in model.config.to_dict()
    text = "I watched this film twice, in 1984 and again\nlast night; naïve but touching 🎬"
    ids = tokenizer(text, return_tensors="pt").input_ids
    with torch.no_grad():
        assert torch.equal(model(ids).logits, quantised(ids).logits)
    assert tokenizer.decode(ids[0]) == text
    assert tokenizer.pad_token_id == tokenizer.eos_token_id == 2 and tokenizer.padding_side == "left"
    assert tokenizer("film").input_ids == [tokenizer.convert_tokens_to_ids("film")]  # no BOS
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


def test_smollm2_predicts_language() -> None:
    prepared("smollm2")
    path = resolve_model("builtin:smollm2")
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        best = model(ids).logits[0, -1].argmax()
    assert tokenizer.decode(best) == " Paris"


@pytest.mark.parametrize(("name", "train", "test"), [("imdb", 19_902, 5_000), ("rotten-tomatoes", 7_530, 1_000)])
def test_reviews_are_clean_split_and_balanced(name: str, train: int, test: int) -> None:
    prepared(name)
    data = resolve(f"builtin:{name}", "data set")
    learning, held_out = read_rows(data / "train.jsonl"), read_rows(data / "test.jsonl")
    assert (len(learning), len(held_out)) == (train, test)
    texts = [row["text"] for row in learning + held_out]
    assert len(set(texts)) == len(texts)
    assert not any("<br" in text or "  " in text for text in texts)
    assert sum(row["label"] for row in held_out) == test // 2
    # A file sorted by label would train a classifier on one class first.
    assert 0.4 < np.mean([row["label"] for row in learning[:1000]]) < 0.6


def accuracy(classifier: str, data: str, limit: int | None = None) -> float:
    rows = read_rows(resolve(data, "data set") / "test.jsonl")[:limit]
    positive = load_classifier(classifier, batch_size=64)([row["text"] for row in rows]) > 0.5
    return float(np.mean(positive == np.array([row["label"] for row in rows], dtype=bool)))


def test_the_reward_model_judges_held_out_texts() -> None:
    prepared("sentiment")
    found = accuracy("builtin:sentiment", "builtin:rotten-tomatoes")
    manifest = read_manifest(find_item("sentiment"))
    assert found >= 0.78
    assert manifest is not None and found == pytest.approx(manifest["measured"]["rotten-tomatoes accuracy"], abs=0.005)


def test_the_reward_model_is_an_ordinary_folder() -> None:
    prepared("sentiment")
    path = resolve_model("builtin:sentiment")
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    tokenizer = AutoTokenizer.from_pretrained(path)
    assert model.config.id2label == {0: "NEGATIVE", 1: "POSITIVE"}
    texts = ["a warm , funny and wonderful film", "a tedious mess with dreadful dialogue"]
    with torch.no_grad():
        good, bad = model(**tokenizer(texts, padding=True, return_tensors="pt")).logits
    assert good[1] > good[0] + 1 and bad[0] > bad[1] + 1


def test_the_evaluator_judges_held_out_texts() -> None:
    prepared("sentiment-eval")
    found = accuracy("builtin:sentiment-eval", "builtin:imdb")
    manifest = read_manifest(find_item("sentiment-eval"))
    assert found >= 0.90
    assert manifest is not None and found == pytest.approx(manifest["measured"]["imdb accuracy"])
    # Texts from elsewhere and as short as generations are harder; it must still be of use on them.
    assert accuracy("builtin:sentiment-eval", "builtin:rotten-tomatoes") >= 0.70


def test_a_second_time_takes_no_time() -> None:
    prepared()
    began = time.perf_counter()
    done = prepare()
    assert time.perf_counter() - began < 2.0
    assert done.stdout.splitlines() == [f"{name}: ready" for name in names()]


def test_a_killed_preparation_starts_over_and_ends_alike(tmp_path: Path) -> None:
    prepared("imdb")
    environment = os.environ | {"RELC_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "trl.builtin", "prepare", "imdb"]
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not (tmp_path / ".building" / "imdb").exists():
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=30)
    assert not (tmp_path / "imdb").exists()
    assert "prepared" in prepare("imdb", home=tmp_path).stdout
    for name in ("train.jsonl", "test.jsonl"):
        assert sha256_of(tmp_path / "imdb" / name) == sha256_of(resolve("builtin:imdb", "data set") / name)


def test_two_at_once_do_the_work_once(tmp_path: Path) -> None:
    environment = os.environ | {"RELC_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "trl.builtin", "prepare", "imdb"]
    both = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    shown = [process.communicate(timeout=120)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert sorted(text.strip().splitlines()[-1] for text in shown) == ["builtin:imdb: prepared", "builtin:imdb: ready"]


def test_a_damaged_file_is_made_again(tmp_path: Path) -> None:
    assert prepare("rotten-tomatoes", home=tmp_path).returncode == 0
    file = tmp_path / "rotten-tomatoes" / "train.jsonl"
    whole, times = sha256_of(file), file.stat()
    with file.open("r+b") as stream:
        stream.seek(1000)
        stream.write(b"\x00")
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert "ready" in prepare("rotten-tomatoes", home=tmp_path).stdout  # same size and time: taken on trust
    assert "prepared" in prepare("rotten-tomatoes", "--verify", home=tmp_path).stdout
    assert sha256_of(file) == whole


def test_an_unknown_item_is_one_line(tmp_path: Path) -> None:
    done = prepare("smollm3", home=tmp_path)
    assert done.returncode == 1 and done.stderr.count("\n") == 1 and "builtin:smollm2" in done.stderr
