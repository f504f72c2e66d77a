"""MindSpore: ``micro_batch_size="auto"`` halves until it fits, and a failed attempt leaves no trace."""

import gc
import subprocess
import sys
import weakref
from pathlib import Path

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Tensor, nn, ops  # noqa: E402

import gradaccum  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import pynative_after, set_mode  # noqa: E402, F401
from gradaccum import ArgumentValueError, AutoMicroBatchSize, UsageError  # noqa: E402
from gradaccum_mindspore.large_batch import auto  # noqa: E402
from gradaccum_mindspore.large_batch.auto import is_out_of_memory  # noqa: E402
from gradaccum_mindspore.large_batch.coupled import coupled_value_and_grad  # noqa: E402
from gradaccum_mindspore.large_batch.value_and_grad import value_and_grad  # noqa: E402
from gradaccum_mindspore.large_batch.value_and_update import value_and_update  # noqa: E402
from gradaccum_mindspore.recomputation.module import recompute  # noqa: E402

ITEMS = 8
X = np.random.RandomState(0).randn(ITEMS, 4).astype(np.float32)
TEXTS = (
    "Allocate memory failed\n\n- C++ Call Stack",
    "std::bad_alloc",
    "Device(id:0) memory isn't enough and alloc failed, kernel name: MatMul",
)


@pytest.fixture(autouse=True)
def on_a_device(request, monkeypatch):
    """The loss says when memory runs out, as a device's allocator does."""
    if "test_refused" not in request.node.name:
        monkeypatch.setattr(auto, "require_device", lambda sizes: None)


class Net(nn.Cell):
    """Batch normalization and two kinds of dropout, by which a trace of a failed attempt would show."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm, self.dropout = nn.Dense(4, 4), nn.BatchNorm1d(4), nn.Dropout(p=0.3)

    def construct(self, x):
        return ops.dropout(self.dropout(self.norm(self.dense(x))), 0.2)


class Faulty(nn.Cell):
    """Runs out of memory at chosen forward or backward passes, counted over all attempts."""

    def __init__(self, forward=(), backward=(), error=None):
        super().__init__()
        self.failing, self.counts = {"forward": forward, "backward": backward}, {"forward": 0, "backward": 0}
        self.error = error or RuntimeError(TEXTS[0])

    def construct(self, x):
        self.reached("forward")
        return x * 1

    def bprop(self, x, out, dout):
        self.reached("backward")
        return (dout,)

    def reached(self, where):
        self.counts[where] += 1
        if self.counts[where] - 1 in self.failing[where]:
            raise self.error


def make():
    ms.set_seed(3)
    net = Net()
    for p in net.trainable_params():
        ops.assign(p, Tensor(np.random.RandomState(len(p.name)).randn(*p.shape).astype(np.float32)))
    ms.set_seed(7)
    return net.set_train()


def loss_of(net, fault):
    def loss(x):
        return (fault(net(x)) ** 2).mean()

    return loss


def outcome(made, net, calls=1):
    """What some calls return and leave: values, Parameters, the place in random numbers."""
    arrays = []
    for _ in range(calls):
        value = made(Tensor(X))
        arrays += [leaf.asnumpy() for leaf in _tensors(value)]
    return [*arrays, *(p.asnumpy().copy() for p in net.get_parameters()), ops.rand(3).asnumpy()]


def _tensors(value):
    return [value] if isinstance(value, Tensor) else [leaf for each in value for leaf in _tensors(each)]


def equal(first, second):
    return len(first) == len(second) and all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


def gradient(net, fault, size):
    return value_and_grad(loss_of(net, fault), None, net.trainable_params(), micro_batch_size=size)


def update(net, fault, size):
    opt = gradaccum.wrap(nn.Momentum(net.trainable_params(), 0.1, 0.9), steps=None, clip_norm=1.0)
    return value_and_update(loss_of(net, fault), opt, micro_batch_size=size)


def coupled(net, fault, size):
    def outputs(x):
        return fault(net(x))

    def loss(rows):
        return (rows @ rows.T).mean()

    return coupled_value_and_grad(outputs, loss, net.trainable_params(), micro_batch_size=size)


CALLS = {"gradient": gradient, "update": update, "coupled": coupled}
WHERE = ("forward", "backward")
KEPT = (("forward", "coupled"), ("backward", "update"))


def clean(call, size):
    """The outcome of a call that finds `size` at once."""
    net, sizes = make(), AutoMicroBatchSize()
    made = call(net, Faulty(), sizes)
    sizes.start = lambda key, items: size
    return outcome(made, net)


@pytest.mark.parametrize(
    ("where", "call"),
    [(where, call) if (where, call) in KEPT else pytest.param(where, call, marks=pytest.mark.deep) for where in WHERE for call in CALLS],
)
def test_failure_at_each_point(call, where):
    """The whole batch fails; then the second attempt fails in each of its micro-batches; the third one has a quarter of the items."""
    expected = clean(CALLS[call], 2)
    for point in (1, 2):
        net, sizes = make(), AutoMicroBatchSize()
        made = CALLS[call](net, Faulty(**{where: (0, point)}), sizes)
        assert equal(outcome(made, net), expected), point
        assert sizes.size == 2


def test_same_draws_at_the_same_size():
    """Three items: the second attempt fails at its last micro-batch, of one item, which is what all of the third one have."""

    def after(failing, first):
        start = make()
        sizes = AutoMicroBatchSize()
        made = gradient(start, Faulty(forward=failing), sizes)
        sizes.start = lambda key, items: first
        return [leaf.asnumpy() for leaf in _tensors(made(Tensor(X[:3])))]

    assert equal(after((0, 2), 3), after((), 1))


def test_known_sizes():
    """A call with the size that was found is the same, and the next call starts with it."""
    net, sizes, fault = make(), AutoMicroBatchSize(), Faulty(forward=(0,))
    made = gradient(net, fault, sizes)
    made(Tensor(X))
    assert (sizes.size, fault.counts["forward"]) == (4, 3)
    made(Tensor(X))
    assert (sizes.size, fault.counts["forward"]) == (4, 5)


@pytest.mark.parametrize("call", CALLS)
def test_other_errors(call):
    """They pass as they are, and everything is as before; an error of memory in the user's own words is none."""
    for error in (KeyError("mine"), RuntimeError("shapes differ"), KeyboardInterrupt()):
        net, fault = make(), Faulty(backward=(1,), error=error)
        before = [*(p.asnumpy().copy() for p in net.get_parameters()), ops.rand(3).asnumpy()]
        ms.set_seed(7)
        sizes = AutoMicroBatchSize()
        made = CALLS[call](net, fault, sizes)
        sizes.start = lambda key, items: 4
        with pytest.raises(type(error)) as caught:
            made(Tensor(X))
        assert caught.value is error or str(error) in str(caught.value)
        assert equal([*(p.asnumpy() for p in net.get_parameters()), ops.rand(3).asnumpy()], before)
        assert sizes.size is None


