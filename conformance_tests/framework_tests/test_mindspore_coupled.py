"""`gradaccum_mindspore.coupled_value_and_grad` beyond the shared suite: nests, dropout,
statistics, and calls that raise.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

from gradaccum import ArgumentValueError, UsageError
from gradaccum_mindspore.large_batch.coupled import coupled_value_and_grad
from gradaccum_mindspore.large_batch.value_and_grad import value_and_grad

from .mindspore_common import pynative_after, set_mode  # noqa: F401
from .mindspore_large_batch import (
    Net,
    X,
    distance,
    from_python,
    in_mode,
    seed,  # noqa: F401
    tensors,
    trained,
)


def squared_sum(outputs):
    return (outputs.sum(0) ** 2).sum()


@from_python
def test_nests_of_outputs(mode):
    """A tuple in a dict, two rows per item, and labels that are no floating numbers."""
    net = Net()

    def outputs_fn(x, labels):
        found = net(x)
        return {"two": (found, ops.concat((found, 2 * found), 0)), "labels": labels}

    def loss_fn(outputs):
        a, b = outputs["two"]
        share = (outputs["labels"] == 1).astype(a.dtype).reshape((-1, 1))
        return (a * share).sum() ** 2 + (b.sum(0) ** 2).mean()

    def whole(x, labels):
        return loss_fn(outputs_fn(x, labels))

    batch = (*tensors(X), Tensor(np.arange(7) % 3, ms.int32))
    expected = ms.value_and_grad(whole, None, trained(net))(*batch)
    made = coupled_value_and_grad(
        outputs_fn, loss_fn, trained(net), micro_batch_size=2, modules=(net,)
    )
    assert distance(in_mode(mode, made)(*batch), expected) <= 1e-13


@pytest.mark.parametrize("seed", [None, 11], indirect=True)
@pytest.mark.parametrize("kind", ["layer", "operator"])
@from_python
def test_dropout_replays(mode, kind, seed):  # noqa: F811
    """The gradient by the input of a dropout shows its mask; outputs show the mask of
    the first pass. Both are one.
    """
    weight = Parameter(Tensor(np.ones((7, 64)), ms.float32), name="w")
    dropout = nn.Dropout(p=0.5).set_train()
    kept = []
    operator = dropout.dropout

    def outputs_fn(rows):
        found = ops.matmul(rows, weight)
        return dropout(found) if kind == "layer" else ops.dropout(found, 0.5)

    def loss_fn(outputs):
        kept.append(outputs.asnumpy())
        return outputs.sum() + 0 * squared_sum(outputs)

    made = coupled_value_and_grad(
        outputs_fn, loss_fn, weight, steps=4, modules=(dropout,)
    )
    _, gradient = in_mode(mode, made)(Tensor(np.eye(7), ms.float32))
    np.testing.assert_array_equal(gradient.asnumpy(), kept[0])
    assert set(np.unique(kept[0])) == {0.0, 2.0}
    assert len({row.tobytes() for row in kept[0]}) == 7, "no two items share a mask"
    assert dropout.dropout is operator
    assert ms.get_seed() == seed, "the seed that was lent is gone"


@from_python
def test_statistics_move_once(mode):
    """Three micro-batches move a BatchNorm's mean three times, not six."""
    norm, alone = (nn.BatchNorm1d(4, momentum=0.5).set_train() for _ in range(2))
    x = Tensor(X[:6], ms.float32)
    made = coupled_value_and_grad(norm, squared_sum, trained(norm), steps=3)
    in_mode(mode, made)(x)
    set_mode("pynative")
    for first in (0, 2, 4):
        alone(x[first : first + 2])
    assert norm.moving_mean.asnumpy().any()
    for name in ("moving_mean", "moving_variance"):
        found, expected = (getattr(each, name).asnumpy() for each in (norm, alone))
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("failure", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("place", [2, 4, 6], ids=["first pass", "loss", "second pass"])
def test_interrupted(place, failure):
    """MindSpore was recording operators when the user's function raised. Statistics and
    the dropout's operator are as before; the next call is right.
    """
    norm = nn.BatchNorm1d(4).set_train()
    dropout = nn.Dropout(p=0.5).set_train()
    operator = dropout.dropout
    calls = []

    def counted(value):
        calls.append(1)
        if len(calls) == place:
            raise failure("now")
        return value

    def outputs_fn(x):
        outputs = norm(x)
        return counted(outputs + 0 * dropout(outputs))

    def loss_fn(outputs):
        return counted((outputs[0] * outputs[5] ** 2).sum())

    def large_batch(x):
        return loss_fn(ops.concat([norm(x[first : first + 2]) for first in (0, 2, 4)]))

    x = Tensor(X[:6], ms.float32)
    made = coupled_value_and_grad(
        outputs_fn, loss_fn, trained(norm), steps=3, modules=(norm, dropout)
    )
    with pytest.raises(failure, match="now"):
        made(x)
    assert not norm.moving_mean.asnumpy().any()
    assert dropout.dropout is operator
    expected = ms.value_and_grad(large_batch, None, trained(norm))(x)
    assert distance(made(x), expected) <= 1e-5


def other_outputs_again():
    """NumPy draws other numbers in the second pass."""
    weight = Parameter(Tensor(np.ones(4)), name="w")
    made = coupled_value_and_grad(
        lambda x: x * weight * Tensor(np.random.rand()),
        squared_sum,
        weight,
        steps=2,
        modules=(),
    )
    made(*tensors(X))


def compiled_call():
    net = nn.Dense(4, 3)
    made = coupled_value_and_grad(net, squared_sum, trained(net), steps=2)
    in_mode("jit", made)(Tensor(X, ms.float32))


def function_without_its_cells():
    """Their statistics would move twice."""
    norm = nn.BatchNorm1d(4)
    coupled_value_and_grad(lambda x: norm(x), squared_sum, trained(norm), steps=3)


def outputs_not_per_item():
    net = Net()
    call = coupled_value_and_grad(lambda x: net(x)[0], len, [], steps=2, modules=[net])
    call(*tensors(X))


def aux_not_per_item():
    net = Net()
    call = value_and_grad(
        lambda x: [net(x).sum()] * 2,
        None,
        [net.weight],
        True,
        merge_aux="concatenate",
        steps=2,
    )
    call(*tensors(X))


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        (other_outputs_again, UsageError, "outputs_fn: expected a function"),
        (compiled_call, AttributeError, ".*'construct' is not defined"),
        (function_without_its_cells, ArgumentValueError, "modules: expected the Cells"),
        (outputs_not_per_item, ArgumentValueError, "outputs_fn: .*(2,).* 4 items"),
        (aux_not_per_item, ArgumentValueError, "aux: expected the same"),
    ],
)
def test_refused(call, kind, words):
    with pytest.raises(kind, match=f"^{words}"):
        call()
