"""Wrong calls raise and name the fix. Calls that only look wrong give the exact
result.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn, ops
from mindspore.communication import GlobalComm
from mindspore.experimental import optim
from mindspore.experimental.optim import lr_scheduler

import gradaccum
from conformance_tests.programs import run_python
from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    CheckpointError,
    GradientError,
    UsageError,
)
from gradaccum_mindspore import TrainOneStepCell, load_checkpoint_into
from gradaccum_mindspore.workers import agreement

from .mindspore_common import (
    entries_of,
    pynative_after,  # noqa: F401
    two_gradients,
    two_parameters,
    values,
)


def bare(**options):
    return nn.SGD(two_parameters(), 1.0, **options)


def wrapped(steps=2, **options):
    return gradaccum.wrap(bare(), steps=steps, **options)


def experimental():
    return optim.SGD(two_parameters(), 1.0)


def of_two_equal_names():
    optimizer = wrapped()
    cell = nn.CellList([optimizer], auto_prefix=False)
    cell.twin = Parameter(Tensor([0.0]), name="a")
    load_checkpoint_into(cell, entries_of(optimizer))


REFUSED = {
    "steps that change": (
        lambda: setattr(wrapped(), "steps", 3),
        UsageError,
        "steps: ",
    ),
    "wrapped twice": (
        lambda: gradaccum.wrap(wrapped(), steps=2),
        ArgumentTypeError,
        "optimizer: ",
    ),
    "a loss scale of the optimizer": (
        lambda: gradaccum.wrap(bare(loss_scale=4.0), steps=2),
        ArgumentValueError,
        "optimizer: .*4.*Leave loss_scale out of the optimizer",
    ),
    "a scaler of MindSpore's": (
        lambda: wrapped(loss_scale=amp.DynamicLossScaler(8.0, 2, 1)),
        ArgumentTypeError,
        "loss_scale: .*DynamicLossScale",
    ),
    "a scheduler of the inner optimizer": (
        lambda: gradaccum.wrap(lr_scheduler.StepLR(experimental(), 1)),
        ArgumentTypeError,
        "scheduler: .*SGD",
    ),
    "a group after wrapping": (
        lambda: gradaccum.wrap(experimental(), steps=2).add_param_group({}),
        UsageError,
        "param_group: .*the constructor",
    ),
    "a scale as the weight": (
        lambda: TrainOneStepCell(nn.Dense(2, 2), wrapped(), 1024.0),
        ArgumentTypeError,
        "weight: .*1024.*loss_scale=",
    ),
    "a loss with outputs": (
        lambda: gradaccum.verify(
            nn.Dense(2, 2), lambda net, x: (net(x).mean(), x), (ops.ones((4, 2)),)
        ),
        ArgumentValueError,
        "loss_fn: .*tuple",
    ),
    "a training cell in another one": (
        lambda: nn.TrainOneStepCell(
            TrainOneStepCell(nn.Dense(2, 2), wrapped()), wrapped()
        ),
        UsageError,
        r"set_grad\(\): ",
    ),
    "a name that stands twice": (of_two_equal_names, CheckpointError, "cell: .*a"),
}


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(call, kind, words):
    with pytest.raises(kind, match=f"^{words}"):
        call()


TRACE = """
import mindspore as ms
from mindspore import Parameter, Tensor, nn
import gradaccum
from gradaccum_mindspore import coupled_value_and_grad, value_and_grad, value_and_update

x = Tensor([2.0, 2.0])
p, q = (Parameter(Tensor([1.0, 1.0]), name=name) for name in "pq")
optimizer = gradaccum.wrap(nn.SGD([p], 1.0), steps=2)
other = gradaccum.wrap(nn.SGD([q], 1.0), steps=None, name="other")
calls = (
    lambda: optimizer((x,)),
    optimizer.flush,
    optimizer.discard,
    lambda: value_and_grad(abs, None, [p], steps=2)(x),
    lambda: value_and_update(abs, other, steps=2)(x),
    lambda: coupled_value_and_grad(abs, abs, [p], steps=2, modules=())(x),
)
for call in calls:
    @ms.jit(capture_mode="trace")
    def step(x):
        call()
        return x

    for _ in range(2):
        try:
            step(x)
        except gradaccum.UsageError as error:
            print(str(error).split(":")[0])
