"""What a batch given to `PPOTrainer.step` must look like, checked before anything is computed."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def check_batch(
    queries: Sequence[Tensor],
    responses: Sequence[Tensor],
    scores: Sequence[Any] | Callable[[], Sequence[Any]],
    response_masks: Sequence[Tensor] | None,
    batch_size: int,
    context: int | None,
) -> list[Tensor]:
    """Validate the lists of a batch; returns one bool mask (N_i,) per response.

    ``context`` is the number of positions that every model of the step has, if it is limited. Raises ValueError that
    names the list and the sample.
    """
    lists: dict[str, Sequence[Any]] = {"queries": queries, "responses": responses}
    if not callable(scores):
        lists["scores"] = scores
    if response_masks is not None:
        lists["response_masks"] = response_masks
    for name, values in lists.items():
        if len(values) != len(queries):
            raise ValueError(f"{name} has {len(values)} entries but queries has {len(queries)}")
    if not 1 <= len(queries) <= batch_size:
        raise ValueError(
            f"step got {len(queries)} samples: expected 1 to batch_size ({batch_size}); only the last batch may be "
            "shorter"
        )
    for name in ("queries", "responses"):
        for i, ids in enumerate(lists[name]):
            if ids.dim() != 1 or ids.is_floating_point():
                raise ValueError(f"{name}[{i}] must be a 1-D tensor of token ids, got {tuple(ids.shape)}")
            if name == "queries" and len(ids) == 0:
                raise ValueError(f"queries[{i}] is empty: give at least one token, such as BOS or EOS")
    for i, (query, response) in enumerate(zip(queries, responses, strict=True)):
        if context is not None and len(query) + len(response) > context + 1:  # the last token is never read
            raise ValueError(
                f"sample {i} has {len(query) + len(response)} tokens, query and response together, but the model "
                f"has {context} positions"
            )
    if response_masks is None:
        return [torch.ones(len(r), dtype=torch.bool) for r in responses]
    for i, (mask, response) in enumerate(zip(response_masks, responses, strict=True)):
        if mask.shape != response.shape:
            raise ValueError(
                f"response_masks[{i}] has shape {tuple(mask.shape)}, responses[{i}] {tuple(response.shape)}"
            )
    return [mask.bool().cpu() for mask in response_masks]
