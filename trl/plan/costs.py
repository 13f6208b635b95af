"""Seconds and dollars of a step, from FLOPs, bytes, and what a machine and a critic's endpoint are said to do.

A lower bound of a real run's time: padding, the input pipeline, launching of kernels and stragglers are not in it.
"""

import math
import time
from dataclasses import dataclass

from trl.plan.flops import StepFlops, Workload
from trl.plan.memory import GENERATED_TOGETHER, Setting, trained_parameters
from trl.plan.shape import ModelShape


@dataclass(frozen=True)
class Machine:
    """What one process's device sustains, in FLOPs and bytes per second; below a data sheet's peaks."""

    flops: float
    memory_bandwidth: float
    link_bandwidth: float = math.inf
    """Of the slowest link of the ring of processes: over machines, the network."""
    dollars_per_hour: float = 0.0
    """Of one device."""


@dataclass(frozen=True)
class CriticCosts:
    """What the LLM critic takes per PPO step, over all processes."""

    requests: float
    tokens_in: float
    tokens_out: float
    seconds: float
    dollars: float | None
    """None without prices."""


@dataclass(frozen=True)
class StepSeconds:
    """Seconds of one PPO step by phase. ``critic_wait`` is what is left of the critic's time after the passes."""

    generate: float
    passes: float
    critic_wait: float
    update: float
    communication: float

    @property
    def total(self) -> float:
        return self.generate + self.passes + self.critic_wait + self.update + self.communication


def critic_costs(
    samples: int,
    *,
    share: float,
    tokens_in: float,
    tokens_out: float,
    latency: float,
    concurrency: int,
    requests_per_minute: int | None = None,
    prices: tuple[float, float] | None = None,
) -> CriticCosts:
    """One request for each of ``share`` of the samples, none repeated, none from the cache.

    tokens_in, tokens_out: per request. latency: seconds of one request. concurrency, requests_per_minute: of the
    whole run. prices: dollars per million tokens in and out.
    """
    requests = samples * share
    seconds = math.ceil(requests / concurrency) * latency
    if requests_per_minute is not None:
        seconds = max(seconds, requests / requests_per_minute * 60)
    dollars = None if prices is None else requests * (tokens_in * prices[0] + tokens_out * prices[1]) / 1e6
    return CriticCosts(requests, requests * tokens_in, requests * tokens_out, seconds, dollars)


def step_seconds(
    policy: ModelShape,
    work: Workload,
    setting: Setting,
    flops: StepFlops,
    machine: Machine,
    critic: CriticCosts | None = None,
    *,
    accumulation: int = 1,
) -> StepSeconds:
    """Time of one step, the phases one after the other and the critic beside the passes.

    Generation takes at least as long as reading the weights once per token and batch. Communication is that of a ring:
    gradients once per optimizer step; under ZeRO-3 the weights too, before each use.
    """
    processes = setting.processes
    each = 2 if setting.bf16 and not work.lora_rank else 4  # adapters are trained on the fp32 weights themselves
    reads = math.ceil(setting.batch / GENERATED_TOGETHER) * work.response_tokens
    generate = max(
        flops.generate / processes / machine.flops, reads * policy.parameters * each / machine.memory_bandwidth
    )
    passes = (flops.passes + flops.reward) / processes / machine.flops
    return StepSeconds(
        generate=generate,
        passes=passes,
        critic_wait=0.0 if critic is None else max(0.0, critic.seconds - passes),
        update=flops.update / processes / machine.flops,
        communication=communicated_bytes(policy, work, setting, accumulation) / machine.link_bandwidth,
    )


def communicated_bytes(policy: ModelShape, work: Workload, setting: Setting, accumulation: int = 1) -> float:
    """Bytes that each process sends per PPO step."""
    passes = work.ppo_epochs * math.ceil(setting.batch / setting.mini_batch)
    size = 2 if setting.zero and setting.bf16 else 4
    ring = (setting.processes - 1) / setting.processes
    gradients = 2 * ring * trained_parameters(policy, work) * size * math.ceil(passes / accumulation)
    if setting.zero < 3:
        return gradients
    # forward and backward of every pass, policy and reference once, and once for generation
    return gradients + ring * policy.parameters * size * (2 * passes + 3)


def measure_machine(size: int = 1024, seconds: float = 1.0) -> Machine:
    """What this machine's device does: fp32 products of ``size`` x ``size`` matrices (bf16 on CUDA), and copies."""
    import torch

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    factor = torch.randn(size, size, device=device, dtype=dtype)
    source = torch.randn(64 * 2**20 // 4, device=device)
    target = torch.empty_like(source)

    def repeats_per_second(work: object) -> float:
        done, begin = 0, time.perf_counter()
        while (spent := time.perf_counter() - begin) < seconds:
            work()  # type: ignore[operator]
            if device.type == "cuda":
                torch.cuda.synchronize()
            done += 1
        return done / spent

    products = repeats_per_second(lambda: factor @ factor)
    copies = repeats_per_second(lambda: target.copy_(source))
    return Machine(flops=products * 2 * size**3, memory_bandwidth=copies * 2 * source.nbytes)
