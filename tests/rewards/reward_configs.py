"""Reward configurations for tests."""

from typing import Any

EXTRACT = {"parseType": "REGEX_EXTRACT", "regexExtractExpression": "<ans>(.*?)</ans>"}


def match(operation: str, expression: str) -> dict[str, Any]:
    return {"matchOperation": operation, "expression": expression}


def string_match(
    name: str = "right",
    operation: str = "EXACT_MATCH",
    expression: str = "{{references.answer}}",
    *,
    correct: float = 1.0,
    wrong: float = -1.0,
    parse: dict[str, Any] | None = None,
    key: str | None = None,
) -> dict[str, Any]:
    """A string match; of the value of ``key`` in a JSON response, if that is given."""
    rule: dict[str, Any] = {"stringMatchExpression": match(operation, expression)}
    if key is not None:
        rule = {"jsonMatchExpression": {"keyName": key, "valueStringMatchExpression": match(operation, expression)}}
    scorer = {"correctAnswerReward": correct, "wrongAnswerReward": wrong, **rule}
    config: dict[str, Any] = {"rewardName": name, "stringMatchRewardScorer": scorer}
    return config if parse is None else {**config, "parseResponseConfig": parse}


def judge(
    name: str = "judge",
    prompt: str = "Rate {{response}}",
    *,
    model: str = "judge-model",
    parse: dict[str, Any] | None = None,
    exact: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """An autorater whose parsed answer is the reward, or is compared with ``exact``."""
    scorer: dict[str, Any] = {"autoraterPrompt": prompt, "autoraterConfig": {"autoraterModel": model}}
    if parse is not None:
        scorer["autoraterResponseParseConfig"] = parse
    scorer |= {"parsedResponseConversionScorer": {}} if exact is None else {"exactMatchScorer": exact}
    return {"rewardName": name, "autoraterScorer": scorer}


def service(uri: str, name: str = "service") -> dict[str, Any]:
    return {"rewardName": name, "cloudRunRewardScorer": {"cloudRunUri": uri}}


def snippet(code: str, name: str = "snippet") -> dict[str, Any]:
    return {"rewardName": name, "codeExecutionRewardScorer": {"pythonCodeSnippet": code}}


def composite(*configs: dict[str, Any], weights: list[float] | None = None) -> dict[str, Any]:
    return {
        "weightedRewardConfigs": [
            {"rewardConfig": config, "weight": weight}
            for config, weight in zip(configs, weights or [1.0] * len(configs), strict=True)
        ]
    }
