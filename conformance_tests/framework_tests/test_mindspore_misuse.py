"""Wrong calls raise and name the fix. Calls that only look wrong give the exact
result.
"""

import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn
from mindspore.communication import GlobalComm
from mindspore.experimental import optim

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    pynative_after,  # noqa: F401
    set_mode,
    two_parameters,
    values,
)
from gradaccum_mindspore import FlushAtEpochEnd, load_checkpoint_into
from gradaccum_mindspore.workers import agreement


def ones(a=1.0, b=1.0):
    return Tensor(np.full(3, a, np.float32)), (
        None if b is None else Tensor(np.full(2, b, np.float32))
    )


def wrapped(steps=2):
    return gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=steps)


@pytest.mark.skipif(
    sys.version_info >= (3, 12), reason="MindSpore captures bytecode up to Python 3.11"
)
def test_bytecode_capture_runs_as_pynative():
    if sys.gettrace():
        pytest.skip(
            "MindSpore captures no bytecode while Python traces, as the record of the"
            " mutants' tests does"
        )
    optimizer = wrapped()

    @ms.jit(capture_mode="bytecode")
    def step(a, b):
        return optimizer((a, b))

    assert [bool(step(*ones(2.0, 4.0))) for _ in range(4)] == [False, True, False, True]
    assert values(optimizer) == [-3.0, -7.0]


TRACE = """
import mindspore as ms, numpy as np
from mindspore import Parameter, Tensor, nn
import gradaccum

parameter, gradient = Parameter(Tensor(np.ones(3, np.float32)), name="a"), Tensor(np.full(3, 2, np.float32))
optimizer = gradaccum.wrap(nn.SGD([parameter], 1.0), steps=2)
calls = lambda: optimizer((gradient,)), optimizer.flush, optimizer.discard

for call in calls:
    @ms.jit(capture_mode="trace")
    def step(x):
        call()
        return x

    for _ in range(2):
        try:
            step(gradient)
        except gradaccum.UsageError as error:
            assert "mindspore.jit" in str(error)
            print("refused", end=" ")
for _ in range(2):
    optimizer((gradient + 0,))
print(parameter.asnumpy()[0])
"""


