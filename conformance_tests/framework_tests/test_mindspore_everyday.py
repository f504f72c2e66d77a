"""Everyday mistakes in MindSpore: each is refused by name, or right."""

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

from mindspore import Parameter, Tensor, nn  # noqa: E402
from mindspore.experimental import optim  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import pynative_after, set_mode  # noqa: E402, F401

INNER = {"nn": lambda p: nn.SGD([p], 1.0), "experimental": lambda p: optim.SGD([p], 1.0)}


def parameter():
    return Parameter(Tensor([10.0, 10.0], ms.float32), name="w")


def gradient(value):
    return (Tensor([value, value], ms.float32),)


def value(p):
    return float(p.asnumpy()[0])


@pytest.mark.parametrize("mode", ["pynative", "graph"])
@pytest.mark.parametrize("kind", INNER)
def test_inner_optimizer_is_not_called(kind, mode):
    """The loop goes on calling the optimizer that it wrapped: it would accumulate nothing."""
    set_mode(mode)
    p = parameter()
    inner = INNER[kind](p)
    opt = gradaccum.wrap(inner, steps=2)
    opt(gradient(1.0))
    with pytest.raises(gradaccum.UsageError, match=r"optimizer\(gradients\): expected a call of the wrapped optimizer.*SGD"):
        inner(gradient(1.0))
    assert (value(p), opt.result.micro_step) == (10.0, 1)
    opt(gradient(3.0))
    assert (value(p), opt.result.optimizer_step) == (8.0, 1)
    assert type(inner).__name__ == "SGD"
    assert isinstance(inner, (nn.SGD, optim.SGD))


def test_inner_optimizer_is_free_again():
    p = parameter()
    inner = nn.SGD([p], 1.0)
    opt = gradaccum.wrap(inner, steps=2)
    with pytest.raises(gradaccum.ArgumentTypeError, match="optimizer: expected one that no living wrapper has"):
        gradaccum.wrap(inner, steps=4)
    del opt
    again = gradaccum.wrap(inner, steps=1)
    again(gradient(1.0))
    assert value(p) == 9.0
    del again
    import gc

    gc.collect()
    inner(gradient(1.0))
    assert value(p) == 8.0
