"""``python -m trl.plan --model gpt2-large --batch 16 …``: what a PPO run needs and costs, before it starts."""

import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import tyro
from tyro.conf import arg

import trl

if vars(trl).get("DISTRIBUTION") != "relc":
    sys.exit(f"'trl' from {trl.__path__[0]} is not relc's: pip uninstall trl, then pip install -e . here")

from pathlib import Path

from trl.limits import estimate_tokens
from trl.plan import (
    CriticCosts,
    Machine,
    ModelShape,
    Setting,
    Workload,
    critic_costs,
    find_shape,
    flops_plan,
    measure_machine,
    process_memory,
    shape_of,
    step_seconds,
    trained_parameters,
)


@dataclass
class Args:
    """What a PPO run needs and costs, before it starts. Sizes are per process, as the scripts' flags are."""

    model: Annotated[str | None, arg(aliases=("--model_name",))] = None
    """Policy: a local folder, a builtin: name, a hub id that can be reached, or a public model listed here."""
    batch: Annotated[int, arg(aliases=("--batch_size",))] = 16
    """Samples per PPO step and process."""
    mini_batch: Annotated[int | None, arg(aliases=("--mini_batch_size",))] = None
    """Samples per forward-backward pass; default the whole batch."""
    gradient_accumulation_steps: int = 1
    """Mini-batches per optimizer step."""
    prompt_tokens: float = 16
    """Mean length of a prompt."""
    response_tokens: float = 20
    """Mean length of a response."""
    ppo_epochs: int = 4
    """Passes over each batch."""
    samples: int = 25_000
    """Prompts of an epoch."""
    num_shared_layers: int = 0
    """Frozen lower blocks that policy and reference share; their states are computed once."""
    lora_r: int = 0
    """Rank of LoRA adapters; 0: none."""
    gradient_checkpointing: bool = False
    """Repeat the forward pass instead of keeping activations."""
    bf16: bool = False
    """bf16 mixed precision."""
    value_model: str | None = None
    """A separate value network (like --model); default the value head."""
    reward_model: str | None = None
    """A reward model (like --model); default none: the reward is computed elsewhere, or by a small classifier."""

    layers: int | None = None
    """Sizes of a policy that has no name here: blocks."""
    width: int | None = None
    """Hidden size."""
    heads: int | None = None
    """Attention heads."""
    vocab: int | None = None
    """Vocabulary."""
    family: Literal["gpt2", "llama"] = "gpt2"
    """Kind of blocks: gpt2 (two MLP maps, tied head) or llama (three, own head)."""
    mlp_width: int | None = None
    """Inner size of the MLP; default 4 times the width."""
    kv_heads: int | None = None
    """Key and value heads (llama); default as many as heads."""

    processes: int = 1
    """Processes, each with a device of its own."""
    zero: Literal[0, 1, 2, 3] = 0
    """DeepSpeed's ZeRO stage; 0: plain data parallelism."""
    flops: float | None = None
    """FLOPs per second that one device sustains (1e14: a large GPU in bf16)."""
    memory_bandwidth: float | None = None
    """Bytes per second that one device reads (1.5e12: a large GPU); default: no bound."""
    link_bandwidth: float | None = None
    """Bytes per second between processes; default: no bound."""
    device_price: float = 0.0
    """Dollars per hour of one device."""
    measure: bool = False
    """Measure FLOPs and memory bandwidth of this machine, in two seconds."""

    use_intrinsic_reward: bool = False
    """Plan an LLM critic too."""
    critic_share: float = 1.0
    """Share of the samples that the critic is asked about (scores at or below the threshold)."""
    prompt_file: str | None = None
    """The critic's prompt, whose length counts in its tokens."""
    critic_prompt_tokens: int = 350
    """Tokens of that prompt, where no file is given."""
    critic_reply_tokens: int = 40
    """Tokens of a reply."""
    critic_latency: float = 1.0
    """Seconds of a request."""
    critic_concurrency: int = 16
    """Requests on the wire at one time, all processes together."""
    critic_rpm: int | None = None
    """Requests per minute, all processes together."""
    critic_prices: tuple[float, float] | None = None
    """Dollars per million prompt tokens and per million reply tokens."""


def policy_shape(args: Args) -> ModelShape:
    """The policy's sizes, by name or from the flags. Raises ValueError where they are incomplete."""
    sizes = {"layers": args.layers, "width": args.width, "heads": args.heads, "vocab": args.vocab}
    if all(value is None for value in sizes.values()):
        if args.model is None:
            raise ValueError("give --model, or its sizes: --layers, --width, --heads and --vocab")
        return find_shape(args.model)
    if args.model is not None or None in sizes.values():
        missing = ", ".join(f"--{name}" for name, value in sizes.items() if value is None)
        raise ValueError(f"give either --model or all of the sizes{': ' if missing else ''}{missing}")
    from transformers import AutoConfig

    mlp = args.mlp_width or 4 * (args.width or 0)
    common = {
        "num_hidden_layers": args.layers,
        "hidden_size": args.width,
        "num_attention_heads": args.heads,
        "vocab_size": args.vocab,
    }
    own: dict[str, Any] = {"n_inner": mlp}
    if args.family == "llama":
        own = {"intermediate_size": mlp, "num_key_value_heads": args.kv_heads or args.heads}
    name = f"{args.family} of {args.layers} x {args.width}"
    return shape_of(AutoConfig.for_model(args.family, **common, **own), name)


