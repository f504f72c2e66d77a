"""float32 masters under MindSpore's own optimizers, which update them as they update
float32 parameters, bit for bit.
"""

from functools import cache

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops
from mindspore.experimental import optim

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    MODES,
    needs_mindspore,
    pynative_after,  # noqa: F401
    set_mode,
)
from gradaccum_conformance.deep import deep_but
from gradaccum_mindspore import load_checkpoint_into

HALF = {"float16": ms.float16, "bfloat16": ms.bfloat16}
RNG = np.random.default_rng(0)
START = {
    "weight": RNG.integers(-64, 64, (3, 2)) / 64,
    "bias": RNG.integers(-64, 64, 2) / 64,
}
GRADIENTS = [
    [RNG.integers(-64, 64, array.shape) / 64 for array in START.values()]
    for _ in range(6)
]
MASTER = ".gradaccum.master"


def make_parameters(dtype):
    return [Parameter(Tensor(array, dtype), name=name) for name, array in START.items()]


def grouped(parameters):
    weight, bias = parameters
    return nn.Momentum(
        [
            {"params": [weight], "lr": 0.05, "weight_decay": 0.1},
            {"params": [bias]},
            {"order_params": parameters},
        ],
        0.1,
        0.9,
    )


def experimental_groups(parameters):
    return optim.SGD(
        [{"params": parameters[:1], "lr": 0.05}, {"params": parameters[1:]}],
        0.1,
        momentum=0.9,
    )


OPTIMIZERS = {
    "SGD": lambda parameters: nn.SGD(parameters, 0.1, momentum=0.9, weight_decay=0.1),
    "dynamic learning rate": lambda parameters: nn.SGD(parameters, [0.5, 0.125, 0.25]),
    "Momentum": lambda parameters: nn.Momentum(parameters, 0.1, 0.9),
    "grouped Momentum": grouped,
    "Adam": lambda parameters: nn.Adam(parameters, 0.1),
    "AdamWeightDecay": lambda parameters: nn.AdamWeightDecay(
        parameters, 0.1, weight_decay=0.1
    ),
    "RMSProp": lambda parameters: nn.RMSProp(parameters, 0.01, centered=True),
    "Adagrad": lambda parameters: nn.Adagrad(
        parameters, accum=0.125, learning_rate=0.1
    ),
    "AdaFactor": lambda parameters: nn.AdaFactor(parameters),
    "experimental groups": experimental_groups,
    "experimental Adam": lambda parameters: optim.Adam(parameters, 0.1),
    "experimental AdamW": lambda parameters: optim.AdamW(parameters, 0.1),
}
COMPILED = ("SGD", "grouped Momentum", "Adam", "experimental Adam")
CASES = [
    (kind, mode)
    for mode in MODES
    for kind in OPTIMIZERS
    if mode == "pynative" or kind in COMPILED
]


def run(kind, dtype, mode, gradients=GRADIENTS, **options):
    """Trains three windows of two; returns the parameters, the wrapped optimizer and
    the inner one.
    """
    set_mode(mode)
    parameters = make_parameters(dtype)
    inner = OPTIMIZERS[kind](parameters)
    optimizer = gradaccum.wrap(inner, steps=2, **options)

    @ms.jit
    def jitted(*tree):
        return optimizer(tree)

    for tree in gradients:
        tensors = [Tensor(array, dtype) for array in tree]
        _ = jitted(*tensors) if mode == "jit" else optimizer(tensors)
    return parameters, optimizer, inner


def numpy_of(parameter):
    return parameter.astype(ms.float32).asnumpy()


def masters_of(optimizer):
    return [p for p in optimizer.get_parameters() if p.name.endswith(MASTER)]


@cache
def float32_run(kind):
    """`run` with float32 parameters, in PyNative, the truth for every mode and half
    dtype.
    """
    return run(kind, ms.float32, "pynative")


