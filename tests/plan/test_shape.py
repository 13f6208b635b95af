"""Sizes from configurations: the public counts, folders, and what is said where there is nothing to read."""

import pytest
from transformers import AutoConfig, GPT2Config

from tests.tiny import tiny_gpt2, tiny_gptj, tiny_llama, tiny_neox, tiny_opt
from trl.plan import find_shape, shape_of
from trl.plan.shape import PUBLIC

PARAMETERS = {
    "distilgpt2": 81_912_576,
    "gpt2": 124_439_808,
    "lvwerra/gpt2-imdb": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-7b-chat-hf": 6_738_415_616,
}
"""As published."""


@pytest.mark.parametrize("name", PUBLIC)
def test_listed_models_have_their_published_size(name):
    assert find_shape(name).parameters == PARAMETERS[name]


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_gptj, tiny_llama, tiny_neox, tiny_opt])
def test_sizes_are_those_of_the_loaded_model(make):
    lm = make(layers=3)
    shape = shape_of(lm.config, "model")
    assert shape.parameters == sum(p.numel() for p in lm.parameters())
    assert (shape.layers, shape.width, shape.vocab) == (3, 32, 320)
    assert shape.tied == lm.config.tie_word_embeddings
    assert shape.attention == 32
    assert shape.keys == (16 if make is tiny_llama else 32)


def test_a_local_folder(tmp_path):
    GPT2Config(n_layer=5, n_embd=64, n_head=4, vocab_size=99).save_pretrained(tmp_path)
    shape = find_shape(str(tmp_path))
    assert (shape.layers, shape.width, shape.vocab, shape.block_weights) == (5, 64, 99, 12 * 64**2)


def test_an_unknown_name_says_what_to_give(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ValueError, match=r"no sizes of nobody/nothing: .*gpt2-large.*--layers, --width, --heads"):
        find_shape("nobody/nothing")


def test_a_mixture_of_experts_is_refused():
    config = AutoConfig.for_model(
        "mixtral",
        num_hidden_layers=2,
        hidden_size=32,
        intermediate_size=64,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=99,
    )
    with pytest.raises(ValueError, match="mixture of experts"):
        shape_of(config, "mixtral")
