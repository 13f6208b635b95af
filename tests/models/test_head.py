"""Log-probabilities in one buffer against plain autograd: values, entropies, gradients, tied and untied weights."""

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import tiny_gpt2, tiny_llama, tiny_neox, tiny_opt
from trl.core import entropy_from_logits, logprobs_from_logits
from trl.models import AutoModelForCausalLMWithValueHead
from trl.models import head as head_module
from trl.models.head import chosen_logprobs, embed

WIDTH, VOCABULARY = 16, 53


@pytest.fixture(autouse=True)
def small_slices(monkeypatch):
    monkeypatch.setattr(head_module, "_ROWS_BYTES", 4 * VOCABULARY * 3)  # three rows each: several, and a rest


def inputs(rows: int = 11) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(rows, WIDTH, requires_grad=True), torch.randint(VOCABULARY, (rows,)), torch.randn(rows)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("frozen", [False, True])
def test_values_and_gradients_equal_plain_autograd(bias, frozen):
    hidden, ids, weights = inputs()
    head = nn.Linear(WIDTH, VOCABULARY, bias=bias).requires_grad_(not frozen)
    trained = [hidden] if frozen else [hidden, *head.parameters()]
    logits = head(hidden)
    slow = logprobs_from_logits(logits, ids)
    expected = torch.autograd.grad((slow * weights).sum(), trained)
    fast, entropy = chosen_logprobs(hidden, head, ids, None)
    torch.testing.assert_close(fast, slow, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, entropy_from_logits(logits), atol=1e-5, rtol=0)
    assert not entropy.requires_grad
    for got, want in zip(torch.autograd.grad((fast * weights).sum(), trained), expected, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    with torch.no_grad():
        for got, want in zip(chosen_logprobs(hidden, head, ids, None), (fast, entropy), strict=True):
            torch.testing.assert_close(got, want, atol=1e-6, rtol=0)


def test_no_rows_and_impossible_tokens():
    head = nn.Linear(WIDTH, VOCABULARY)
    hidden, ids, _ = inputs(rows=0)
    logprobs, entropy = chosen_logprobs(hidden, head, ids, None)
    assert logprobs.shape == entropy.shape == (0,)
    logprobs.sum().backward()
    assert head.weight.grad is not None and not head.weight.grad.any()
    hidden, ids, _ = inputs(rows=2)
    with torch.no_grad():
        head.bias[:] = -torch.inf
        head.bias[ids] = 0.0
        logprobs, entropy = chosen_logprobs(hidden, head, ids, None)
        logits = head(hidden)
    torch.testing.assert_close(logprobs, logprobs_from_logits(logits, ids))
    torch.testing.assert_close(entropy, entropy_from_logits(logits))


def test_bf16_autocast_is_near_and_keeps_dtypes():
    hidden, ids, weights = inputs()
    head = nn.Linear(WIDTH, VOCABULARY)
    exact = chosen_logprobs(hidden, head, ids, None)[0]
    expected = torch.autograd.grad((exact * weights).sum(), [hidden, head.weight])
    with torch.autocast("cpu", torch.bfloat16):
        rounded = chosen_logprobs(hidden, head, ids, None)[0]
    assert rounded.dtype == torch.float32
    torch.testing.assert_close(rounded, exact, atol=0.05, rtol=0)
    for got, want in zip(torch.autograd.grad((rounded * weights).sum(), [hidden, head.weight]), expected, strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)


def test_a_second_backward_through_one_graph_is_refused():
    hidden, ids, _ = inputs()
    total = chosen_logprobs(hidden, nn.Linear(WIDTH, VOCABULARY), ids, None)[0].sum()
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="already differentiated"):
        total.backward()


@pytest.mark.parametrize("padding_idx", [None, 3])
def test_a_tied_weight_gets_both_parts_of_its_gradient(padding_idx):
    torch.manual_seed(1)
    embedding = nn.Embedding(VOCABULARY, WIDTH, padding_idx=padding_idx)
    head = nn.Linear(WIDTH, VOCABULARY, bias=False)
    head.weight = embedding.weight
    read, ids = torch.tensor([[3, 4, 4], [5, 3, 6]]), torch.randint(VOCABULARY, (6,))
    plain = embedding(read).tanh().view(6, WIDTH)
    [expected] = torch.autograd.grad(logprobs_from_logits(head(plain), ids).sum(), [embedding.weight])
    embedded, tied = embed(embedding, read, head)
    assert tied is not None
    logprobs, _ = chosen_logprobs(embedded.tanh().view(6, WIDTH), head, ids, tied)
    [got] = torch.autograd.grad(logprobs.sum(), [embedding.weight])
    torch.testing.assert_close(got, expected, atol=1e-5, rtol=0)
    embedded, _ = embed(embedding, read, head)  # and where the loss asks for no log-probabilities
    [alone] = torch.autograd.grad(embedded.sum(), [embedding.weight])
    torch.testing.assert_close(alone, torch.autograd.grad(embedding(read).sum(), [embedding.weight])[0])


@pytest.mark.parametrize("make", [tiny_gpt2, tiny_llama, tiny_neox, tiny_opt])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_every_architecture_has_the_gradients_of_its_logits(make, checkpointing):
    model = AutoModelForCausalLMWithValueHead(make(0))
    if checkpointing:
        model.pretrained_model.gradient_checkpointing_enable()
    model.train()
    torch.manual_seed(0)
    ids = torch.randint(3, 30, (3, 9))
    positions = torch.rand(3, 9) < 0.5
    chosen = torch.randint(3, 30, (int(positions.sum()),))

    def gradients(fast: bool) -> list[Tensor]:
        model.zero_grad()
        if fast:
            logprobs, _, values = model(ids, positions=positions, next_ids=chosen)
        else:
            logits, _, values = model(ids)
            logprobs, values = logprobs_from_logits(logits[positions], chosen), values[positions]
        (logprobs.sum() + values.square().sum()).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for got, want in zip(gradients(True), gradients(False), strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
