"""Saving and loading in the middle of a window: a resumed run equals the uninterrupted
one, and a wrong checkpoint changes nothing.
"""

import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Parameter, Tensor, nn, ops

import gradaccum
from conformance_tests.framework_tests.mindspore_common import (
    X,
    Y,
    make_net,
    pynative_after,  # noqa: F401
    two_parameters,
)
from gradaccum_mindspore import load_checkpoint_into
from gradaccum_mindspore.state import THIS_WORKER, Storage
from gradaccum_mindspore.window.compiled import CompiledWindow


def cell():
    net = make_net()
    optimizer = gradaccum.wrap(nn.Adam(net.trainable_params(), 0.1), steps=4)
    return nn.TrainOneStepCell(nn.WithLossCell(net, nn.MSELoss()), optimizer)


def go_on(step, first, last):
    for index in range(first, last):
        step(Tensor(X[3 * index : 3 * index + 3]), Tensor(Y[3 * index : 3 * index + 3]))


def everything(step):
    return {name: p.asnumpy().tobytes() for name, p in step.parameters_dict().items()}


def test_instances_have_the_same_names():
    names = [sorted(cell().parameters_dict()) for _ in range(2)]
    assert names[0] == names[1]
    assert {
        "weight.gradaccum.grad_sum",
        "gradaccum.micro_step",
        "gradaccum.loss_scale",
    } <= set(names[0])


def test_storage_of_one_worker_of_two():
    """Its own sums are told apart, and nothing of it is trained."""
    storage = Storage(
        two_parameters(),
        gradaccum.wrap(nn.SGD(two_parameters(), 1.0), steps=2).options,
        "mine",
        place=(1, 2),
        sharded=(1,),
    )
    assert [
        [total.name for total in sums]
        for sums in (storage.shared_sums, storage.sharded_sums)
    ] == [["a.mine.grad_sum"], ["b.mine.grad_sum"]]
    assert storage.owner.tolist() == [THIS_WORKER, 1, 2]
    assert not [entry.name for entry in storage.get_parameters() if entry.requires_grad]
    assert CompiledWindow(storage, storage.options).is_sharded


def spoil(entries, fault):
    if fault == "missing field":
        del entries["gradaccum.growth_tracker"]
    elif fault == "missing sum":
        del entries["weight.gradaccum.grad_sum"]
    elif fault == "shape":
        entries["bias"] = Tensor(np.zeros(3, np.float32))
    elif fault == "dtype":
        entries["weight.gradaccum.grad_sum"] = Tensor(np.zeros((2, 4), np.float16))
    elif fault == "another parameter":
        entries["more.weight.gradaccum.grad_sum"] = Tensor(np.zeros((2, 4), np.float32))
    elif fault == "terms":
        entries["gradaccum.terms"] = Tensor([1, 9, 0, 0, 4], ms.int32)
    elif fault == "format":
        entries["gradaccum.terms"] = Tensor([2, 0, 0, 0, 4], ms.int32)
    else:
        entries["gradaccum.micro_step"] = Tensor(5, ms.int32)


@pytest.mark.parametrize(
    "fault",
    [
        "missing field",
        "missing sum",
        "shape",
        "dtype",
        "another parameter",
        "terms",
        "format",
        "window",
    ],
)
def test_unfit_checkpoint_is_refused_whole(fault):
    source, target = cell(), cell()
    go_on(source, 0, 3)
    go_on(target, 3, 5)
    entries = {
        name: Tensor(p.asnumpy()) for name, p in source.parameters_dict().items()
    }
    spoil(entries, fault)
    before = everything(target)
    with pytest.raises(gradaccum.CheckpointError, match="expected"):
        load_checkpoint_into(target, entries)
    assert everything(target) == before


def test_other_entries_are_ignored():
    """Entries of a checkpoint that are no parameters, such as ``epoch_num``."""
    source, target = cell(), cell()
    go_on(source, 0, 3)
    load_checkpoint_into(target, {**source.parameters_dict(), "epoch_num": 3})
    assert everything(target) == everything(source)


