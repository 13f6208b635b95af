import json
import random
import re
import time
from pathlib import Path

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.critic.toy_tokenizers import FAST_PATHS, KINDS, LOSSLESS, random_split, tokenizer_of
from trl.critic.align import critic_text, span_rewards
from trl.critic.token_text import ranges_by_prefix, token_ranges
from trl.critic.types import Span

CASES = [json.loads(line) for line in (Path(__file__).parents[1] / "cases" / "align.jsonl").open()]
TEXTS = st.text(st.sampled_from("abtTh ié.,'’\n🎬映👍🏽क़"), max_size=24)


def encode_pieces(pieces: list[str]) -> list[int]:
    """The ids of a sampled split into given pieces, each of which may take several byte-level tokens."""
    return [i for piece in pieces for i in random_split("byte_level", piece, random.Random(0))]


def rewards_of(spans: list[Span], query: str, response: str, mode: str = "each", kind: str = "byte_level"):
    rng = random.Random(7)
    ids = random_split(kind, query, rng), random_split(kind, response, rng)
    return span_rewards(spans, *ids, tokenizer_of(kind), positive_value=0.5, negative_value=-1.0, mode=mode)


def rewarded_text(result, value: float) -> str:
    """Without spaces: a sampled split may write the blank before a word as a token of its own."""
    texts = zip(result.token_texts, result.rewards.tolist(), strict=True)
    return "".join(text for text, reward in texts if reward == value).replace(" ", "")


def ids_of(kind: str, data: st.DataObject) -> list[int]:
    size = len(tokenizer_of(kind))
    return data.draw(st.lists(st.integers(0, size - 1), max_size=16))


def plain_decode(kind: str, ids: list[int]) -> str:
    tokenizer = tokenizer_of(kind)
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@pytest.mark.parametrize("case", CASES, ids=[case["why"] for case in CASES])
def test_shared_case(case):
    pieces = [encode_pieces([piece]) for piece in case["response"]]
    spans = [Span(text, polarity) for text, polarity in case["spans"]]
    result = span_rewards(
        spans,
        encode_pieces(case["query"]),
        [i for piece in pieces for i in piece],
        tokenizer_of("byte_level"),
        positive_value=1.0,
        negative_value=-1.0,
    )
    owner = [n for n, piece in enumerate(pieces) for _ in piece]
    words_hit = sorted({n for n, reward in zip(owner, result.rewards.tolist(), strict=True) if reward})
    assert words_hit == case["hit"]
    assert len(result.unmatched) == case.get("unmatched", 0)
    assert result.matched == len(spans) - len(result.unmatched)


