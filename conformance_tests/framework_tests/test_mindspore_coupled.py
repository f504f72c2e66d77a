"""`gradaccum_mindspore.coupled_value_and_grad`: losses that couple the items of a
batch, in float64 against the large batch.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import pynative_after, set_mode  # noqa: F401
from conformance_tests.framework_tests.mindspore_large_batch import (
    COMPILED,
    FROM_PYTHON,
    distance,
    in_mode,
    seed,  # noqa: F401
    tensors,
    trained,
)
from conformance_tests.framework_tests.mindspore_towers import (
    IMAGES,
    TEXTS,
    Towers,
    info_nce,
)
from gradaccum_mindspore.large_batch.coupled import coupled_value_and_grad

TOLERANCE = 1e-13


def large_batch(net, loss_fn):
    return ms.value_and_grad(lambda *batch: loss_fn(net(*batch)), None, trained(net))


@pytest.mark.parametrize("mode", FROM_PYTHON)
def test_nests_of_outputs(mode):
    """A tuple in a dict, two rows per item, and labels that are no floating numbers."""
    net, labels = Towers(), Tensor(np.arange(7) % 3, ms.int32)

    def outputs_fn(images, texts, labels):
        found = net(images, texts)
        return {
            "two": (
                found["images"],
                ops.concat((found["texts"], 2 * found["texts"]), 0),
            ),
            "labels": labels,
        }

    def loss_fn(outputs):
        a, b = outputs["two"]
        share = (outputs["labels"] == 1).astype(a.dtype).reshape((-1, 1))
        return (a * share).sum() ** 2 + (b.sum(0) ** 2).mean()

    batch = (*tensors(IMAGES, TEXTS), labels)
    expected = ms.value_and_grad(
        lambda *batch: loss_fn(outputs_fn(*batch)), None, trained(net)
    )(*batch)
    found = in_mode(
        mode,
        coupled_value_and_grad(outputs_fn, loss_fn, trained(net), micro_batch_size=2),
    )(*batch)
    assert distance(found, expected) <= TOLERANCE


@pytest.mark.parametrize("seed", [None, 11], indirect=True)
@pytest.mark.parametrize("kind", ["layer", "operator"])
def test_dropout_replays(kind, seed):  # noqa: F811
    """The gradient by the input of a dropout shows its mask; outputs show the mask of
    the first pass. Both are one.
    """
    assert ms.get_seed() == seed
    weight, dropout, kept = (
        Parameter(Tensor(np.ones((7, 64)), ms.float32), name="w"),
        nn.Dropout(p=0.5).set_train(),
        [],
    )

    def outputs_fn(rows):
        found = ops.matmul(rows, weight)
        return dropout(found) if kind == "layer" else ops.dropout(found, 0.5)

    def loss_fn(outputs):
        kept.append(outputs.asnumpy())
        return outputs.sum() + 0 * (outputs.sum(0) ** 2).sum()

    operator = dropout.dropout
    _, gradient = coupled_value_and_grad(outputs_fn, loss_fn, weight, steps=4)(
        Tensor(np.eye(7), ms.float32)
    )
    np.testing.assert_array_equal(gradient.asnumpy(), kept[0])
    assert set(np.unique(kept[0])) == {0.0, 2.0}
    assert len({row.tobytes() for row in kept[0]}) == 7, "no two items share a mask"
    assert dropout.dropout is operator
    assert ms.get_seed() == seed, "the seed that was lent is gone"


@pytest.mark.parametrize("mode", FROM_PYTHON)
def test_statistics_move_once(mode):
    """Three micro-batches move a BatchNorm's mean three times, not six."""
    norm, alone = (
        nn.BatchNorm1d(4, momentum=0.5).set_train(),
        nn.BatchNorm1d(4, momentum=0.5).set_train(),
    )
    x = Tensor(IMAGES[:6], ms.float32)

    def loss_fn(outputs):
        return (outputs.sum(0) ** 2).sum() + (outputs[0] * outputs[5]).sum()

    in_mode(mode, coupled_value_and_grad(norm, loss_fn, trained(norm), steps=3))(x)
    set_mode("pynative")
    for first in (0, 2, 4):
        alone(x[first : first + 2])
    np.testing.assert_allclose(
        norm.moving_mean.asnumpy(), alone.moving_mean.asnumpy(), rtol=1e-6
    )
    np.testing.assert_allclose(
        norm.moving_variance.asnumpy(), alone.moving_variance.asnumpy(), rtol=1e-6
    )
    assert norm.moving_mean.asnumpy().any()


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("call", [3, 6], ids=["first pass", "second pass"])
def test_interrupted(call, failure):
    """Statistics, the seeds and the dropout's operator are as before; the next call is
    right.
    """
    norm, dropout, calls = (
        nn.BatchNorm1d(4).set_train(),
        nn.Dropout(p=0.5).set_train(),
        [],
    )
    operator, before = dropout.dropout, norm.moving_mean.asnumpy().copy()

    def outputs_fn(x):
        calls.append(1)
        if len(calls) == call:
            raise failure("now")
        return dropout(norm(x))

    made = coupled_value_and_grad(
        outputs_fn, lambda outputs: (outputs.sum(0) ** 2).sum(), trained(norm), steps=3
    )
    with pytest.raises(failure, match="now"):
        made(Tensor(IMAGES[:6], ms.float32))
    np.testing.assert_array_equal(norm.moving_mean.asnumpy(), before)
    assert dropout.dropout is operator
    loss, _ = made(Tensor(IMAGES[:6], ms.float32))
    assert np.isfinite(loss.asnumpy())


