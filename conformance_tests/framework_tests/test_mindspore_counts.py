"""The cost of a compiled step, counted in MindSpore's graphs: operators, copies and
buffers, never times.
"""

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import gradaccum

from .mindspore_graphs import operators, saved_graphs

SHAPES = ((24, 24), (24,), (40, 24))


def dumped(shapes, stage):
    """Compiles a step of a wrapped Adam; returns the graphs after one compiler
    stage.
    """
    arrays = [np.ones(shape, np.float32) for shape in shapes]
    parameters = [
        Parameter(Tensor(array), name=f"p{i}") for i, array in enumerate(arrays)
    ]
    optimizer = gradaccum.wrap(nn.Adam(parameters, 0.1), steps=2)

    @ms.jit
    def step(*gradients):
        return optimizer(gradients, 128)

    with saved_graphs(stage) as texts:
        for _ in range(2):
            closed = step(*map(Tensor, arrays))
    assert closed
    assert texts, "no graphs were saved, so the tests would count nothing"
    return texts


@pytest.fixture(scope="module")
def graphs():
    """The text of each graph of kernels."""
    return dumped(SHAPES, "graph_build")


def with_operator(graphs, name):
    return [operators(text) for text in graphs if operators(text)[name]]


def test_micro_batch_copies_nothing(graphs):
    """A micro-batch adds into each sum and into two scalars."""
    (entry,) = [
        counts for counts in with_operator(graphs, "AssignAdd") if not counts["Adam"]
    ]
    assert entry["AssignAdd"] == len(SHAPES) + 2, "the sums, micro_step and weight"
    assert entry["Assign"] == 0
    assert entry["TensorMove"] == 0, "state that does not change is not copied"
    assert entry["Add"] == 1, "the micro-batches, to see whether the window is full"
    assert entry["Select"] == 0, "a constant weight needs no selection"


def test_window_end_measures_and_divides_once(graphs):
    (updated,) = with_operator(graphs, "Adam")
    assert updated["Adam"] == updated["Div"] == len(SHAPES), (
        "one compiled update, and one division of each sum"
    )
    (decided,) = with_operator(graphs, "Square")
    assert decided["Square"] == decided["Abs"] == 1, "one norm of all small sums"
    assert decided["Assign"] == 9, "the state is written where it is decided"


def test_graphs_grow_slowly_with_parameters():
    """MindSpore compiles at most two more graphs for each further parameter: it unrolls
    a loop over parameters into nested graphs, and Adam's own adds one for each.
    """
    few, many = (
        "".join(dumped(((3,),) * count, "type_inference")).count("\nsubgraph @")
        for count in (2, 8)
    )
    assert few > 100, "the pattern finds no graphs"
    assert many - few <= 2 * 6


def test_compiled_code_runs_no_python(graphs):
    assert not with_operator(graphs, "PyExecute")


def test_constants_are_smaller_than_parameters(graphs):
    shapes = ["[" + ", ".join(map(str, shape)) + "]" for shape in SHAPES]
    assert not [
        shape for shape in shapes for text in graphs if f"Tensor(shape={shape}" in text
    ], "constant zeros for clearing are a second buffer"


@pytest.mark.parametrize("masters", [False, True])
def test_one_buffer_of_the_models_size(masters):
    """The sums, and the masters where there are any; beside Adam's two moments. Of
    these only the masters are trained.
    """
    dtype = ms.float16 if masters else ms.float32
    parameters = [
        Parameter(Tensor(np.ones(shape), dtype), name=f"p{i}")
        for i, shape in enumerate(SHAPES)
    ]
    optimizer = gradaccum.wrap(
        nn.Adam(parameters, 0.1), steps=2, master_weights=masters
    )
    model = sum(p.size for p in parameters)
    held = sum(p.size for p in optimizer.get_parameters() if p.size >= 24)
    assert len(optimizer.storage.trainable_params()) == masters * len(SHAPES)
    assert held == model * (1 + 2 + 1 + masters)
