"""Wrong calls raise and name the fix. Calls that only look wrong give the exact
result.
"""

import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, amp, nn
from mindspore.communication import GlobalComm
from mindspore.experimental import optim
from mindspore.experimental.optim import lr_scheduler
from mindspore.train import RunContext
from mindspore.train.callback import _InternalCallbackParam

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    make_net,
    pynative_after,  # noqa: F401
    two_parameters,
    values,
)
from gradaccum import (
    ArgumentTypeError,
    ArgumentValueError,
    CheckpointError,
    GradientError,
    UsageError,
)
from gradaccum_mindspore import (
    FlushAtEpochEnd,
    TrainOneStepCell,
    WatchWindows,
    load_checkpoint_into,
    value_and_update,
)
from gradaccum_mindspore.workers import agreement


def ones(a=1.0, b=1.0):
    return Tensor(np.full(3, a, np.float32)), (
        None if b is None else Tensor(np.full(2, b, np.float32))
    )


def bare(**options):
    return nn.SGD(two_parameters(), 1.0, **options)


def wrapped(steps=2, **options):
    return gradaccum.wrap(bare(), steps=steps, **options)


def of_one(parameter, **options):
    inner = nn.SGD([Parameter(Tensor([1.0]), name=parameter)], 1.0)
    return gradaccum.wrap(inner, steps=2, **options)


def scaler_of_two():
    scaler = amp.DynamicLossScaler(8.0, 2, 1)
    return wrapped(loss_scale=scaler), of_one("q", name="other", loss_scale=scaler)


def watched_sink():
    """On a CPU MindSpore turns the sink off."""
    callback = WatchWindows(wrapped(), print)
    parameters = _InternalCallbackParam(
        list_callback=[callback], dataset_sink_mode=True
    )
    callback.on_train_begin(RunContext(parameters))


def of_two_equal_names():
    optimizer = wrapped()
    cell = nn.CellList([optimizer], auto_prefix=False)
    cell.twin = Parameter(Tensor([0.0]), name="a")
    entries = {p.name: Tensor(p.asnumpy()) for p in optimizer.get_parameters()}
    load_checkpoint_into(cell, entries)


REFUSED = {
    "steps that change": (
        lambda: setattr(wrapped(), "steps", 3),
        UsageError,
        "steps: ",
    ),
    "a scale that is assigned": (
        lambda: setattr(wrapped(loss_scale=4.0), "loss_scale", 2.0),
        UsageError,
        "loss_scale: ",
    ),
    "wrapped twice": (
        lambda: gradaccum.wrap(wrapped(), steps=2),
        ArgumentTypeError,
        "optimizer: ",
    ),
    "a further group": (
        lambda: gradaccum.wrap(
            optim.SGD(two_parameters()[:1], 1.0), steps=2
        ).add_param_group({"params": two_parameters()[1:]}),
        UsageError,
        ".*before the optimizer is wrapped",
    ),
    "two loss scales": (
        lambda: gradaccum.wrap(bare(loss_scale=4.0), steps=2, loss_scale=4.0),
        ArgumentValueError,
        "loss_scale: .*4.*Leave loss_scale out of the optimizer",
    ),
    "a scaler of two optimizers": (
        scaler_of_two,
        ArgumentValueError,
        "loss_scale: .*drives.*of its own",
    ),
    "a parameter named as the state": (
        lambda: of_one("g.gradaccum.bias", name="g"),
        ArgumentValueError,
        r"name: .*g\.gradaccum\.bias",
    ),
    "a file's name": (
        lambda: load_checkpoint_into(wrapped(), "run.ckpt"),
        ArgumentTypeError,
        r".*mindspore\.load_checkpoint\(",
    ),
    "no cell": (
        lambda: load_checkpoint_into({}, wrapped()),
        ArgumentTypeError,
        "cell: ",
    ),
    "a name that stands twice": (of_two_equal_names, CheckpointError, "cell: .*a"),
    "a flush of a bare optimizer": (
        lambda: FlushAtEpochEnd(bare()),
        ArgumentTypeError,
        r".*gradaccum\.wrap",
    ),
    "a cell of a bare optimizer": (
        lambda: TrainOneStepCell(make_net(), bare()),
        ArgumentTypeError,
        "optimizer: .*wrap",
    ),
    "a number for all weights": (
        lambda: TrainOneStepCell(make_net(), wrapped(), weight=4),
        ArgumentTypeError,
        "weight: ",
    ),
    "a number that listens": (
        lambda: wrapped().add_listener(3),
        ArgumentTypeError,
        ".*a function of one ClosedWindow",
    ),
    "a number that watches": (
        lambda: WatchWindows(wrapped(), 3),
        ArgumentTypeError,
        ".*a function of one ClosedWindow",
    ),
    "a bare optimizer that is watched": (
        lambda: WatchWindows(bare(), print),
        ArgumentTypeError,
        ".*a wrapped optimizer",
    ),
    "a sink that is watched": (watched_sink, UsageError, ".*dataset_sink_mode=False"),
    "a scheduler of a bare optimizer": (
        lambda: gradaccum.wrap(
            lr_scheduler.StepLR(optim.SGD(two_parameters(), 0.1), 2)
        ),
        ArgumentTypeError,
        ".*built on a wrapped optimizer; got a StepLR on SGD",
    ),
    "an update of a bare optimizer": (
        lambda: value_and_update(lambda x: x, bare(), steps=2),
        ArgumentTypeError,
        "optimizer: expected a wrapped optimizer",
    ),
}