def critic_of(args: Args, samples: int) -> CriticCosts | None:
    """The critic's costs per step; None without one."""
    if not args.use_intrinsic_reward:
        return None
    template = args.critic_prompt_tokens
    if args.prompt_file is not None:
        template = estimate_tokens(Path(args.prompt_file).read_text(encoding="utf-8"))
    return critic_costs(
        samples,
        share=args.critic_share,
        tokens_in=template + args.prompt_tokens + args.response_tokens,
        tokens_out=args.critic_reply_tokens,
        latency=args.critic_latency,
        concurrency=args.critic_concurrency,
        requests_per_minute=args.critic_rpm,
        prices=args.critic_prices,
    )


def machine_of(args: Args) -> Machine | None:
    """The device that the flags describe, or this one measured; None where no rate is known."""
    if args.measure:
        return measure_machine()
    if args.flops is None:
        return None
    unbounded = float("inf")
    return Machine(args.flops, args.memory_bandwidth or unbounded, args.link_bandwidth or unbounded, args.device_price)


def report(args: Args) -> str:
    """The plan as text. Raises ValueError for settings that can't be right."""
    policy = policy_shape(args)
    work = Workload(
        samples=args.batch * args.processes,
        prompt_tokens=args.prompt_tokens,
        response_tokens=args.response_tokens,
        ppo_epochs=args.ppo_epochs,
        shared_layers=args.num_shared_layers,
        lora_rank=args.lora_r,
        checkpointing=args.gradient_checkpointing,
        whole_batch=args.mini_batch in (None, args.batch) and not args.zero,
    )
    setting = Setting(args.batch, args.mini_batch or args.batch, args.processes, args.zero, args.bf16)
    others = {
        "value_model": None if args.value_model is None else find_shape(args.value_model),
        "reward_model": None if args.reward_model is None else find_shape(args.reward_model),
    }
    flops = flops_plan(policy, work, **others)
    memory = process_memory(policy, work, setting, **others)
    critic, machine = critic_of(args, work.samples), machine_of(args)
    steps = -(-args.samples // work.samples)
    lines = [
        f"policy      {policy.name}: {policy.layers} blocks of {policy.width}, vocabulary {policy.vocab:,}; "
        f"{policy.parameters:,} parameters, {trained_parameters(policy, work):,} trained",
        f"run         {args.processes} process(es) x batch {args.batch} = {work.samples} samples a step; "
        f"{steps:,} steps an epoch of {args.samples:,}",
        "",
        f"{'FLOPs':<22}{'a step':>12}{'an epoch':>12}",
    ]
    phases = {"generate": flops.generate, "log-prob passes": flops.passes, "reward model": flops.reward}
    for name, value in {**phases, "update": flops.update, "total": flops.total}.items():
        lines.append(f"  {name:<20}{value:>12.3g}{value * steps:>12.3g}")
    lines += ["", "memory of a process" + (f", ZeRO-{args.zero}" if args.zero else "")]
    lines += [f"  {name.replace('_', ' '):<20}{value / 1e9:>12,.2f} GB" for name, value in memory.rows().items()]
    lines += ["", *_tokens(args, work, critic, steps)]
    if machine is None:
        return "\n".join([*lines, "", "time        give --flops (what a device sustains) or --measure"])
    spent = step_seconds(policy, work, setting, flops, machine, critic, accumulation=args.gradient_accumulation_steps)
    rate = f"{machine.flops:.3g} FLOP/s, {machine.memory_bandwidth:.3g} B/s of memory"
    lines += ["", f"{'time, at least':<22}{'a step, s':>12}{'an epoch, h':>12}   at {rate}"]
    phases = {"generate": spent.generate, "passes and reward": spent.passes, "waiting for critic": spent.critic_wait}
    phases |= {"update": spent.update, "communication": spent.communication, "total": spent.total}
    lines += [f"  {name:<20}{value:>12.3f}{value * steps / 3600:>12.2f}" for name, value in phases.items()]
    if machine.dollars_per_hour:
        lines.append(
            f"  devices: ${spent.total * steps / 3600 * args.processes * machine.dollars_per_hour:,.2f} an epoch"
        )
    return "\n".join(lines)


def _tokens(args: Args, work: Workload, critic: CriticCosts | None, steps: int) -> list[str]:
    lines = [
        f"tokens      {args.samples * work.response_tokens:,.0f} sampled an epoch, each trained {work.ppo_epochs} times"
    ]
    if critic is None:
        return [*lines, "critic      none (--use_intrinsic_reward plans one)"]
    scale = args.samples / work.samples
    dollars = "give --critic_prices" if critic.dollars is None else f"${critic.dollars * scale:,.2f}"
    calls, given, written = (n * scale for n in (critic.requests, critic.tokens_in, critic.tokens_out))
    return [
        *lines,
        f"critic      at most {critic.requests:,.0f} calls a step, {calls:,.0f} an epoch; repeated prompts cost none",
        f"            {given:,.0f} tokens in and {written:,.0f} out an epoch: {dollars}",
        f"            {critic.seconds:.1f} s a step, beside the passes",
    ]


def main(argv: list[str] | None = None) -> None:
    args = tyro.cli(Args, args=argv, prog="python -m trl.plan", use_underscores=True, description=Args.__doc__)
    try:
        print(report(args))
    except (ValueError, OSError) as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    main()
