"""`gradaccum_torch.sharded_cross_entropy`: the dense loss and gradient, in two processes and over four threads; its peak of memory."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

pytest.importorskip("torch.distributed.fsdp", reason="needs a torch with distributed support")

import torch
import torch.distributed as dist
from torch.testing._internal.distributed import multi_threaded_pg as threaded
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import gradaccum
from gradaccum_torch import sharded_cross_entropy

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="this torch was built without gloo")

SCRIPT = Path(__file__).with_name("torch_sharded_cross_entropy.py")
SECONDS = 500
MEBI = 2**20


def test_two_processes(tmp_path: Path) -> None:
    commands = [[sys.executable, str(SCRIPT), str(rank), str(tmp_path / "store")] for rank in range(2)]
    running = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for command in commands]
    try:
        said = [process.communicate(timeout=SECONDS)[0] for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0, 0], "\n".join(said)


def test_four_workers_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Uneven and empty shards that two workers do not have."""
    monkeypatch.syspath_prepend(SCRIPT.parent)
    from torch_sharded_cross_entropy import check

    store, failures = dist.HashStore(), []

    def work(rank: int) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=4, store=store)
            check(rank, 4)
        except BaseException as error:
            failures.append(error)
            threaded.ProcessLocalGroup.exception_handle(error)

    torch._C._distributed_c10d._set_thread_isolation_mode(True)
    threaded._install_threaded_pg()
    try:
        threads = [Thread(target=work, args=(rank,), daemon=True) for rank in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
        assert not any(thread.is_alive() for thread in threads)
    finally:
        threaded._uninstall_threaded_pg()
        torch._C._distributed_c10d._set_thread_isolation_mode(False)
    assert not [error for error in failures if not isinstance(error, SystemExit)], failures


@pytest.fixture
def one_worker() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


class Peak(TorchDispatchMode):
    """The bytes of all tensors made within it that live at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        made = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given | self._known:
                self._add(tensor.untyped_storage())
        return made

    def _add(self, storage: Any) -> None:
        self._known.add(storage._cdata)
        self.live += storage.nbytes()
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._drop, storage._cdata, storage.nbytes())

    def _drop(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_a_million_classes_cost_one_gradient(one_worker: None, dtype: Any, smoothing: float) -> None:
    """Forward a sixteenth of the shard; backward the gradient and twice that, in float32: two temporaries may live for a moment."""
    shard = torch.zeros(16, 10**6, dtype=dtype, requires_grad=True)
    labels = torch.arange(16) * 60000
    size, block = shard.numel() * shard.itemsize, shard.numel() * 4 // 16
    with Peak() as forward:
        loss = sharded_cross_entropy(shard, labels, label_smoothing=smoothing)
    with Peak() as backward:
        loss.backward()
    assert 0 < forward.peak <= 2 * block + MEBI
    assert size < backward.peak <= size + 2 * block + MEBI
    assert shard.grad is not None
    assert shard.grad.dtype == dtype


def test_without_a_process_group() -> None:
    with pytest.raises(gradaccum.UsageError, match=r"^group: .*init_process_group"):
        sharded_cross_entropy(torch.zeros(2, 3), torch.tensor([0, 1]))


LOGITS, LABELS = torch.zeros(2, 3), torch.tensor([0, 1])


@pytest.mark.parametrize(
    ("name", "arguments", "options"),
    [
        ("logits_shard", ([[0.0]], LABELS), {}),
        ("logits_shard", (LOGITS.int(), LABELS), {}),
        ("labels", (LOGITS, [0, 1]), {}),
        ("labels", (LOGITS, LABELS.float()), {}),
        ("labels", (LOGITS, torch.zeros(2, 3)), {}),
        ("labels", (LOGITS, LABELS[:1]), {}),
        ("labels", (torch.zeros(()), LABELS), {}),
        ("labels", (LOGITS.T, LABELS), {}),
        ("labels", (LOGITS, LABELS.to("meta")), {}),
        ("ignore_index", (LOGITS, LABELS), {"ignore_index": 1.5}),
        ("label_smoothing", (LOGITS, LABELS), {"label_smoothing": 1.5}),
        ("label_smoothing", (LOGITS, LABELS), {"label_smoothing": float("nan")}),
        ("label_smoothing", (LOGITS, LABELS), {"label_smoothing": "much"}),
        ("reduction", (LOGITS, LABELS), {"reduction": "median"}),
        ("reduction", (LOGITS, LABELS), {"reduction": None}),
    ],
)
def test_bad_input(one_worker: None, name: str, arguments: tuple[Any, Any], options: dict[str, Any]) -> None:
    with pytest.raises((gradaccum.ArgumentTypeError, gradaccum.ArgumentValueError), match=rf"^{name}: expected"):
        sharded_cross_entropy(*arguments, **options)


def test_a_second_derivative_is_refused(one_worker: None) -> None:
    shard = torch.zeros(2, 3, requires_grad=True)
    loss = sharded_cross_entropy(shard, LABELS)
    with pytest.raises(gradaccum.UsageError, match=r"^create_graph"):
        torch.autograd.grad(loss, shard, create_graph=True)
