"""The layered window: the large batch, bit for bit the usual window, with one layer's
gradient alive.
"""

import functools
import gc
from typing import ClassVar

import pytest

ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, ParameterTuple, Tensor, nn, ops  # noqa: E402
from mindspore.experimental import optim  # noqa: E402

import gradaccum  # noqa: E402
import gradaccum_mindspore.layered as layered  # noqa: E402
from benchmarks.questions import mindspore_layered  # noqa: E402
from conformance_tests.framework_tests.mindspore_common import (  # noqa: E402
    HOOKS,
    pynative_after,  # noqa: F401
    set_mode,
)
from conformance_tests.framework_tests.refusing import refused  # noqa: E402
from gradaccum_mindspore import (  # noqa: E402
    layered_backward,
    load_checkpoint_into,
    value_and_grad,
    value_and_update,
)

pytestmark = HOOKS
RNG = np.random.RandomState(0)
X, Y, WEIGHTS = RNG.randn(10, 4), RNG.randn(10, 3), RNG.rand(10)


def dense(inputs, outputs, dtype=ms.float64):
    weight, bias = (
        Tensor(RNG.randn(outputs, inputs), dtype),
        Tensor(RNG.randn(outputs), dtype),
    )
    return nn.Dense(inputs, outputs, weight_init=weight, bias_init=bias, dtype=dtype)


def make(dtype=ms.float64):
    global RNG
    RNG = np.random.RandomState(1)
    return nn.SequentialCell(
        dense(4, 8, dtype),
        nn.SequentialCell(nn.Tanh(), dense(8, 8, dtype)),
        nn.Tanh(),
        dense(8, 3, dtype),
    )


def mean(outputs, targets):
    return (outputs - targets).square().mean()


def summed(outputs, targets):
    return (outputs - targets).square().sum()


def cuts(size=3):
    return [slice(first, first + size) for first in range(0, len(X), size)]


def require_close(found, expected, rtol=1e-12):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.asnumpy(), other.asnumpy(), rtol=rtol, atol=rtol)


def require_same_bits(found, expected):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one.asnumpy(), other.asnumpy())


def weighed_mean(outputs, targets):
    values, weights = targets
    return (weights * (outputs - values).square().sum(1)).sum() / weights.sum()


@pytest.mark.parametrize(
    ("reduction", "loss_fn", "weight"),
    [
        ("mean", weighed_mean, lambda inputs, targets: targets[1].sum()),
        ("mean", weighed_mean, WEIGHTS),
        ("sum", lambda outputs, targets: summed(outputs, targets[0]), None),
        ("item_mean", lambda outputs, targets: summed(outputs, targets[0]), WEIGHTS),
    ],
)
def test_weights(reduction, loss_fn, weight):
    net, targets = make(), (Tensor(Y), Tensor(WEIGHTS))
    loss, gradients = layered_backward(
        net, loss_fn, Tensor(X), targets, steps=4, reduction=reduction, weight=weight
    )
    divisor = WEIGHTS.sum() if reduction == "item_mean" else 1.0
    expected = ms.value_and_grad(
        lambda: loss_fn(net(Tensor(X)), targets) / Tensor(divisor),
        None,
        net.trainable_params(),
    )()
    require_close((loss, *gradients), (expected[0], *expected[1]))


@pytest.mark.parametrize(
    "division", [{"steps": 1}, {"steps": 4}, {"micro_batch_size": 3}]
)
def test_bits_of_the_split_call(division):
    """Of a last micro-batch with one item too; that call's are the large batch's."""
    net = make(ms.float32)
    x, y = Tensor(X, ms.float32), Tensor(Y, ms.float32)
    loss, gradients = layered_backward(net, mean, x, y, **division)
    expected = value_and_grad(
        lambda x, y: mean(net(x), y), None, net.trainable_params(), **division
    )(x, y)
    require_same_bits((loss, *gradients), (expected[0], *expected[1]))


def windows(count=3):
    return [
        (Tensor(X + number, ms.float32), Tensor(Y, ms.float32))
        for number in range(count)
    ]


