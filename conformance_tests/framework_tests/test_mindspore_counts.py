"""The cost of a compiled step, counted in MindSpore's graphs: operators, copies and
buffers, never times.
"""

import re
from collections import Counter

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn

import gradaccum
from conformance_tests.framework_tests.mindspore_common import needs_mindspore, set_mode
from conformance_tests.framework_tests.mindspore_graphs import saved_graphs

SHAPES = ((24, 24), (24,), (40, 24))


class Step(nn.Cell):
    def __init__(self, optimizer, weight=None):
        super().__init__(auto_prefix=False)
        self.optimizer, self.weight = optimizer, weight

    def construct(self, *gradients):
        return self.optimizer(gradients, self.weight)


def dumped(shapes, stage, weight=None):
    """Calls a wrapped Adam in graph mode; returns the graphs after one compiler
    stage.
    """
    parameters = [
        Parameter(Tensor(np.ones(shape, np.float32)), name=f"p{i}")
        for i, shape in enumerate(shapes)
    ]
    with saved_graphs(stage) as texts:
        set_mode("graph")
        step = Step(gradaccum.wrap(nn.Adam(parameters, 0.1), steps=2), weight)
        for _ in range(2):
            closed = step(*(Tensor(np.ones(shape, np.float32)) for shape in shapes))
        set_mode("pynative")
    assert closed
    assert abs(parameters[0].asnumpy().flat[0] - 0.9) < 1e-5
    assert texts, "no graphs were saved, so the tests would count nothing"
    return texts


@pytest.fixture(scope="module")
def graphs():
    """The text of each graph of kernels."""
    return dumped(SHAPES, "graph_build")


def operators(text):
    return Counter(re.findall(r"= (?:PrimFunc_)?([A-Z]\w*)\(", text))


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
    assert entry["Select"] == 0, "a finite gradient of weight 1 needs no selection"


def test_constant_weight_is_one_multiplication():
    """A number as weight leaves nothing to be selected; one that is huge may be no
    weight in the end.
    """
    for weight, selected in ((3, False), (1e13, True)):
        (entry,) = [
            counts
            for counts in with_operator(
                dumped(SHAPES, "graph_build", weight), "AssignAdd"
            )
            if not counts["Adam"]
        ]
        assert entry["Mul"] >= len(SHAPES)
        assert bool(entry["Select"]) == selected


def test_window_end_measures_and_divides_once(graphs):
    (updated,) = with_operator(graphs, "Adam")
    assert updated["Adam"] == updated["Div"] == len(SHAPES), (
        "one compiled update, and one division of each sum"
    )
    (decided,) = plain_norms(graphs)
    assert decided["Square"] == decided["Concat"] == 1, "small sums are measured as one"
    assert decided["Reshape"] == 2, "a copy of each that is no vector"
    assert decided["MatMul"] == 0


def plain_norms(graphs):
    return [counts for counts in with_operator(graphs, "Square") if not counts["Abs"]]


def test_large_sums_are_measured_where_they_lie():
    (decided,) = plain_norms(dumped(((130, 130), (200, 100)), "graph_build"))
    assert decided["Square"] == 2, "one pass over the sums"
    assert decided["Reshape"] == decided["Concat"] == 0


def test_untold_losses_cost_nothing(graphs):
    assert not with_operator(graphs, "StridedSlice"), (
        "nobody reads the sum of the losses"
    )


def test_graphs_grow_slowly_with_parameters():
    """MindSpore compiles at most two more graphs for each further parameter."""
    few, many = (
        sum(
            text.count("\nsubgraph @")
            for text in dumped(((3,),) * count, "type_inference")
        )
        for count in (2, 8)
    )
    assert few > 100, "the pattern finds no graphs"
    assert many - few <= 2 * 6, (
        "MindSpore unrolls a loop over parameters into nested graphs; Adam's own adds"
        " one for each"
    )


def test_compiled_code_runs_no_python(graphs):
    assert not with_operator(graphs, "PyExecute")


def test_constants_are_smaller_than_parameters(graphs):
    shapes = ["[" + ", ".join(map(str, shape)) + "]" for shape in SHAPES]
    assert not [
        shape for shape in shapes for text in graphs if f"Tensor(shape={shape}" in text
    ], "constant zeros for clearing are a second buffer"


@pytest.mark.parametrize("masters", [False, True])
def test_one_buffer_of_the_models_size(masters):
    parameters = [
        Parameter(
            Tensor(np.ones(shape), ms.float16 if masters else ms.float32), name=f"p{i}"
        )
        for i, shape in enumerate(SHAPES)
    ]
    optimizer = gradaccum.wrap(
        nn.Adam(parameters, 0.1), steps=2, master_weights=masters
    )
    model, moments = (
        sum(p.size for p in parameters),
        sum(p.size for p in (*optimizer.moment1, *optimizer.moment2)),
    )
    held = (
        sum(p.size for p in optimizer.get_parameters() if p.size >= 24)
        - moments
        - model
    )
    assert held == model * (2 if masters else 1), (
        "the sums, and the masters where there are any"
    )
    assert moments == 2 * model


@needs_mindspore("2.9", "before it MindSpore tells no cell its program")
def test_a_call_tells_no_cell_of_the_package_its_program():
    """MindSpore tells every cell below the one that is called: that took a tenth of a
    millisecond of each micro-batch.
    """
    parameters = [Parameter(Tensor(np.ones((2, 3), np.float32)), name="p")]
    wrapped = gradaccum.wrap(nn.Adam(parameters, 0.1), steps=2)
    step = Step(wrapped)
    step.layer = nn.Dense(2, 2)
    step.compile_phase = "some program"
    assert {step.layer.compile_phase, wrapped.compile_phase} == {"some program"}
    below = [cell for _, cell in wrapped.cells_and_names() if cell is not wrapped]
    assert len(below) > 3
    assert all(cell.compile_phase is None for cell in below)
