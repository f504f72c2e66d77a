"""`verify` names the mistake planted in each model, and passes the sound ones. Nothing
of the user's is changed.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterable
from typing import Any

import mindspore as ms
import mindspore.common.seed  # the module; `mindspore.common` has functions of its name
import numpy as np
import pytest
from mindspore import nn, ops

import gradaccum
from gradaccum_mindspore import verify

from .mindspore_common import pynative_after  # noqa: F401
from .mindspore_losses import ITEMS, PLANTED, SOUND, Case, Moving, X, Y, net, plain


def verified(case: Case) -> gradaccum.VerificationReport:
    return verify(
        case.model(), case.loss_fn, case.batch, **{"steps": 4, **case.options}
    )


def some(models: Iterable[str], usual: Iterable[str]) -> list[Any]:
    """The names of all `models`; those that are not `usual` are deep: each takes some
    hundred windows of single operators.
    """
    return [
        name if name in usual else pytest.param(name, marks=pytest.mark.deep)
        for name in models
    ]


@pytest.mark.parametrize("name", some(PLANTED, ("batch_norm", "seeding")))
def test_mistake_is_named(name: str) -> None:
    report = verified(PLANTED[name])
    assert not report.equivalent
    (cause,) = report.causes
    assert cause.kind == PLANTED[name].kind, str(report)
    assert PLANTED[name].where in cause.where, str(report)


@pytest.mark.parametrize(
    "name", some(SOUND, ("dropout", "layer_norm", "criterion", "closing_over"))
)
def test_sound_model_passes(name: str) -> None:
    report = verified(SOUND[name])
    assert report.equivalent, str(report)
    assert not report.causes


def test_context_is_put_back() -> None:
    """Operators run one by one during the check alone, also if the loss raises."""
    case = SOUND["plain"]

    def raising(model: Any, x: Any, y: Any) -> Any:
        assert ms.get_context("pynative_synchronize")
        raise Boom

    for users in (True, False):
        ms.set_context(pynative_synchronize=users)
        with pytest.raises(Boom):
            verify(case.model(), raising, case.batch)
        assert ms.get_context("pynative_synchronize") is users


def test_random_operator_is_told() -> None:
    """Its numbers cannot be given to the items again."""

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        return plain(model, ops.dropout(x, 0.5, True), y)

    assert [cause.kind for cause in verify(net(), loss_fn, (X, Y)).causes] == [
        "not_repeatable"
    ]


class Boom(Exception):
    pass


def state_of(model: Any) -> list[Any]:
    seeds = sys.modules["mindspore.common.seed"]
    parameters = [parameter.asnumpy().tobytes() for parameter in model.get_parameters()]
    modes = [cell.training for _, cell in model.cells_and_names()]
    attributes = [getattr(cell, "mean", None) for _, cell in model.cells_and_names()]
    operators = [
        id(cell.dropout)
        for _, cell in model.cells_and_names()
        if isinstance(cell, nn.Dropout)
    ]
    randomness = (
        ms.get_seed(),
        dict(seeds._KERNEL_SEED),
        random.getstate(),
        repr(np.random.get_state()),
    )
    return [
        parameters,
        modes,
        attributes,
        operators,
        randomness,
        ms.get_context("mode"),
    ]


@pytest.mark.parametrize("mode", [ms.PYNATIVE_MODE, ms.GRAPH_MODE])
@pytest.mark.parametrize("raises", [False, True])
def test_nothing_of_the_users_changes(raises: bool, mode: int) -> None:
    """Parameters, statistics, attributes, modes, dropouts, random states and the
    context, also if the loss raises in the middle.
    """
    model = net(
        nn.BatchNorm1d(3), Moving(), nn.Dropout(p=0.5), PLANTED["baseline"].model()[1]
    )
    model[3].set_train(False)

    def loss_fn(model: Any, x: Any, y: Any) -> Any:
        np.random.random()
        random.random()
        loss = plain(model, ops.dropout(x, 0.5, True), y)
        if raises and x.shape[0] != ITEMS:
            raise Boom
        return loss

    ms.set_context(mode=mode)
    before = state_of(model)
    if raises:
        with pytest.raises(Boom):
            verify(model, loss_fn, (X, Y), 2)
    else:
        assert not verify(model, loss_fn, (X, Y), 2).equivalent
    assert state_of(model) == before


def test_loss_of_several_elements_is_refused() -> None:
    """MindSpore would differentiate their sum."""
    with pytest.raises(gradaccum.ArgumentValueError, match="scalar"):
        verify(net(), lambda model, x, y: model(x), (X, Y))


def test_error_leaves_nothing_recorded() -> None:
    """After it a gradient of layer norm would be taken for a second derivative, which
    MindSpore has not.
    """
    case = SOUND["plain"]

    def raising(model: Any, x: Any, y: Any) -> Any:
        case.loss_fn(model, x, y)
        raise Boom

    with pytest.raises(Boom):
        verify(case.model(), raising, case.batch)
    layer = ms.nn.LayerNorm((4,))
    x = ms.Tensor([[1.0, 2.0, 4.0, 8.0]], ms.float32)
    _, gradients = ms.value_and_grad(
        lambda x: (layer(x) ** 3).sum(), None, layer.trainable_params()
    )(x)
    assert all(np.isfinite(each.asnumpy()).all() for each in gradients)
