"""What a run needs and costs before it starts: FLOPs, bytes, seconds, dollars (``python -m trl.plan``)."""

from trl.plan.costs import (
    CriticCosts,
    Machine,
    StepSeconds,
    communicated_bytes,
    critic_costs,
    measure_machine,
    step_seconds,
)
from trl.plan.flops import StepFlops, Workload, flops_plan
from trl.plan.memory import ProcessMemory, Setting, process_memory, trained_parameters
from trl.plan.placement import Placement, memory_plan, memory_table
from trl.plan.shape import ModelShape, find_shape, shape_of

__all__ = [
    "CriticCosts",
    "Machine",
    "ModelShape",
    "Placement",
    "ProcessMemory",
    "Setting",
    "StepFlops",
    "StepSeconds",
    "Workload",
    "communicated_bytes",
    "critic_costs",
    "find_shape",
    "flops_plan",
    "measure_machine",
    "memory_plan",
    "memory_table",
    "process_memory",
    "shape_of",
    "step_seconds",
    "trained_parameters",
]
