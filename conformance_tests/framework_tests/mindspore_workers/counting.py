"""Counts the collectives in the graphs that MindSpore compiles."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from conformance_tests.framework_tests.mindspore_graphs import saved_graphs

COLLECTIVES = ("AllReduce", "AllGather", "ReduceScatter", "Broadcast")
Graph = Counter[str]
"""How often each operator stands in it."""


def sent(texts: Sequence[str]) -> list[tuple[str, int]]:
    """The collectives in the texts of some graphs, and how many numbers each sends."""
    pattern = rf"= (?:PrimFunc_)?({'|'.join(COLLECTIVES)})\(.*\n?.*?-> \(<Tensor\[\w+\], \((\d+)"
    return [
        (name, int(size)) for text in texts for name, size in re.findall(pattern, text)
    ]


@contextmanager
def compiled_graphs() -> Iterator[list[Graph]]:
    """The operators of each graph of kernels that MindSpore compiles meanwhile."""
    graphs: list[Graph] = []
    with saved_graphs("graph_build") as texts:
        yield graphs
    graphs += [
        Counter(re.findall(r"= (?:PrimFunc_)?([A-Z]\w*)\(", text)) for text in texts
    ]


def require_one_branch(graphs: list[Graph]) -> None:
    """The collectives stand together in one graph, which neither differentiates nor
    updates: the branch that ends a window.
    """
    with_them = [graph for graph in graphs if any(graph[name] for name in COLLECTIVES)]
    assert [[graph[name] for name in COLLECTIVES] for graph in with_them] == [
        [2, 0, 0, 0]
    ]
    (entry,) = [graph for graph in graphs if graph["MatMul"] or graph["MatMulExt"]]
    assert entry not in with_them, "a micro-batch reduces nothing"
    assert [graph["ApplyMomentum"] for graph in graphs if graph["ApplyMomentum"]] == [2]
    assert not with_them[0]["ApplyMomentum"]
