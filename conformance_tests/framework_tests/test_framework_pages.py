"""Each framework's own page, and torch's page on `verify`: their programs run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from conformance_tests.programs import PYTHON_BLOCK, ROOT

from .recipes import Recipe, run_recipe

by_mode = pytest.mark.parametrize("mode", ["pynative", "graph"])
BACKENDS = ROOT / "backends"
ELIMINATED = "side effect nodes were eliminated by mistake"
JITTED = """
import mindspore as ms
from mindspore import Tensor, nn

import gradaccum
import gradaccum_mindspore

scale = gradaccum.DynamicLossScale(4.0)
x = Tensor([[1.0, 2.0], [3.0, 4.0]])
net = nn.Dense(2, 1)


def mean(x):
    return net(x).mean()


def run(name, **options):
    optimizer = gradaccum.wrap(nn.Adam(net.trainable_params()), name=name, **options)

    def forward(x):
        return optimizer.scale(net(x).mean())

    backward = ms.value_and_grad(forward, None, optimizer.parameters)

    @ms.jit
    def step(x):
        loss, gradients = backward(x)
        optimizer(gradients)
        return loss

    for _ in range(4):
        step(x)
    ms.jit(optimizer.flush.construct)()
    ms.jit(optimizer.discard.construct)()
    assert optimizer.result.optimizer_step >= 2


run("plain", steps=2)
run("all", steps=[(0, 1), (1, 2)], loss_scale=scale, on_overflow="drop_micro_batch")
run("ignoring", steps=2, on_overflow="ignore")
window = gradaccum.wrap(nn.Adam(net.trainable_params()), steps=None, name="window")
ms.jit(gradaccum_mindspore.value_and_update(mean, window, steps=2).construct)(x)
assert window.result.applied
"""


def page_of(framework: str, page: str = "README.md") -> str:
    return (BACKENDS / f"gradaccum_{framework}" / page).read_text("utf-8")


def programs_of(framework: str, page: str = "README.md") -> list[str]:
    pytest.importorskip(framework)
    return PYTHON_BLOCK.findall(page_of(framework, page))


@pytest.mark.parametrize(
    ("framework", "page"),
    [("torch", "README.md"), ("torch", "VERIFY.md"), ("jax", "README.md")],
)
def test_programs_of_the_page(framework: str, page: str) -> None:
    programs = programs_of(framework, page)
    assert programs
    for program in programs:
        assert "assert" in program
        exec(
            compile(program, f"{framework}'s {page}", "exec"), {"__name__": "__main__"}
        )


GRAPH_MODE = "import mindspore\n\nmindspore.set_context(mode=mindspore.GRAPH_MODE)\n"
OF_VERIFY = "'pynative_synchronize' will be deprecated"
"""What MindSpore warns of in each call of `gradaccum.verify`."""
CHINESE = "README.zh.md"


def in_mode(program: str, mode: str) -> str:
    return GRAPH_MODE * (mode == "graph") + program


def warnings_in(said: str) -> list[str]:
    return [
        line
        for line in said.splitlines()
        if "[WARNING]" in line and OF_VERIFY not in line
    ]


@pytest.mark.slow
@by_mode
def test_program_from_a_file(mode: str, tmp_path: Path) -> None:
    """MindSpore's compiler reads the source of what it compiles from a file. It prints
    no warning.
    """
    (program,) = programs_of("mindspore")
    recipe = Recipe("MindSpore", in_mode(program, mode))
    said = run_recipe(recipe, tmp_path, GLOG_v="2")
    assert not warnings_in(said)


@pytest.mark.deep
@by_mode
def test_recipe_in_chinese(mode: str, tmp_path: Path) -> None:
    """The page's programs follow one another in one file, but for the program of two
    workers.
    """
    programs = programs_of("mindspore", CHINESE)
    (of_workers,) = [program for program in programs if "\ninit()\n" in program]
    programs.remove(of_workers)
    assert len(programs) >= 9
    recipe = Recipe(CHINESE, in_mode("\n\n".join(programs), mode))
    assert not warnings_in(run_recipe(recipe, tmp_path, GLOG_v="2"))
    (command,) = re.findall(
        r"^```bash\n(msrun .*?)\n```",
        page_of("mindspore", CHINESE),
        flags=re.MULTILINE | re.DOTALL,
    )
    recipe = Recipe(CHINESE, in_mode(of_workers, mode), command)
    run_recipe(recipe, tmp_path, GLOG_v="3")


@pytest.mark.slow
def test_compiled_code_warns_of_nothing(tmp_path: Path) -> None:
    """MindSpore warns of each value that code with side effects leaves unused, and
    names the code.
    """
    pytest.importorskip("mindspore")
    assert ELIMINATED not in run_recipe(Recipe("jit", JITTED), tmp_path, GLOG_v="2")
