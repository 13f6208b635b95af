import json
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl.critic.parse import parse_critique

CASES = [json.loads(line) for line in (Path(__file__).parents[1] / "cases" / "parse.jsonl").open()]
STYLES = ["sentiment", "toxicity", "summary"]
NEGATIVE = "\n\nIdentified Negative Text Span:\n"


def spans_of(reply: str, style: str = "sentiment") -> list[tuple[str, str]]:
    return [(span.text, span.polarity[0]) for span in parse_critique(reply, style).spans]


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_shared_case(case):
    critique = parse_critique(case["reply"], case["style"])
    got = [[s.text, s.polarity] + ([s.label] if s.label else []) for s in critique.spans]
    assert (critique.status, got) == (case["status"], case["spans"])
    assert critique.reply == case["reply"]


@pytest.mark.parametrize(
    "line",
    [
        "[Span 1]: quite boring",
        "Span 1: quite boring",
        "span 7 quite boring",
        "[SPAN 12] - quite boring",
        "(Span 1) quite boring",
        "Span #1: quite boring",
        "**[Span 1]:** quite boring",
        "**Span 1**: **quite boring**",
        "* [Span 1]: “quite boring”",
        "1. [Span 1]: 'quite boring'",
        '- Span 1: "quite boring".',
        "> Span 2 = `quite boring`",
        "Toxic Span 1: «quite boring»",
        "[Negative Span 1]: ‘quite boring’",
        "Span 1:quite boring",
        "  [Span 1]:\tquite boring  ",
        "- quite boring",
        "1) quite boring",
        "• quite boring",
        '2. "quite boring"',
    ],
)
def test_ways_to_write_a_span(line):
    assert spans_of("None identified" + NEGATIVE + line) == [("quite boring", "n")]
    assert spans_of(line, "toxicity") == [("quite boring", "n")]


@pytest.mark.parametrize(
    "header",
    [
        "Identified Negative Text Span:",
        "identified negative text spans",
        "**Identified Negative Text Span(s):**",
        "## Identified Negative Text Spans",
        "##### Identified Negative Text Span: #####",
        "2. Identified Negative Text Span:",
        "Negative Text Spans:",
        "Negative spans",
        "**Negative:**",
        "Negative",
        "Negative remarks that I found:",
        "Identified Negative Text Span (1):",
        "Identified Negative\nText Span:",
    ],
)
def test_ways_to_write_a_header(header):
    reply = f"[Span 1]: warm\n\n{header}\n[Span 1]: dull"
    assert spans_of(reply) == [("warm", "p"), ("dull", "n")]
    back = header.replace("Negative", "Positive").replace("negative", "positive")
    assert spans_of(f"{reply}\n\n{back}\n[Span 1]: funny") == [("warm", "p"), ("dull", "n"), ("funny", "p")]


def test_span_on_the_headers_own_line():
    assert spans_of("None identified\nIdentified Negative Text Span: [Span 1]: dull") == [("dull", "n")]
    assert parse_critique("Identified Toxic Text Span: None identified", "toxicity").status == "none"


@pytest.mark.parametrize(
    ("style", "reply"),
    [
        ("toxicity", "I can't help with that."),
        ("toxicity", "As a moderator I won't repeat it:\n- it is harmful\n- it is rude"),
        ("toxicity", "No toxic spans were found."),
        ("toxicity", "The toxic span here is the insult at the end."),
        ("toxicity", "Toxic content cannot be shown because:\n- it breaks our rules"),
        ("toxicity", "Toxic Span 1:\nToxic Span 2"),
        ("toxicity", 'Toxic Span 1: ""'),
        ("sentiment", "The sentence is positive overall - it praises the cast."),
        ("sentiment", "Positive and negative sentiments are mixed here"),
        ("sentiment", "Identified Positive Text Span:\n\nIdentified Nega"),
        ("sentiment", "Spanish films 1: great"),
        ("summary", "The summary is fine (Label: Good)."),
        ("summary", "   \n\n"),
        ("sentiment", "##### Example 6 #####\n[Span 1]: great"),
        ("sentiment", "Sentence to be Labeled:\nA great film\n\nIdentified Positive Text Span:\n[Span 1]: great"),
        ("sentiment", "<think>[Span 1]: great"),
    ],
)
def test_prose_refusals_and_echoes_give_no_spans(style, reply):
    critique = parse_critique(reply, style)
    assert (critique.status, critique.spans) == ("unparsable", ())


