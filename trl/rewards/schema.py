"""Reading and checking a reward configuration, JSON or YAML.

The schema is that of Vertex AI's reinforcement tuning (SingleReinforcementTuningRewardConfig and
CompositeReinforcementTuningRewardConfig): https://cloud.google.com/vertex-ai/docs/reference/rest. Field names are
camelCase, or snake_case.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self, TypeVar, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.alias_generators import to_camel
from pydantic_core import ErrorDetails

from trl.jsonl import DataFileError
from trl.rewards.placeholders import regex_of

MOST_REWARDS = 16
"""In one composite."""


class RewardConfigError(DataFileError):
    """A reward configuration that can't be used; ``path`` is the JSON path of what is wrong, ``$`` the whole."""

    def __init__(self, path: str, problem: str, source: str = "reward configuration") -> None:
        super().__init__(f"{source}: {path}: {problem}")
        self.path = path


class _Fields(BaseModel):
    """Nothing is converted: in YAML, ``expression: yes`` is an error instead of the text "True"."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        validate_by_alias=True,
        validate_by_name=True,
        extra="forbid",
        strict=True,
        frozen=True,
        allow_inf_nan=False,
    )


T = TypeVar("T", bound=_Fields)


class ParseConfig(_Fields):
    """Which part of a text is scored."""

    parse_type: Literal["IDENTITY", "REGEX_EXTRACT", "RESPONSE_PARSE_TYPE_UNSPECIFIED"] = "IDENTITY"
    regex_extract_expression: str | None = None

    @field_validator("regex_extract_expression")
    @classmethod
    def _compiles(cls, expression: str | None) -> str | None:
        if expression is not None:
            _check_regex(expression)
        return expression

    @model_validator(mode="after")
    def _fits(self) -> Self:
        if self.parse_type == "REGEX_EXTRACT" and self.regex_extract_expression is None:
            raise ValueError("parseType is REGEX_EXTRACT; expected regexExtractExpression beside it")
        if self.parse_type != "REGEX_EXTRACT" and self.regex_extract_expression is not None:
            raise ValueError("regexExtractExpression is given; expected parseType REGEX_EXTRACT beside it")
        return self

    @property
    def regex(self) -> str | None:
        """What to extract; None: the whole text."""
        return self.regex_extract_expression


class StringMatch(_Fields):
    """How a text is compared with an expression, in which ``{{references.key}}`` stands for the row's value."""

    match_operation: Literal["EXACT_MATCH", "PARTIAL_MATCH", "REGEX_CONTAINS"]
    expression: str

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        if self.match_operation == "REGEX_CONTAINS":
            _check_regex(regex_of(self.expression, None))
        return self


class JsonMatch(_Fields):
    """Compares one value of the first level of a JSON object."""

    key_name: str
    value_string_match_expression: StringMatch


class StringMatchScorer(_Fields):
    correct_answer_reward: float
    wrong_answer_reward: float
    string_match_expression: StringMatch | None = None
    json_match_expression: JsonMatch | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        return _with_one(self, "string_match_expression", "json_match_expression")


class AutoraterConfig(_Fields):
    """The judge. The last three fields are Vertex AI's own; one answer at temperature 0 needs none of them."""

    autorater_model: str
    sampling_count: int | None = None
    flip_enabled: bool | None = None
    generation_config: dict[str, Any] | None = None


class ConversionScorer(_Fields):
    """The judge's parsed answer is the reward, as a number."""


class ExactMatchScorer(_Fields):
    expression: str
    correct_answer_reward: float
    wrong_answer_reward: float


class AutoraterScorer(_Fields):
    autorater_prompt: str
    autorater_config: AutoraterConfig
    autorater_response_parse_config: ParseConfig = ParseConfig()
    parsed_response_conversion_scorer: ConversionScorer | None = None
    exact_match_scorer: ExactMatchScorer | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        return _with_one(self, "parsed_response_conversion_scorer", "exact_match_scorer")


class CodeExecutionScorer(_Fields):
    python_code_snippet: str


class CloudRunScorer(_Fields):
    cloud_run_uri: str


class RewardConfig(_Fields):
    """One reward: what of the response is scored, and how."""

    reward_name: Annotated[str, Field(min_length=1)]
    parse_response_config: ParseConfig = ParseConfig()
    string_match_reward_scorer: StringMatchScorer | None = None
    autorater_scorer: AutoraterScorer | None = None
    code_execution_reward_scorer: CodeExecutionScorer | None = None
    cloud_run_reward_scorer: CloudRunScorer | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        return _with_one(
            self,
            "string_match_reward_scorer",
            "autorater_scorer",
            "code_execution_reward_scorer",
            "cloud_run_reward_scorer",
        )

    @property
    def templates(self) -> Iterator[tuple[str, str]]:
        """(path below this reward, text) of everything that may hold ``{{references.key}}``."""
        if (match := self.string_match_reward_scorer) is not None:
            if match.string_match_expression is not None:
                yield (
                    "stringMatchRewardScorer.stringMatchExpression.expression",
                    match.string_match_expression.expression,
                )
            if match.json_match_expression is not None:
                yield (
                    "stringMatchRewardScorer.jsonMatchExpression.valueStringMatchExpression.expression",
                    match.json_match_expression.value_string_match_expression.expression,
                )
        if (judge := self.autorater_scorer) is not None:
            yield "autoraterScorer.autoraterPrompt", judge.autorater_prompt
            if judge.exact_match_scorer is not None:
                yield "autoraterScorer.exactMatchScorer.expression", judge.exact_match_scorer.expression


class WeightedReward(_Fields):
    reward_config: RewardConfig
    weight: float


class CompositeConfig(_Fields):
    """Several rewards; the total is their weighted mean."""

    weighted_reward_configs: Annotated[list[WeightedReward], Field(min_length=1, max_length=MOST_REWARDS)]


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
    return abs(math.fsum(weights)) <= 1e-9 * math.fsum(map(abs, weights))


def _validated(model: type[T], data: Any, path: str) -> T:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        first = error.errors()[0]
        where, problem = path + _json_path(first["loc"]), _problem(first, model)
        raise RewardConfigError(where, problem) from None


def _problem(error: ErrorDetails, model: type[_Fields]) -> str:
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


def _model_at(model: type[_Fields], location: Sequence[str | int]) -> type[_Fields]:
    """The class of the object at a place where validation failed."""
    for step in location:
        if isinstance(step, str):
            name = next(name for name in model.model_fields if step in (name, to_camel(name)))
            annotation = model.model_fields[name].annotation
            kinds = [annotation, *get_args(annotation)]
            model = next(kind for kind in kinds if isinstance(kind, type) and issubclass(kind, _Fields))
    return model


def _json_path(location: Sequence[str | int]) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _check_regex(expression: str) -> None:
    try:
        re.compile(expression)
    except (re.error, RecursionError, OverflowError) as error:
        raise ValueError(f"not a regular expression in Python's syntax: {error}") from None


def _with_one(fields: T, *names: str) -> T:
    given = [to_camel(name) for name in names if getattr(fields, name) is not None]
    if len(given) != 1:
        expected = ", ".join(map(to_camel, names))
        raise ValueError(f"expected exactly one of {expected}; got {' and '.join(given) or 'none'}")
    return fields