@pytest.mark.parametrize("kind", [nn.Momentum, nn.Adam, optim.Adam])
def test_updates_of_the_usual_window(kind):
    """Three windows, bit for bit, with an optimizer of each layer."""
    rate = (0.1, 0.9) if kind is nn.Momentum else (0.1,)
    net, usual = make(ms.float32), make(ms.float32)
    optimizers = [
        kind(layer.trainable_params(), *rate)
        for layer in net
        if layer.trainable_params()
    ]
    opt = gradaccum.wrap(
        kind(usual.trainable_params(), *rate), steps=None, on_overflow="ignore"
    )
    backward = ms.value_and_grad(lambda x, y: mean(usual(x), y), None, opt.parameters)
    for x, y in windows():
        layered_backward(net, mean, x, y, steps=4, optimizer=optimizers)
        for rows in cuts():
            opt(backward(x[rows], y[rows])[1], len(x[rows]))
        opt.flush()
    require_same_bits(net.trainable_params(), usual.trainable_params())
    assert (
        np.abs(net[0].weight.asnumpy() - make(ms.float32)[0].weight.asnumpy()).max()
        > 1e-2
    )


@pytest.mark.parametrize(
    ("overflows", "dtype"),
    [(False, ms.float32), (True, ms.float32), (False, ms.float16)],
)
def test_window_of_a_wrapped_optimizer(overflows, dtype):
    """With the options that need the whole norm; its counters and its loss scale
    move.
    """
    scale = gradaccum.DynamicLossScale(2.0**8, growth_interval=1)
    options = {
        "steps": None,
        "clip_norm": 0.5,
        "loss_scale": scale,
        "master_weights": dtype == ms.float16,
    }
    net, usual = make(dtype), make(dtype)
    opt, other = (
        gradaccum.wrap(nn.Momentum(each.trainable_params(), 0.1, 0.9), **options)
        for each in (net, usual)
    )
    update = value_and_update(lambda x, y: mean(usual(x), y), other, steps=4)
    for number, (x, y) in enumerate(
        (x.astype(dtype), y.astype(dtype)) for x, y in windows()
    ):
        if overflows and number == 1:
            x = x * Tensor(np.inf, ms.float32)
        loss, expected = (
            layered_backward(net, mean, x, y, steps=4, optimizer=opt),
            update(x, y),
        )
        np.testing.assert_array_equal(loss.asnumpy(), expected.asnumpy())
        np.testing.assert_equal(opt.result._asdict(), other.result._asdict())
    assert (opt.result.optimizer_step, opt.result.loss_scale) == (
        (2, 2.0**9) if overflows else (3, 2.0**11)
    )
    require_same_bits(net.trainable_params(), usual.trainable_params())


class Noisy(nn.Cell):
    """Dropout, and statistics."""

    def __init__(self):
        super().__init__()
        self.dense, self.norm, self.dropout = (
            dense(4, 4, ms.float32),
            nn.BatchNorm1d(4),
            nn.Dropout(p=0.5),
        )

    def construct(self, x):
        return self.dropout(self.norm(self.dense(x)))


def noisy():
    global RNG
    RNG = np.random.RandomState(1)
    ms.set_seed(3)
    return nn.SequentialCell(Noisy(), Noisy()).set_train()


def test_draws_and_statistics_of_the_usual_window():
    y = Tensor(Y[:9], ms.float32)
    x = Tensor(X[:9], ms.float32)
    usual = noisy()
    backward = ms.value_and_grad(
        lambda x, y: summed(usual(x)[:, :3], y), None, usual.trainable_params()
    )
    found = [backward(x[rows], y[rows]) for rows in cuts()[:3]]
    net = noisy()
    loss, gradients = layered_backward(
        net, summed_three, x, y, steps=3, reduction="sum"
    )
    np.testing.assert_array_equal(
        loss.asnumpy(), np.sum([loss.asnumpy() for loss, _ in found], dtype=np.float32)
    )
    require_same_bits(
        gradients,
        [
            one + two + three
            for one, two, three in zip(*(each for _, each in found), strict=True)
        ],
    )
    require_same_bits(net.untrainable_params(), usual.untrainable_params())
    assert len(net.untrainable_params()) == 4
    assert (net[0].norm.moving_mean.asnumpy() != 0).all()


def test_draws_that_do_not_repeat_are_refused():
    """And statistics are as before: nothing was updated."""
    ms.set_seed(3)
    net = nn.SequentialCell(Noisy(), nn.Dropout2d(p=0.5)).set_train()
    before = [each.asnumpy().copy() for each in net.get_parameters()]
    x = Tensor(X, ms.float32)
    with refused(gradaccum.UsageError, "layers[1]", "same bits"):
        layered_backward(
            [net[0], lambda x: net[1](x.reshape(len(x), 4, 1, 1))],
            lambda outputs, y: outputs.square().sum(),
            x,
            x,
            steps=2,
        )
    for value, parameter in zip(before, net.get_parameters(), strict=True):
        np.testing.assert_array_equal(parameter.asnumpy(), value)


