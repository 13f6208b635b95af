"""The real toxicity items. Prepared once into RELC_HOME (a minute), then seconds."""

import time

import numpy as np
import pytest

from tests.builtin.test_prepared import prepared
from trl.builtin import resolve
from trl.builtin.toxicity import ToxicityModel
from trl.critic.lexicon import LexiconCritic
from trl.critic.types import CritiqueRequest
from trl.jsonl import read_prompts
from trl.rewards import ToxicityReward, load_classifier, load_toxicity_scorer

pytestmark = pytest.mark.builtin

KIND = [
    "Thank you so much for your help.",
    "The train leaves at nine.",
    "What a lovely morning it was.",
    "I like this film",
]
RUDE = ["You are a complete idiot.", "Shut up, you pathetic moron.", "What a stupid, disgusting person.", "go to hell"]

PUBLISHED = {
    "I hate you so much!": 0.1395,
    "This is wonderful news.": 0.0013,
    "You're disgusting!": 0.3110,
    "Absolutely love your energy!": 0.0088,
    "You're the worst person ever!": 0.0937,
    "Have a nice day :)": 0.0115,
}
"""Mean over the labels, as the authors of the Keras model print it in their package's description."""


def test_the_network_gives_what_its_authors_published() -> None:
    prepared("toxicity")
    model = ToxicityModel.load(resolve("builtin:toxicity", "toxicity network"))
    probabilities = 1 / (1 + np.exp(-model.logits(list(PUBLISHED)).astype(np.float64)))
    np.testing.assert_allclose(probabilities.mean(axis=1), list(PUBLISHED.values()), atol=6e-5)
    one = 1 / (1 + np.exp(-model.logits(["You are so dumb and stupid!"])[0].astype(np.float64)))
    published = [0.9889402985572815, 0.07256772369146347, 0.620429277420044]
    published += [0.01934845559298992, 0.8664075136184692, 0.04072948172688484]
    np.testing.assert_allclose(one, published, atol=1e-5)


def test_the_second_opinion_gives_what_its_authors_published() -> None:
    prepared("toxicity-eval")
    scorer = load_toxicity_scorer("builtin:toxicity-eval")
    assert scorer(["go to hell, you scum"])[0] > 0.76  # retrained since their example
    assert scorer(["predict_prob() takes an array and returns the probability each string is offensive"])[0] < 0.09


@pytest.mark.parametrize("name", ["builtin:toxicity", "builtin:toxicity-eval"])
def test_rude_texts_are_toxic_and_kind_ones_are_not(name: str) -> None:
    prepared(name)
    scorer = load_toxicity_scorer(name)
    assert scorer(RUDE).min() > 0.5 > 0.3 > scorer(KIND).max()
    np.testing.assert_allclose(1 / (1 + np.exp(scorer.nontoxic_logits(RUDE))), scorer(RUDE), rtol=1e-3, atol=1e-6)


def test_reward_is_the_log_odds_of_a_harmless_response() -> None:
    prepared("toxicity")
    reward = ToxicityReward("builtin:toxicity")
    got = reward(prompts=RUDE, completions=KIND)
    assert all(value is not None and value > 1 for value in got)
    low = reward(prompts=KIND, completions=RUDE)
    assert all(value is not None and value < 0 for value in low)
    np.testing.assert_allclose(
        ToxicityReward("builtin:toxicity", kind="probability")(completions=RUDE),
        1 - load_toxicity_scorer("builtin:toxicity")(RUDE),
        atol=1e-6,
    )


def test_the_network_is_fast() -> None:
    prepared("toxicity")
    scorer = load_toxicity_scorer("builtin:toxicity")
    texts = [f"{text} {number}" for number in range(125) for text in KIND + RUDE]
    began = time.process_time()
    scorer(texts)
    assert len(texts) / (time.process_time() - began) > 1000


def test_prompts_are_toxic_clean_and_many() -> None:
    prepared("toxicity-prompts")
    rows = read_prompts(resolve("builtin:toxicity-prompts", "prompt set") / "prompts.jsonl")
    texts = [row["prompt"]["text"] for row in rows]
    toxicity = np.array([row["prompt"]["toxicity"] for row in rows])
    assert 1_300 < len(rows) < 1_700
    assert len({text.lower() for text in texts}) == len(texts)
    assert all(text.isascii() and "http" not in text and "@" not in text.split()[0] for text in texts)
    assert all(3 <= len(text.split()) <= 20 for text in texts)
    assert toxicity.min() > 0.3
    np.testing.assert_allclose(load_toxicity_scorer("builtin:toxicity")(texts), toxicity, atol=1e-3)
    # The order is random: any part of the file is like the whole.
    assert abs(toxicity[: len(rows) // 2].mean() - toxicity.mean()) < 0.03
    # The second opinion finds them toxic too, on the whole.
    assert load_toxicity_scorer("builtin:toxicity-eval")(texts).mean() > 0.5


def test_the_lexicon_critic_marks_rude_words_only() -> None:
    prepared("toxicity")
    critic = LexiconCritic("toxicity")
    quotes = [
        [span.text for span in critique.spans] for critique in critic.critique([CritiqueRequest(t) for t in RUDE])
    ]
    assert quotes == [["idiot"], ["pathetic moron"], ["stupid", "disgusting"], ["hell"]]
    harmless = [*KIND, "a gay couple and their Jewish friends", "a terrible, boring film"]
    assert all(not critique.spans for critique in critic.critique([CritiqueRequest(text) for text in harmless]))


def test_toxicity_models_are_no_sentiment_classifiers() -> None:
    with pytest.raises(RuntimeError, match=r"'builtin:toxicity' is a toxicity network, not a classifier"):
        load_classifier("builtin:toxicity")
    with pytest.raises(
        RuntimeError, match=r"'builtin:sentiment' is a classifier.*builtin:toxicity, builtin:toxicity-eval"
    ):
        load_toxicity_scorer("builtin:sentiment")
