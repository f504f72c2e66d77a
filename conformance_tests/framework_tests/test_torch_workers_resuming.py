"""A window that two workers saved goes on with one, two or four. Here no process is
started: the state dicts say it all.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import gradaccum
from gradaccum_torch import redistributed

from .torch_workers.common import alone, build, learn, micro_batches, require_equal, sgd


def make(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[Any, Any]:
    model = build(dtype)
    return model, gradaccum.wrap(sgd(model), 4, **options)


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize(
    "options",
    [
        {"reduction": "sum"},
        {"clip_norm": 0.05, "on_overflow": "drop_micro_batch"},
        {"loss_scale": gradaccum.DynamicLossScale(1024.0)},
        {"dtype": torch.bfloat16, "master_weights": True},
    ],
    ids=str,
)
def test_window_ends_as_the_large_batch(workers: int, options: Any) -> None:
    """The first worker goes on with all, and the others with nothing; that window is
    ended here by the first alone.
    """
    dtype = options.get("dtype", torch.float64)
    own = [micro_batches(rank, dtype) for rank in range(2)]
    states = []
    for rank in range(2):
        model, opt = make(**options)
        for batch in (*own[0][:4], *own[rank][:2]):  # An update that all make alike.
            learn(model, opt, batch)
        states.append(opt.state_dict())
        states[-1]["gradaccum"]["worker"] = [rank, 2]  # As with module=.
    new = redistributed(states, workers)
    first, *others = (state["gradaccum"] for state in new)
    assert first["worker"] == [0, workers]
    for rank, entry in enumerate(others, 1):
        assert entry["worker"] == [rank, workers]
        assert entry["weight"] == 0
        assert entry["sums"] == {}
    first["worker"] = [0, 1]  # It is loaded here by a process alone.
    again, opt = make(**options)
    again.load_state_dict(model.state_dict())
    opt.load_state_dict(new[0])
    for batch in own[0][2:4]:
        learn(again, opt, batch)
    assert opt.result.applied
    windows = [own[0][:4], [*own[0][:2], *own[1][:2], *own[0][2:4]]]
    reference, other = alone(windows, **options)
    half = dtype is torch.bfloat16
    require_equal(again, reference, off=0 if half else 1e-13)
    for name in ("grad_norm", "loss"):
        mine = getattr(opt.result, name)
        wanted = getattr(other.result, name)
        assert mine == pytest.approx(wanted, rel=1e-6 if half else 1e-12)