@pytest.mark.parametrize("none", ["None identified", "none identified.", "[None identified]", "**None identified**"])
@pytest.mark.parametrize("style", STYLES)
def test_none_identified(none, style):
    for reply in (none, f"- {none}", f"[Span 1]: {none}", f'Span 1: "{none}"', f"{none}\n- the text is neutral"):
        critique = parse_critique(reply, style)
        assert (critique.status, critique.spans) == ("none", ())
    assert spans_of(f"{none}\nSpan 1: dull\nSpan 2: {none}", style)[0][0] == "dull"
    assert len(spans_of(f"{none}\nSpan 1: dull\nSpan 2: {none}", style)) == 1


def test_what_comes_after_the_answer_is_left_out():
    for more in (
        "##### Example 6 #####\nSentence to be Labeled:\nx\nIdentified Positive Text Span:\n[Span 1]: x",
        "Example 6\n[Span 1]: x",
        "Sentence to be labeled: x\n[Span 1]: x",
    ):
        assert spans_of(f"[Span 1]: warm\n\n{more}") == [("warm", "p")]
    assert spans_of("[Span 1]: warm ##### Example 6 #####\n[Span 1]: x") == [("warm", "p")]
    assert spans_of("Span 1: his dog (Label: Irrelevant)\n\nDocument:\n- x\nSpan 1: x", "summary") == [("his dog", "n")]


def test_reasoning_before_the_answer_is_left_out():
    assert spans_of("<think>\n[Span 1]: x\n</think>\n\n[Span 1]: warm") == [("warm", "p")]


def test_plain_items_are_spans_only_directly_under_a_header():
    assert spans_of("- warm\n\n- funny" + NEGATIVE + "1. dull\n2. long") == [
        ("warm", "p"),
        ("funny", "p"),
        ("dull", "n"),
        ("long", "n"),
    ]
    assert spans_of("Toxic Span 1: idiot\n- this is an insult", "toxicity") == [("idiot", "n")]
    assert spans_of("Here is my view.\n- idiot", "toxicity") == []


def test_an_item_that_starts_with_the_word_positive_is_an_item():
    assert spans_of("- positive vibes\n- positive words") == [("positive vibes", "p"), ("positive words", "p")]


def test_sections_that_name_no_flaws_are_left_out_in_the_flaw_styles():
    reply = "Positive spans:\n- a fine start\n\nIdentified Flawed Text Span:\nSpan 1: his dog (Label: Irrelevant)"
    assert spans_of(reply, "summary") == [("his dog", "n")]
    assert spans_of("Non-toxic spans:\n[Span 1]: hello", "toxicity") == []
    assert spans_of("Identified Neutral Text Span:\n[Span 1]: film") == []


@pytest.mark.parametrize(
    ("line", "text", "label"),
    [
        ("why switch (Label: Irrelevant)", "why switch", "Irrelevant"),
        ("why switch [label = Irrelevant].", "why switch", "Irrelevant"),
        ("why switch - Label: Irrelevant", "why switch", "Irrelevant"),
        ('"why switch" Label: Irrelevant', "why switch", "Irrelevant"),
        ('"why switch" (Irrelevant)', "why switch", "Irrelevant"),
        ('"why switch", (Label: "Irrelevant")', "why switch", "Irrelevant"),
        ("why switch (Label: Irrelevant (off topic))", "why switch", "Irrelevant (off topic)"),
        ("the record label: Sony", "the record label: Sony", None),
        ("my dog (a collie)", "my dog (a collie)", None),
        ("why switch (Label:)", "why switch", None),
        ("he said “no” again", "he said “no” again", None),
        ("'tis the lovin' kind", "'tis the lovin' kind", None),
        ("f*** you, s**t", "f*** you, s**t", None),
        ("*** you", "*** you", None),
        ("10.5 stars", "10.5 stars", None),
    ],
)
def test_quotes_and_labels(line, text, label):
    for style in STYLES:
        (span,) = parse_critique(f"[Span 1]: {line}\n", style).spans
        assert (span.text, span.label) == (text, label)


