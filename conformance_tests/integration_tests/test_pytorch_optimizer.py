"""Every optimizer of pytorch_optimizer, of torch_optimizer, of lion-pytorch and of
prodigyopt: as on the large batches, or refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("torch", reason="needs PyTorch")

import torch
from torch import nn

import gradaccum
from conformance_tests.integration_tests.optimizer_runs import (
    SUMS,
    Loop,
    Make,
    assert_equals_large_batches,
    furthest,
)

pytorch_optimizer = pytest.importorskip(
    "pytorch_optimizer", reason="needs pytorch_optimizer"
)
torch_optimizer = pytest.importorskip("torch_optimizer", reason="needs torch_optimizer")
lion_pytorch = pytest.importorskip("lion_pytorch", reason="needs lion-pytorch")
prodigyopt = pytest.importorskip("prodigyopt", reason="needs prodigyopt")

pytestmark = [
    pytest.mark.filterwarnings(line)
    for line in (
        (
            "ignore:Using backward.. with create_graph=True will create a reference"
            " cycle:UserWarning"
        ),
        "ignore:This overload of add.* is deprecated:UserWarning",
        "ignore:Converting a tensor with requires_grad=True to a scalar:UserWarning",
        "ignore:`torch.jit.script` is deprecated:DeprecationWarning",
    )
]


def muon_groups(model: nn.Module) -> list[dict[str, Any]]:
    """Matrices for the optimizer itself, the rest for its AdamW."""
    return [
        {
            "params": [p for p in model.parameters() if (p.ndim == 2) == own],
            "use_muon": own,
        }
        for own in (True, False)
    ]


def of_matrices(name: str) -> Make:
    return lambda model: pytorch_optimizer.load_optimizer(name)(muon_groups(model))


SPECIAL: dict[str, Make] = {
    **{
        name: of_matrices(name)
        for name in ("adago", "adamuon", "muon", "muonclip", "normuon")
    },
    "adammini": lambda model: pytorch_optimizer.AdamMini(model),
    "adashift": lambda model: pytorch_optimizer.AdaShift(
        model.parameters(), keep_num=2
    ),
    "sara": lambda model: pytorch_optimizer.load_optimizer("sara")(
        model.parameters(), lr=0.01, threshold=1.0
    ),
    "ranger21": lambda model: pytorch_optimizer.Ranger21(
        model.parameters(), num_iterations=6
    ),
}
LOOPS = {
    **dict.fromkeys(("adahessian", "sophiah"), Loop(graph=True)),
    "spectralsphere": Loop(bias=False),
    "fadam": Loop(dtype=torch.float32),
}
CANNOT = {
    "lbfgs": "evaluates the model again and again",
    "alig": "reads the loss of the closure",
    "bsam": "calls the closure a second time",
    "lomo": "updates within the backward pass",
    "adalomo": "updates within the backward pass",
    "distributedmuon": "needs a process group to be made",
    "demo": "needs einops and a process group",
}
"""Tests below say what each of them does; the last two cannot be made in one process.
"""
NAMES = [
    name for name in pytorch_optimizer.get_supported_optimizers() if name not in CANNOT
]


@pytest.mark.parametrize("name", NAMES)
def test_equals_large_batches(name: str) -> None:
    make: Make = SPECIAL.get(
        name, lambda model: pytorch_optimizer.load_optimizer(name)(model.parameters())
    )
    loop = LOOPS.get(name, Loop())
    assert_equals_large_batches(
        make, loop, bound=1e-11 if loop.dtype == torch.float64 else 1e-5
    )


OTHERS: dict[str, Make] = {
    **{
        name: lambda model, name=name: getattr(torch_optimizer, name)(
            model.parameters()
        )
        for name in torch_optimizer.__all__
        if name not in ("get", "Lookahead", "Adahessian")
    },
    "Lookahead": lambda model: torch_optimizer.Lookahead(
        torch_optimizer.Yogi(model.parameters()), k=2
    ),
    "Lookahead of pytorch_optimizer": lambda model: pytorch_optimizer.Lookahead(
        torch.optim.SGD(model.parameters(), lr=0.01), k=2
    ),
    "Lion": lambda model: lion_pytorch.Lion(
        model.parameters(), lr=0.01, weight_decay=0.1
    ),
    "Prodigy": lambda model: prodigyopt.Prodigy(model.parameters()),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_libraries_equal_large_batches(name: str) -> None:
    assert_equals_large_batches(OTHERS[name])


def test_adahessian_of_torch_optimizer() -> None:
    assert_equals_large_batches(
        lambda model: torch_optimizer.Adahessian(model.parameters()), Loop(graph=True)
    )


@pytest.mark.parametrize(
    "make",
    [lambda m: pytorch_optimizer.LOMO(m), lambda m: pytorch_optimizer.AdaLOMO(m)],
    ids=["LOMO", "AdaLOMO"],
)
@pytest.mark.parametrize("options", SUMS, ids=str)
def test_update_within_the_backward_pass_is_refused(
    make: Make, options: dict[str, Any]
) -> None:
    with pytest.raises(
        gradaccum.ArgumentTypeError,
        match=r"optimizer: .*LOMO, which makes it within each backward pass",
    ):
        gradaccum.wrap(make(Loop().model().float()), steps=4, **options)


CLOSURE_WANTED: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "alig": lambda model: pytorch_optimizer.AliG(model.parameters(), max_lr=0.1),
    "bsam": lambda model: pytorch_optimizer.BSAM(model.parameters(), num_data=20),
}


@pytest.mark.parametrize("name", CLOSURE_WANTED)
def test_closure_wanted_at_the_windows_end(name: str) -> None:
    """Their own error, with a note; the window stays as it is."""
    loop = Loop()
    model, before = loop.model(), loop.model()
    opt = gradaccum.wrap(CLOSURE_WANTED[name](model), steps=2)

    def closure() -> float:
        loss = loop.loss(model, 0, 8)
        loss.backward()
        return float(loss.detach())

    opt.step(closure)
    with pytest.raises(Exception, match="requires closure") as raised:
        opt.step(closure)
    assert "An optimizer with two updates" in raised.value.__notes__[0]
    assert opt.result.micro_step == 2
    assert furthest(model, before) == 0


def test_wrap_comes_last() -> None:
    """Lookahead around a wrapped optimizer counts micro-batches: it is another
    optimizer than the one that is wrapped around it.
    """
    loop = Loop(epochs=1)

    def run(make: Callable[[nn.Module], Any]) -> nn.Module:
        model = loop.model()
        opt = make(model)
        for start in range(0, 16, 2):
            opt.zero_grad()
            loop.loss(model, start, 2).backward()
            opt.step()
        return model

    def inner(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.1)

    right = run(
        lambda model: gradaccum.wrap(
            pytorch_optimizer.Lookahead(inner(model), k=2), steps=4
        )
    )
    wrong = run(
        lambda model: pytorch_optimizer.Lookahead(
            gradaccum.wrap(inner(model), steps=4), k=2
        )
    )
    assert furthest(wrong, right) > 1e-3
