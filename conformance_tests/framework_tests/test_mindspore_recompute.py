"""MindSpore: recomputation gives the same gradient to the bit, repeats dropout, and moves statistics once."""

import mindspore as ms
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import HOOKS, MODES, pynative_after, set_mode  # noqa: F401
from conformance_tests.framework_tests.mindspore_recompute_cells import HOW, Block, Net, Unread, X, equal, gradients, make, sequence
from gradaccum_mindspore.recomputation.module import recompute

pytestmark = HOOKS


@pytest.mark.parametrize("mode", MODES)
def test_same_bits(mode):
    """Every way to recompute: loss, gradients and all that the forward pass changes."""
    plain = make()
    expected = gradients(plain, plain.trainable_params(), mode)
    buffers = [p.asnumpy() for p in plain.get_parameters()]
    assert float(plain.blocks[3].count.asnumpy()) == 2
    for how, recomputed in HOW.items():
        net = make()
        names = [p.name for p in net.get_parameters()]
        found = gradients(recomputed(net), net.trainable_params(), mode)
        assert equal(found, expected), how
        assert equal([p.asnumpy() for p in net.get_parameters()], buffers), how
        assert [p.name for p in net.get_parameters()] == names, how


@pytest.mark.parametrize("mode", MODES)
def test_half_precision(mode):
    """MindSpore's own recomputation rounds a float32 statistic to half precision, and reads buffers that have moved on: off by 30 %."""

    def network():
        return make(lambda: Net(block=Block if mode == "pynative" else Unread)).to_float(ms.float16)

    plain = network()
    expected = gradients(plain, plain.trainable_params(), mode)
    buffers = [p.asnumpy() for p in plain.get_parameters()]
    for how in HOW:
        net = network()
        assert equal(gradients(HOW[how](net), net.trainable_params(), mode), expected), how
        assert equal([p.asnumpy() for p in net.get_parameters()], buffers), how


def test_mixed_precision():
    """Under `mindspore.amp.auto_mixed_precision`, whose choice belongs to the call."""

    def gradient(recomputed):
        net = ms.amp.auto_mixed_precision(recomputed(make()), "O2")
        return gradients(net, net.trainable_params(), "pynative")

    assert equal(gradient(lambda net: net), gradient(sequence))


def test_several_calls_of_one_segment():
    """Each call replays its own draws: two micro-batches before one backward pass, and a call that is never differentiated."""
    nets = make(), sequence(make())

    def gradient(net):
        def loss(x):
            first, second = net(x), net(2 * x)
            ops.stop_gradient(net(3 * x))
            return first * 2 + second

        ms.set_seed(7)
        return [g.asnumpy() for g in ms.grad(loss, None, net.trainable_params())(X)]

    assert equal(gradient(nets[0]), gradient(nets[1]))


def test_an_error_changes_nothing():
    """A forward pass that raises: the buffers stay, and the next call is as if there had been none."""
    net = make(Failing)
    recompute(net)
    with pytest.raises(KeyError, match="on purpose"):
        ms.grad(net, None, net.trainable_params())(X)
    assert int(net.count.asnumpy()) == 0
    net.fails = False
    ms.grad(net, None, net.trainable_params())(X)
    assert int(net.count.asnumpy()) == 1


class Failing(nn.Cell):
    def __init__(self):
        super().__init__()
        self.dense, self.fails = nn.Dense(4, 4), True
        self.count = Parameter(Tensor(0, ms.int32), requires_grad=False)

    def construct(self, x):
        ops.assign_add(self.count, Tensor(1, ms.int32))
        if self.fails:
            raise KeyError("on purpose")
        return self.dense(x).sum()


@pytest.mark.parametrize("mode", ["pynative", pytest.param("graph", marks=pytest.mark.deep)])
def test_wrapped_optimizer(mode):
    """A window of two micro-batches under a loss scale ends with the same parameters."""

    def trained(recomputed):
        set_mode("pynative")
        net = recomputed(make())
        set_mode(mode)
        opt = gradaccum.wrap(nn.SGD(net.trainable_params(), 0.1), steps=2, loss_scale=8.0)

        def loss(x):
            return opt.scale(net(x))

        ms.set_seed(7)
        step = ms.value_and_grad(loss, None, net.trainable_params())
        for k in range(4):
            opt(step(X * (k + 1))[1])
        return [p.asnumpy() for p in net.get_parameters()]

    assert equal(trained(lambda net: net), trained(sequence))