def test_a_reply_cut_in_the_middle_keeps_what_is_complete():
    whole = (
        "[Span 1]: “warm”\n[Span 2]: “funny”\n\nIdentified Negative Text Span:\n[Span 1]: “dull”\n[Span 2]: “long”\n"
    )
    complete = [("warm", "p"), ("funny", "p"), ("dull", "n"), ("long", "n")]
    for end in range(len(whole) + 1):
        spans = spans_of(whole[:end])
        assert spans == complete[: len(spans)]
        assert len(spans) >= sum(whole[:end].count(f"“{text}”") for text, _ in complete)
    assert spans_of('[Span 1]: "warm"\n[Span 2]: "fun') == [("warm", "p")]


MARKERS = st.sampled_from(["[Span {}]: ", "Span {}: ", "- [span {}] ", "**Span {}:** ", "[Span {}]\t"])
QUOTES = st.sampled_from(["{}", '"{}"', "“{}”", "'{}'", "‘{}’"])
PHRASES = st.lists(st.text("abcxyzäß", min_size=1, max_size=6), min_size=1, max_size=4).map(" ".join)


@given(
    st.lists(PHRASES, max_size=4), st.lists(PHRASES, max_size=4), MARKERS, QUOTES, st.sampled_from(["\n", "\r\n", "\r"])
)
def test_a_written_critique_is_read_back(positive, negative, marker, quote, line_break):
    def section(phrases: list[str]) -> list[str]:
        return [marker.format(n) + quote.format(p) for n, p in enumerate(phrases, 1)] or ["None identified"]

    lines = [*section(positive), "", "Identified Negative Text Span:", *section(negative)]
    critique = parse_critique(line_break.join(lines), "sentiment")
    assert [s.text for s in critique.spans if s.polarity == "positive"] == positive
    assert [s.text for s in critique.spans if s.polarity == "negative"] == negative
    assert critique.status == ("ok" if positive or negative else "none")


FRAGMENTS = st.sampled_from(
    [
        *("[Span 1]", "Span", "Toxic Span 2: ", "Identified ", "Negative Text Span:", "Positive", "None identified"),
        *("(Label: ", "label:", "#####", "Example 3", "\n", "\r\n", "- ", "1. ", "**", "<think>", "</think>"),
        *("“", "”", '"', "'", ":", " ", "bad"),
    ]
)


@given(
    st.one_of(st.text(), st.lists(FRAGMENTS | st.text(max_size=3), max_size=40).map("".join)), st.sampled_from(STYLES)
)
@settings(max_examples=500)
def test_any_string_gives_a_critique(reply, style):
    critique = parse_critique(reply, style)
    assert critique.status in ("ok", "none", "unparsable")
    assert (critique.status == "ok") == bool(critique.spans)
    for span in critique.spans:
        assert span.text == span.text.strip() != ""
        assert span.text in reply
        assert style == "sentiment" or span.polarity == "negative"


HARD_LINES = ["- ", "1. ", "[", "span ", "label:", "label ", '"', "“\n", "Identified ", "none ", "()", "Positive:", "a"]
HARD_LINES += ["\n", " ", "#", "*", "\x85", "</think>", "[Span 1]: a\n", 'Span 1: label: "a" (b)\n', "- a\n"]


@pytest.mark.parametrize("unit", HARD_LINES)
def test_time_grows_linearly_up_to_a_megabyte(unit):
    def seconds(size: int) -> float:
        replies = [
            prefix + unit * (size // len(unit)) for prefix in ("", "[Span 1]: x", "Identified Positive Text Span: ")
        ]
        start = time.process_time()
        for reply in replies:
            parse_critique(reply, "sentiment")
        return time.process_time() - start

    # Quadratic time would be 64 times as long for 8 times the text, and minutes for a megabyte.
    small, large = seconds(125_000), seconds(1_000_000)
    assert large < 30 * small + 0.5
