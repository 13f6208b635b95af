"""What a reward configuration may hold.

The schema is that of Vertex AI's reinforcement tuning (SingleReinforcementTuningRewardConfig and
CompositeReinforcementTuningRewardConfig): https://cloud.google.com/vertex-ai/docs/reference/rest. Field names are
camelCase, or snake_case.
"""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic.alias_generators import to_camel

from trl.rewards.placeholders import regex_of

MOST_REWARDS = 16
"""In one composite."""


class Fields(BaseModel):
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


T = TypeVar("T", bound=Fields)


class ParseConfig(Fields):
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


class StringMatch(Fields):
    """How a text is compared with an expression, in which ``{{references.key}}`` stands for the row's value."""

    match_operation: Literal["EXACT_MATCH", "PARTIAL_MATCH", "REGEX_CONTAINS"]
    expression: str

    @model_validator(mode="after")
    def _compiles(self) -> Self:
        if self.match_operation == "REGEX_CONTAINS":
            _check_regex(regex_of(self.expression, None))
        return self


class JsonMatch(Fields):
    """Compares one value of the first level of a JSON object."""

    key_name: str
    value_string_match_expression: StringMatch


class StringMatchScorer(Fields):
    correct_answer_reward: float
    wrong_answer_reward: float
    string_match_expression: StringMatch | None = None
    json_match_expression: JsonMatch | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        return _with_one(self, "string_match_expression", "json_match_expression")


class AutoraterConfig(Fields):
    """The judge. The last three fields are Vertex AI's own; one answer at temperature 0 needs none of them."""

    autorater_model: str
    sampling_count: int | None = None
    flip_enabled: bool | None = None
    generation_config: dict[str, Any] | None = None


class ConversionScorer(Fields):
    """The judge's parsed answer is the reward, as a number."""


class ExactMatchScorer(Fields):
    expression: str
    correct_answer_reward: float
    wrong_answer_reward: float


class AutoraterScorer(Fields):
    autorater_prompt: str
    autorater_config: AutoraterConfig
    autorater_response_parse_config: ParseConfig = ParseConfig()
    parsed_response_conversion_scorer: ConversionScorer | None = None
    exact_match_scorer: ExactMatchScorer | None = None

    @model_validator(mode="after")
    def _has_one(self) -> Self:
        return _with_one(self, "parsed_response_conversion_scorer", "exact_match_scorer")


class CodeExecutionScorer(Fields):
    python_code_snippet: str


class CloudRunScorer(Fields):
    cloud_run_uri: str


class RewardConfig(Fields):
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
    def scale(self) -> tuple[float, float] | None:
        """The wrong and the right answer's reward, where there are no others."""
        judge = self.autorater_scorer
        two = self.string_match_reward_scorer if judge is None else judge.exact_match_scorer
        return None if two is None else (two.wrong_answer_reward, two.correct_answer_reward)

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


class WeightedReward(Fields):
    reward_config: RewardConfig
    weight: float


class CompositeConfig(Fields):
    """Several rewards; the total is their weighted mean."""

    weighted_reward_configs: Annotated[list[WeightedReward], Field(min_length=1, max_length=MOST_REWARDS)]


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
