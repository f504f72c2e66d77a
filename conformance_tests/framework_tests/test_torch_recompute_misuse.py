"""Refusals of recomputation: at the call, or before a second run that would differ from the first."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from conformance_tests.framework_tests.torch_recompute import data, make, same, trained
from gradaccum import ArgumentTypeError, ArgumentValueError, UsageError
from gradaccum_torch.recomputation import recompute


def test_changed_parameter_is_refused() -> None:
    """Also one whose value autograd alone would not need."""
    model = recompute(make())
    loss = model(data()).sum()
    with torch.no_grad():
        model[0].bias.add_(1)
    with pytest.raises(UsageError, match="'bias' of Linear"):
        loss.backward()
    assert [each.num_batches_tracked.item() for each in model if isinstance(each, nn.BatchNorm1d)] == [1, 1]


def test_changed_arguments_are_refused() -> None:
    with pytest.raises(UsageError, match="inplace=False"):
        recompute(nn.ReLU(inplace=True))(2 * data().requires_grad_())
    for call in (lambda f, x, y: f(x, y=y), lambda f, x, y: f(x, [y])):
        y = data()
        loss = call(recompute(lambda x, y: (x * (y[0] if isinstance(y, list) else y)).sum()), data().requires_grad_(), y)
        y.add_(1)
        with pytest.raises(RuntimeError, match="inplace operation"):
            loss.backward()


def test_lent_parameters_are_refused() -> None:
    """`torch.func.functional_call` lends them for the forward pass alone."""
    model = recompute(make())
    lent = {name: (2 * p.detach()).requires_grad_() for name, p in model.named_parameters()}
    loss = torch.func.functional_call(model, lent, data()).sum()
    with pytest.raises(UsageError, match="'weight' of Linear, which was written into or replaced"):
        loss.backward()


REFUSED: dict[str, tuple[type[Exception], str, Callable[[nn.Sequential], Any]]] = {
    "no function": (ArgumentTypeError, "function: ", lambda _: recompute(3)),
    "too many": (ArgumentValueError, "segments: expected at most 12", lambda model: recompute(model, segments=13)),
    "none": (ArgumentValueError, "segments: ", lambda model: recompute(model, segments=0)),
    "no layers": (ArgumentValueError, "recompute: .*empty chain", lambda _: recompute(nn.Sequential())),
    "bool": (ArgumentTypeError, "segments: ", lambda model: recompute(model, segments=True)),
    "no sequence": (ArgumentTypeError, "segments: .*submodules=", lambda model: recompute(model[0], segments=1)),
    "of a function": (ArgumentValueError, "segments, submodules: ", lambda _: recompute(len, segments=2)),
    "both": (ArgumentValueError, "segments, submodules: ", lambda model: recompute(model, segments=2, submodules=["0"])),
    "unknown": (ArgumentValueError, r"submodules\[1\]: .*got 'head'", lambda model: recompute(model, submodules=["0", "head"])),
    "foreign": (ArgumentValueError, r"submodules\[0\]: expected a submodule", lambda model: recompute(model, submodules=[nn.Linear(1, 1)])),
    "no module": (ArgumentValueError, r"submodules\[1\]: ", lambda model: recompute(model, submodules=["0", 1])),
    "a name": (ArgumentValueError, r"submodules\[0\]: .*got 'layers'", lambda model: recompute(model, submodules="layers")),
    "empty": (ArgumentValueError, "submodules: ", lambda model: recompute(model, submodules=[])),
    "container": (ArgumentTypeError, "function: .*container", lambda model: recompute(nn.ModuleList(model))),
    "twice": (UsageError, "recomputed yet", lambda model: recompute(recompute(copy.deepcopy(model)))),
    "function twice": (UsageError, "recomputed yet", lambda _: recompute(recompute(abs))),
    "parallel": (ArgumentTypeError, "DistributedDataParallel", lambda _: recompute(object.__new__(Parallel))),
}


class Parallel(nn.parallel.DistributedDataParallel):
    """Of no process group."""

    __init__ = nn.Module.__init__


@pytest.mark.parametrize("what", REFUSED)
def test_refused(what: str) -> None:
    """And nothing is replaced."""
    kind, words, call = REFUSED[what]
    model = make()
    with pytest.raises(kind, match=words):
        call(model)
    assert all("forward" not in each.__dict__ for each in model.modules())
    assert same(trained(model), trained(make()))