@pytest.mark.parametrize(("call", "kind", "words"), REFUSED.values(), ids=REFUSED)
def test_refused(call, kind, words):
    with pytest.raises(kind, match=f"^{words}"):
        call()


BAD_GRADIENTS = {
    "count": lambda a, b: (a,),
    "shape": lambda a, b: (b, a),
    "dtype": lambda a, b: (a, b.astype(ms.int32)),
    "names": lambda a, b: {"a": a, "c": b},
}


@pytest.mark.parametrize("make", BAD_GRADIENTS.values(), ids=BAD_GRADIENTS)
def test_compiled_code_refuses_gradients(make):
    optimizer = wrapped()

    @ms.jit
    def step(gradients):
        return optimizer(gradients)

    with pytest.raises(GradientError, match="expected"):
        step(make(*ones()))
    assert optimizer.result.micro_step == 0


@pytest.mark.parametrize(
    ("weight", "words"),
    [(-2.0, "weight"), (True, "weight"), (Tensor([1.0, 2.0]), r"weight\.sum")],
    ids=str,
)
def test_compiled_code_refuses_a_constant_weight(weight, words):
    optimizer = wrapped()

    @ms.jit
    def step(a, b):
        return optimizer((a, b), weight=weight)

    with pytest.raises(gradaccum.GradAccumError, match=words):
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


def test_sparse_gradient_is_refused():
    net = nn.EmbeddingLookup(20, 4)
    optimizer = gradaccum.wrap(nn.Adam(net.trainable_params(), 0.1), steps=2)
    backward = ms.grad(net, None, optimizer.parameters)

    @ms.jit
    def step(tokens):
        return optimizer(backward(tokens))

    with pytest.raises(GradientError, match="RowTensor"):
        step(Tensor([1, 2, 3], ms.int32))


