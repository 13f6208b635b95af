"""stringMatchRewardScorer: a response, or one value of a JSON response, compared with an expression."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from trl.rewards.patterns import PatternError, Patterns
from trl.rewards.placeholders import fill, reference_values, regex_of
from trl.rewards.schema import StringMatch, StringMatchScorer
from trl.rewards.scoring import Sample, Verdict, failure


class StringMatchReward:
    """Gives one reward to the right answer and another to every wrong one.

    A response in which nothing was found to extract, that is not JSON where JSON is expected, or that lacks the key
    is wrong. A search that hits its time limit has no verdict.
    """

    def __init__(self, config: StringMatchScorer, patterns: Patterns) -> None:
        self._config, self._patterns = config, patterns

    def score(self, samples: Sequence[Sample]) -> list[Verdict]:
        return [self._verdict(sample) for sample in samples]

    def close(self) -> None:
        """Nothing is open."""

    def _verdict(self, sample: Sample) -> Verdict:
        config = self._config
        rule = config.string_match_expression
        target: str | None = sample.response
        stages = {}
        if config.json_match_expression is not None:
            rule = config.json_match_expression.value_string_match_expression
            key = config.json_match_expression.key_name
            target = json_value(sample.response, key)
            stages["json value"] = f"none: not a JSON object, or without {key!r}" if target is None else target
        if rule is None:
            raise ValueError("the schema guarantees one of the two expressions")
        stages["expression"] = substituted(rule, sample.references)
        right = False
        if sample.extracted and target is not None:
            try:
                right = self._matches(rule, stages["expression"], target)
            except PatternError as error:
                return failure(str(error), stages)
        stages["match"] = f"{rule.match_operation}: {'right' if right else 'wrong'}"
        return Verdict(config.correct_answer_reward if right else config.wrong_answer_reward, None, stages)

    def _matches(self, rule: StringMatch, expression: str, target: str) -> bool:
        match rule.match_operation:
            case "EXACT_MATCH":
                return target == expression
            case "PARTIAL_MATCH":
                return expression in target
            case "REGEX_CONTAINS":
                return self._patterns.contains(expression, target)


def substituted(rule: StringMatch, references: Mapping[str, Any]) -> str:
    """The expression with its references put in, escaped if it is a regular expression."""
    if rule.match_operation == "REGEX_CONTAINS":
        return regex_of(rule.expression, references)
    return fill(rule.expression, reference_values(references))


def json_value(text: str, key: str) -> str | None:
    """The value of ``key`` in a JSON object: a string as it is, anything else as JSON; None where there is none."""
    try:
        found = json.loads(text)
        if not isinstance(found, dict) or key not in found:
            return None
        value = found[key]
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError):
        return None
