"""Prompts that leave room for a response in a model's positions."""

import logging
from collections.abc import Sequence
from typing import Any

from trl.failures import SettingError

logger = logging.getLogger(__name__)


def fit_prompts(rows: Sequence[dict[str, Any]], positions: int | None, new_tokens: int) -> list[dict[str, Any]]:
    """Rows whose ``input_ids`` leave room for ``new_tokens``; a warning counts those that lose their beginning for it.

    The end is what a response follows, so the rule is to cut on the left. ``positions`` None: the model has no limit.
    Raises SettingError where no prompt has room.
    """
    if positions is None:
        return list(rows)
    room = positions - new_tokens
    if room < 1:
        raise SettingError(f"{new_tokens} new tokens leave a prompt no room in the model's {positions} positions")
    cut = sum(len(row["input_ids"]) > room for row in rows)
    if cut:
        logger.warning("%d of %d prompts have more than %d tokens and lose their beginnings", cut, len(rows), room)
    return [{**row, "input_ids": row["input_ids"][-room:]} for row in rows]