def test_another_process_resumes_by_name(tmp_path):
    """The second process builds its objects in another order."""
    script = tmp_path / "resume.py"
    script.write_text(
        "import sys, numpy as np, mindspore as ms, gradaccum\nfrom mindspore import nn,"
        " Tensor\nfrom gradaccum_mindspore import load_checkpoint_into\nunrelated ="
        " gradaccum.wrap(nn.SGD(nn.Dense(2, 2).trainable_params(), 0.1), steps=2)\nnet"
        " = nn.Dense(4, 2)\noptimizer = gradaccum.wrap(nn.Adam(net.trainable_params(),"
        " 0.1), steps=4)\nload_checkpoint_into(optimizer,"
        " ms.load_checkpoint(sys.argv[1]))\nprint(*optimizer.result[5:7])\n"
    )
    step = cell()
    go_on(step, 0, 6)
    ms.save_checkpoint(step, str(tmp_path / "step.ckpt"))
    ran = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "step.ckpt")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.stdout.split() == ["2", "1"], ran.stderr[-2000:]


# Names in a checkpoint: the state's Parameters share none with a layer, and no name
# stands twice.


class Model(nn.Cell):
    """A model with a layer of the optimizer's name."""

    def __init__(self, weight):
        super().__init__()
        self.generator = nn.Dense(4, 2, has_bias=False)
        ops.assign(self.generator.weight, Tensor(weight))

    def construct(self, x):
        return self.generator(x)


def trained(weight, steps):
    net = Model(np.full((2, 4), weight, np.float32))
    optimizer = gradaccum.wrap(
        nn.Adam(net.trainable_params(), 0.1), steps=2, name="generator"
    )
    backward = ms.value_and_grad(
        lambda x: ops.square(net(x)).mean(), None, optimizer.parameters
    )
    for _ in range(steps):
        optimizer(backward(Tensor(np.ones((3, 4), np.float32)))[1])
    return net, optimizer


def test_layer_may_have_the_optimizers_name(tmp_path):
    """The saved file holds the layer's matrix, and the loaded run gets it back."""
    net, optimizer = trained(1.0, 3)
    ms.save_checkpoint(optimizer, str(tmp_path / "run.ckpt"))
    saved = ms.load_checkpoint(str(tmp_path / "run.ckpt"))
    assert saved["generator.weight"].shape == (2, 4)
    assert saved["generator.gradaccum.weight"].asnumpy() == 1.0
    other, resumed = trained(5.0, 0)
    load_checkpoint_into(resumed, saved)
    np.testing.assert_array_equal(
        other.generator.weight.asnumpy(), net.generator.weight.asnumpy()
    )
    assert resumed.result.micro_step == 1


@pytest.mark.parametrize(
    ("parameter", "name"),
    [("gradaccum.weight", "gradaccum"), ("g.gradaccum.bias", "g")],
)
def test_taken_parameter_name_is_refused(parameter, name):
    inner = nn.SGD([Parameter(Tensor(np.ones(3, np.float32)), name=parameter)], 0.1)
    with pytest.raises(gradaccum.ArgumentValueError, match=rf"name: .*{parameter}"):
        gradaccum.wrap(inner, steps=2, name=name)
    gradaccum.wrap(inner, steps=2, name="accumulation")


class Holder(nn.Cell):
    def __init__(self, optimizer, parameter):
        super().__init__(auto_prefix=False)
        self.optimizer, self.parameter = optimizer, parameter


def test_duplicate_parameter_names_are_refused():
    _, optimizer = trained(1.0, 1)
    twin = Parameter(Tensor(np.zeros((2, 4), np.float32)), name="generator.weight")
    cell = Holder(optimizer, twin)
    entries = {p.name: Tensor(p.asnumpy()) for p in optimizer.get_parameters()}
    with pytest.raises(gradaccum.CheckpointError, match=r"cell.*generator\.weight"):
        load_checkpoint_into(cell, entries)
