"""A run that was saved, and goes on elsewhere, is the run that never stopped; states that don't fit are refused."""

import os
import random
import resource
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.tiny import tiny_llama, tiny_tokenizer
from tests.trainer.state_runs import KINDS, advance, critic, lora, make, scalar, trainer_of, weights
from trl import AutoModelForCausalLMWithValueHead, PPOTrainer, create_reference_model, set_seed
from trl.jsonl import DataFileError
from trl.trainer.batches import ShardedBatches


def assert_equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("at", [2, 3])
def test_a_run_that_was_saved_goes_on_as_the_whole_run_to_the_bit(kind, at, tmp_path):
    """Broken off within a pass over the data and between two."""
    whole = make(kind)
    rows = advance(whole, 5, kind)
    before = make(kind)
    advance(before, at, kind)
    before.save_state(tmp_path / "state")
    advance(before, 1, kind)  # it went on for a while, and was then killed
    set_seed(99)
    after = make(kind)
    set_seed(77)
    after.load_state(tmp_path / "state")
    assert after.current_step == at
    assert advance(after, 5 - at, kind) == rows[at:]
    assert_equal(weights(after), weights(whole))
    assert after.kl_ctl.value == whole.kl_ctl.value
    assert after.score_scaler.moments == whole.score_scaler.moments


def test_the_generators_of_python_numpy_and_torch_go_on(tmp_path):
    trainer = make("critic")
    set_seed(5)
    random.gauss(0, 1), np.random.standard_normal()  # each leaves a second number for the next call
    trainer.save_state(tmp_path / "state")
    expected = [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand(), torch.rand(3)]
    set_seed(6)
    trainer.load_state(tmp_path / "state")
    drawn = [random.gauss(0, 1), random.random(), np.random.standard_normal(), np.random.rand(), torch.rand(3)]
    assert [float(x) for x in drawn[:-1]] == [float(x) for x in expected[:-1]]
    assert torch.equal(drawn[-1], expected[-1])


def test_a_state_that_is_loaded_and_saved_is_the_same_state(tmp_path):
    first = make("scalar")
    advance(first, 2, "scalar")
    first.save_state(tmp_path / "a")
    second = make("scalar")
    second.load_state(tmp_path / "a")
    second.save_state(tmp_path / "b")
    results = []
    for name in ("a", "b"):
        trainer = make("scalar")
        trainer.load_state(tmp_path / name)
        results.append((advance(trainer, 2, "scalar"), weights(trainer)))
    assert results[0][0] == results[1][0]
    assert_equal(results[0][1], results[1][1])


def test_only_what_is_trained_is_kept(tmp_path):
    adapters, shared = make("lora"), make("scalar")
    for name, trainer in (("lora", adapters), ("shared", shared)):
        advance(trainer, 1, "scalar")
        trainer.save_state(tmp_path / name)
        assert not list(tmp_path.glob(".*"))
    kept = load_file(tmp_path / "lora" / "policy.safetensors")
    assert {key.split(".")[0] for key in kept if "lora_" not in key} == {"v_head"}
    kept = load_file(tmp_path / "shared" / "policy.safetensors")
    assert not any("embed" in key or "layers.0." in key for key in kept)
    assert any("layers.2." in key for key in kept)
    files = ["policy.safetensors", "policy_optimizer.pt", "process-0.pt"]
    assert sorted(os.listdir(tmp_path / "lora")) == files


def test_every_file_is_read_as_data_only(tmp_path):
    """A state can't bring code along: what is not tensors and plain values is refused."""
    trainer = make("critic")
    trainer.save_state(tmp_path)
    torch.save({"state": Path("x")}, tmp_path / "policy_optimizer.pt")
    with pytest.raises(Exception, match="weights_only"):
        trainer.load_state(tmp_path)