@pytest.mark.parametrize("kind", KINDS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_text_is_what_decode_gives(kind, data):
    ids = ids_of(kind, data)
    text, ranges = token_ranges(ids, tokenizer_of(kind))
    assert text == plain_decode(kind, ids)
    assert len(ranges) == len(ids)
    shown = [(start, end) for start, end in ranges if start < end]
    assert shown == sorted(shown)
    assert all(0 <= start <= end <= len(text) for start, end in ranges)
    assert {at for start, end in shown for at in range(start, end)} == set(range(len(text)))
    for i, (start, end) in zip(ids, ranges, strict=True):
        assert start == end or i not in tokenizer_of(kind).all_special_ids


@pytest.mark.parametrize("kind", FAST_PATHS)
@given(data=st.data())
@settings(max_examples=150, deadline=None)
def test_ranges_equal_those_found_by_decoding_every_prefix(kind, data):
    if kind in LOSSLESS and data.draw(st.booleans()):
        ids = random_split(kind, data.draw(TEXTS), random.Random(data.draw(st.integers(0, 9))))
    else:
        ids = ids_of(kind, data)
    hidden = {i for i, t in tokenizer_of(kind).added_tokens_decoder.items() if t.special}
    ids = [i for i in ids if i not in hidden]
    expected_text, expected = ranges_by_prefix(ids, lambda prefix: plain_decode(kind, prefix))
    # Which tokens share the U+FFFD of an invalid sequence cannot be told from the text of prefixes.
    assume("\ufffd" not in expected_text)
    assert token_ranges(ids, tokenizer_of(kind)) == (expected_text, expected)


def test_bytes_of_a_character_share_its_range():
    tokenizer = tokenizer_of("byte_level")
    by_byte = [random_split("byte_level", "é🎬", random.Random(seed)) for seed in range(50)]
    ids = max(by_byte, key=len)
    assert len(ids) == 6
    assert token_ranges(ids, tokenizer) == ("é🎬", [(0, 1), (0, 1), (1, 2), (1, 2), (1, 2), (1, 2)])
    assert token_ranges(ids[:-1], tokenizer) == ("é\ufffd", [(0, 1), (0, 1), (1, 2), (1, 2), (1, 2)])
    result = span_rewards([Span("🎬", "negative")], ids[:3], ids[3:], tokenizer, positive_value=1, negative_value=-1)
    assert result.rewards.tolist() == [-1, -1, -1]
    assert result.token_texts == ("🎬", "", "")


def test_a_slow_decoder_that_hides_open_characters_gives_them_to_the_last_byte():
    ids = random_split("slow_bytes", "aéb", random.Random(0))
    assert token_ranges(ids, tokenizer_of("slow_bytes")) == ("aéb", [(0, 1), (1, 1), (1, 2), (2, 3)])


def test_invalid_bytes_follow_each_decoders_rule():
    fallback = tokenizer_of("byte_fallback_unstripped")
    euro = [fallback.convert_tokens_to_ids(token) for token in ("<0xE2>", "<0x82>", "<0xAC>", "<0x80>")]
    assert token_ranges(euro[:3], fallback) == ("€", [(0, 1)] * 3)
    assert token_ranges(euro, fallback) == ("\ufffd" * 4, [(0, 1), (1, 2), (2, 3), (3, 4)])
    byte_level = tokenizer_of("byte_level")
    cut = byte_level.convert_tokens_to_ids(["â", "Ĥ", "a"])
    assert token_ranges(cut, byte_level) == ("\ufffda", [(0, 1), (0, 1), (1, 2)])


def test_special_and_unknown_ids_are_invisible_and_earn_nothing():
    tokenizer = tokenizer_of("byte_level")
    reserved = tokenizer.convert_tokens_to_ids("<|reserved|>")
    query = [tokenizer.pad_token_id, *encode_pieces(["A", " bad"])]
    response = [reserved, *encode_pieces([" bad"]), tokenizer.eos_token_id, len(tokenizer) + 5]
    result = span_rewards(
        [Span("bad", "negative"), Span("pad", "positive")],
        query,
        response,
        tokenizer,
        positive_value=1,
        negative_value=-1,
    )
    assert result.text == "A bad bad"
    assert result.visible.tolist() == [False, *[True] * (len(response) - 3), False, False]
    assert result.rewards[~result.visible].tolist() == [0, 0, 0]
    assert (result.rewards[result.visible] == -1).any()
    assert [span.text for span in result.unmatched] == ["pad"]


@pytest.mark.parametrize("kind", LOSSLESS)
@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_a_quoted_word_hits_the_tokens_that_wrote_it(kind, data):
    words = ["bad", "badly", "or", "boring", "no"]
    if kind != "slow_bytes":  # whose decoder gives a character to its last byte alone
        words += ["schön", "映画"]
    words = data.draw(st.lists(st.sampled_from(words), min_size=1, max_size=8))
    word = data.draw(st.sampled_from(words))
    seed = random.Random(data.draw(st.integers(0, 999)))
    pieces = [random_split(kind, " " + item, seed) for item in words]
    result = span_rewards(
        [Span(word, "negative")],
        random_split(kind, "So", seed),
        [i for piece in pieces for i in piece],
        tokenizer_of(kind),
        positive_value=1.0,
        negative_value=-1.0,
    )
    tokenizer = tokenizer_of(kind)
    expected = [
        -1.0 if item == word and tokenizer.convert_ids_to_tokens(i) not in (" ", "Ġ", "▁", "<0x20>") else 0.0
        for item, piece in zip(words, pieces, strict=True)
        for i in piece
    ]
    assert result.rewards.tolist() == expected
    assert result.text == " ".join(["So", *words])


@pytest.mark.parametrize("kind", ["unigram", "wordpiece", "word_suffix", "byte_fallback"])
def test_words_of_a_canonical_encoding_are_found(kind):
    tokenizer = tokenizer_of(kind)
    text = "The film was quite boring, but the cast is great!"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    result = span_rewards(
        [Span("quite boring,", "negative"), Span("great", "positive")],
        [],
        ids,
        tokenizer,
        positive_value=0.5,
        negative_value=-1.0,
    )
    if kind == "word_suffix":  # its decoder leaves a space before punctuation, so the quote is not there
        assert [span.text for span in result.unmatched] == ["quite boring,"]
    else:
        assert rewarded_text(result, -1.0) == "quiteboring,"
    assert rewarded_text(result, 0.5) == "great"


def test_newlines_are_spaces_in_the_text_and_in_quotes():
    result = rewards_of([Span("bad\nfilm", "negative")], "A", " bad\nfilm")
    assert result.text == "A bad film"
    assert result.matched == 1
    ids = encode_pieces(["a\n", "b"])
    assert critic_text(torch.tensor(ids[:1]), torch.tensor(ids[1:]), tokenizer_of("byte_level")) == "a b"


@pytest.mark.parametrize(
    ("quote", "response", "hit"),
    [
        ("great", " great Great", "great"),  # exact before folded
        ("GREAT", " great Great", "greatGreat"),
        ("it's “so” bad", " it’s 'so'  BAD", "it’s'so'BAD"),
        ("bad", " badly BAD", "BAD"),  # a folded whole word before an exact part of one
        ("bad", " badly sbad", "badbad"),  # exact inside words
        ("BAD", " badly", "bad"),  # folded inside words
        ("ha ha", " ha ha ha", "hahaha"),  # occurrences may overlap
        ("cafe", " cafe\u0301 cafe", "cafe"),
        ("STRASSE", " Straße", "Straße"),
        ("  bad ", " bad film", "bad"),
        ("bad", " bad_film bad.", "bad"),
    ],
)
def test_the_first_way_that_finds_a_quote_decides(quote, response, hit):
    letters = [i for char in "A" + response for i in random_split("byte_level", char, random.Random(0))]
    result = span_rewards(
        [Span(quote, "negative")],
        letters[:1],
        letters[1:],
        tokenizer_of("byte_level"),
        positive_value=1,
        negative_value=-1,
    )
    assert rewarded_text(result, -1.0) == hit


def test_a_quote_in_the_query_counts_as_found_and_decides_the_tier():
    result = rewards_of([Span("bad", "negative")], "A bad film,", " badly made")
    assert (result.matched, result.unmatched) == (1, ())
    assert not result.rewards.any()


@pytest.mark.parametrize("quote", ["", "  ", "\n", "terrible"])
def test_quotes_that_are_nowhere_are_reported(quote):
    span = Span(quote, "negative")
    result = rewards_of([span, span], "It", " is  fine")
    assert (result.matched, result.unmatched) == (0, (span,))
    assert not result.rewards.any()
    assert not result.covered.any()


def test_same_text_quoted_twice_counts_once_and_the_negative_one_stands():
    spans = [Span("bad", "positive"), Span("bad", "negative", "x"), Span("bad", "negative", "y")]
    result = rewards_of(spans, "A", " bad film", mode="spread")
    assert result.matched == 1
    assert result.rewards.sum().item() == pytest.approx(-1.0)


def test_the_shorter_of_overlapping_spans_wins_token_by_token():
    spans = [Span("not a good film", "negative"), Span("good", "positive")]
    for order in (spans, spans[::-1]):
        result = rewards_of(order, "It is", " not a good film")
        assert rewarded_text(result, 0.5) == "good"
        assert rewarded_text(result, -1.0) == "notafilm"


def test_of_equally_long_overlapping_spans_the_negative_wins():
    spans = [Span("so good", "positive"), Span("good so", "negative")]
    for order in (spans, spans[::-1]):
        result = rewards_of(order, "", "so good so")
        assert rewarded_text(result, 0.5) == "so"
        assert rewarded_text(result, -1.0) == "goodso"


def test_spread_gives_each_occurrence_the_same_mass():
    result = rewards_of([Span("boring", "negative")], "A boring", " boring film, boring cast", mode="spread")
    assert result.rewards.sum().item() == pytest.approx(-2.0)
    result = rewards_of(
        [Span("not a good film", "negative"), Span("good", "positive")], "", "not a good film", "spread"
    )
    assert result.rewards[result.rewards > 0].sum().item() == pytest.approx(0.5)
    assert result.rewards[result.rewards < 0].sum().item() == pytest.approx(-1.0)


def test_spread_divides_only_over_response_tokens():
    result = rewards_of([Span("really quite bad", "negative")], "This was really", " quite bad and sad", mode="spread")
    assert result.rewards.sum().item() == pytest.approx(-1.0)


def test_covered_knows_spans_of_value_zero_and_the_blanks_inside_them():
    pieces = encode_pieces(["a", " ", " ", "b", " ", "c"])
    result = span_rewards(
        [Span("a  b", "negative")], [], pieces, tokenizer_of("byte_level"), positive_value=1, negative_value=0.0
    )
    assert result.covered.tolist() == [True, True, True, True, False, False]
    result = span_rewards(
        [Span("a  b", "negative")], [], pieces, tokenizer_of("byte_level"), positive_value=1, negative_value=-1
    )
    assert result.rewards.tolist() == [-1, 0, 0, -1, 0, 0]


@given(data=st.data())
@settings(max_examples=200, deadline=None)
def test_overlaps_equal_a_slow_twin(data):
    text = " ".join(data.draw(st.lists(st.sampled_from("xyz"), min_size=1, max_size=9)))
    words = text.split()
    spans = {}
    for _ in range(data.draw(st.integers(0, 5))):
        start = data.draw(st.integers(0, len(words) - 1))
        stop = data.draw(st.integers(start + 1, len(words)))
        spans.setdefault(" ".join(words[start:stop]), data.draw(st.sampled_from(["positive", "negative"])))
    response = [i for char in text for i in encode_pieces([char])]
    result = span_rewards(
        [Span(quote, polarity) for quote, polarity in spans.items()],
        [],
        response,
        tokenizer_of("byte_level"),
        positive_value=0.5,
        negative_value=-1.0,
    )
    for at, char in enumerate(text):
        claims = [
            (len(quote), polarity == "positive")
            for quote, polarity in spans.items()
            for found in re.finditer(f"(?=({re.escape(quote)}))", text)
            if found.start() <= at < found.start() + len(quote)
        ]
        expected = 0.0 if not claims or char == " " else (0.5 if min(claims)[1] else -1.0)
        assert result.rewards[at].item() == expected
        assert result.covered[at].item() == bool(claims)


@given(data=st.data())
@settings(max_examples=100, deadline=None)
def test_token_texts_write_the_response(data):
    query, response = data.draw(TEXTS), data.draw(TEXTS)
    result = rewards_of([], query, response)
    assert result.text == (query + response).replace("\n", " ")
    assert "".join(result.token_texts) == response.replace("\n", " ")


def test_results_have_one_value_per_token_and_errors_say_what_is_wrong():
    result = rewards_of([], "A", "")
    assert result.rewards.shape == result.covered.shape == result.visible.shape == (0,)
    assert result.rewards.dtype == torch.float32
    with pytest.raises(ValueError, match="'each' or 'spread'"):
        rewards_of([], "A", " b", mode="sum")
    with pytest.raises(ValueError, match=r"shape \(1, 3\)"):
        critic_text(torch.ones(1, 3, dtype=torch.long), [1], tokenizer_of("byte_level"))


def test_aligning_a_batch_takes_milliseconds():
    rng = random.Random(3)
    text = " the film was quite boring or in parts badly made, but the cast is great"
    batch = [(random_split("byte_level", "A review", rng), random_split("byte_level", text, rng)) for _ in range(128)]
    spans = [Span("quite boring", "negative"), Span("badly made", "negative"), Span("great", "positive")]
    tokenizer = tokenizer_of("byte_level")
    start = time.perf_counter()
    for query, response in batch:
        span_rewards(spans, query, response, tokenizer, positive_value=0.5, negative_value=-0.5)
    assert time.perf_counter() - start < 1.0  # some 40 ms on an idle core
