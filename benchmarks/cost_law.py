"""The cost law: what a window sends between its workers, and how long that takes on a
network: ``python -m benchmarks.cost_law``.

Counts and bytes are functions of the gradients, the workers and the micro-batches;
tests compare them with what was counted, for torch at up to 1024 workers. The times are
arithmetic, not measurements: a collective of B bytes over W workers takes 2 log2(W)
latencies and 2 (W - 1) / W * B / bandwidth (Thakur, Rabenseifner and Gropp, 2005,
"Optimization of Collective Communication Operations in MPICH"), a reduce-scatter or an
all-gather half of both. Nothing else is under way meanwhile; under a backward pass that takes
longer, only the last bucket and the numbers are waited for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

import typer
from rich.console import Console
from rich.table import Table


class Window(NamedTuple):
    """A window of `steps` micro-batches on `workers` workers."""

    gradients: int
    """Bytes of all gradients of the model, S on the page."""
    workers: int
    steps: int
    tensors: int = 1
    element: int = 4
    """Bytes of an element of the gradients."""
    copies: int = 1
    """Of the model, each of which is in shards (HSDP)."""
    units: int = 1
    """Calls of `fully_shard` on modules with parameters of their own."""

    @property
    def shards(self) -> int:
        return self.workers // self.copies


class Sent(NamedTuple):
    """Collectives of one kind in one window."""

    collectives: int
    bytes: int
    """What a worker hands to them together."""


Law = Mapping[tuple[str, int], Sent]
"""By kind, and the number of workers that take part."""
BUCKET = 25 * 2**20
"""Small tensors travel together up to here, in torch and MindSpore."""
NUMBERS = 38
"""Numbers in float64 after the sums in torch: the weight, the loss, flags, the learning
rates' fingerprint. One more for each tensor.
"""


def messages(window: Window, large: int) -> int:
    """Return how many all-reduces the sums take, of tensors of equal size, each alone
    from `large` bytes on.
    """
    each = window.gradients // window.tensors
    return (
        window.tensors
        if each >= large
        else math.ceil(window.tensors / (BUCKET // each))
    )


def all_reduced_once(window: Window) -> Law:
    """torch: `DistributedDataParallel`, or copies with ``process_group=``, at the
    window's end or under its last backward pass.
    """
    sent = Sent(
        1 + messages(window, 4 * 2**20),
        window.gradients + 8 * (NUMBERS + window.tensors),
    )
    return {("allreduce", window.workers): sent}


def reduced_in_two(window: Window) -> Law:
    """MindSpore: the weight, the loss, flags, which optimizer it is, and each worker's
    learning rate; then the sums.
    """
    return {
        ("allreduce", window.workers): Sent(
            1 + messages(window, 2**20), window.gradients + 4 * (8 + window.workers)
        )
    }


def sharded(
    scattered: Callable[[Window], int], reduced: Callable[[Window], int], told: int
) -> Callable[[Window], Law]:
    """torch: FSDP2, which reduce-scatters and all-reduces so many times per unit;
    `told`: the workers say which gradients they have.
    """

    def law(window: Window) -> Law:
        shard = window.gradients // window.shards
        numbers = Sent(1 + told, 8 * 36 + told * 4 * window.tensors)
        found = {
            ("reduce_scatter", window.shards): Sent(
                scattered(window) * window.units, scattered(window) * window.gradients
            )
        }
        # And the norm of each tensor's shards.
        found["allreduce", window.shards] = Sent(
            numbers.collectives + 1, numbers.bytes + window.element * window.tensors
        )
        if window.copies > 1:
            of_copies = reduced(window)
            found["allreduce", window.copies] = Sent(
                of_copies * window.units + numbers.collectives,
                of_copies * shard + numbers.bytes,
            )
        return found

    return law


class Way(NamedTuple):
    """A way to train on several workers."""

    name: str
    law: Callable[[Window], Law]
    collectives: str
    bytes: str
    """The law in the page's words: of S bytes in n gradients, N micro-batches and so
    on; see `LEGEND`.
    """


LEGEND = """
S: bytes of gradients in n tensors. L large tensors are sent separately, the other
tensors in B buckets of 25 MiB. N micro-batches, W workers, U calls of fully_shard.
"""
ONCE = "DistributedDataParallel"
EACH = "reduced in each micro-batch"
WAYS = {
    way.name: way
    for way in (
        Way(ONCE, all_reduced_once, "1 + B + L", "S + 8*(38 + n)"),
        Way(
            "FSDP2, micro_batch",
            sharded(lambda window: window.steps, lambda window: window.steps, told=0),
            "N*U + 2",
            "N*S + 288 + 4*n",
        ),
        Way(
            "FSDP2, window",
            sharded(lambda window: 1, lambda window: 1, told=1),
            "U + 3",
            "S + 288 + 8*n",
        ),
        Way(
            "JAX, data_parallel",
            lambda window: {
                ("allreduce", window.workers): Sent(1, window.gradients + 12)
            },
            "1",
            "S + 12",
        ),
        Way("MindSpore, data_parallel", reduced_in_two, "1 + B + L", "S + 32 + 4*W"),
        Way(
            EACH,
            lambda window: {
                ("allreduce", window.workers): Sent(
                    window.steps, window.steps * window.gradients
                )
            },
            "N or more",
            "N*S",
        ),
    )
}


class Network(NamedTuple):
    """A link's nominal numbers."""

    latency: float
    """Seconds of one message."""
    bandwidth: float
    """Bytes a second, in each direction."""


