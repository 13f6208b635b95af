"""String match: operations, extraction, JSON values, references, and patterns that would never end."""

import itertools
import json
import math
import re
import threading
import time

import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.rewards.reward_configs import EXTRACT, composite, string_match
from trl.rewards import load_reward
from trl.rewards.pattern_worker import SECONDS
from trl.rewards.patterns import Patterns
from trl.rewards.placeholders import fill, regex_of

CATASTROPHIC = r"^(a|aa)+$"
ENDLESS = "a" * 60 + "b"
PATTERNS = Patterns()
contains, last_match = PATTERNS.contains, PATTERNS.last_match


def rewards(config, completions, **references):
    with load_reward(config) as reward:
        return reward(completions=completions, references=[references] * len(completions))


@pytest.mark.parametrize(
    ("operation", "expression", "response", "right"),
    [
        ("EXACT_MATCH", "{{references.answer}}", "4", True),
        ("EXACT_MATCH", "{{references.answer}}", "4 ", False),
        ("EXACT_MATCH", "{{ references.answer }}", "4", True),
        ("EXACT_MATCH", "4|5", "4", False),
        ("PARTIAL_MATCH", "{{references.answer}}", "it is 4.", True),
        ("PARTIAL_MATCH", "it is {{references.answer}}.", "4", False),  # expression in target, not the other way
        ("REGEX_CONTAINS", r"\b{{references.answer}}\b", "it is 4.", True),
        ("REGEX_CONTAINS", r"\b{{references.answer}}\b", "it is 42.", False),
        ("REGEX_CONTAINS", r"^{{references.answer}}", "is it\n4", False),
        ("REGEX_CONTAINS", r"(?<=is )(\d)\1", "it is 44", True),  # Python's syntax, not RE2's
    ],
)
def test_operations(operation, expression, response, right):
    config = string_match(operation=operation, expression=expression, correct=0.75, wrong=-0.25)
    assert rewards(config, [response], answer="4") == [0.75 if right else -0.25]


def test_a_reference_in_a_regex_is_literal():
    config = string_match(operation="REGEX_CONTAINS", expression="^{{references.answer}}$")
    assert rewards(config, ["1.5", "105", "1.5+"], answer="1.5+") == [-1, -1, 1]


@pytest.mark.parametrize(("value", "text"), [(4, "4"), (2.5, "2.5"), (True, "true"), (["a"], '["a"]')])
def test_references_that_are_no_text_are_json(value, text):
    assert rewards(string_match(), [text], answer=value) == [1.0]


def test_extraction_takes_the_last_match_and_nothing_found_is_wrong():
    responses = ["<ans>5</ans> no: <ans>4</ans>", "<ans>4</ans> or <ans>5</ans>", "4", "<ans></ans>"]
    assert rewards(string_match(parse=EXTRACT), responses, answer="4") == [1, -1, -1, -1]
    # an empty string would be equal to the reference, but nothing was found
    assert rewards(string_match(parse=EXTRACT), ["", "<ans></ans>"], answer="") == [-1, 1]


def test_extraction_without_a_group_and_with_one_that_took_no_part():
    parse = {"parseType": "REGEX_EXTRACT", "regexExtractExpression": r"\d+"}
    assert rewards(string_match(parse=parse), ["3, then 4"], answer="4") == [1]
    assert last_match(r"x(\d)|y", "x1 y") is None
    assert last_match(r"x(\d)|y", "y x1") == "1"


@pytest.mark.parametrize(
    ("response", "right"),
    [
        ('{"answer": "4"}', True),
        ('{"answer": 4, "why": "sum"}', True),
        ('{"answer": "5"}', False),
        ('{"result": "4"}', False),
        ('{"deep": {"answer": "4"}}', False),
        ('[{"answer": "4"}]', False),
        ("4", False),
        ("not json", False),
        ('{"answer": "4"', False),
        ("[" * 100_000, False),
        ('{"answer": ' + "[" * 900 + "]" * 900 + "}", False),
        ("", False),
    ],
)
def test_json_values(response, right):
    assert rewards(string_match(key="answer"), [response], answer="4") == [1.0 if right else -1.0]


def test_json_values_that_are_no_text_are_compared_as_json():
    config = string_match(key="ok", expression="true")
    assert rewards(config, ['{"ok": true}', '{"ok": "true"}', '{"ok": null}']) == [1, 1, -1]


def test_rewards_are_clipped():
    with load_reward(string_match(correct=5, wrong=-1.5)) as reward:
        right, wrong = reward.details(completions=["4", "5"], references=[{"answer": "4"}] * 2)
    assert (right.reward, right.components[0].unclipped) == (1.0, 5.0)
    assert (wrong.reward, wrong.components[0].unclipped) == (-1.0, -1.5)