@pytest.mark.parametrize("mode", ["pynative", "jit"])
def test_what_is_not_the_gradients_is_named(mode):
    """A pair of a loss and its gradients, and the gradients by another list of the
    parameters, as an optimizer with groups has one.
    """
    a, b = two_parameters()
    optimizer = gradaccum.wrap(nn.SGD([{"params": [b]}, {"params": [a]}], 1.0), steps=2)

    def loss_of(x):
        return (x * a).sum() + b.sum()

    of_groups = ms.value_and_grad(loss_of, None, optimizer.parameters)
    of_the_net = ms.value_and_grad(loss_of, None, [a, b])

    def pair(x):
        return optimizer(of_groups(x))

    def other_order(x):
        return optimizer(of_the_net(x)[1])

    for step, words in (
        (pair, "a pair of a loss and its grad"),
        (other_order, r"gradients in another order.*by optimizer\.parameters"),
    ):
        call = ms.jit(step) if mode == "jit" else step
        with pytest.raises(GradientError, match=words):
            call(Tensor([1.0, 2.0, 3.0]))
    assert optimizer.result.micro_step == 0


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("step", r"then optimizer\(gradients, weight=n\)"),
        ("backward", r"then optimizer\(gradients, weight=n\)"),
        ("zero_grad", "nothing in its place"),
        ("epoch_end", r"optimizer\.epoch\(loader\)"),
        ("micro_step", r"optimizer\.result\.micro_step"),
        ("sgd", ""),
    ],
)
def test_names_of_other_frameworks_are_explained(name, fix):
    words = rf"optimizer\.{name}: expected a name.*{fix}" if fix else "'SGD' object"
    with pytest.raises(AttributeError, match=words):
        getattr(wrapped(), name)
    assert not hasattr(wrapped(), name)


def test_one_worker_needs_no_option(monkeypatch):
    """A program for several workers, started with one."""
    monkeypatch.setattr(GlobalComm, "INITED", True)
    monkeypatch.setattr(agreement, "get_group_size", lambda: 1)
    wrapped()(ones())


class Own(nn.Optimizer):
    """A user's own, which may update bfloat16."""

    def construct(self, gradients):
        return gradients


def test_bfloat16_needs_masters_on_a_cpu():
    """Every optimizer of MindSpore's would raise, after a whole window."""
    halves = two_parameters(ms.bfloat16)
    for inner in (nn.AdamWeightDecay(halves, 0.1), optim.Adam(halves, 0.1)):
        with pytest.raises(
            ArgumentValueError, match="master_weights: expected True for bfloat16"
        ):
            gradaccum.wrap(inner, steps=2)
        gradaccum.wrap(inner, steps=2, master_weights=True)
    gradaccum.wrap(Own(0.1, two_parameters(ms.bfloat16)), steps=2)
    gradaccum.wrap(nn.SGD(two_parameters(ms.float16), 0.1), steps=2)


class Pair(nn.Cell):
    """Two wrapped optimizers with the default name in one cell; auto_prefix,
    MindSpore's default, makes it rename the parameters.
    """

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Dense(3, 2), nn.Dense(3, 2)
        self.first, self.second = (
            gradaccum.wrap(nn.Adam(net.trainable_params(), 0.1), steps=4)
            for net in (self.one, self.two)
        )


def test_two_wrapped_optimizers_load_their_checkpoint(tmp_path):
    """Their gradients may come by the names from before too."""
    pair, other = Pair(), Pair()
    for name, optimizer in (("one", pair.first), ("two", pair.second)):
        now = [p.name for p in optimizer.parameters]
        before = [f"{name}.weight", f"{name}.bias"]
        assert now != before
        gradients = [Tensor(np.ones(p.shape, np.float32)) for p in optimizer.parameters]
        for names in (now, before):
            optimizer(dict(zip(names, gradients, strict=True)))
    ms.save_checkpoint(pair, str(tmp_path / "pair.ckpt"))
    load_checkpoint_into(other, ms.load_checkpoint(str(tmp_path / "pair.ckpt")))
    assert other.first.result.micro_step == other.second.result.micro_step == 2
    for mine, theirs in zip(other.get_parameters(), pair.get_parameters(), strict=True):
        np.testing.assert_array_equal(mine.asnumpy(), theirs.asnumpy())