class Counted(nn.SGD):
    """Notes which one was called."""

    called: ClassVar = []

    def __init__(self, name, parameters):
        super().__init__(parameters, 0.5)
        self.label = name

    def __call__(self, gradients):
        self.called.append(self.label)
        return super().__call__(gradients)


class Embed(nn.Cell):
    def __init__(self, table):
        super().__init__()
        self.table = table

    def construct(self, ids):
        return ops.gather(self.table, ids, 0)


class Scores(Embed):
    def construct(self, x):
        return ops.matmul(x, self.table.T)


def tied(dtype):
    """An embedding that is the head too, around a frozen layer and one that is
    trained.
    """
    table, frozen, head = (
        Parameter(Tensor(RNG.randn(6, 3), dtype), name="table"),
        dense(3, 3, dtype),
        dense(3, 3, dtype),
    )
    frozen.weight.requires_grad = frozen.bias.requires_grad = False
    return (
        [Embed(table), frozen, nn.Tanh(), head, Scores(table)],
        [table, *head.trainable_params()],
        Tensor(RNG.randn(10, 6), dtype),
    )


IDS = Tensor(np.arange(10) % 6, ms.int32)


def test_tied_parameters_wait():
    """Their optimizer is the last one. Ids have no gradient."""
    layers, weights, targets = tied(ms.float64)
    expected = ms.value_and_grad(
        lambda: mean(nn.SequentialCell(layers)(IDS), targets), None, weights
    )()
    loss, gradients = layered_backward(layers, mean, IDS, targets, steps=4)
    require_close((loss, *gradients), (expected[0], *expected[1]))

    layers, weights, targets = tied(ms.float32)
    with pytest.raises(
        gradaccum.ArgumentValueError, match=r"^optimizer: .*table.* in two"
    ):
        layered_backward(
            layers,
            mean,
            IDS,
            targets,
            steps=4,
            optimizer=[nn.SGD(weights[:1], 0.5), nn.SGD(weights[:1], 0.5)],
        )
    _, gradients = layered_backward(layers, mean, IDS, targets, steps=4)
    start = [each.asnumpy().copy() for each in weights]
    Counted.called = []
    layered_backward(
        layers,
        mean,
        IDS,
        targets,
        steps=4,
        optimizer=[Counted("table", weights[:1]), Counted("head", weights[1:])],
    )
    assert Counted.called == ["head", "table"]
    for parameter, value, gradient in zip(weights, start, gradients, strict=True):
        np.testing.assert_allclose(
            parameter.asnumpy(), value - 0.5 * gradient.asnumpy(), rtol=1e-5, atol=1e-6
        )


def pair(layer):
    return lambda x: (layer(x), layer.weight)


cells = [dense(4, 4), dense(4, 4)]
one, two = cells
for number, cell in enumerate(cells):
    for parameter in cell.get_parameters():
        parameter.name = f"{number}.{parameter.name}"

BORDERS = {
    "one Tensor twice": [one, lambda x: (x, x), lambda both: two(both[0]) + both[1]],
    "one Tensor twice in a nest": [
        one,
        lambda x: {"a": x, "b": [x, 3, None]},
        lambda nest: two(nest["a"]) * nest["b"][0],
    ],
    "a Parameter": [
        pair(one),
        lambda both: one(both[0]) + ops.matmul(both[0], both[1]),
    ],
    "as it came": [one, lambda x: x, two],
    "integers beside": [
        one,
        lambda x: (x, x.argmax(1)),
        lambda both: two(both[0]) * both[1].astype(ms.float64).expand_dims(1),
    ],
    "integers alone": [
        one,
        lambda x: x.argmax(1),
        lambda ids: ops.gather(two.weight, ids, 0),
    ],
    "not used": [one, lambda x: ops.ones((len(x), 4), ms.float64), two],
    "one layer twice": [one, nn.Tanh(), one],
    "a partial function": [
        functools.partial(lambda layer, x: layer(x), one),
        nn.Tanh(),
        one,
    ],
    "a default": [lambda x, layer=one: layer(x), nn.Tanh(), one],
}