@pytest.mark.parametrize(
    ("saved", "made", "message"),
    [
        (critic, lambda: critic(learning_rate=1e-3), r"\(learning_rate: 0.01 → 0.001\); repeat the old settings"),
        (critic, lambda: critic(seed=1, batch_size=4), r"\(seed: 0 → 1, batch_size: 8 → 4\)"),
        (lora, scalar, r"optimizers|weights that are not trained"),
        (critic, lambda: trainer_of(
            AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama())), "weights that are not trained: "),
    ],
)  # fmt: skip
def test_a_state_of_another_run_is_refused_and_nothing_changes(saved, made, message, tmp_path):
    set_seed(0)
    trainer = saved()
    advance(trainer, 1, "scalar")
    trainer.save_state(tmp_path / "state")
    other = made()
    before = weights(other)
    with pytest.raises(DataFileError, match=message):
        other.load_state(tmp_path / "state")
    assert_equal(weights(other), before)
    assert other.current_step == 0
    with pytest.raises(DataFileError, match=r"holds no trainer state"):
        other.load_state(tmp_path / "nothing")


def of_base(seed: int, *, shared: int | None = None) -> PPOTrainer:
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama(seed=seed, layers=3))
    return trainer_of(policy, create_reference_model(policy, shared))


@pytest.mark.parametrize("shared", [None, 2])
def test_the_same_architecture_with_other_weights_is_noticed(shared, tmp_path):
    """All that is trained comes from the state, so that a run would go on, with another reference."""
    of_base(0, shared=shared).save_state(tmp_path)
    of_base(0, shared=shared).load_state(tmp_path)
    with pytest.raises(DataFileError, match="weights that are not trained: "):
        of_base(1, shared=shared).load_state(tmp_path)


def test_other_layers_to_train_are_named(tmp_path):
    policy = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama())
    trainer = trainer_of(policy, create_reference_model(policy))
    trainer.save_state(tmp_path)
    state = torch.load(tmp_path / "process-0.pt", weights_only=True)
    torch.save(state | {"identity": {}}, tmp_path / "process-0.pt")  # nothing else tells them apart
    other = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_llama(layers=3))
    with pytest.raises(DataFileError, match=r"does not fit.*layers\.2\..*missing there"):
        trainer_of(other, create_reference_model(other)).load_state(tmp_path)


def test_a_full_disk_leaves_the_state_that_was_there(tmp_path):
    """Files can't grow beyond 1,000 bytes while the second state is written."""
    trainer = make("critic")
    trainer.save_state(tmp_path / "state")
    files = {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()}
    advance(trainer, 1, "critic")
    unlimited = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, unlimited[1]))
        for save in (trainer.save_state, trainer.save_pretrained):
            with pytest.raises(OSError, match=r"^could not write .*MB are free there\); what was saved .* whole$"):
                save(tmp_path / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, unlimited)
    assert {path.name: path.read_bytes() for path in (tmp_path / "state").iterdir()} == files
    assert os.listdir(tmp_path) == ["state"]


def test_the_model_folder_is_plain_and_other_files_in_it_stay(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("mine\n")
    trainer = make("value model")
    advance(trainer, 1, "scalar")
    for _ in range(2):  # the second replaces the first
        trainer.save_pretrained(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == "mine\n"
    assert not list(tmp_path.glob("**/.*"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    own = trainer.policy.pretrained_model.state_dict()
    assert all(torch.equal(loaded[key], own[key]) for key in own)
    assert (tmp_path / "value_model" / "config.json").exists()
    assert AutoTokenizer.from_pretrained(tmp_path / "value_model").eos_token_id == tiny_tokenizer().eos_token_id


@pytest.mark.parametrize("given", range(7))
def test_batches_go_on_within_a_pass_and_after_one(given):
    whole = ShardedBatches(22, 4, seed=3)
    order = [batch for _ in range(4) for batch in whole]
    broken_off, taken_up = ShardedBatches(22, 4, seed=3), ShardedBatches(22, 4, seed=3)
    list(broken_off)
    assert list(islice(broken_off, given)) == order[6 : 6 + given]
    taken_up.load_state_dict(broken_off.state_dict())
    assert taken_up.state_dict() == broken_off.state_dict()
    assert [*taken_up, *taken_up][:7] == order[6 + given :][:7]
