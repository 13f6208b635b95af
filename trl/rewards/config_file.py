"""Reading a reward configuration, JSON or YAML; what is wrong is said with its JSON path."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

import yaml
from pydantic import ValidationError
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from trl.jsonl import DataFileError
from trl.rewards.schema import MOST_REWARDS, CompositeConfig, Fields, RewardConfig

T = TypeVar("T", bound=Fields)


class RewardConfigError(DataFileError):
    """A reward configuration that can't be used; ``path`` is the JSON path of what is wrong, ``$`` the whole."""

    def __init__(self, path: str, problem: str, source: str = "reward configuration") -> None:
        super().__init__(f"{source}: {path}: {problem}")
        self.path = path


@dataclass(frozen=True)
class LocatedReward:
    """One reward with its weight and its JSON path in the file."""

    config: RewardConfig
    weight: float
    path: str


_WRAPPERS = ("singleRewardConfig", "single_reward_config", "compositeRewardConfig", "composite_reward_config")


def read_config(source: str | Path | Mapping[str, Any]) -> list[LocatedReward]:
    """The rewards of a file (``.json``; anything else is YAML) or dict, single or composite, in order.

    Raises RewardConfigError with the JSON path of the first thing that is wrong, and OSError for an unreadable file.
    """
    shown = "reward configuration" if isinstance(source, Mapping) else str(source)
    data = source if isinstance(source, Mapping) else _load(Path(source))
    try:
        return _read(data)
    except RewardConfigError as error:
        problem = str(error).split(": ", 2)[2]
        raise RewardConfigError(error.path, problem, shown) from None


def _load(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8-sig")
        return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        kind = "JSON" if path.suffix == ".json" else "YAML"
        raise RewardConfigError("$", f"expected {kind} in UTF-8; {' '.join(str(error).split())}", str(path)) from None


def _read(data: Any) -> list[LocatedReward]:
    path = "$"
    if isinstance(data, Mapping) and len(data) == 1 and (wrapper := str(next(iter(data)))) in _WRAPPERS:
        path, data = f"$.{wrapper}", data[wrapper]
    if not isinstance(data, Mapping):
        raise RewardConfigError(path, f"expected an object, got {_brief(data)}")
    if not {"weightedRewardConfigs", "weighted_reward_configs"} & set(data):
        return [LocatedReward(config=_validated(RewardConfig, data, path), weight=1.0, path=path)]
    composite = _validated(CompositeConfig, data, path)
    path += ".weightedRewardConfigs"
    rewards = [
        LocatedReward(config=each.reward_config, weight=each.weight, path=f"{path}[{index}].rewardConfig")
        for index, each in enumerate(composite.weighted_reward_configs)
    ]
    first: dict[str, str] = {}
    for reward in rewards:
        name = reward.config.reward_name
        if name in first:
            raise RewardConfigError(f"{reward.path}.rewardName", f"{name!r} is the name of {first[name]} too")
        first[name] = reward.path
    if sum_is_zero([reward.weight for reward in rewards]):
        raise RewardConfigError(path, "the weights sum to 0; the total is divided by their sum")
    return rewards


def sum_is_zero(weights: Sequence[float]) -> bool:
    """Whether weights cancel, but for rounding."""
    largest = max(map(abs, weights), default=0.0)
    return largest == 0 or abs(math.fsum(weight / largest for weight in weights)) <= 1e-9 * len(weights)


def _validated(model: type[T], data: Any, path: str) -> T:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where, problem = path + _json_path(first["loc"]), _problem(first, model)
        raise RewardConfigError(where, problem) from None


def _problem(error: ErrorDetails, model: type[Fields]) -> str:
    match error["type"]:
        case "missing":
            return "missing"
        case "extra_forbidden":
            fields = _model_at(model, error["loc"][:-1]).model_fields
            return f"unknown field; expected {', '.join(to_camel(name) for name in fields)}"
        case "too_short" | "too_long":
            return f"expected 1 to {MOST_REWARDS} rewards, got {error['ctx']['actual_length']}"
        case "value_error":
            return str(error["ctx"]["error"])
    message = error["msg"].replace("Input should", "should")
    return f"{message}, got {_brief(error['input'])}"


def _model_at(model: type[Fields], location: Sequence[str | int]) -> type[Fields]:
    """The class of the object at a place where validation failed."""
    for step in location:
        if isinstance(step, str):
            name = next(name for name in model.model_fields if step in (name, to_camel(name)))
            annotation = model.model_fields[name].annotation
            kinds = [annotation, *get_args(annotation)]
            model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Fields))
    return model


def _json_path(location: Sequence[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