@pytest.mark.parametrize(
    "config",
    [
        string_match(operation="REGEX_CONTAINS", expression=CATASTROPHIC),
        string_match(parse={"parseType": "REGEX_EXTRACT", "regexExtractExpression": CATASTROPHIC}),
    ],
)
def test_a_catastrophic_pattern_is_no_verdict_and_holds_up_nobody(config):
    beats = []
    done = threading.Event()

    def beat() -> None:
        while not done.is_set():
            beats.append(time.monotonic())
            time.sleep(0.02)

    clock = threading.Thread(target=beat)
    clock.start()
    begin = time.monotonic()
    with load_reward(config) as reward:
        pending = reward.submit(completions=[ENDLESS, "b"], references=[{"answer": "4"}] * 2)
        slow, quick = pending.details
    took = time.monotonic() - begin
    done.set()
    clock.join()
    assert math.isnan(slow.reward)
    assert slow.error == f"the regular expression took more than {SECONDS:g} s"
    assert quick.reward == -1.0
    assert took < 30  # on a machine with nothing else to do: a little over a second
    # the interpreter was not held: another thread went on all the time
    assert max(later - earlier for earlier, later in itertools.pairwise(beats)) < 0.5


@pytest.mark.parametrize("unit", ["x", "ab", "-|"])
def test_long_periodic_references_take_no_time(unit):
    long = unit * 20_000  # an engine that prepares a table of all suffixes takes hours
    config = string_match(operation="REGEX_CONTAINS", expression="^{{references.answer}}$")
    assert rewards(config, [long, long + unit], answer=long) == [1.0, -1.0]


def test_many_searches_at_once_and_no_process_left():
    me = psutil.Process()
    before = set(me.children())
    config = composite(*(string_match(f"r{i}", "REGEX_CONTAINS", f"^{i}$") for i in range(8)))
    with load_reward(config) as reward:
        for _ in range(3):
            results = reward.details(completions=[str(i) for i in range(8)])
            assert [[each.reward for each in result.components] for result in results] == [
                [1.0 if i == j else -1.0 for i in range(8)] for j in range(8)
            ]
        workers = set(me.children()) - before
        assert 1 <= len(workers) <= 8
        for worker in workers:
            worker.kill()  # by the system, say
        assert reward(completions=["0"]) == [(1 - 7) / 8]
    assert set(me.children()) <= before


def test_details_show_the_stages():
    config = string_match(operation="REGEX_CONTAINS", expression="^{{references.answer}}$", parse=EXTRACT)
    with load_reward(config) as reward:
        (result,) = reward.details(completions=["so <ans>1.5</ans>"], references=[{"answer": "1.5"}])
    (component,) = result.components
    assert component.response == "1.5"
    assert component.stages == {"expression": r"^1\.5$", "match": "REGEX_CONTAINS: right"}
    with load_reward(string_match(key="answer")) as reward:
        (result,) = reward.details(completions=["{}"], references=[{"answer": "4"}])
    assert result.components[0].stages["json value"] == "none: not a JSON object, or without 'answer'"


# --- properties

placeholders = st.sampled_from(["{{references.a}}", "{{references.b}}", "{{response}}"])
inserted = st.one_of(st.text(max_size=20), st.lists(placeholders, min_size=1, max_size=3).map("".join))
literals = st.text(st.characters(exclude_characters="{}"), max_size=10)


@given(st.lists(st.one_of(placeholders, literals)), inserted, inserted)
def test_what_is_put_in_is_never_expanded_again(parts, a, b):
    values = {"references.a": a, "references.b": b}
    expected = [values.get(part[2:-2], part) if part.startswith("{{") else part for part in parts]
    assert fill("".join(parts), values) == "".join(expected)


@given(inserted, inserted)
def test_an_escaped_reference_matches_itself_only(value, other):
    pattern = regex_of(r"\A{{references.a}}\Z", {"a": value})
    assert contains(pattern, value)
    assert contains(pattern, other) == (other == value)


@given(st.text(alphabet="ab<>/ns", max_size=40))
def test_last_match_is_the_last_that_python_finds(text):
    found = re.findall("<(.*?)>", text)
    assert last_match("<(.*?)>", text) == (found[-1] if found else None)


@given(st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=3), st.text(max_size=5))
def test_any_json_object_answers_its_keys(row, key):
    verdict = rewards(string_match(key=key or "k"), [json.dumps(row)], answer=row.get(key or "k", "4"))
    assert verdict == [1.0 if (key or "k") in row else -1.0]
