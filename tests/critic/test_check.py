import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.critic.test_local import tiny_model
from tests.critic.toy_tokenizers import byte_level
from trl.critic.check import CheckResult, LabelledText, check, read_labelled
from trl.critic.choose import SCORE_PROMPTS
from trl.critic.local import LocalCritic
from trl.critic.template import PromptTemplate
from trl.critic.types import Critic, Critique, CritiqueRequest, Span, Style
from trl.critic.windows import ScorePrompt
from trl.jsonl import DataFileError, read_jsonl

ROOT = Path(__file__).parents[2]
LABELLED = sorted((ROOT / "prompts/labelled").glob("*.jsonl"))
STYLES: tuple[Style, ...] = ("sentiment", "toxicity", "summary")


class LabelReplay:
    """Answers each request with the labels of its text: a critic without fault."""

    def __init__(self, texts: Sequence[LabelledText]) -> None:
        self._spans = {text.request: text.spans for text in texts}

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        spans = [self._spans[request] for request in requests]
        return [Critique(found, "ok" if found else "none") for found in spans]


class Silent:
    """Finds nothing, ever."""

    def critique(self, requests: Sequence[CritiqueRequest]) -> list[Critique]:
        return [Critique((), "none")] * len(requests)


def checked(critic: Critic, texts: Sequence[LabelledText]) -> CheckResult:
    return check(texts, critic.critique([text.request for text in texts]))


def labelled(text: str, *spans: tuple[str, str], style: Style = "sentiment", id: str = "1") -> LabelledText:
    return LabelledText(id, style, CritiqueRequest(text), tuple(Span(*span) for span in spans))  # type: ignore[arg-type]


def one(text: LabelledText, *spans: tuple[str, str]) -> CheckResult:
    return check([text], [Critique(tuple(Span(*span) for span in spans), "ok")])  # type: ignore[arg-type]


# --- the shipped labelled texts


@pytest.fixture(scope="module")
def shipped() -> list[LabelledText]:
    return read_labelled(LABELLED)


def test_shipped_texts_are_enough_short_and_balanced(shipped: list[LabelledText]) -> None:
    per_style = Counter(text.style for text in shipped)
    assert set(per_style) == set(STYLES)
    assert min(per_style.values()) >= 22
    assert len({text.request.text for text in shipped}) == len(shipped)
    assert all(len(text.request.text) < 160 for text in shipped)
    with_spans = Counter(text.style for text in shipped if text.spans)
    assert with_spans["toxicity"] == per_style["toxicity"] / 2
    assert 0.5 <= with_spans["summary"] / per_style["summary"] <= 0.65
    sentiment = [text for text in shipped if text.style == "sentiment"]
    by_sign = Counter(span.polarity for text in sentiment for span in text.spans)
    assert abs(by_sign["positive"] - by_sign["negative"]) <= 3
    texts_with = Counter(sign for text in sentiment for sign in {span.polarity for span in text.spans})
    assert abs(texts_with["positive"] - texts_with["negative"]) <= 3
    assert sum(not text.spans for text in sentiment) >= len(sentiment) / 5


def test_shipped_texts_have_hard_negatives_and_every_kind_of_flaw(shipped: list[LabelledText]) -> None:
    kinds = {path.stem: Counter(row["kind"] for row in read_jsonl(path)) for path in LABELLED}
    for kind in ("negation", "irony", "quoted", "neutral", "plot", "mixed"):
        assert kinds["sentiment"][kind] >= 2
    for kind in ("negation", "quoted", "criticism", "strong words", "insult", "threat"):
        assert kinds["toxicity"][kind] >= 2
    labels = Counter(span.label for text in shipped if text.style == "summary" for span in text.spans)
    assert set(labels) == {"Factually Incorrect", "Unsupported", "Irrelevant", "Redundant", "Incoherent"}
    assert min(labels.values()) >= 2


def test_every_shipped_quote_stands_once_in_its_text_as_whole_words(shipped: list[LabelledText]) -> None:
    for text in shipped:
        for span in text.spans:
            found = re.findall(rf"(?<!\w){re.escape(span.text)}(?!\w)", text.request.text)
            assert len(found) == 1, (text.id, span.text)


def test_no_shipped_text_is_a_shot_of_a_prompt(shipped: list[LabelledText]) -> None:
    prompts = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "prompts").glob("*.txt")).casefold()
    for text in shipped:
        assert text.request.text.casefold() not in prompts
        assert (text.request.document or text.request.text).casefold() not in prompts


# --- the measures


@pytest.mark.parametrize("style", STYLES)
def test_labels_replayed_are_perfect_and_silence_finds_nothing(shipped: list[LabelledText], style: Style) -> None:
    texts = [text for text in shipped if text.style == style]
    perfect, silent = checked(LabelReplay(texts), texts), checked(Silent(), texts)
    for level in ("words", "spans"):
        assert set(getattr(perfect, level)) == (
            {"positive", "negative", "all"} if style == "sentiment" else {"negative"}
        )
        for row in getattr(perfect, level).values():
            for estimate in (row.precision, row.recall, row.f1):
                assert (estimate.value, estimate.low, estimate.high) == (1.0, 1.0, 1.0)
            assert (row.wrong, row.missed) == (0, 0)
        for row in getattr(silent, level).values():
            assert (row.precision.value, row.recall.value, row.f1.value) == (None, 0.0, 0.0)
    assert (perfect.hallucinated, silent.hallucinated_share.value) == (0, None)
    assert perfect.quoted == sum(len(text.spans) for text in texts)
    assert silent.status == {"none": len(texts)}


