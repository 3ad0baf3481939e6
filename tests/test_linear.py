import pytest
import torch
import torch.nn.functional as F
from oracles import toy

from kvlab.linear import Linear
from kvlab.measure import count_flops
from kvlab.model import GPT


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(8,), (1, 1, 8), (3, 5, 8), (1, 65, 8)], ids=str)
def test_equal_to_nn_linear_with_any_number_of_threads(n, bias, shape, threads):
    threads(n)
    layer = Linear(8, 600, bias=bias).double()
    x = torch.randn(shape, dtype=torch.float64)
    assert layer.parts(x[..., 0].numel()) == (1 if x[..., 0].numel() > 64 else n)
    y, want = layer(x), F.linear(x, layer.weight, layer.bias)
    assert y.shape == want.shape
    assert (y - want).abs().max() < 1e-14


def test_what_is_not_split(threads):
    threads(2)
    assert Linear(8, 600).parts(1) == 2
    assert Linear(8, 600).parts(Linear.few_rows + 1) == 1  # many rows keep the cores busy by themselves
    assert Linear(8, 64).parts(1) == 1  # small
    assert Linear(8, 601).parts(1) == 1  # no equal parts
    assert Linear(8, 600).half().parts(1) == 1
    assert Linear(8, 600).to("meta").parts(1) == 1
    by_rows = Linear(8, 600)
    by_rows.weight = torch.nn.Parameter(torch.randn(600, 8))
    assert by_rows.parts(1) == 1


def test_gradients_pass(threads):
    threads(2)
    layer, x = Linear(8, 600).double(), torch.randn(2, 8, dtype=torch.float64, requires_grad=True)
    layer(x).square().sum().backward()
    got = x.grad.clone(), layer.weight.grad.clone()
    x.grad = layer.weight.grad = None
    F.linear(x, layer.weight, layer.bias).square().sum().backward()
    assert torch.allclose(got[0], x.grad) and torch.allclose(got[1], layer.weight.grad)


@torch.no_grad()
def test_logits_and_counted_flops_do_not_depend_on_the_number_of_threads(threads):
    config = toy(vocab_size=1024, hidden_size=64, intermediate_size=1024).config
    model, ids = GPT(config).double(), torch.randint(0, 1024, (2, 7), generator=torch.Generator().manual_seed(0))
    results = []
    for n in (1, 2):
        threads(n)
        with count_flops(model) as flops:
            logits = model(ids)
        results.append((logits, flops.projections, flops.attention))
    assert (results[0][0] - results[1][0]).abs().max() < 1e-14
    assert results[0][1:] == results[1][1:]