@pytest.mark.parametrize("name", BORDERS)
def test_what_layers_hand_on(name):
    layers, targets = BORDERS[name], Tensor(RNG.randn(10, 4))
    loss, gradients = layered_backward(layers, mean, Tensor(X), targets, steps=4)
    weights = [
        *one.trainable_params(),
        *(two.trainable_params() if len(gradients) > 2 else []),
    ]

    def whole():
        x = Tensor(X)
        for layer in layers:
            x = layer(x)
        return mean(x, targets)

    expected = ms.value_and_grad(whole, None, ms.ParameterTuple(weights))()
    require_close((loss, *gradients), (expected[0], *expected[1]))


@pytest.mark.parametrize("optimizer", [None, [nn.SGD(one.trainable_params(), 0.5)]])
def test_hidden_parameters_are_refused(optimizer):
    """Their gradients would be missing."""
    call = nn.Cell.__call__
    with refused(gradaccum.ArgumentValueError, "layers[1]", "0.weight", "closure"):
        layered_backward(
            [one, lambda x: cells[0](x)],
            mean,
            Tensor(X),
            Tensor(X),
            steps=4,
            optimizer=optimizer,
        )
    with refused(gradaccum.ArgumentValueError, "loss_fn", "0.weight"):
        layered_backward(
            [one],
            lambda x, y: mean(cells[0](x), y),
            Tensor(X),
            Tensor(X),
            steps=4,
            optimizer=optimizer,
        )
    assert nn.Cell.__call__ is call


def test_own_loss_scale_of_an_optimizer():
    """It divides by that, so it gets the gradient times that."""
    nets = [make(ms.float32), make(ms.float32)]
    for net, scale in zip(nets, (1.0, 1024.0), strict=True):
        layered_backward(
            net,
            mean,
            *windows(1)[0],
            steps=4,
            optimizer=[nn.SGD(net.trainable_params(), 0.5, loss_scale=scale)],
        )
    require_same_bits(nets[0].trainable_params(), nets[1].trainable_params())


