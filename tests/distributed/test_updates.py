"""Two processes under DDP and ZeRO-1, 2, 3 make the updates that one process makes with the whole batch."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.distributed.launching import ROOT, accelerate, run
from trl import AutoModelForCausalLMWithValueHead
from trl.jsonl import read_jsonl

pytestmark = pytest.mark.distributed

WORKER = str(Path(__file__).with_name("update_worker.py"))
KINDS = ("plain", "trunk", "value model", "lora", "pretraining", "dropped", "stopped")
SUPERVISED = "supervised"
SAMPLES = 17
STAGES = ("ddp", "zero1", "zero2", "zero3")


def kinds_of(stage: str) -> list[str]:
    """ZeRO-3 refuses the shared trunk."""
    return [kind for kind in KINDS if stage != "zero3" or kind != "trunk"]


def launcher(stage: str, precision: str, folder: Path) -> list[str]:
    """With the shipped files, but that ZeRO-3 divides even the smallest weights."""
    config: str | Path = {"ddp": "multi_cpu", "zero1": "deepspeed_zero1", "zero2": "deepspeed_zero2"}.get(stage, "")
    if stage == "zero3":
        zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
        sizes = {"train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": 1}
        (folder / "deepspeed.json").write_text(json.dumps({"zero_optimization": zero, **sizes}))
        shipped = (ROOT / "configs" / "accelerate" / "deepspeed_zero3.yaml").read_text()
        head = shipped.partition("deepspeed_config:")[0].replace("mixed_precision: bf16", "")
        own = f"deepspeed_config:\n  deepspeed_config_file: {folder / 'deepspeed.json'}\n  zero3_init_flag: false\n"
        config = folder / "launch.yaml"
        config.write_text(head + own)
    return accelerate(config, "--mixed_precision", precision)


def launch(folder: Path, stage: str, precision: str, kinds: list[str]) -> Path:
    results = folder / "results"
    results.mkdir()
    run(*launcher(stage, precision, folder), WORKER, str(results), *kinds)
    return results


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    run(*accelerate("cpu"), WORKER, str(folder), *KINDS, SUPERVISED)
    return folder


@pytest.fixture(scope="module", params=STAGES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    return request.param, launch(
        tmp_path_factory.mktemp("pair"), request.param, "no", [*kinds_of(request.param), SUPERVISED]
    )


def results(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("[0-9].json"))]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted((folder / "model").rglob("*.safetensors"))
    assert files
    return {f"{file.relative_to(folder)}:{k}": w for file in files for k, w in load_file(file).items()}


def test_statistics_and_weights_are_those_of_one_process(alone: Path, pair: tuple[str, Path]) -> None:
    stage, folder = pair
    for kind in kinds_of(stage):
        [one], two = results(alone / kind), results(folder / kind)
        assert [each["world"] for each in two] == [2, 2]
        assert two[0]["stats"] == two[1]["stats"], kind
        assert [each["caches_trunk"] for each in two] == [kind == "trunk"] * 2
        for name, value in one["stats"].items():
            # a token at the very edge of the clip range may fall on either side
            tolerance = 0.01 if "clipfrac" in name else 1e-5
            assert two[0]["stats"][name] == pytest.approx(value, abs=tolerance, rel=1e-5), (kind, name)
        assert [row for rows in zip(two[0]["kl"], [*two[1]["kl"], None], strict=True) for row in rows][
            :SAMPLES
        ] == pytest.approx(one["kl"], abs=1e-5), kind
        expected, found = weights(alone / kind), weights(folder / kind)
        assert expected.keys() == found.keys(), kind
        for name, weight in expected.items():
            assert torch.allclose(found[name], weight, rtol=0, atol=1e-5), (kind, name)


def test_dropped_and_stopped_steps(alone: Path, pair: tuple[str, Path]) -> None:
    """Dropped steps leave every weight as it was, bit for bit; an early stop comes at the same mini-batch."""
    _, folder = pair
    for each in results(folder / "dropped"):
        assert each["stats"]["ppo/skipped_minibatches"] == 2  # one per epoch
        assert each["stats"]["ppo/optimizer_steps"] == 0
    before, after = weights(alone / "dropped"), weights(folder / "dropped")
    assert all(torch.equal(before[name], after[name]) for name in before)
    for each in results(folder / "stopped"):
        assert each["stats"]["ppo/early_stopped"] == 1
        assert each["stats"]["ppo/optimizer_steps"] == 1


def test_policy_and_reference_are_sampled_with_all_their_weights(alone: Path, pair: tuple[str, Path]) -> None:
    stage, folder = pair
    for kind in kinds_of(stage):
        [one], two = results(alone / kind), results(folder / kind)
        found: list[Any] = [None] * SAMPLES
        found[0::2], found[1::2] = two[0]["greedy"], two[1]["greedy"]
        assert found == one["greedy"], kind


def test_saved_models_load(pair: tuple[str, Path]) -> None:
    stage, folder = pair
    for kind in kinds_of(stage):
        saved = folder / kind / "model"
        if kind != "lora":
            assert AutoModelForCausalLM.from_pretrained(saved).dtype == torch.float32
            model = AutoModelForCausalLMWithValueHead.from_pretrained(saved)
            assert torch.equal(model.v_head.summary.weight, weights(folder / kind)[_HEAD])


def test_a_state_that_is_taken_up_goes_on_as_the_run_did(pair: tuple[str, Path]) -> None:
    _, folder = pair
    for kind in ("plain", "value model", "lora"):
        for each in results(folder / kind):
            for name, value in each["stats"].items():
                assert each["resumed"][name] == pytest.approx(value, abs=1e-6, rel=1e-6), (kind, name)


def test_supervised_training_and_its_checkpoints(alone: Path, pair: tuple[str, Path]) -> None:
    """Loss and weights of one process, also of a run that goes on from a checkpoint."""
    _, folder = pair
    [one], two = results(alone / SUPERVISED), results(folder / SUPERVISED)
    expected, found = (torch.load(each / SUPERVISED / "weights.bin", weights_only=True) for each in (alone, folder))
    assert [each["world"] for each in two] == [2, 2]
    assert two[0]["losses"] == two[1]["losses"] == pytest.approx([one["losses"][0]] * 2, rel=1e-5)
    assert expected.keys() == found.keys()
    for name, weight in expected.items():
        assert torch.allclose(found[name], weight, rtol=0, atol=1e-5), name
    rows = [row for row in read_jsonl(folder / SUPERVISED / "metrics.jsonl") if "grad_norm" in row]
    reference = [row for row in read_jsonl(alone / SUPERVISED / "metrics.jsonl") if "grad_norm" in row]
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert [row["grad_norm"] for row in rows] == pytest.approx([row["grad_norm"] for row in reference], rel=1e-4)


_HEAD = "model/value_head.safetensors:summary.weight"


@pytest.mark.parametrize("stage", STAGES)
def test_bf16_is_near(alone: Path, stage: str, tmp_path: Path) -> None:
    kinds = [kind for kind in ("plain", "trunk", "value model", "lora") if kind in kinds_of(stage)]
    folder = launch(tmp_path, stage, "bf16", kinds)
    for kind in kinds:
        [one], two = results(alone / kind), results(folder / kind)
        assert two[0]["stats"] == two[1]["stats"], kind
        for name in ("objective/score", "tokens/trained", "objective/entropy", "ppo/returns/mean"):
            assert two[0]["stats"][name] == pytest.approx(one["stats"][name], abs=0.05), (kind, name)
        assert two[0]["stats"]["ppo/skipped_minibatches"] == 0
        if kind == "trunk":
            assert two[0]["first_kl"] == 0  # policy and reference are in one precision
        expected, found = weights(alone / kind), weights(folder / kind)
        for name, weight in expected.items():
            assert torch.allclose(found[name].float(), weight, rtol=0, atol=0.1), (kind, name)


def test_zero3_refuses_shared_layers(tmp_path: Path) -> None:
    done = run(*launcher("zero3", "no", tmp_path), WORKER, str(tmp_path), "trunk", check=False)
    assert done.returncode != 0
    assert "share 2 blocks, but ZeRO-3 divides" in done.stderr