words = st.lists(st.sampled_from(["good", "bad", "film", "it", "was", "not", "very"]), min_size=1, max_size=8)


@given(st.data(), words)
def test_any_labels_replayed_are_perfect(data: st.DataObject, chosen: list[str]) -> None:
    spans = []
    for _ in range(data.draw(st.integers(1, 3))):
        start = data.draw(st.integers(0, len(chosen) - 1))
        end = data.draw(st.integers(start + 1, len(chosen)))
        spans.append((" ".join(chosen[start:end]), data.draw(st.sampled_from(["positive", "negative"]))))
    text = labelled(" ".join(chosen), *spans)
    result = checked(LabelReplay([text]), [text])
    for rows in (result.words, result.spans):
        assert (rows["all"].precision.value, rows["all"].recall.value) == (1.0, 1.0)
    assert checked(Silent(), [text]).words["all"].recall.value == 0.0


def test_words_by_hand() -> None:
    text = labelled("a very good film with a bad, boring end", ("very good", "positive"), ("bad, boring", "negative"))
    result = one(text, ("good film", "positive"), ("bad", "negative"), ("boring end", "positive"))
    positive, negative, both = (result.words[name] for name in ("positive", "negative", "all"))
    # positive: good | film, boring, end | very; negative: bad | - | boring
    assert (positive.right, positive.wrong, positive.missed) == (1, 3, 1)
    assert (negative.right, negative.wrong, negative.missed) == (1, 0, 1)
    assert (both.right, both.wrong, both.missed) == (2, 3, 2)
    assert (both.precision.value, both.recall.value, both.f1.value) == pytest.approx((2 / 5, 2 / 4, 4 / 9))


def test_a_word_counts_when_a_part_of_it_is_quoted() -> None:
    text = labelled("an unbelievable film", ("unbelievable", "positive"))
    assert one(text, ("unbeliev", "positive")).words["positive"].right == 1


def test_spans_by_hand() -> None:
    text = labelled("one two three four five six seven", ("one two three four", "positive"), ("six", "negative"))
    # half of the words in either: the same span; less: another one
    assert one(text, ("one two", "positive")).spans["positive"].right == 1
    assert one(text, ("one", "positive")).spans["positive"].right == 0
    # each label has one quote at most
    halves = one(text, ("one two", "positive"), ("three four", "positive")).spans["positive"]
    assert (halves.right, halves.wrong, halves.missed) == (1, 1, 0)
    wrong_sign = one(text, ("six", "positive")).spans
    assert (wrong_sign["positive"].wrong, wrong_sign["negative"].missed) == (1, 1)


def test_quotes_that_are_not_there_are_counted_and_are_wrong_spans() -> None:
    text = labelled("a good film", ("good", "positive"))
    result = one(text, ("good", "positive"), ("great", "positive"), ("great", "positive"), ("bad", "negative"))
    assert (result.quoted, result.hallucinated) == (3, 2)
    assert result.hallucinated_share.value == pytest.approx(2 / 3)
    assert (result.spans["positive"].wrong, result.spans["negative"].wrong) == (1, 1)
    assert (result.words["positive"].wrong, result.words["negative"].wrong) == (0, 0)


def test_failed_requests_are_counted_and_left_out() -> None:
    texts = [labelled("good film", ("good", "positive"), id=str(i)) for i in range(3)]
    good = Critique((Span("good", "positive"),), "ok")
    result = check(texts, [good, Critique((), "failed", error="500"), Critique((), "unparsable", "I can't")])
    assert result.status == {"ok": 1, "failed": 1, "unparsable": 1}
    assert result.words["positive"].recall.value == 0.5


def test_intervals_hold_the_value_and_shrink_with_more_texts() -> None:
    def width(n: int) -> float:
        texts = [labelled("good bad", ("good", "positive"), id=str(i)) for i in range(n)]
        quotes = [Critique((Span(("good", "bad")[i % 2], "positive"),), "ok") for i in range(n)]
        estimate = check(texts, quotes).words["positive"].precision
        assert estimate.value == 0.5
        assert estimate.low is not None and estimate.high is not None and estimate.low < 0.5 < estimate.high
        return estimate.high - estimate.low

    assert width(100) == pytest.approx(2 * 1.96 * 0.5 / 100**0.5, rel=0.1)  # the binomial's own width
    assert width(16) > 2 * width(100)


def test_check_refuses_what_it_cannot_compare() -> None:
    text, other = labelled("x"), labelled("y", style="toxicity", id="2")
    for texts, critiques in (([], []), ([text], []), ([text, other], [Critique((), "none")] * 2)):
        with pytest.raises(ValueError, match="expected at least one text"):
            check(texts, critiques)


