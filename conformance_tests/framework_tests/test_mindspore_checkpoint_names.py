"""Names in a checkpoint: the state's Parameters share none with a layer, and no name stands twice."""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from gradaccum_mindspore import load_checkpoint_into


class Model(nn.Cell):
    """A model with a layer of the optimizer's name."""

    def __init__(self, weight):
        super().__init__()
        self.generator = nn.Dense(4, 2, has_bias=False)
        ops.assign(self.generator.weight, Tensor(weight))

    def construct(self, x):
        return self.generator(x)


def trained(weight, steps):
    net = Model(np.full((2, 4), weight, np.float32))
    optimizer = gradaccum.wrap(nn.Adam(net.trainable_params(), 0.1), steps=2, name="generator")
    backward = ms.value_and_grad(lambda x: ops.square(net(x)).mean(), None, optimizer.parameters)
    for _ in range(steps):
        optimizer(backward(Tensor(np.ones((3, 4), np.float32)))[1])
    return net, optimizer


def test_layer_may_have_the_optimizers_name(tmp_path):
    """The saved file holds the layer's matrix, and the loaded run gets it back."""
    net, optimizer = trained(1.0, 3)
    ms.save_checkpoint(optimizer, str(tmp_path / "run.ckpt"))
    saved = ms.load_checkpoint(str(tmp_path / "run.ckpt"))
    assert saved["generator.weight"].shape == (2, 4)
    assert saved["generator.gradaccum.weight"].asnumpy() == 1.0
    other, resumed = trained(5.0, 0)
    load_checkpoint_into(resumed, saved)
    np.testing.assert_array_equal(other.generator.weight.asnumpy(), net.generator.weight.asnumpy())
    assert resumed.result.micro_step == 1


@pytest.mark.parametrize(("parameter", "name"), [("gradaccum.weight", "gradaccum"), ("g.gradaccum.bias", "g")])
def test_taken_parameter_name_is_refused(parameter, name):
    inner = nn.SGD([Parameter(Tensor(np.ones(3, np.float32)), name=parameter)], 0.1)
    with pytest.raises(gradaccum.ArgumentValueError, match=rf"name: .*{parameter}"):
        gradaccum.wrap(inner, steps=2, name=name)
    gradaccum.wrap(inner, steps=2, name="accumulation")


class Holder(nn.Cell):
    def __init__(self, optimizer, parameter):
        super().__init__(auto_prefix=False)
        self.optimizer, self.parameter = optimizer, parameter


def test_duplicate_parameter_names_are_refused():
    _, optimizer = trained(1.0, 1)
    twin = Parameter(Tensor(np.zeros((2, 4), np.float32)), name="generator.weight")
    cell = Holder(optimizer, twin)
    entries = {p.name: Tensor(p.asnumpy()) for p in optimizer.get_parameters()}
    with pytest.raises(gradaccum.CheckpointError, match=r"cell.*generator\.weight"):
        load_checkpoint_into(cell, entries)