def test_tracing_is_refused(tmp_path):
    """A trace would repeat its first micro-batch's work and never update. MindSpore
    crashes if the refusal leaves it tracing.
    """
    (tmp_path / "trace.py").write_text(TRACE)
    ran = subprocess.run(
        [sys.executable, str(tmp_path / "trace.py")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == ["refused"] * 6 + ["-1.0"], ran.stderr[-2000:]


@pytest.mark.parametrize("weight", [-2.0, True])
def test_constant_weight_is_checked_at_compilation(weight):
    optimizer = wrapped()

    @ms.jit
    def step(a, b):
        return optimizer((a, b), weight)

    with pytest.raises(gradaccum.GradAccumError, match="weight"):
        step(*ones())
    assert optimizer.result.micro_step == 0


def test_constant_weight_zero_adds_nothing():
    optimizer = wrapped()

    @ms.jit
    def step(bad, worse, *good):
        optimizer((bad, worse), 0)
        return optimizer(good, 1)

    assert step(*ones(np.inf, np.nan), *ones(2.0, 4.0))
    assert values(optimizer) == [-1.0, -3.0]


@pytest.mark.parametrize("mode", ["pynative", "jit", "graph"])
def test_weight_of_one_element_is_taken(mode):
    set_mode(mode)
    optimizer = wrapped()

    @ms.jit
    def jitted(weight, *gradients):
        return optimizer(gradients, weight=weight)

    for value, weight in ((1.0, 3.0), (5.0, 1.0)):
        tensor = Tensor([[weight]], ms.float32)
        closed = (
            jitted(tensor, *ones(value, value))
            if mode == "jit"
            else optimizer(ones(value, value), weight=tensor)
        )
    assert closed
    assert values(optimizer) == [-1.0, -1.0]


def test_weight_of_two_elements_is_refused():
    optimizer = wrapped()

    @ms.jit
    def step(weight, *gradients):
        return optimizer(gradients, weight=weight)

    with pytest.raises(gradaccum.ArgumentValueError, match=r"weight\.sum"):
        step(Tensor([1.0, 2.0]), *ones())


class Lookup(nn.Cell):
    def __init__(self):
        super().__init__()
        self.rows = nn.EmbeddingLookup(20, 4)

    def construct(self, tokens):
        return self.rows(tokens).sum()


def test_sparse_gradient_is_refused():
    net = Lookup()
    optimizer = gradaccum.wrap(nn.Adam(net.trainable_params(), 0.1), steps=2)
    backward = ms.value_and_grad(net, None, optimizer.parameters)

    @ms.jit
    def step(tokens):
        loss, gradients = backward(tokens)
        optimizer(gradients)
        return loss

    with pytest.raises(gradaccum.GradientError, match="RowTensor"):
        step(Tensor([1, 2, 3], ms.int32))


def test_none_gradient_compiles_once():
    """MindSpore takes a tuple that holds a None for a constant, and would compile anew
    for each.
    """
    ms.set_context(mode=ms.GRAPH_MODE)
    optimizer = wrapped()
    for value in (1.0, 2.0, 3.0, 4.0):
        optimizer(ones(value, None))
    assert len(optimizer.micro_batch.compile_cache) == 1
    assert values(optimizer) == [1.0 - 1.5 - 3.5, 1.0]


@pytest.mark.parametrize("how", ["pynative", "jit", "graph"])
def test_what_is_not_the_gradients_is_named(how):
    """A pair of a loss and its gradients, and the gradients by another list of the
    parameters, as an optimizer with groups has one.
    """
    set_mode(how)
    a, b = two_parameters()
    optimizer = gradaccum.wrap(nn.SGD([{"params": [b]}, {"params": [a]}], 1.0), steps=2)

    def loss_of(x):
        return (x * a).sum() + b.sum()

    of_groups = ms.value_and_grad(loss_of, None, optimizer.parameters)
    of_the_net = ms.value_and_grad(loss_of, None, [a, b])
    x = Tensor([1.0, 2.0, 3.0], ms.float32)

    def pair(x):
        return optimizer(of_groups(x))

    def other_order(x):
        return optimizer(of_the_net(x)[1])

    def right(x):
        return optimizer(of_groups(x)[1])

    def call(step):
        return (ms.jit(step) if how == "jit" else step)(x)

    with pytest.raises(gradaccum.GradientError, match="a pair of a loss and its grad"):
        call(pair)
    with pytest.raises(
        gradaccum.GradientError,
        match=r"gradients in another order.*by optimizer\.parameters",
    ):
        call(other_order)
    assert optimizer.result.micro_step == 0
    call(right)
    assert optimizer.result.micro_step == 1
    assert [float(total.asnumpy().sum()) for total in optimizer.storage.sums] == [2, 6]


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("step", r"then optimizer\(gradients, weight=n\)"),
        ("backward", r"then optimizer\(gradients, weight=n\)"),
        ("zero_grad", "nothing in its place"),
        ("epoch_end", r"optimizer\.epoch\(loader\)"),
        ("micro_step", r"optimizer\.result\.micro_step"),
    ],
)
def test_names_of_other_frameworks_are_explained(name, fix):
    optimizer = wrapped()
    with pytest.raises(
        AttributeError, match=rf"optimizer\.{name}: expected a name.*{fix}"
    ):
        getattr(optimizer, name)
    assert not hasattr(optimizer, name)
    with pytest.raises(AttributeError, match="'SGD' object has no attribute 'sgd'"):
        _ = optimizer.sgd
    assert optimizer.momentum is optimizer.inner.momentum


@pytest.mark.parametrize("mode", ["stand_alone", "data_parallel"])
def test_one_worker_needs_no_option(mode, monkeypatch):
    """A program for several workers, started with one; of two, each must say whether
    they share windows.
    """
    monkeypatch.setattr(GlobalComm, "INITED", True)
    ms.set_auto_parallel_context(parallel_mode=mode)
    try:
        monkeypatch.setattr(agreement, "get_group_size", lambda: 1)
        wrapped()((*ones(),))
        monkeypatch.setattr(agreement, "get_group_size", lambda: 2)
        with pytest.raises(gradaccum.UsageError, match=r"data_parallel=True.*False if"):
            wrapped()
    finally:
        ms.reset_auto_parallel_context()


class Own(nn.Optimizer):
    """A user's own, which may update bfloat16."""

    def construct(self, gradients):
        return gradients