NETWORKS = {
    "10 Gb/s": Network(30e-6, 10e9 / 8),
    "100 Gb/s": Network(10e-6, 100e9 / 8),
    "400 Gb/s": Network(5e-6, 400e9 / 8),
    "3.6 Tb/s": Network(2e-6, 3.6e12 / 8),
}


def seconds(law: Law, network: Network) -> float:
    return sum(
        _seconds(kind, workers, sent, network) for (kind, workers), sent in law.items()
    )


def _seconds(kind: str, workers: int, sent: Sent, network: Network) -> float:
    if workers == 1:
        return 0.0
    times = 2 if kind == "allreduce" else 1
    moved = (workers - 1) / workers * sent.bytes / network.bandwidth
    return times * (sent.collectives * math.log2(workers) * network.latency + moved)


def make_tables(window: Window) -> list[Table]:
    """Return the law as formulas, and the seconds that it makes of `window` on each
    network.
    """
    law, times = (Table(box=None, pad_edge=False) for _ in range(2))
    for table, names in (
        (law, ("a window sends", "collectives", "bytes of each worker")),
        (times, ("seconds", *NETWORKS)),
    ):
        for name in names:
            table.add_column(
                name, justify="right" if name in NETWORKS else "left", no_wrap=True
            )
    for way in WAYS.values():
        found = way.law(window)
        law.add_row(way.name, way.collectives, way.bytes)
        times.add_row(
            way.name,
            *(f"{seconds(found, network):.3g}" for network in NETWORKS.values()),
        )
    return [law, times]


def draw(window: Window, path: Path) -> None:
    """Write a plot: the seconds of a window by its workers, reduced once and in each
    micro-batch, for each network.
    """
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5))
    workers = [2**power for power in range(1, 11)]
    for color, (name, network) in enumerate(NETWORKS.items()):
        for way, style in ((ONCE, "-"), (EACH, ":")):
            times = [
                seconds(WAYS[way].law(window._replace(workers=count)), network)
                for count in workers
            ]
            axes.loglog(
                workers,
                times,
                style,
                color=f"C{color}",
                label=f"{name}, {'once' if style == '-' else 'each micro-batch'}",
            )
    axes.set_xscale("log", base=2)
    axes.set_xlabel("workers")
    axes.set_ylabel(f"seconds of reductions, window of {window.steps}")
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    plt.close(figure)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    parameters: Annotated[float, typer.Option(help="Of the model, in float32.")] = 8e9,
    tensors: Annotated[int, typer.Option(help="How many tensors they make.")] = 300,
    workers: Annotated[int, typer.Option(help="That share a window.")] = 64,
    steps: Annotated[int, typer.Option(help="Micro-batches of a window.")] = 8,
    units: Annotated[
        int, typer.Option(help="Parts of the model under fully_shard.")
    ] = 32,
    plot: Annotated[
        Path | None, typer.Option(help="A file for the plot, such as law.png.")
    ] = None,
) -> None:
    """Print what each way sends in a window, and the seconds that it takes on some
    networks.
    """
    window = Window(int(4 * parameters), workers, steps, tensors, units=units)
    console = Console(highlight=False)
    law, times = make_tables(window)
    console.print(law, LEGEND, sep="\n")
    console.print(
        f"N {steps}, W {workers}, S {window.gradients:,}, n {tensors}, U {units}:\n",
        times,
        sep="\n",
    )
    if plot is not None:
        draw(window, plot)


if __name__ == "__main__":
    app()
