"""Saving and loading in the middle of a window: a resumed run equals the uninterrupted one, and a wrong checkpoint changes nothing."""

import subprocess
import sys

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, nn

import gradaccum
from conformance_tests.framework_tests.mindspore_common import X, Y, make_net, pynative_after  # noqa: F401
from gradaccum_mindspore import load_checkpoint_into


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
    assert {"weight.gradaccum.grad_sum", "gradaccum.micro_step", "gradaccum.loss_scale"} <= set(names[0])


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


@pytest.mark.parametrize("fault", ["missing field", "missing sum", "shape", "dtype", "another parameter", "terms", "format", "window"])
def test_unfit_checkpoint_is_refused_whole(fault):
    source, target = cell(), cell()
    go_on(source, 0, 3)
    go_on(target, 3, 5)
    entries = {name: Tensor(p.asnumpy()) for name, p in source.parameters_dict().items()}
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
        "import sys, numpy as np, mindspore as ms, gradaccum\n"
        "from mindspore import nn, Tensor\n"
        "from gradaccum_mindspore import load_checkpoint_into\n"
        "unrelated = gradaccum.wrap(nn.SGD(nn.Dense(2, 2).trainable_params(), 0.1), steps=2)\n"
        "net = nn.Dense(4, 2)\n"
        "optimizer = gradaccum.wrap(nn.Adam(net.trainable_params(), 0.1), steps=4)\n"
        "load_checkpoint_into(optimizer, ms.load_checkpoint(sys.argv[1]))\n"
        "print(*optimizer.result[5:7])\n"
    )
    step = cell()
    go_on(step, 0, 6)
    ms.save_checkpoint(step, str(tmp_path / "step.ckpt"))
    ran = subprocess.run([sys.executable, str(script), str(tmp_path / "step.ckpt")], capture_output=True, text=True, check=False)
    assert ran.stdout.split() == ["2", "1"], ran.stderr[-2000:]