# --- files of labelled texts


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"style": "sentiment", "text": "x", "spans": []}, "expected"),
        ({"id": "1", "style": "sentiment", "text": " ", "spans": []}, "expected"),
        ({"id": "1", "style": "joy", "text": "x", "spans": []}, "style is 'joy'"),
        ({"id": "1", "style": "summary", "text": "x", "spans": []}, "document and a score"),
        ({"id": "1", "style": "sentiment", "text": "x", "spans": [["x", "neutral"]]}, "positive or negative"),
        ({"id": "1", "style": "toxicity", "text": "x", "spans": [["x", "positive"]]}, "polarity negative"),
        ({"id": "1", "style": "toxicity", "text": "x", "spans": ["x"]}, "a span is"),
        ({"id": "1", "style": "toxicity", "text": "x", "spans": [["y", "negative"]]}, "'y' is not in the text"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: dict[str, object], message: str) -> None:
    file = tmp_path / "labels.jsonl"
    good = {"id": "0", "style": "sentiment", "text": "good", "spans": [["good", "positive"]]}
    file.write_text(json.dumps(good) + "\n" + json.dumps(row) + "\n")
    with pytest.raises(DataFileError, match=message) as error:
        read_labelled([file])
    assert f"{file}, row 2" in str(error.value)


def test_repeated_ids_and_empty_files_are_errors(tmp_path: Path) -> None:
    file = tmp_path / "labels.jsonl"
    file.write_text(json.dumps({"id": "0", "style": "sentiment", "text": "good", "spans": []}) + "\n")
    with pytest.raises(DataFileError, match="id '0' was used before"):
        read_labelled([file, file])
    file.write_text("")
    with pytest.raises(DataFileError, match="no rows"):
        read_labelled([file])


# --- scoring prompts


@pytest.mark.parametrize("style", STYLES)
def test_shipped_scoring_prompts_have_a_label_pair_and_use_both(style: Style) -> None:
    prompt = ScorePrompt.from_template(PromptTemplate.from_file(ROOT / SCORE_PROMPTS[style], style=style))
    filled = prompt.fill("some words", CritiqueRequest("", document="A post.", score=3.0))
    assert filled.endswith("some words:")
    for label in prompt.labels:
        assert filled.count(f": {label}\n") >= 3


SUMMARY_PROMPT = "right bad\nPost: it was good\ngood: good\nPost: {document}\nScore: {score}\n{summary}:\n"


def test_summary_phrases_are_scored_against_their_own_document(tmp_path: Path) -> None:
    file = tmp_path / "score.txt"
    file.write_text(SUMMARY_PROMPT)
    tokenizer, model = byte_level(), tiny_model("llama", vocab_size=len(byte_level()))
    critic = LocalCritic(PromptTemplate.from_file(file, style="summary"), model, tokenizer, "score", margin=0.0)
    scores = {}
    for document in ("The film was quite\nboring.", "The cast is great."):
        request = CritiqueRequest("never watch", document=document, score=3.14)
        (scores[document],) = critic.scores(["never watch"], request).values()
        written = f"Post: it was good\ngood: good\nPost: {document}\nScore: 3.1\nnever watch:".replace("e\nb", "e b")
        ids = tokenizer(written, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            logits = model(input_ids=ids, use_cache=False).logits[0, -1]
        labels = [tokenizer(f"{written} {label}")["input_ids"][-1] for label in ("right", "bad")]
        assert scores[document] == pytest.approx((logits[labels[0]] - logits[labels[1]]).item(), abs=1e-4)
    assert len(set(scores.values())) == 2
    requests = [CritiqueRequest("never watch this again", document=d, score=3.0) for d in scores]
    together = critic.critique(requests)
    assert together == [critic.critique([request])[0] for request in requests]
    assert all(span.polarity == "negative" for critique in together for span in critique.spans)


def test_a_document_beyond_the_context_fails_its_own_summary_only(tmp_path: Path) -> None:
    file = tmp_path / "score.txt"
    file.write_text(SUMMARY_PROMPT)
    tokenizer, model = byte_level(), tiny_model("gpt2", vocab_size=len(byte_level()))
    critic = LocalCritic(PromptTemplate.from_file(file, style="summary"), model, tokenizer, "score")
    long, short = critic.critique([CritiqueRequest("bad", document=d, score=1.0) for d in ("zq " * 600, "The film.")])
    assert (long.status, long.spans) == ("failed", ())
    assert "context" in str(long.error)
    assert short.status in ("ok", "none")


@pytest.mark.builtin
@pytest.mark.parametrize("style", STYLES)
def test_labels_are_single_tokens_of_the_built_in_model(style: Style) -> None:
    from transformers import AutoTokenizer

    from trl.builtin import resolve_model

    tokenizer = AutoTokenizer.from_pretrained(resolve_model("builtin:smollm2"))
    template = PromptTemplate.from_file(ROOT / SCORE_PROMPTS[style], style=style)
    for label in ScorePrompt.from_template(template).labels:
        assert len(tokenizer(f" {label}")["input_ids"]) == 1
