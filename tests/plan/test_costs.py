"""Seconds and dollars, computed by hand."""

import pytest

from tests.tiny import tiny_llama
from trl.plan import (
    Machine,
    Setting,
    StepFlops,
    Workload,
    communicated_bytes,
    critic_costs,
    measure_machine,
    shape_of,
    step_seconds,
    trained_parameters,
)

SHAPE = shape_of(tiny_llama().config, "llama")
WORK = Workload(32, 10, 10, ppo_epochs=4)


def test_the_critic_by_hand():
    costs = critic_costs(32, share=0.5, tokens_in=400, tokens_out=50, latency=2.0, concurrency=5, prices=(0.5, 1.5))
    assert (costs.requests, costs.tokens_in, costs.tokens_out) == (16, 6400, 800)
    assert costs.seconds == 4 * 2.0  # 16 requests, five at a time
    assert costs.dollars == pytest.approx((6400 * 0.5 + 800 * 1.5) / 1e6)
    limited = critic_costs(32, share=0.5, tokens_in=1, tokens_out=1, latency=2.0, concurrency=5, requests_per_minute=60)
    assert limited.seconds == 16
    assert limited.dollars is None


def test_a_step_by_hand():
    flops = StepFlops(generate=8e9, passes=6e9, reward=2e9, update=40e9)
    critic = critic_costs(32, share=1, tokens_in=1, tokens_out=1, latency=3.0, concurrency=32)
    spent = step_seconds(SHAPE, WORK, Setting(8, 8, 4), flops, Machine(1e9, 1e12, 1e6), critic)
    assert spent.generate == 2  # a quarter of the FLOPs on each of four devices
    assert spent.passes == 2
    assert spent.critic_wait == 1  # three seconds, two of them beside the passes
    assert spent.update == 10
    assert spent.communication == pytest.approx(4 * 2 * 3 / 4 * SHAPE.parameters * 4 / 1e6)
    assert spent.total == pytest.approx(15 + spent.communication)


def test_generation_takes_as_long_as_reading_the_weights():
    machine = Machine(1e30, memory_bandwidth=1e6)
    spent = step_seconds(SHAPE, WORK, Setting(40, 40), StepFlops(1, 1, 1, 1), machine)
    assert spent.generate == pytest.approx(2 * 10 * SHAPE.parameters * 4 / 1e6)  # two batches of at most 32


def test_what_is_sent_depends_on_the_stage_and_on_accumulation():
    setting = Setting(8, 2, 4)
    once = communicated_bytes(SHAPE, WORK, setting, accumulation=4)
    assert communicated_bytes(SHAPE, WORK, setting) == 4 * once  # four mini-batches an epoch
    assert communicated_bytes(SHAPE, WORK, Setting(8, 2, 1)) == 0
    lora = Workload(32, 10, 10, lora_rank=2)
    assert communicated_bytes(SHAPE, lora, setting) / communicated_bytes(SHAPE, WORK, setting) == pytest.approx(
        trained_parameters(SHAPE, lora) / SHAPE.parameters
    )
    weights = communicated_bytes(SHAPE, WORK, Setting(8, 2, 4, zero=3)) - communicated_bytes(SHAPE, WORK, setting)
    assert weights == pytest.approx(0.75 * SHAPE.parameters * 4 * (2 * 16 + 3))


def test_this_machine_can_be_measured():
    machine = measure_machine(size=64, seconds=0.05)
    assert machine.flops > 1e6
    assert machine.memory_bandwidth > 1e6
