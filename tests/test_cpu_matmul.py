"""Matrix products by oneDNN against torch's own, in every form that a linear layer and its gradients use."""

import pytest
import torch
from torch import nn

from trl import cpu_matmul
from trl.cpu_matmul import _addmm, _mm, gains_from_onednn, onednn_product, use_fast_matmul

FORMS = {
    "plain": (torch.randn(64, 200), torch.randn(200, 96)),
    "transposed right (a linear layer)": (torch.randn(64, 200), torch.randn(96, 200).t()),
    "transposed left (a weight's gradient)": (torch.randn(200, 64).t(), torch.randn(200, 96)),
    "slices": (torch.randn(128, 400)[::2, ::2], torch.randn(200, 192)[:, ::2]),
    "expanded": (torch.randn(1, 200).expand(64, 200), torch.randn(200, 96)),
}


@pytest.mark.parametrize("form", FORMS)
def test_products_equal_torchs(form):
    left, right = FORMS[form]
    exact = (left.double() @ right.double()).float()
    bias = torch.randn(96)
    torch.testing.assert_close(onednn_product(left, right), exact, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(onednn_product(left, right, bias), exact + bias, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(_mm(left, right), exact, atol=1e-4, rtol=1e-5)
    torch.testing.assert_close(_addmm(bias, left, right), exact + bias, atol=1e-4, rtol=1e-5)


def test_what_oneDNN_is_not_asked_for_is_torchs_own():
    small = torch.randn(3, 4), torch.randn(4, 5)
    assert torch.equal(_mm(*small), torch.mm(*small))
    left, right = torch.randn(64, 200), torch.randn(200, 96)
    scaled = torch.addmm(torch.ones(96), left.double().float(), right, beta=2, alpha=0.5)
    torch.testing.assert_close(_addmm(torch.ones(96), left, right, beta=2, alpha=0.5), scaled)
    whole = torch.addmm(torch.ones(64, 96), left, right)
    torch.testing.assert_close(_addmm(torch.ones(64, 96), left, right), whole)
    double = left.double(), right.double()
    assert _mm(*double).dtype == torch.float64
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        _mm(left, right.t())


def test_switching_it_on_twice_keeps_layers_and_gradients():
    assert use_fast_matmul() == use_fast_matmul() == gains_from_onednn()
    assert (cpu_matmul._library is not None) == gains_from_onednn()
    torch.manual_seed(0)
    layer, inputs = nn.Linear(200, 96), torch.randn(64, 200, requires_grad=True)
    layer(inputs).square().sum().backward()
    exact, exact_inputs = nn.Linear(200, 96).double(), inputs.detach().double().requires_grad_()
    exact.load_state_dict({k: v.double() for k, v in layer.state_dict().items()})
    exact(exact_inputs).square().sum().backward()
    for got, want in [(layer.weight.grad, exact.weight.grad), (inputs.grad, exact_inputs.grad)]:
        torch.testing.assert_close(got.double(), want, atol=1e-3, rtol=1e-4)