def test_one_item_does_not_fit():
    net = make()
    fault = Faulty(forward=range(99))
    with pytest.raises(UsageError, match="one item to fit") as caught:
        gradient(net, fault, AutoMicroBatchSize())(Tensor(X))
    assert "Allocate memory failed" in str(caught.value.__cause__)
    assert fault.counts["forward"] == 4


def test_freed_before_the_retry():
    """What lived in the failed frame is dead when memory is asked for again, though somebody holds the error."""
    net, seen, held = make(), [], []

    def loss(x):
        alive = [reference() is not None for reference in seen]
        activation = net.dense(x)
        seen.append(weakref.ref(activation))
        if len(seen) == 1:
            held.append(RuntimeError(TEXTS[1]))
            raise held[0]
        assert alive[0] is False
        return (activation**2).mean()

    gc.disable()
    try:
        value_and_grad(loss, None, net.trainable_params(), micro_batch_size=AutoMicroBatchSize())(Tensor(X))
    finally:
        gc.enable()
    assert len(seen) == 3


def test_refused():
    for mode in ("pynative", "graph"):
        set_mode(mode)
        for sizes in ("auto", AutoMicroBatchSize(2**30)):
            with pytest.raises(ArgumentValueError, match="micro_batch_size: expected a device that says when its memory runs out"):
                gradient(make(), Faulty(), sizes)(Tensor(X))


def test_older_mindspore_is_refused(monkeypatch):
    monkeypatch.setattr(ms, "__version__", "2.7.0")
    with pytest.raises(UsageError, match=r"recompute: expected MindSpore 2\.9.*mindspore>=2\.9.*cell\.recompute\(\)"):
        recompute(make())


@pytest.mark.parametrize("text", TEXTS)
def test_texts(text):
    assert is_out_of_memory(RuntimeError(text))
    assert is_out_of_memory(MemoryError())
    assert not is_out_of_memory(ValueError(text))
    assert not is_out_of_memory(UsageError(text))


PROGRAM = Path(__file__).with_name("mindspore_out_of_memory.py")


@pytest.mark.deep
@pytest.mark.parametrize("mode", ["pynative", "jit", "graph"])
def test_the_frameworks_own_error(mode):
    """A process whose memory is limited by the system: what MindSpore raises is known, and it goes on with less."""
    done = subprocess.run([sys.executable, str(PROGRAM), mode], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["RuntimeError", "True", "16384.0"]
