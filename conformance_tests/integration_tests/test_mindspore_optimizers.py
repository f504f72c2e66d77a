"""Every optimizer of MindSpore that runs on a CPU: as on the large batches. Those that
do not run there fail bare as they do wrapped.

Each class of MindSpore's public modules is tested by its name, also a new one.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

os.environ.setdefault("GLOG_v", "4")
ms = pytest.importorskip("mindspore")

import numpy as np  # noqa: E402
from mindspore import nn  # noqa: E402
from mindspore.experimental import optim as experimental  # noqa: E402
from mindspore.mint import optim as mint_optim  # noqa: E402

from gradaccum import UsageError  # noqa: E402
from gradaccum_conformance.deep import deep_but  # noqa: E402

from .mindspore_runs import (  # noqa: E402
    START,
    Make,
    make_net,
    trained,
)

PLACES = {"nn": nn, "mint": mint_optim, "experimental": experimental}
BASES = (nn.Optimizer, experimental.Optimizer)


def public(place: str) -> Iterator[str]:
    """The names under which `place` has optimizers."""
    for name, kind in vars(PLACES[place]).items():
        if isinstance(kind, type) and issubclass(kind, BASES) and kind not in BASES:
            yield f"{place}.{name}"


FOUND = sorted(name for place in PLACES for name in public(place))
BROKEN = {
    "nn.LARS": "Unsupported op .LARS",
    "nn.Lamb": "Unsupported op .Lamb",
    "nn.OptTFTWrapper": "MindIO TFT",
    "mint.AdamW": "kernel AdamW unregistered",
    "mint.FusedAdamW": "InplaceCopy",
}
"""They do not run on a CPU, bare or wrapped: MindSpore's error."""
UNMOVED = ("mint.SGD", "mint.Adam")
"""In PyNative on a CPU the bare optimizer moves no parameter and raises nothing."""
AROUND = ("nn.LARS", "nn.OptTFTWrapper")
"""They take an optimizer, and no parameters."""
MORE: dict[str, dict[str, Any]] = {
    "nn.Momentum": {"momentum": 0.9},
    "nn.AdaFactor": {"learning_rate": None},
}
RUN = [name for name in FOUND if name not in BROKEN and name not in UNMOVED]


def groups(net: nn.Cell) -> list[dict[str, Any]]:
    weight = {"params": [net.weight], "lr": 0.05, "weight_decay": 0.1}
    return [weight, {"params": [net.bias]}]


def centralized(net: nn.Cell) -> list[dict[str, Any]]:
    return [{"params": net.trainable_params(), "grad_centralization": True}]


def make(
    kind: Any, rate: Any, parameters: Any = nn.Cell.trainable_params, **options: Any
) -> Make:
    name = "lr" if issubclass(kind, experimental.Optimizer) else "learning_rate"
    return lambda net: kind(parameters(net), **{name: rate, **options})


VARIANTS = {
    "nn.SGD, Nesterov": make(
        nn.SGD, 0.1, momentum=0.9, nesterov=True, weight_decay=0.1
    ),
    "nn.Adam, AMSGrad": make(nn.Adam, 0.1, use_amsgrad=True),
    "nn.Adam, lazy": make(nn.Adam, 0.1, use_lazy=True),
    "nn.RMSProp, centered": make(nn.RMSProp, 0.01, centered=True),
    "nn.Momentum, centralized": make(nn.Momentum, 0.1, centralized, momentum=0.9),
    "nn.Momentum, groups": make(nn.Momentum, 0.1, groups, momentum=0.9),
    "experimental.Adam, AMSGrad": make(
        experimental.Adam, 0.1, amsgrad=True, maximize=True
    ),
    "experimental.SGD, groups": make(experimental.SGD, 0.1, groups, momentum=0.9),
}
RATES = {
    "CosineDecayLR": nn.CosineDecayLR(0.01, 0.1, 4),
    "ExponentialDecayLR": nn.ExponentialDecayLR(0.1, 0.5, 1),
    "InverseDecayLR": nn.InverseDecayLR(0.1, 0.5, 1),
    "NaturalExpDecayLR": nn.NaturalExpDecayLR(0.1, 0.5, 1),
    "PolynomialDecayLR": nn.PolynomialDecayLR(0.1, 0.01, 4, 2.0),
    "WarmUpLR": nn.WarmUpLR(0.1, 4),
    "a list of rates": [0.1, 0.2, 0.3],
}
DECAY = nn.ExponentialDecayLR(0.1, 0.5, 1)
VARIANTS |= {
    name: make(nn.Momentum, rate, momentum=0.9, weight_decay=DECAY)
    for name, rate in RATES.items()
}


COMPILED = ("nn.Momentum, groups", "experimental.SGD, groups", "experimental.Adam")


def maker(name: str) -> Make:
    """Builds the optimizer for a net."""
    place, _, short = name.partition(".")
    kind = getattr(PLACES[place], short)
    if name in AROUND:
        return lambda net: kind(nn.Momentum(net.trainable_params(), 0.01, 0.9))
    return make(kind, 0.01, **MORE.get(name, {}))


@pytest.mark.parametrize("name", [*RUN, *VARIANTS])
def test_equals_large_batches(name: str) -> None:
    make_optimizer = VARIANTS.get(name) or maker(name)
    wanted = trained(make_optimizer, wrapped=False)
    assert np.abs(wanted - START).max() > 1e-5
    np.testing.assert_allclose(trained(make_optimizer), wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("name", BROKEN)
def test_broken_on_cpu_bare_too(name: str, wrapped: bool) -> None:
    """If the bare one runs, the gap is closed: take its name out of `BROKEN`."""
    with pytest.raises((RuntimeError, ValueError), match=BROKEN[name]):
        trained(maker(name), wrapped)


@pytest.mark.parametrize("name", UNMOVED)
def test_unmoved_parameters_are_refused(name: str) -> None:
    """If they move, the gap is closed: take the name out of `UNMOVED`."""
    np.testing.assert_array_equal(trained(maker(name), wrapped=False), START)
    with pytest.raises(UsageError, match=r"mint\.optim.*changes nothing"):
        trained(maker(name))


@pytest.mark.parametrize(
    "name", deep_but(("mint.SGD", *COMPILED[:1]), (*UNMOVED, *COMPILED))
)
def test_compiled_equals_large_batches(name: str) -> None:
    """The truth is in PyNative, where each shape of a batch compiles nothing; of
    mint's, the experimental optimizer of the same formula.
    """
    truth = VARIANTS.get(name) or maker(name.replace("mint", "experimental"))
    compiled = trained(VARIANTS.get(name) or maker(name), jit=True)
    wanted = trained(truth, wrapped=False)
    np.testing.assert_allclose(compiled, wanted, rtol=1e-6, atol=1e-6)


def test_thor_needs_its_own_layers() -> None:
    with pytest.raises(IndexError):
        nn.thor(make_net(), ms.Tensor([0.1] * 3), ms.Tensor([0.1] * 3), 0.9)
