import hashlib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl.critic.parse import parse_critique
from trl.critic.template import FIELDS, PromptFileError, PromptTemplate, single_line
from trl.critic.types import CritiqueRequest

PROMPTS = Path(__file__).parents[2] / "prompts"
SHIPPED = {
    "sentiment": ["prompt_sentiment_3shot_v2.txt", "prompt_sentiment_0shot_v2.txt"],
    "toxicity": ["prompt_toxicity_3shot_v2.txt", "prompt_toxicity_0shot_v2.txt"],
    "summary": [
        "prompt_summ_3shot_rouge_v2.txt",
        "prompt_summ_0shot_rouge_v2.txt",
        "prompt_summ_3shot_rouge_rlhf.txt",
        "prompt_summ_0shot_rouge_rlhf.txt",
    ],
}
REQUEST = CritiqueRequest(text="a summary", document="a document", score=7.25)


def template_of(tmp_path, text: str, style: str = "sentiment") -> PromptTemplate:
    path = tmp_path / "prompt.txt"
    path.write_text(text, encoding="utf-8")
    return PromptTemplate.from_file(path, style=style)


@pytest.mark.parametrize(
    ("style", "text", "filled"),
    [
        ("sentiment", "Text: {}\n", "Text: a summary\n"),
        ("toxicity", "Text: {text}", "Text: a summary"),
        ("summary", "{} | {} | {}", "a document | a summary | 7.2"),
        ("summary", "{score} {summary} {document}", "7.2 a summary a document"),
        ("sentiment", 'as {"a": {1}, { }} {{{}}} {0} {name}', 'as {"a": {1}, { }} {{a summary}} {0} {name}'),
    ],
)
def test_placeholders_are_filled_and_other_braces_are_literal(tmp_path, style, text, filled):
    assert template_of(tmp_path, text, style).fill(REQUEST) == filled


@pytest.mark.parametrize(
    ("style", "text", "problem"),
    [
        ("sentiment", "no place", "has no placeholder"),
        ("sentiment", "", "is empty"),
        ("sentiment", " \n", "is empty"),
        ("sentiment", "{} {}", "too many placeholders"),
        ("toxicity", "{text} {text}", "too many placeholders"),
        ("sentiment", "{} {text}", "mixes {} with {text}"),
        ("sentiment", "{document}", "placeholder {document} that this style does not fill"),
        ("summary", "{} {}", "2 of 3 placeholders; missing: score"),
        ("summary", "{document} {score}", "is missing {summary}"),
        ("summary", "{} {} {} {}", "too many placeholders"),
    ],
)
def test_unusable_files_are_named_with_what_is_wrong(tmp_path, style, text, problem):
    with pytest.raises(PromptFileError) as error:
        template_of(tmp_path, text, style)
    assert problem in str(error.value)
    assert str(tmp_path / "prompt.txt") in str(error.value)


def test_unreadable_files_are_named(tmp_path):
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe{}\x80")
    for path in (tmp_path / "missing.txt", tmp_path, tmp_path / "binary.txt"):
        with pytest.raises(PromptFileError, match="cannot be read") as error:
            PromptTemplate.from_file(path, style="sentiment")
        assert str(path) in str(error.value)
    with pytest.raises(ValueError, match="expected one of sentiment"):
        PromptTemplate.from_file(PROMPTS / "README.md", style="other")


def test_byte_order_mark_and_windows_line_ends_are_not_part_of_the_prompt(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"\xef\xbb\xbfText:\r\n{}\r\n")
    assert PromptTemplate.from_file(path, style="sentiment").fill(CritiqueRequest("x")) == "Text:\nx\n"


@given(st.text(), st.text())
def test_inserted_text_is_one_line_of_the_same_length_and_never_expanded(text, document):
    template = PromptTemplate("summary", ("A\n", "|", "|", "\nZ"), ("document", "summary", "score"))
    filled = template.fill(CritiqueRequest(text + "{}{summary}", document=document + "{text}", score=1))
    body = filled.removeprefix("A\n").removesuffix("\nZ")
    assert len(body) == len(text) + len("{}{summary}") + len(document) + len("{text}") + len("||1.0")
    assert "\n" not in body
    assert "\r" not in body
    assert body == f"{single_line(document)}{{text}}|{single_line(text)}{{}}{{summary}}|1.0"


def test_every_line_break_is_one_space():
    assert single_line("a\nb\r\nc\n\nd") == "a b  c  d"


def test_a_request_without_what_the_prompt_needs_is_refused():
    template = PromptTemplate.from_file(PROMPTS / "prompt_summ_3shot_rouge_v2.txt", style="summary")
    with pytest.raises(ValueError, match="score is None"):
        template.fill(CritiqueRequest("s", document="d"))
    with pytest.raises(ValueError, match="document is None"):
        template.fill(CritiqueRequest("s", score=1.0))


def test_digest_is_that_of_the_text_in_the_file(tmp_path):
    text = "Sentence: {text} é\n"
    assert template_of(tmp_path, text).digest == hashlib.sha256(text.encode()).hexdigest()
    assert template_of(tmp_path, text + ".").digest != template_of(tmp_path, text).digest


def test_shipped_prompts_are_those_listed_and_the_readme_names_each():
    files = {path.name for path in PROMPTS.glob("prompt_*.txt")}
    assert files == {name for names in SHIPPED.values() for name in names}
    readme = (PROMPTS / "README.md").read_text()
    assert all(f"`{name}`" in readme for name in files)


@pytest.mark.parametrize(("style", "name"), [(style, name) for style, names in SHIPPED.items() for name in names])
def test_shipped_prompt_fits_its_style(style, name):
    template = PromptTemplate.from_file(PROMPTS / name, style=style)
    prompt = template.fill(REQUEST)
    assert "#####" in template.stop
    assert len(template.stop) <= 4
    assert prompt.rstrip().endswith("Text Span:")
    assert prompt.count("a summary") == 1 + (PROMPTS / name).read_text().count("a summary")
    if "3shot" in name:
        _check_shots(prompt, style)


def _check_shots(prompt: str, style: str) -> None:
    """The parser reads each example's answer, and the example quotes its own text to the letter."""
    examples = prompt.split("#####")[2::2]
    assert len(examples) == 4
    source = "Summary:\n" if style == "summary" else "Sentence to be Labeled:\n"
    found = []
    for example in examples[:3]:
        text = example.split(source)[1].split("\n")[0]
        answer = example.split("Text Span:\n", 1)[1]
        critique = parse_critique(answer, style)
        assert critique.status in ("ok", "none")
        assert all(span.text in text for span in critique.spans)
        assert all((span.label is not None) == (style == "summary") for span in critique.spans)
        found.append(critique)
    polarities = {span.polarity for critique in found for span in critique.spans}
    assert polarities == ({"positive", "negative"} if style == "sentiment" else {"negative"})
    assert "None identified" in prompt


def test_fields_name_the_arguments_of_every_style():
    assert FIELDS == {"sentiment": ("text",), "toxicity": ("text",), "summary": ("document", "summary", "score")}
