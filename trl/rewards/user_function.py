"""A reward function of the user's own: ``path/to/file.py:name``.

The file is trusted: it runs in this process with everything this process may do. (Snippets of configuration files run
in a sandbox instead, see `trl.rewards.sandbox`.) The function follows the convention of Hugging Face TRL's trainers:
keyword lists of equal length (``prompts``, ``completions``, ``completion_ids`` and the columns of the data) in, one
number per completion out, None or NaN for "no verdict". An ordinary function runs where it is called; one that is
``async def`` runs in the background, so that its waiting costs no time.
"""

import asyncio
import importlib.util
import inspect
import math
import sys
from collections.abc import Awaitable, Callable, Collection, Sequence
from multiprocessing.pool import ThreadPool
from pathlib import Path
from typing import Any

from trl.jsonl import DataFileError
from trl.rewards.composite import SampleResult
from trl.rewards.fuse import RewardFuse
from trl.rewards.reward_function import PendingReward

Parameters = dict[str, inspect.Parameter]


class FunctionReward:
    """A function from a Python file, used like a `trl.rewards.ConfiguredReward`.

    Args:
        location: ``path/to/file.py:name``.

    Raises:
        DataFileError: no such function, or a file that can't be imported by its path.
        OSError: no such file.
    """

    def __init__(self, location: str) -> None:
        self.location = location
        self._function = _load(location)
        self.__name__ = location.rpartition(":")[2]
        self._parameters: Parameters = dict(inspect.signature(self._function).parameters)
        self._fuse = RewardFuse()
        # Its thread is a daemon: a process that fails elsewhere does not wait for a service.
        self._worker = ThreadPool(1)

    def check(self, columns: Collection[str]) -> None:
        """Raise DataFileError if the function needs a column that the data don't have."""
        for name, parameter in self._parameters.items():
            needed = parameter.default is parameter.empty and parameter.kind not in (
                parameter.VAR_POSITIONAL,
                parameter.VAR_KEYWORD,
            )
            if needed and name not in columns:
                raise DataFileError(
                    f"{self.location} needs the column {name!r}, which the data don't have; they have "
                    f"{', '.join(sorted(columns))}. Put it into each row, or into its references"
                )

    def details(self, completions: Sequence[Any], **columns: Any) -> list[SampleResult]:
        """The reward of each completion, in order. Raises what the function raises.

        Raises TypeError for anything but one number or None per completion.
        """
        keywords = {"completions": list(completions), **columns}
        if not any(each.kind is each.VAR_KEYWORD for each in self._parameters.values()):
            keywords = {name: column for name, column in keywords.items() if name in self._parameters}
        try:
            rewards = self._function(**keywords)
            if inspect.isawaitable(rewards):
                rewards = asyncio.run(_awaited(rewards))
        except SystemExit as error:  # the run would end here, without its model, and look as if it had succeeded
            raise RuntimeError(
                f"{self.location} called sys.exit({error.code!r}); raise an error to stop a run"
            ) from error
        return self._results(rewards, len(completions))

    def submit(self, completions: Sequence[Any], **columns: Any) -> PendingReward:
        """The same; an ``async`` function runs in a background thread. Failures count towards stopping the run."""
        if inspect.iscoroutinefunction(self._function):
            return PendingReward(self._worker.apply_async(lambda: self._counted(self.details(completions, **columns))))
        return PendingReward(self._worker.apply_async(self._counted, (self.details(completions, **columns),)))

    def close(self) -> None:
        """End the thread."""
        self._worker.terminate()

    def _counted(self, results: list[SampleResult]) -> list[SampleResult]:
        self._fuse.record(results)
        return results

    def _results(self, rewards: Any, count: int) -> list[SampleResult]:
        try:
            rewards = list(rewards)  # a generator can be read once only
            numbers = [math.nan if reward is None else float(reward) for reward in rewards]
        except (TypeError, ValueError, OverflowError) as error:
            raise TypeError(f"{self.location} returned {rewards!r:.80}; expected a list of numbers or None") from error
        if len(numbers) != count:
            raise TypeError(f"{self.location} returned {len(numbers)} rewards for {count} completions")
        return [
            SampleResult(number, None, ())
            if math.isfinite(number)
            else SampleResult(math.nan, f"{self.__name__} returned {reward!r:.40}", ())
            for number, reward in zip(numbers, rewards, strict=True)
        ]


async def _awaited(rewards: Awaitable[Any]) -> Any:
    return await rewards


def _load(location: str) -> Callable[..., Any]:
    file, _, name = location.rpartition(":")
    path = Path(file)
    if not path.is_file():
        raise FileNotFoundError(f"{location}: there is no file {file}")
    spec = importlib.util.spec_from_file_location(f"reward_file_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise DataFileError(f"{location}: expected path/to/file.py:function")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    sys.path.append(str(path.parent.resolve()))  # it may import its neighbours
    try:
        spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise DataFileError(f"{path} can't be imported by its path: {type(error).__name__}: {error}") from error
    function = vars(module).get(name)
    if not callable(function):
        found = [key for key, value in vars(module).items() if inspect.isfunction(value) and not key.startswith("_")]
        raise DataFileError(f"{location}: there is no function {name!r} in it; it has {', '.join(found) or 'none'}")
    return function
