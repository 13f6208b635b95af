"""Tiny deterministic models and a tokenizer for tests and for the peer comparison.

Nothing here needs the network, a saved file or torch's random initialisation: weights come from raw PCG64
words (the one part of numpy's generators whose stream is promised never to change), one stream per parameter
name, so a golden number computed in another environment holds here too. Imports neither our ``trl`` nor
anybody else's; ``benchmarks/peer`` loads this file in an environment that has a different ``trl``.
"""

import math
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    GPTJConfig,
    GPTJForCausalLM,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

VOCAB_SIZE = 320
EOS_ID = 0
EOS_TOKEN = "<|endoftext|>"
HIDDEN_SIZE = 32
SCALE = 0.2
"""Standard deviation of a weight: large enough that next-token distributions are far from uniform."""

_TEXT = (
    "The film was a quiet wonder, and the acting was better than anything I have seen this year. "
    "The plot was dull, the jokes were bad, and I left the cinema before the end of the second act. "
    "What a lovely, warm and funny story about a father, a daughter and the sea. "
    "Nothing in this movie works: the music is loud, the camera shakes, the ending makes no sense. "
    "I would watch it again with my friends, because the cast is great and the writing is sharp. "
    "It is too long and too slow, but there are some moments of real beauty in the last half hour. "
)


def stable_normal(name: str, shape: Sequence[int], seed: int, scale: float = SCALE) -> torch.Tensor:
    """Zero-mean fp32 tensor of standard deviation ``scale`` (uniform: an exact formula everywhere)."""
    count = math.prod(shape)
    words = np.random.PCG64(np.random.SeedSequence([seed, zlib.crc32(name.encode())])).random_raw(count)
    unit = (np.asarray(words, dtype=np.uint64) >> np.uint64(11)).astype(np.float64) * 2.0**-53
    values = (2.0 * unit - 1.0) * math.sqrt(3.0) * scale
    return torch.from_numpy(values.astype(np.float32)).reshape(tuple(shape))


def fill_weights(model: torch.nn.Module, seed: int, scale: float = SCALE) -> None:
    """Set every parameter from its name and ``seed``; the weights of norms sit around one."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            value = stable_normal(name, parameter.shape, seed, scale)
            is_norm_weight = parameter.dim() == 1 and name.endswith("weight")
            parameter.copy_(1.0 + value if is_norm_weight else value)


def perturb_weights(model: torch.nn.Module, seed: int, scale: float = 0.02) -> None:
    """Move every parameter a little, so that a copy of a model has a KL divergence from it."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.add_(stable_normal(name, parameter.shape, seed, scale))


def tiny_gpt2(seed: int = 0, *, layers: int = 2, vocab_size: int = VOCAB_SIZE) -> GPT2LMHeadModel:
    """GPT-2 with learned positions and tied embeddings, dropout off, 32 wide."""
    config = GPT2Config(
        vocab_size=vocab_size,
        n_positions=128,
        n_embd=HIDDEN_SIZE,
        n_layer=layers,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        summary_first_dropout=0.0,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    return _filled(GPT2LMHeadModel(config), seed)


def tiny_llama(seed: int = 0, *, layers: int = 2, vocab_size: int = VOCAB_SIZE, tied: bool = False) -> LlamaForCausalLM:
    """Llama with rotary positions, grouped-query attention and (unless ``tied``) an own LM head."""
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    return _filled(LlamaForCausalLM(config), seed)


def tiny_neox(seed: int = 0, *, layers: int = 2, vocab_size: int = VOCAB_SIZE) -> GPTNeoXForCausalLM:
    """GPT-NeoX with parallel residual and partial rotary positions; its LM head is called ``embed_out``."""
    config = GPTNeoXConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=128,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    return _filled(GPTNeoXForCausalLM(config), seed)


def tiny_gptj(seed: int = 0, *, layers: int = 2, vocab_size: int = VOCAB_SIZE) -> GPTJForCausalLM:
    """GPT-J, of which the public TL;DR models are: parallel blocks, interleaved rotary positions, LM head with bias."""
    config = GPTJConfig(
        vocab_size=vocab_size,
        n_positions=128,
        n_embd=HIDDEN_SIZE,
        n_layer=layers,
        n_head=4,
        rotary_dim=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=EOS_ID,
    )
    return _filled(GPTJForCausalLM(config), seed)


def tiny_opt(
    seed: int = 0, *, layers: int = 2, vocab_size: int = VOCAB_SIZE, projected: bool = False
) -> OPTForCausalLM:
    """OPT with learned, offset positions.

    ``projected`` gives the odd member of the family (opt-350m): embeddings half as wide as the model, linear
    maps in and out, norms after the blocks' parts and no final norm.
    """
    config = OPTConfig(
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        word_embed_proj_dim=HIDDEN_SIZE // 2 if projected else HIDDEN_SIZE,
        do_layer_norm_before=not projected,
        ffn_dim=64,
        num_hidden_layers=layers,
        num_attention_heads=4,
        max_position_embeddings=128,
        dropout=0.0,
        attention_dropout=0.0,
        bos_token_id=EOS_ID,
        eos_token_id=EOS_ID,
        pad_token_id=1,  # its embedding has a padding row: keep that away from a token the tests sample
    )
    return _filled(OPTForCausalLM(config), seed)


def _filled(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    fill_weights(model, seed)
    return model


def value_head_weights(seed: int = 0, hidden_size: int = HIDDEN_SIZE) -> dict[str, torch.Tensor]:
    """Weight (1, H) and bias (1,) of a value head, under the names that legacy checkpoints use."""
    return {
        "v_head.summary.weight": stable_normal("v_head.summary.weight", (1, hidden_size), seed),
        "v_head.summary.bias": stable_normal("v_head.summary.bias", (1,), seed),
    }


def save_legacy_checkpoint(model: PreTrainedModel, head: dict[str, torch.Tensor], folder: Path) -> None:
    """Write what the classic library wrote: config.json and a ``pytorch_model.bin`` with the head inside."""
    folder.mkdir(parents=True, exist_ok=True)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    model.generation_config.save_pretrained(folder)
    torch.save({**model.state_dict(), **head}, folder / "pytorch_model.bin")


def tiny_tokenizer(vocab_size: int = VOCAB_SIZE) -> PreTrainedTokenizerFast:
    """Byte-level BPE (any text survives encode and decode), offsets, left padding, pad == eos (id 0)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([_TEXT], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=EOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=EOS_TOKEN,
        padding_side="left",
    )


def ragged_batch(
    query_lengths: Sequence[int], response_lengths: Sequence[int], seed: int = 0, vocab_size: int = VOCAB_SIZE
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Queries and responses (1-D LongTensors) of the given lengths.

    Every third response ends with EOS and every fourth query starts with it, so that code which takes
    ``ids != pad`` for a mask goes wrong.
    """

    def ids(name: str, length: int) -> torch.Tensor:
        unit = stable_normal(name, (length,), seed, scale=1.0) / (2.0 * math.sqrt(3.0)) + 0.5  # [0, 1)
        return 1 + (unit.double() * (vocab_size - 1)).long().clamp(max=vocab_size - 2)

    queries = [ids(f"query.{i}", n) for i, n in enumerate(query_lengths)]
    responses = [ids(f"response.{i}", n) for i, n in enumerate(response_lengths)]
    for i, query in enumerate(queries):
        if i % 4 == 3 and len(query) > 1:
            query[0] = EOS_ID
    for i, response in enumerate(responses):
        if i % 3 == 2 and len(response) > 1:
            response[-1] = EOS_ID
    return queries, responses
