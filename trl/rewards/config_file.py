"""Reading a reward configuration, JSON or YAML; what is wrong is said with its JSON path."""

import json
import math
import reprlib
from collections.abc import Hashable, Mapping, Sequence
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


_LARGEST = 100_000
"""Values in a file; a YAML file of a few lines can stand for more than any memory holds."""
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
    kind = "JSON" if path.suffix == ".json" else "YAML"
    try:
        text = path.read_text(encoding="utf-8-sig")
        # the loader is PyYAML's safe one
        data = json.loads(text, object_pairs_hook=_object) if kind == "JSON" else yaml.load(text, _YamlLoader)
        if _size(data, {}) > _LARGEST:
            raise ValueError(f"with its aliases written out it has more than {_LARGEST:,} values")
        return data
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise RewardConfigError("$", f"expected {kind} in UTF-8; {' '.join(str(error).split())}", str(path)) from None


def _object(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object; a second value for a key is an error, since one of the two is a mistake."""
    found = dict(pairs)
    if len(found) < len(pairs):
        repeated = next(key for key, _ in pairs if [each for each, _ in pairs].count(key) > 1)
        raise ValueError(f"the key {repeated!r} is given twice in one object")
    return found


class _YamlLoader(yaml.SafeLoader):
    """PyYAML's safe loader, for which a key given twice in one mapping is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [(key.tag, key.value) for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        repeated = next((key for key in keys if keys.count(key) > 1), None)
        if repeated is not None:
            raise yaml.constructor.ConstructorError(problem=f"the key {repeated[1]!r} is given twice in one mapping")
        return super().construct_mapping(node, deep)


def _size(value: Any, known: dict[int, float]) -> float:
    """Values in ``value``, where each alias counts with all that it stands for; infinite where one holds itself."""
    if not isinstance(value, Mapping | list):
        return 1
    if id(value) not in known:
        known[id(value)] = math.inf
        items = value.values() if isinstance(value, Mapping) else value
        known[id(value)] = 1 + sum(_size(item, known) for item in items)
    return known[id(value)]


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
    text = reprlib.repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
