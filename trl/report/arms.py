"""Arms: runs that differ only in their seed belong together, and their spread says how sure a curve is."""

import os.path
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from trl.jsonl import dump_line
from trl.report.runlog import Run

NOT_SETTINGS = frozenset(
    {"seed", "output_dir", "overwrite", "resume", "dry_run", "save_freq", "save_steps", "keep_checkpoints"}
    | {"log_with", "tracker_project_name", "tracker_kwargs", "project_kwargs"}
)
"""What may differ within an arm: the seed, where results go, and what is kept or shown of them."""

GROUPING_RULE = (
    "Runs are one arm when all settings in their run.json agree, apart from seed, folder and what is only kept or shown"
)


@dataclass(frozen=True)
class Arm:
    """Runs of equal settings (see `GROUPING_RULE`), one per seed; a run without settings is an arm of its own."""

    name: str
    runs: tuple[Run, ...]
    settings: dict[str, Any]

    @property
    def asks_critic(self) -> bool:
        """Whether any of its runs showed a critic something."""
        return any(row.get("critic/requests") for run in self.runs for row in run.metrics)


def group_runs(runs: Sequence[Run]) -> list[Arm]:
    """The arms, in order of their first run, each under a name that no other has."""
    groups: dict[str, list[Run]] = {}
    for index, run in enumerate(runs):
        key = dump_line(compared_settings(run)) if run.settings else f"run {index}"
        groups.setdefault(key, []).append(run)
    names = [_name(members) for members in groups.values()]
    unique = [
        name if names.count(name) == 1 else f"{name}, {', '.join(run.name for run in members)}"
        for name, members in zip(names, groups.values(), strict=True)
    ]
    return [
        Arm(name, tuple(members), compared_settings(members[0]))
        for name, members in zip(unique, groups.values(), strict=True)
    ]


def compared_settings(run: Run) -> dict[str, Any]:
    """The settings that make an arm, nested ones as ``outer.inner``, in alphabetical order."""
    return dict(sorted(_flat(run.settings, "")))


def _flat(settings: Mapping[str, Any], prefix: str) -> Iterable[tuple[str, Any]]:
    for key, value in settings.items():
        if key in NOT_SETTINGS:
            continue
        if isinstance(value, dict) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _name(runs: Sequence[Run]) -> str:
    """One run: its name. Several: what their folders share, without a seed's number at its end."""
    if len(runs) == 1:
        return runs[0].name
    last = {run.folder.name for run in runs}
    if len(last) == 1:
        return last.pop()
    shared = os.path.commonprefix([run.name for run in runs])  # noqa: RUF071 (by character is meant)
    shared = re.sub(r"(?i)(^|[-_./ ])(seed|s)?[-_. ]?\d*$", "", shared).rstrip("-_./ ")
    return shared.rsplit("/", 1)[-1] or ", ".join(run.name for run in runs)


def baseline(arms: Sequence[Arm]) -> Arm:
    """The first arm that asks no critic; where all do, the first."""
    return next((arm for arm in arms if not arm.asks_critic), arms[0])


def differences(arms: Sequence[Arm]) -> dict[str, list[str]]:
    """Setting → its value in each arm, for the settings that are not the same in all that have some."""
    known = [arm.settings for arm in arms if arm.settings]
    keys = sorted({key for settings in known for key in settings})
    found = {}
    for key in keys:
        if len({dump_line(settings.get(key)) for settings in known}) > 1:
            found[key] = [_shown(arm.settings.get(key)) if arm.settings else "not recorded" for arm in arms]
    return found


def _shown(value: Any) -> str:
    return "–" if value is None else value if isinstance(value, str) else dump_line(value)