@pytest.mark.parametrize("place", ["first pass", "loss", "second pass"])
def test_right_after_an_error(place):
    """MindSpore was recording operators when the user's function raised."""
    net, batch, calls, failing = (
        Towers(),
        tensors(IMAGES, TEXTS),
        [],
        {"first pass": 2, "loss": 4, "second pass": 6}[place],
    )

    def outputs_fn(*batch):
        outputs = net(*batch)
        count()
        return outputs

    def loss_fn(outputs):
        loss = info_nce(net)(outputs)
        count()
        return loss

    def count():
        calls.append(1)
        if len(calls) == failing:
            raise RuntimeError("now")

    made = coupled_value_and_grad(outputs_fn, loss_fn, trained(net), steps=3)
    with pytest.raises(RuntimeError, match="now"):
        made(*batch)
    assert distance(made(*batch), large_batch(net, info_nce(net))(*batch)) <= TOLERANCE


def test_loss_scale():
    """The loss function scales; the wrapped optimizer divides, and clips the large
    batch's gradient.
    """
    net, reference, batch = (
        Towers(ms.float32),
        Towers(ms.float32),
        tensors(IMAGES, TEXTS, dtype=ms.float32),
    )
    optimizer = gradaccum.wrap(
        nn.SGD(net.trainable_params(), 0.1), steps=1, loss_scale=1024.0, clip_norm=0.5
    )
    loss_fn = info_nce(net)

    loss, gradients = coupled_value_and_grad(
        net,
        lambda outputs: optimizer.scale(loss_fn(outputs)),
        optimizer.parameters,
        steps=3,
    )(*batch)
    optimizer(gradients)
    expected, gradients = large_batch(reference, info_nce(reference))(*batch)
    norm = np.sqrt(sum((gradient.asnumpy() ** 2).sum() for gradient in gradients))
    assert abs(loss.asnumpy() / 1024 / expected.asnumpy() - 1) <= 1e-6
    assert abs(optimizer.result.grad_norm / norm - 1) <= 1e-5
    for mine, start, gradient in zip(
        net.trainable_params(), reference.trainable_params(), gradients, strict=True
    ):
        np.testing.assert_allclose(
            mine.asnumpy(),
            start.asnumpy() - 0.1 * gradient.asnumpy() * 0.5 / norm,
            rtol=0,
            atol=1e-6,
        )


def test_other_randomness_is_noticed():
    weight = Parameter(Tensor(np.ones(4)), name="w")

    def outputs_fn(x):
        return x * weight * Tensor(np.random.rand())

    with pytest.raises(
        gradaccum.UsageError,
        match="outputs_fn: expected a function that gives the same outputs again",
    ):
        coupled_value_and_grad(
            outputs_fn, lambda outputs: outputs.sum(), weight, steps=2
        )(*tensors(IMAGES))


def test_dropout_in_compiled_operators_is_refused():
    net = nn.SequentialCell(nn.Dense(4, 3), nn.Dropout(p=0.5)).set_train()
    made = in_mode(
        "graph", coupled_value_and_grad(net, ops.ReduceSum(), trained(net), steps=2)
    )
    with pytest.raises(gradaccum.UsageError, match="a Dropout in training in"):
        made(Tensor(IMAGES, ms.float32))


@pytest.mark.parametrize("mode", COMPILED)
def test_compiled_code(mode):
    net = nn.Dense(4, 3)
    made = in_mode(
        mode, coupled_value_and_grad(net, ops.ReduceSum(), trained(net), steps=2)
    )
    with pytest.raises(
        gradaccum.UsageError,
        match="coupled_value_and_grad: expected a call from Python",
    ):
        made(Tensor(IMAGES, ms.float32))


@pytest.mark.parametrize(
    ("outputs_fn", "loss_fn", "words"),
    [
        (
            lambda x: (x, 3),
            lambda outputs: outputs[0].sum(),
            r"outputs\[1\]: expected an array with a leading axis",
        ),
        (
            lambda x: x.astype(ms.int32),
            lambda outputs: outputs.sum(),
            "outputs_fn: expected a floating output",
        ),
    ],
    ids=["number", "integers"],
)
def test_misuse(outputs_fn, loss_fn, words):
    weight = Parameter(Tensor(np.ones(4)), name="w")
    with pytest.raises(gradaccum.ArgumentValueError, match=words):
        coupled_value_and_grad(
            lambda x: outputs_fn(x * weight), loss_fn, weight, steps=2
        )(*tensors(IMAGES))
