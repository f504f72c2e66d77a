"""The private names of torch: the installed torch has them, and where it would say nothing a lacking name is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs PyTorch")

import gradaccum  # noqa: E402
from gradaccum_torch import private  # noqa: E402


def test_every_name_exists() -> None:
    assert private.lacking() == {}
    assert len(private.fsdp_names()) > 15


def test_lacking_name_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    gone = ("torch.amp:GradScaler._renamed", "torch.renamed:Anything", "torch.optim:Adam._renamed")
    monkeypatch.setitem(private.USED, "fused=True", gone)
    assert private.lacking() == dict.fromkeys(gone, "fused=True fails.")


def model_state(model: Any, opt: Any) -> None:
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    get_optimizer_state_dict(model, opt)


def static_graph(model: Any, opt: Any) -> None:
    model.static_graph = True
    private.leave_reduction_out(model, AssertionError)


SILENT: dict[str, tuple[Callable[[Any, Any], None], str]] = {
    "torch.distributed.checkpoint.state_dict:_get_optim_state_dict": (model_state, r"opt\.state_dict\(\)"),
    "torch.nn.parallel:DistributedDataParallel._static_graph_delay_allreduce_enqueued": (static_graph, "static_graph=True"),
}
"""By name: a call in which torch would not say that it lacks the name."""


@pytest.mark.parametrize("name", SILENT)
def test_silent_name_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call, fix = SILENT[name]
    plain = private.exists
    assert plain(name)
    monkeypatch.setattr(private, "exists", lambda asked: asked != name and plain(asked))
    model = torch.nn.Linear(2, 1)
    with pytest.raises(gradaccum.UsageError, match=f"which lacks it.*{fix}"):
        call(model, gradaccum.wrap(torch.optim.SGD(model.parameters()), steps=2))


def test_tensor_parallel_parts_are_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch no longer says what `DistributedDataParallel` was made of, a part may be one of a tensor."""
    import torch.distributed.tensor.parallel.ddp

    parameters = list(torch.nn.Linear(2, 1).parameters())
    assert not private.were_sharded(parameters)
    monkeypatch.setattr(private, "exists", lambda name: False)
    assert private.were_sharded(parameters)
