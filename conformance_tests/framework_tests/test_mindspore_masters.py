"""float32 masters under MindSpore's own optimizers, which update them as they update
float32 parameters, bit for bit.
"""

from functools import cache

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn
from mindspore.experimental import optim

import gradaccum
from gradaccum_conformance.deep import deep_but
from gradaccum_mindspore import load_checkpoint_into

from .mindspore_common import (
    MODES,
    by_mode,
    needs_mindspore,
    pynative_after,  # noqa: F401
    set_mode,
)

HALF = {"float16": ms.float16, "bfloat16": ms.bfloat16}
RNG = np.random.default_rng(0)
START = {"weight": np.ones((3, 2)), "bias": np.ones(2)}
GRADIENTS = [
    [RNG.integers(-64, 64, array.shape) / 64 for array in START.values()]
    for _ in range(6)
]
MASTER = ".gradaccum.master"


def grouped(parameters):
    weight, bias = parameters
    groups = [
        {"params": [weight], "lr": 0.05, "weight_decay": 0.1},
        {"params": [bias]},
        {"order_params": parameters},
    ]
    return nn.Momentum(groups, 0.1, 0.9)


OPTIMIZERS = {
    "dynamic learning rate": lambda p: nn.SGD(p, [0.5, 0.125, 0.25], momentum=0.9),
    "grouped Momentum": grouped,
    "AdamWeightDecay": lambda p: nn.AdamWeightDecay(p, 0.1, weight_decay=0.1),
    "RMSProp": lambda p: nn.RMSProp(p, 0.01, centered=True),
    "AdaFactor": nn.AdaFactor,
    "experimental Adam": lambda p: optim.Adam(
        [{"params": p[:1], "lr": 0.05}, {"params": p[1:]}], 0.1
    ),
}
COMPILED = ("grouped Momentum", "experimental Adam")
CASES = [
    (kind, mode)
    for mode in MODES
    for kind in (OPTIMIZERS if mode == "pynative" else COMPILED)
]


def called(mode, optimizer):
    """`optimizer` of gradients, as it is called in a mode."""

    @ms.jit
    def jitted(*gradients):
        return optimizer(gradients)

    return jitted if mode == "jit" else lambda *gradients: optimizer(gradients)


def run(kind, dtype, mode, **options):
    """Trains three windows of two; returns the parameters, the wrapped optimizer and
    the inner one.
    """
    set_mode(mode)
    parameters = [
        Parameter(Tensor(array, dtype), name=name) for name, array in START.items()
    ]
    inner = OPTIMIZERS[kind](parameters)
    optimizer = gradaccum.wrap(inner, steps=2, **options)
    call = called(mode, optimizer)
    for gradients in GRADIENTS:
        call(*[Tensor(array, dtype) for array in gradients])
    return parameters, optimizer, inner


def masters_of(optimizer):
    return [p for p in optimizer.get_parameters() if p.name.endswith(MASTER)]


@cache
def float32_run(kind):
    """In PyNative, the truth for every mode and half dtype."""
    return run(kind, ms.float32, "pynative")


@pytest.mark.parametrize("half", deep_but(("bfloat16",), HALF))
@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_masters_equal_float32_parameters(kind, mode, half):
    expected, _, plain = float32_run(kind)
    parameters, optimizer, inner = run(kind, HALF[half], mode, master_weights=True)
    masters = masters_of(optimizer)
    for truth, parameter, master in zip(expected, parameters, masters, strict=True):
        assert master.name == parameter.name + MASTER
        bound = 0 if mode == "pynative" else 3e-7
        np.testing.assert_allclose(
            master.asnumpy(), truth.asnumpy(), rtol=0, atol=bound
        )
        in_model = parameter.astype(ms.float32).asnumpy()
        rounded = master.astype(HALF[half]).astype(ms.float32)
        np.testing.assert_array_equal(in_model, rounded.asnumpy())
        assert np.abs(in_model - 1).max() > 1e-3
    names = {p.name.removesuffix(MASTER): p.dtype for p in inner.get_parameters()}
    assert names.keys() == {p.name for p in plain.get_parameters()}
    assert not set(names.values()) & set(HALF.values())


RATE = 2.0**-10


def of_one(dtype, weights=(1.0,)):
    """A Cell with a weight of half precision, and its wrapped optimizer."""
    net = nn.Cell()
    net.weight = Parameter(Tensor(weights, dtype), name="weight")
    inner = nn.SGD([net.weight], RATE)
    return net, gradaccum.wrap(inner, steps=2, master_weights=True)


@by_mode
@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
def test_weights_that_are_loaded_after_wrapping(dtype, mode):
    """They are the masters from the next update on: 100 - 2 * RATE is 100 in half
    precision.
    """
    set_mode(mode)
    net, optimizer = of_one(dtype)
    loaded = Parameter(Tensor([100.0], dtype), name="weight")
    ms.load_param_into_net(net, {"weight": loaded})
    call = called(mode, optimizer)
    for _ in range(4):
        call(Tensor([1.0], dtype))
    (master,) = masters_of(optimizer)
    assert master.asnumpy() == 100 - 2 * RATE
    assert net.weight.astype(ms.float32).asnumpy() == 100


@by_mode
def test_weights_that_are_changed_in_place(mode):
    """After updates whose sum is less than the half precision's rounding. A weight that
    is not changed keeps its master's low bits.
    """
    set_mode(mode)
    net, optimizer = of_one(ms.float16, [100.0] * 3)
    call = called(mode, optimizer)
    gradient = Tensor(np.ones(3), ms.float16)
    for _ in range(6):
        call(gradient)
    changed = Tensor([100.0, 0.25, np.nan], ms.float16)
    load_checkpoint_into(net, {"weight": changed})
    for _ in range(4):
        call(gradient)
    (master,) = masters_of(optimizer)
    expected = [100 - 5 * RATE, 0.25 - 2 * RATE, np.nan]
    np.testing.assert_array_equal(master.asnumpy(), np.float32(expected))


@needs_mindspore("2.10", "set_data can crash MindSpore 2.7")
@pytest.mark.parametrize("put_back", [True, False])
def test_weights_that_are_swapped_between_updates(put_back):
    """Put back, as after an evaluation with averaged weights: the masters keep their
    low bits.
    """
    net, optimizer = of_one(ms.float16)
    ones = (Tensor([1.0], ms.float16),)
    for _ in range(3):
        optimizer(ones)
    trained = Tensor(net.weight.asnumpy().copy())
    net.weight.set_data(Tensor([100.0], ms.float16))
    if put_back:
        net.weight.set_data(trained)
    optimizer(ones)
    (master,) = masters_of(optimizer)
    assert master.asnumpy() == (1 - 2 * RATE if put_back else 100 - RATE)
