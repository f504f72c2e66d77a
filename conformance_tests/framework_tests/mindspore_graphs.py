"""The graphs that MindSpore compiles, as texts."""

import os
import re
import shutil
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp

import mindspore as ms

STAGES = ("graph_build", "type_inference")
"""MindSpore saves the graphs after these alone. It reads them when it saves for the
first time, so they are the same for all.
"""


@contextmanager
def saved_graphs(stage: str) -> Iterator[list[str]]:
    """The graphs after one of `STAGES`, of everything that is compiled meanwhile; they
    are there when the context ends.
    """
    folder = Path(mkdtemp())
    texts = []
    os.environ["MS_DEV_DUMP_IR_PASSES"] = ",".join(STAGES)
    ms.set_context(save_graphs=2, save_graphs_path=str(folder))
    try:
        yield texts
    finally:
        ms.set_context(save_graphs=0)
        del os.environ["MS_DEV_DUMP_IR_PASSES"]
        texts += [path.read_text() for path in folder.rglob(f"*{stage}_*.ir")]
        shutil.rmtree(folder)


def operators(*texts: str) -> Counter[str]:
    """How often each operator is in graphs of kernels."""
    return Counter(re.findall(r"= (?:PrimFunc_)?([A-Z]\w*)\(", "".join(texts)))