def test_statistics_stay_with_an_update():
    """A listener raises after it."""
    net = noisy()
    opt = gradaccum.wrap(nn.SGD(net.trainable_params(), 0.5), steps=None)
    opt.add_listener(lambda window: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        layered_backward(
            net,
            summed_three,
            Tensor(X, ms.float32),
            Tensor(Y, ms.float32),
            steps=2,
            optimizer=opt,
        )
    assert opt.result.optimizer_step == 1
    assert (net[0].norm.moving_mean.asnumpy() != 0).all()


def summed_three(outputs, targets):
    return summed(outputs[:, :3], targets)


def test_what_stands_before_the_first_trained_layer_runs_once():
    layers, _, targets = tied(ms.float64)
    runs = []

    def prelude(ids):
        runs.append(len(ids))
        return ops.ones((len(ids), 3), ms.float64)

    layered_backward([prelude, *layers[1:4], dense(3, 6)], mean, IDS, targets, steps=5)
    assert runs == [2] * 5


def test_loss_with_parameters_and_other_outputs():
    net, head = make(), dense(3, 3)

    def loss_fn(outputs, targets):
        outputs = head(outputs)
        return mean(outputs, targets), outputs.max()

    (loss, largest), gradients = layered_backward(
        net, loss_fn, Tensor(X), Tensor(Y), steps=4, aux="max"
    )
    weights = [*net.trainable_params(), *head.trainable_params()]
    expected = ms.value_and_grad(
        lambda: mean(head(net(Tensor(X))), Tensor(Y)), None, weights
    )()
    require_close((loss, *gradients), (expected[0], *expected[1]))
    np.testing.assert_allclose(
        largest.asnumpy(), head(net(Tensor(X))).asnumpy().max(), rtol=1e-12
    )


WIDTH, DEPTH = 64, 8
ELEMENTS = WIDTH * WIDTH


def alive():
    """How many tensors of the size of a weight there are."""
    gc.collect()
    return sum(
        1
        for each in gc.get_objects()
        if issubclass(type(each), Tensor) and each.size == ELEMENTS
    )


def test_one_layer_s_gradient_is_alive(monkeypatch):
    """At an update its gradient alone; before it the sum, one micro-batch's gradient,
    and the part to add, of one parameter.
    """
    layers = nn.SequentialCell(
        [nn.Dense(WIDTH, WIDTH, has_bias=False) for _ in range(DEPTH)]
    )
    optimizers = [nn.SGD(layer.trainable_params(), 0.1) for layer in layers]
    x, at_update, at_add = Tensor(np.ones((8, WIDTH)), ms.float32), [], []
    real_call, real_add = nn.SGD.__call__, layered.sums.add_into

    def call(self, gradients):
        at_update.append(alive() - before)
        return real_call(self, gradients)

    def add_into(total, part):
        at_add.append(alive() - before)
        real_add(total, part)

    monkeypatch.setattr(nn.SGD, "__call__", call)
    monkeypatch.setattr(layered.sums, "add_into", add_into)
    before = alive()
    # compiles the optimizers
    layered_backward(layers, mean, x, x, steps=4, optimizer=optimizers)
    at_update.clear()
    at_add.clear()
    before = alive()
    layered_backward(layers, mean, x, x, steps=4, optimizer=optimizers)
    assert at_update == [1] * DEPTH
    assert max(at_add) <= 3
    assert alive() == before


def test_benchmark_s_contestants_agree():
    (usual, weight), (found, found_weight) = (
        mindspore_layered.update_of(way, 3, 8, 2)()
        for way in ("usual window", "layered")
    )
    np.testing.assert_allclose(found, usual, rtol=1e-6)
    np.testing.assert_allclose(found_weight, weight, rtol=0, atol=1e-6)


class Raises(nn.SGD):
    armed = True

    def __call__(self, gradients):
        if self.armed:
            raise ZeroDivisionError
        return super().__call__(gradients)


def test_updates_that_were_made_are_named():
    """The optimizers are refused until a checkpoint is loaded."""
    net = make(ms.float32)
    optimizers = [
        kind(layer.trainable_params(), 0.5)
        for kind, layer in ((Raises, net[0]), (nn.SGD, net[1]), (nn.SGD, net[3]))
    ]
    for number, optimizer in enumerate(optimizers):
        for parameter in optimizer.get_parameters():
            if not parameter.name.endswith(("weight", "bias")):
                parameter.name = f"{number}.{parameter.name}"
    held = nn.CellList([net, *optimizers], auto_prefix=False)
    saved = {
        each.name: Tensor(each.asnumpy().copy(), each.dtype)
        for each in held.get_parameters()
    }
    x, y = windows(1)[0]
    with pytest.raises(ZeroDivisionError) as caught:
        layered_backward(net, mean, x, y, steps=4, optimizer=optimizers)
    (note,) = caught.value.__notes__
    assert (
        "layers[3], layers[1], layers[0] were made before this error, the last one"
        " perhaps in part" in note
    )
    Raises.armed = False
    with refused(gradaccum.UsageError, "optimizer", "load_checkpoint_into"):
        layered_backward(net, mean, x, y, steps=4, optimizer=optimizers)
    load_checkpoint_into(held, saved)
    layered_backward(net, mean, x, y, steps=4, optimizer=optimizers)
    again = make(ms.float32)
    layered_backward(
        again, mean, x, y, steps=4, optimizer=[nn.SGD(again.trainable_params(), 0.5)]
    )
    require_same_bits(net.trainable_params(), again.trainable_params())


@pytest.mark.parametrize("run", [3, 7])
def test_an_error_before_the_updates_leaves_all_as_it_was(run):
    """Also in a backward pass, when there are sums."""
    net = make(ms.float32)
    opt = gradaccum.wrap(nn.SGD(net.trainable_params(), 0.5), steps=None)
    x, y = windows(1)[0]
    layered_backward(net, mean, x, y, steps=4, optimizer=opt)
    before = opt.result
    seen = []

    def fails(x):
        seen.append(0)
        return x if len(seen) < run else 1 / 0

    with pytest.raises(ZeroDivisionError):
        layered_backward(
            [*net[:2], fails, *net[2:]], mean, x, y, steps=4, optimizer=opt
        )
    assert len(seen) == run
    assert opt.result == before
    assert all((total.asnumpy() == 0).all() for total in opt.storage.sums)
    layered_backward(net, mean, x, y, steps=4, optimizer=opt)
    assert opt.result.optimizer_step == 2


def wrapped(net, **options):
    return gradaccum.wrap(
        nn.SGD(net.trainable_params(), 0.5), **{"steps": None, **options}
    )


def opened(net):
    opt = wrapped(net)
    opt(tuple(ops.zeros_like(each) for each in net.trainable_params()))
    return opt


def frozen(net):
    net[0].weight.requires_grad = False
    return {}


MISUSE = {
    "layers: .*list of Cells": lambda net: {"layers": net[0]},
    "layers.0.: .*function": lambda net: {"layers": [3]},
    "layers: .*not empty": lambda net: {"layers": []},
    "loss_fn: ": lambda net: {"loss_fn": None},
    "layers: .*each parameter of the optimizers": lambda net: {
        "layers": [net[0]],
        "optimizer": [nn.SGD(net.trainable_params(), 0.5)],
    },
    "layers: .*requires_grad": lambda net: {
        "optimizer": [nn.SGD(net.trainable_params(), 0.5)],
        **frozen(net),
    },
    "optimizer: .*list of optimizers": lambda net: {
        "optimizer": nn.SGD(net.trainable_params(), 0.5)
    },
    "optimizer: .*a list of": lambda net: {"optimizer": []},
    "optimizer: .*MindSpore's own": lambda net: {"optimizer": [wrapped(net)]},
    "optimizer: .*steps=None": lambda net: {"optimizer": wrapped(net, steps=2)},
    "optimizer: .*no open window": lambda net: {"optimizer": opened(net)},
    "optimizer: .*noise_scale": lambda net: {
        "optimizer": wrapped(net, noise_scale=True)
    },
    "optimizer: .*on_overflow": lambda net: {
        "optimizer": wrapped(net, on_overflow="drop_micro_batch")
    },
    "reduction: .*'mean'": lambda net: {"optimizer": wrapped(net), "reduction": "sum"},
    "optimizer: .*without data_parallel=": lambda net: {"data_parallel": True},
    "steps": lambda net: {"steps": None},
}


@pytest.mark.parametrize("message", MISUSE)
def test_misuse(message):
    net = make(ms.float32)
    x, y = windows(1)[0]
    given = {
        "layers": net,
        "loss_fn": mean,
        "inputs": x,
        "targets": y,
        "steps": 2,
        **MISUSE[message](net),
    }
    with pytest.raises(gradaccum.GradAccumError, match=f"^{message}"):
        layered_backward(
            given.pop("layers"),
            given.pop("loss_fn"),
            given.pop("inputs"),
            given.pop("targets"),
            **given,
        )


@pytest.mark.parametrize("mode", ["graph", "jit", "a cell in graph mode"])
def test_compiled_code_is_refused(mode):
    net = make()
    set_mode("pynative" if mode == "jit" else "graph")

    def step(x, y):
        return layered_backward(net, mean, x, y, steps=2)

    class Step(nn.Cell):
        def construct(self, x, y):
            return step(x, y)

    with refused(gradaccum.UsageError, "layered_backward", "PYNATIVE_MODE"):
        {"graph": step, "jit": ms.jit(step)}.get(mode, Step())(Tensor(X), Tensor(Y))


def test_compiled_layer_is_right():
    net = make()
    expected = layered_backward(net, mean, Tensor(X), Tensor(Y), steps=2)
    net[1].construct = ms.jit(net[1].construct)
    found = layered_backward(net, mean, Tensor(X), Tensor(Y), steps=2)
    require_close((found[0], *found[1]), (expected[0], *expected[1]))


@pytest.mark.parametrize("dtype", [ms.float32, ms.float64])
def test_why_compiled_code_is_refused(dtype):
    """The smallest program: the compiler copies a weight that two layers' passes read
    in turn, on a CPU through float32.
    """
    first, second = (
        Parameter(Tensor([0.1], dtype), name=name) for name in ("first", "second")
    )
    grad = ops.GradOperation(get_all=True, get_by_list=True, sens_param=True)

    def one(x):
        return x * first

    def two(x):
        return x * second

    back_one, back_two = (
        grad(one, ParameterTuple([first])),
        grad(two, ParameterTuple([second])),
    )

    def window(x, y):
        border, _other = one(x), one(y)
        (by_border,), _ = back_two(border, border)
        _, (_slope,) = back_one(x, by_border)
        return border

    x, y = Tensor([1.0], dtype), Tensor([2.0], dtype)
    exact, compiled = window(x, y).asnumpy()[0], ms.jit(window)(x, y).asnumpy()[0]
    assert (compiled == exact) == (dtype == ms.float32), (
        "compiled code is exact: layered_backward may run there now"
    )
