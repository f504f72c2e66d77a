"""Windows that two processes take from loaders of different length: their totals, and the update of a loss of two terms."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import gradaccum
from conformance_tests.framework_tests.torch_workers.checks import check
from conformance_tests.framework_tests.torch_workers.common import (
    WORLD,
    Batch,
    build,
    micro_batches,
    require_equal,
    require_same_everywhere,
    sgd,
)

COUNT = {"items": lambda batch: len(batch[0]), "positive": lambda batch: (batch[1] > 0).sum()}


def reduce(values: list[float]) -> list[float]:
    """As the docs say: the sum, in float64."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor)
    return tensor.tolist()


def terms(model: torch.nn.Module, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """A sum over items, and one over the positive targets."""
    x, y, rare = batch
    off = (model(x, rare) - y).square()
    return off.sum(), (off * (y > 0)).sum()


@check
def totals_are_those_of_both_workers(rank: int) -> None:
    """A worker whose data end first goes on with empty windows, and the update is that of one large batch."""
    model, reference = build(), build()
    parallel = DistributedDataParallel(model, find_unused_parameters=True)
    opt = gradaccum.wrap(sgd(model), steps=None, reduction="sum", module=parallel)
    seen = []
    for window in gradaccum.windows(micro_batches(rank), 4, COUNT, reduce=reduce):
        seen.append((window.number, dict(window.totals)))
        for batch in window:
            items, positive = terms(parallel, batch)
            opt.backward(items / window.totals["items"] + positive / window.totals["positive"])
            opt.step()
            opt.zero_grad()
        opt.flush()
    optimizer = sgd(reference)
    for first in (0, 4):
        large = [batch for worker in range(WORLD) for batch in micro_batches(worker)[first : first + 4]]
        sums = [terms(reference, batch) for batch in large]
        total = [sum(float(count(batch)) for batch in large) for count in COUNT.values()]
        loss = sum(items for items, _ in sums) / total[0] + sum(positive for _, positive in sums) / total[1]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[union-attr]  # There are micro-batches.
        optimizer.step()
        assert seen[first // 4] == (first // 4, dict(zip(COUNT, total, strict=True)))
    require_equal(model, reference)
    require_same_everywhere((seen, opt.result.optimizer_step))


@check
def windows_end_by_the_weight_of_both_workers(rank: int) -> None:
    by_weight = gradaccum.windows(micro_batches(rank), gradaccum.until_weight(15), COUNT, "items", reduce)
    made = [(len(window), window.totals["items"]) for window in by_weight]
    # Sizes are 3, 4, 5, 6, 7, 8 and 4, 5, 6: in each round one of each worker, while it has one.
    assert [total for _, total in made] == [16, 17, 15]
    assert [length for length, _ in made] == [[2, 2, 2], [2, 1, 0]][rank], made
    require_same_everywhere([total for _, total in made])
