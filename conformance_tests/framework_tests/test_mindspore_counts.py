"""What the compiled step consists of, counted in the graphs that MindSpore builds: a guard of the costs, by counts and never by times."""

import os
import re
import subprocess
import sys
from collections import Counter

import pytest

os.environ.setdefault("GLOG_v", "4")
ms = pytest.importorskip("mindspore", reason="needs MindSpore")

import numpy as np  # noqa: E402
from mindspore import Parameter, Tensor, nn  # noqa: E402

import gradaccum  # noqa: E402

SHAPES = ((24, 24), (24,), (40, 24))
SCRIPT = """
import mindspore as ms
import numpy as np
from mindspore import Parameter, Tensor, nn
import gradaccum

class Step(nn.Cell):
    def __init__(self, optimizer):
        super().__init__(auto_prefix=False)
        self.optimizer = optimizer

    def construct(self, *gradients):
        return self.optimizer(gradients)

ms.set_context(mode=ms.GRAPH_MODE)
shapes = {shapes}
parameters = [Parameter(Tensor(np.ones(shape, np.float32)), name=f"p{{i}}") for i, shape in enumerate(shapes)]
step = Step(gradaccum.wrap(nn.Adam(parameters, 0.1), steps=2))
for _ in range(2):
    closed = step(*(Tensor(np.ones(shape, np.float32)) for shape in shapes))
assert closed
assert abs(parameters[0].asnumpy().flat[0] - 0.9) < 1e-5
"""


def dumped(folder, shapes, pattern):
    """The text of each file of graphs, by the pattern of its name, of a wrapped Adam's call in graph mode."""
    script = folder / "step.py"
    script.write_text(SCRIPT.format(shapes=shapes))
    environment = os.environ | {"MS_DEV_SAVE_GRAPHS": "2", "MS_DEV_SAVE_GRAPHS_PATH": str(folder / "ir")}
    subprocess.run([sys.executable, str(script)], cwd=folder, env=environment, check=True)
    texts = [path.read_text() for path in (folder / "ir").glob(pattern)]
    assert texts, "no graphs were saved: the tests below would count nothing"
    return texts


@pytest.fixture(scope="module")
def graphs(tmp_path_factory):
    """The text of each graph of kernels."""
    return dumped(tmp_path_factory.mktemp("graphs"), SHAPES, "graph_build_*.ir")


def operators(text):
    return Counter(re.findall(r"= (?:PrimFunc_)?([A-Z]\w*)\(", text))


def with_operator(graphs, name):
    return [operators(text) for text in graphs if operators(text)[name]]


def test_a_micro_batch_writes_its_sums_and_two_scalars(graphs):
    (entry,) = [counts for counts in with_operator(graphs, "AssignAdd") if not counts["Adam"]]
    assert entry["AssignAdd"] == len(SHAPES)
    assert entry["Assign"] == 2, "micro_step and weight"
    assert entry["TensorMove"] == 0, "what does not change is not copied"
    assert entry["Add"] == 2
    assert entry["Select"] == 0, "a finite gradient of weight 1 asks nothing"


def test_the_end_of_a_window_measures_and_divides_once(graphs):
    (updated,) = with_operator(graphs, "Adam")
    assert updated["Adam"] == updated["Div"] == len(SHAPES), "the update is compiled once, and the sums are divided for it alone"
    decided = [counts for counts in with_operator(graphs, "Square") if not counts["Abs"]]
    assert [counts["Square"] for counts in decided] == [len(SHAPES)], "one pass over the sums"
    assert decided[0]["Reshape"] == decided[0]["MatMul"] == 0


def test_what_there_is_to_compile_hardly_grows_with_the_number_of_parameters(tmp_path_factory):
    few, many = (
        sum(text.count("\nsubgraph @") for text in dumped(tmp_path_factory.mktemp("ir"), ((3,),) * count, "*_type_inference_*.ir"))
        for count in (2, 8)
    )
    assert few > 100, "graphs are counted at all"
    assert many - few <= 2 * 6, "a loop over the parameters is unrolled into graphs within graphs; one of Adam's own for each"


def test_no_python_runs_in_compiled_code(graphs):
    assert not with_operator(graphs, "PyExecute")


def test_no_constant_is_as_large_as_a_parameter(graphs):
    shapes = ["[" + ", ".join(map(str, shape)) + "]" for shape in SHAPES]
    assert not [shape for shape in shapes for text in graphs if f"Tensor(shape={shape}" in text], (
        "zeros kept to clear with are a second buffer"
    )


@pytest.mark.parametrize("masters", [False, True])
def test_one_buffer_of_the_models_size(masters):
    parameters = [Parameter(Tensor(np.ones(shape), ms.float16 if masters else ms.float32), name=f"p{i}") for i, shape in enumerate(SHAPES)]
    optimizer = gradaccum.wrap(nn.Adam(parameters, 0.1), steps=2, master_weights=masters)
    model, moments = sum(p.size for p in parameters), sum(p.size for p in (*optimizer.moment1, *optimizer.moment2))
    held = sum(p.size for p in optimizer.get_parameters() if p.size >= 24) - moments - model
    assert held == model * (2 if masters else 1), "the sums, and the masters where there are any"
    assert moments == 2 * model