@pytest.mark.parametrize("half", deep_but(("bfloat16",), HALF))
@pytest.mark.parametrize(("kind", "mode"), CASES)
def test_masters_equal_float32_parameters(kind, mode, half):
    expected, _, plain = float32_run(kind)
    parameters, optimizer, inner = run(kind, HALF[half], mode, master_weights=True)
    masters = {p.name.removesuffix(MASTER): p for p in masters_of(optimizer)}
    for truth, parameter in zip(expected, parameters, strict=True):
        master = masters[parameter.name]
        if mode == "pynative":
            np.testing.assert_array_equal(master.asnumpy(), truth.asnumpy())
        np.testing.assert_allclose(master.asnumpy(), truth.asnumpy(), rtol=0, atol=3e-7)
        np.testing.assert_array_equal(
            numpy_of(parameter), numpy_of(master.astype(HALF[half]))
        )
        assert np.abs(numpy_of(parameter) - START[parameter.name]).max() > 1e-3, (
            "the comparison would pass without an update"
        )
    assert optimizer.result.optimizer_step == 3
    names = [p.name.removesuffix(MASTER) for p in inner.get_parameters()]
    assert sorted(names) == sorted(p.name for p in plain.get_parameters()), (
        "masters changed the names of the state"
    )
    assert not [p.name for p in inner.get_parameters() if p.dtype in HALF.values()]


def test_masters_are_the_only_copy():
    """Adam holds the model, its masters, two moments and the sum; all but the model in
    float32.
    """
    _, optimizer, _ = run("Adam", ms.float16, "pynative", master_weights=True)
    full_size = [
        str(p.dtype)
        for p in optimizer.get_parameters()
        if p.shape == START["weight"].shape
    ]
    assert sorted(full_size) == ["Float16"] + 4 * ["Float32"]
    _, without, _ = run("Adam", ms.float16, "pynative")
    full_size = [
        str(p.dtype)
        for p in without.get_parameters()
        if p.shape == START["weight"].shape
    ]
    assert sorted(full_size) == 3 * ["Float16"] + ["Float32"]


def test_only_half_parameters_have_masters():
    half, full = (
        Parameter(Tensor(np.ones(2), ms.float16), name="half"),
        Parameter(Tensor(np.ones(2), ms.float32), name="full"),
    )
    optimizer = gradaccum.wrap(nn.SGD([half, full], 1.0), steps=1, master_weights=True)
    optimizer(
        (
            Tensor(np.full(2, 2.0**-13), ms.float16),
            Tensor(np.full(2, 2.0**-13), ms.float32),
        )
    )
    assert [p.name for p in masters_of(optimizer)] == ["half" + MASTER]
    assert [
        masters_of(optimizer)[0].asnumpy()[0],
        full.asnumpy()[0],
        half.asnumpy()[0],
    ] == [1 - 2.0**-13, 1 - 2.0**-13, 1.0]


def test_used_optimizer_gets_masters():
    parameters = make_parameters(ms.float16)
    inner = nn.SGD(parameters, 1.0)
    inner(tuple(Tensor(np.zeros(p.shape), ms.float16) for p in parameters))
    optimizer = gradaccum.wrap(inner, steps=1, master_weights=True)
    optimizer(tuple(Tensor(np.full(p.shape, 2.0**-13), ms.float16) for p in parameters))
    np.testing.assert_array_equal(
        masters_of(optimizer)[0].asnumpy(),
        (START["weight"] - 2.0**-13).astype(np.float32),
    )


class Squares(nn.Cell):
    def __init__(self):
        super().__init__()
        self.weight = Parameter(Tensor(np.ones((3, 2)), ms.float16), name="weight")

    def construct(self, x):
        return ops.square(self.weight * x).mean()