for _ in range(2):
    optimizer((x + 0,))
print(p.asnumpy()[0])
"""


def test_tracing_is_refused(tmp_path):
    """A trace would repeat its first micro-batch's work and never update. MindSpore
    crashes if the refusal leaves it tracing. It also reads the source of every caller,
    which pytest has not.
    """
    (tmp_path / "trace.py").write_text(TRACE)
    ran = run_python(str(tmp_path / "trace.py"))
    found = ran.stdout.split()
    assert found == ["capture_mode"] * 12 + ["-1.0"], ran.stderr[-2000:]


BAD_GRADIENTS = {
    "count": lambda a, b: (a,),
    "shape": lambda a, b: (b, a),
    "dtype": lambda a, b: (a, b.astype(ms.int32)),
}


@pytest.mark.parametrize("make", BAD_GRADIENTS.values(), ids=BAD_GRADIENTS)
def test_compiled_code_refuses_gradients(make):
    optimizer = wrapped()

    @ms.jit
    def step(gradients):
        return optimizer(gradients)

    with pytest.raises(GradientError, match=r"expected.*optimizer\.parameters"):
        step(make(*two_gradients()))
    assert optimizer.result.micro_step == 0


@pytest.mark.parametrize("policy", ["skip_window", "drop_micro_batch"])
@pytest.mark.parametrize("weight", [-2.0, True, (3, 2)])
def test_compiled_code_refuses_a_constant_weight(weight, policy):
    optimizer = wrapped(reduction="sum_per_item", on_overflow=policy)

    @ms.jit
    def step(a, b):
        return optimizer((a, b), weight=weight)

    with pytest.raises(gradaccum.GradAccumError, match="weight"):
        step(*two_gradients())
    assert optimizer.result.micro_step == 0


def test_constant_weight_zero_adds_nothing():
    optimizer = wrapped()

    @ms.jit
    def step(bad, worse, *good):
        optimizer((bad, worse), 0)
        return optimizer(good, 1)

    assert step(*two_gradients(np.inf, np.nan), *two_gradients(2.0, 4.0))
    assert values(optimizer) == [-1.0, -3.0]


def test_one_worker_needs_no_option(monkeypatch):
    """A program for several workers, started with one."""
    monkeypatch.setattr(GlobalComm, "INITED", True)
    monkeypatch.setattr(agreement, "get_group_size", lambda: 1)
    wrapped()(two_gradients())


class Pair(nn.Cell):
    """Two wrapped optimizers with the default name in one cell; auto_prefix,
    MindSpore's default, makes it rename the parameters.
    """

    def __init__(self):
        super().__init__()
        self.one = nn.Dense(3, 2)
        self.two = nn.Dense(3, 2)
        self.first, self.second = (
            gradaccum.wrap(nn.Adam(net.trainable_params(), 0.1), steps=4)
            for net in (self.one, self.two)
        )


def test_two_wrapped_optimizers_load_their_checkpoint(tmp_path):
    pair = Pair()
    other = Pair()
    for optimizer in (pair.first, pair.second):
        gradients = [Tensor(np.ones(p.shape, np.float32)) for p in optimizer.parameters]
        for _ in range(2):
            optimizer(gradients)
    ms.save_checkpoint(pair, str(tmp_path / "pair.ckpt"))
    load_checkpoint_into(other, ms.load_checkpoint(str(tmp_path / "pair.ckpt")))
    assert other.first.result.micro_step == other.second.result.micro_step == 2
    for mine, theirs in zip(other.get_parameters(), pair.get_parameters(), strict=True):
        np.testing.assert_array_equal(mine.asnumpy(), theirs.asnumpy())