def test_bfloat16_needs_masters_on_a_cpu():
    """Every optimizer of MindSpore's would raise, after a whole window."""
    halves = two_parameters(ms.bfloat16)
    for inner in (nn.AdamWeightDecay(halves, 0.1), optim.Adam(halves, 0.1)):
        with pytest.raises(
            gradaccum.ArgumentValueError,
            match=r"master_weights: expected True for bfloat16.*master_weights=True",
        ):
            gradaccum.wrap(inner, steps=2)
        gradaccum.wrap(inner, steps=2, master_weights=True)
    gradaccum.wrap(Own(0.1, two_parameters(ms.bfloat16)), steps=2)
    gradaccum.wrap(nn.SGD(two_parameters(ms.float16), 0.1), steps=2)


class Inside(nn.Cell):
    """A training cell; auto_prefix, MindSpore's default, makes it rename the
    parameters.
    """

    def __init__(self, net, optimizer):
        super().__init__()
        self.optimizer, self.net = optimizer, net


@pytest.mark.parametrize("mode", ["pynative", "jit", "graph"])
def test_dict_takes_old_and_new_names(mode):
    """A training cell renames the parameters; a dict of gradients may use either
    names.
    """
    set_mode(mode)
    net = nn.Dense(3, 2)
    optimizer = gradaccum.wrap(nn.SGD(net.trainable_params(), 1.0), steps=4)
    before = [p.name for p in optimizer.parameters]
    Inside(net, optimizer)
    after = [p.name for p in optimizer.parameters]
    assert before != after
    weight, bias = Tensor(np.ones((2, 3), np.float32)), Tensor(np.ones(2, np.float32))

    @ms.jit
    def jitted(gradients):
        return optimizer(gradients)

    call = jitted if mode == "jit" else optimizer
    for names in (before, after):
        call(dict(zip(names, (weight, bias), strict=True)))
    assert optimizer.result.micro_step == 2
    assert optimizer.storage.sums[0].asnumpy()[0, 0] == 2.0
    with pytest.raises(gradaccum.GradientError, match=after[0]):
        call({after[0]: weight, "another": bias})


class Pair(nn.Cell):
    """Two wrapped optimizers with the default name in one cell."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Dense(4, 2), nn.Dense(4, 2)
        self.first = gradaccum.wrap(nn.Adam(self.one.trainable_params(), 0.1), steps=2)
        self.second = gradaccum.wrap(nn.Adam(self.two.trainable_params(), 0.1), steps=3)


def test_two_wrapped_optimizers_load_their_checkpoint(tmp_path):
    pair, other = Pair(), Pair()
    for optimizer in (pair.first, pair.second):
        optimizer(
            tuple(
                Tensor(np.full(p.shape, 2.0, np.float32)) for p in optimizer.parameters
            )
        )
    ms.save_checkpoint(pair, str(tmp_path / "pair.ckpt"))
    load_checkpoint_into(other, ms.load_checkpoint(str(tmp_path / "pair.ckpt")))
    assert other.first.result.micro_step == other.second.result.micro_step == 1
    for mine, theirs in zip(other.get_parameters(), pair.get_parameters(), strict=True):
        np.testing.assert_array_equal(mine.asnumpy(), theirs.asnumpy())


def test_experimental_optimizer_refuses_another_group():
    optimizer = gradaccum.wrap(optim.SGD(two_parameters()[:1], 1.0), steps=2)
    with pytest.raises(gradaccum.UsageError, match="before the optimizer is wrapped"):
        optimizer.add_param_group({"params": two_parameters()[1:]})
    assert len(optimizer.param_groups) == 1


def test_steps_may_be_a_tensor():
    assert wrapped(Tensor(2)).options.steps == 2


def test_wrong_argument_types_are_refused():
    optimizer = wrapped()
    with pytest.raises(
        gradaccum.ArgumentTypeError, match=r"mindspore\.load_checkpoint\("
    ):
        load_checkpoint_into(optimizer, "run.ckpt")
    with pytest.raises(gradaccum.ArgumentTypeError, match="cell"):
        load_checkpoint_into({}, optimizer)
    with pytest.raises(gradaccum.ArgumentTypeError, match=r"gradaccum\.wrap"):
        FlushAtEpochEnd(nn.SGD(two_parameters(), 1.0))