@pytest.mark.parametrize("mode", ["pynative", "graph"])
def test_train_cell_differentiates_the_model(mode):
    """`nn.TrainOneStepCell` differentiates by the model's parameters, not by their
    masters.
    """
    set_mode(mode)
    net = Squares()
    optimizer = gradaccum.wrap(
        nn.SGD(net.trainable_params(), 0.5), steps=2, master_weights=True
    )
    step = nn.TrainOneStepCell(net, optimizer)
    assert [p.name for p in step.weights] == ["weight"]
    for _ in range(4):
        step(Tensor(np.ones((3, 2)), ms.float16))
    expected = (1 - np.float32(np.float16(2 / 6)) / 2) * np.ones((3, 2), np.float32)
    assert optimizer.result.optimizer_step == 2
    assert np.abs(net.weight.asnumpy() - 1).min() > 0.3
    assert (net.weight.asnumpy() < expected).all(), (
        "the second window's gradient is taken at the rounded model"
    )


RATE = 2.0**-10


@pytest.mark.parametrize("mode", ["pynative", "jit", "graph"])
@pytest.mark.parametrize("dtype", [ms.float16, ms.bfloat16])
def test_weights_that_are_loaded_after_wrapping(dtype, mode):
    """They are the masters from the next update on: 100 - 2 * RATE is 100 in half
    precision.
    """
    set_mode(mode)
    net = Squares()
    parameter = net.weight
    parameter.set_dtype(dtype)
    optimizer = gradaccum.wrap(nn.SGD([parameter], RATE), steps=2, master_weights=True)
    loaded = Parameter(Tensor(np.full((3, 2), 100), dtype), name="weight")
    ms.load_param_into_net(net, {"weight": loaded})

    @ms.jit
    def jitted(gradient):
        return optimizer((gradient,))

    ones = Tensor(np.ones((3, 2)), dtype)
    for _ in range(4):
        jitted(ones) if mode == "jit" else optimizer((ones,))
    (master,) = masters_of(optimizer)
    assert master.asnumpy()[0, 0] == 100 - 2 * RATE
    assert numpy_of(parameter)[0, 0] == 100


def test_weights_that_are_swapped_and_put_back():
    """As for an evaluation with averaged weights: the masters keep their low bits."""
    net = Squares()
    optimizer = gradaccum.wrap(nn.SGD([net.weight], RATE), steps=2, master_weights=True)
    ones = Tensor(np.ones((3, 2)), ms.float16)
    for _ in range(3):
        optimizer((ones,))
    trained = Tensor(net.weight.asnumpy().copy())
    net.weight.set_data(Tensor(np.zeros((3, 2)), ms.float16))
    net.weight.set_data(trained)
    optimizer((ones,))
    (master,) = masters_of(optimizer)
    assert master.asnumpy()[0, 0] == 1 - 2 * RATE


@needs_mindspore("2.10", "MindSpore 2.7 loads weights into the memory of the old ones")
def test_weights_that_are_loaded_between_updates():
    net = Squares()
    optimizer = gradaccum.wrap(nn.SGD([net.weight], RATE), steps=2, master_weights=True)
    ones = Tensor(np.ones((3, 2)), ms.float16)
    for _ in range(3):
        optimizer((ones,))
    net.weight.set_data(Tensor(np.full((3, 2), 100), ms.float16))
    optimizer((ones,))
    (master,) = masters_of(optimizer)
    assert master.asnumpy()[0, 0] == 100 - RATE


def test_masters_are_no_model():
    """A wrapper without masters refuses them where each of its own entries fits."""
    _, source, _ = run(
        "Adam", ms.float16, "pynative", GRADIENTS[:3], master_weights=True
    )
    _, target, _ = run("Adam", ms.float16, "pynative", GRADIENTS[:1])
    entries = {p.name: p for p in source.get_parameters()}
    own = {
        p.name: entries.get(p.name, p).astype(p.dtype) for p in target.get_parameters()
    }
    with pytest.raises(gradaccum.CheckpointError, match="masters"):
        load_checkpoint_into(target, {**entries, **own})
