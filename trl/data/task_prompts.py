"""Prompts of a user's own task, as token ids that a language model continues.

Rows are those of `trl.data.tuning_rows`; further keys of a row are kept as columns for reward functions. A data set
is a file, a folder or ``builtin:`` name with ``train.jsonl`` and perhaps ``eval.jsonl``.
"""

import hashlib
import json
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jinja2 import TemplateError

from trl.builtin import is_builtin, resolve
from trl.data.tuning_rows import TuningRow, parse_row, prompt_text
from trl.jsonl import DataFileError, read_numbered

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

ChatChoice = Literal["auto", "on", "off"]
_TUNING_KEYS = {"contents", "systemInstruction", "system_instruction", "references"}


@dataclass(frozen=True)
class TaskRow:
    """One prompt with everything its reward may ask for."""

    tuning: TuningRow
    columns: dict[str, Any]
    """The row's other keys."""
    where: str
    """File and line."""

    @property
    def shown(self) -> str:
        """The prompt as people and critics read it: one turn alone as it is, several with their roles."""
        turns = self.tuning.prompt
        return "\n\n".join(f"{turn['role']}: {turn['content']}" for turn in turns) if turns[1:] else turns[0]["content"]

    @property
    def digest(self) -> str:
        """Of what the model is asked, whatever the references."""
        return hashlib.sha256(json.dumps(self.tuning.messages).encode()).hexdigest()


def read_task_rows(name: str, split: str = "train") -> list[TaskRow]:
    """The rows of a file, or of one split of a folder or ``builtin:`` name.

    Raises DataFileError with file and line of a row that can't be used, OSError, BuiltinError.
    """
    path = _located(name, split)
    rows = []
    for line, row in read_numbered(path):
        where = f"{path}, line {line}"
        columns = {key: value for key, value in row.items() if key not in _TUNING_KEYS}
        rows.append(TaskRow(parse_row(row, where), columns, where))
    if not rows:
        raise DataFileError(f'{path}: expected at least one row {{"contents": [...]}}, the file is empty')
    return rows


def _located(name: str, split: str) -> Path:
    path = resolve(name, "questions") if is_builtin(name) else Path(name)
    return path / f"{split}.jsonl" if path.is_dir() else path


def train_and_eval_rows(
    data: str, eval_data: str | None, fraction: float, limit: int
) -> tuple[list[TaskRow], list[TaskRow]]:
    """Rows to train on, and up to ``limit`` held-out rows, a sample by content; with a limit of 0 none is held out.

    The held-out rows are those of ``eval_data``; else of the data set's own ``eval.jsonl``; else the share
    ``fraction`` of the prompts, by the hash of their content: at least one prompt, the same whatever the order of
    the file, and rows of one prompt on the same side.
    """
    rows = read_task_rows(data)
    if limit == 0:
        return rows, []
    if eval_data is not None or (_located(data, "eval") != _located(data, "train") and _located(data, "eval").exists()):
        held_out = read_task_rows(eval_data or data, "eval")
        known = {row.digest for row in rows}
        repeated = sum(row.digest in known for row in held_out)
        if repeated:
            logger.warning("%d of %d held-out prompts are trained on, too", repeated, len(held_out))
    else:
        rows, held_out = split_by_content(rows, fraction)
        if not rows:
            raise DataFileError(
                f"{data}: nothing is left to train on: all rows have one prompt, or a share of {fraction} is too much "
                "to hold out; give --eval_data"
            )
    return rows, sorted(held_out, key=lambda row: row.digest)[:limit]


def split_by_content(rows: Sequence[TaskRow], fraction: float) -> tuple[list[TaskRow], list[TaskRow]]:
    """(the others, about ``fraction`` of the prompts), each in order."""
    digests = {row.digest for row in rows}
    held = {digest for digest in digests if int(digest[:13], 16) < fraction * 16**13} or {min(digests)}
    return [row for row in rows if row.digest not in held], [row for row in rows if row.digest in held]


def uses_chat_template(choice: ChatChoice, tokenizer: "PreTrainedTokenizerBase") -> bool:
    """Whether prompts go through the tokenizer's chat template. Raises DataFileError if there is none to put on."""
    if choice == "on" and tokenizer.chat_template is None:
        raise DataFileError("--chat_template on: this model's tokenizer has no chat template; use auto or off")
    return choice != "off" and tokenizer.chat_template is not None


def encode_rows(
    rows: Iterable[TaskRow], tokenizer: "PreTrainedTokenizerBase", *, chat: bool, longest: int | None
) -> list[dict[str, Any]]:
    """Rows of batches: ``query`` (readable), ``input_ids`` (Q,), ``critic_ids`` (the prompt as a critic is shown it,
    without the chat template's marks) and ``row``.

    Of a prompt of more than ``longest`` tokens, the last ones are kept; a warning counts such prompts.
    """
    import torch

    encoded, cut = [], []
    for row in rows:
        ids = _ids(_text(row, tokenizer, chat), tokenizer)
        shown = _ids(row.shown + "\n", tokenizer) if chat else ids
        if longest is not None and len(ids) > longest:
            cut.append(row)
            ids, shown = ids[-longest:], shown[-longest:]
        tensors = {"input_ids": torch.tensor(ids), "critic_ids": torch.tensor(shown)}
        encoded.append({"query": row.shown, **tensors, "row": row})
    if cut:
        logger.warning(
            "%d of %d prompts have more than %d tokens and lose their beginnings (first: %s)",
            len(cut),
            len(encoded),
            longest,
            cut[0].where,
        )
    return encoded


def _text(row: TaskRow, tokenizer: "PreTrainedTokenizerBase", chat: bool) -> str:
    if not chat:
        return "\n\n".join(message["content"] for message in row.tuning.messages)
    try:
        return prompt_text(row.tuning, tokenizer)
    except TemplateError as error:  # some templates know no system instruction, or want turns to alternate
        raise DataFileError(f"{row.where}: the model's chat template refuses this conversation ({error})") from None


def _ids(text: str, tokenizer: "PreTrainedTokenizerBase") -> list[int]:
    """Token ids of an open text: never empty, and without the end token that some tokenizers add."""
    ids: list[int] = list(tokenizer(text, verbose=False)["input_ids"])
    end = tokenizer.eos_token_id
    if len(ids) > 1 and ids[-1] == end and not text.endswith(str(tokenizer.eos_token)):
        ids = ids[:-1]
    start = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else end
    if not ids and start is None:
        raise DataFileError("an empty prompt needs a tokenizer with a beginning or end token")
    return ids or [start]
