"""Stage 1: versions, the card, and its two ceilings."""

from __future__ import annotations

import platform

import torch

from benchmarks.gpu.problem import seconds_of
from benchmarks.gpu.records import Check, Measured, Setting
from benchmarks.machine import version_of

PACKAGES = (
    "jax",
    "jaxlib",
    "optax",
    "flax",
    "accelerate",
    "lightning",
    "lightning-fabric",
    "transformers",
    "triton",
    "numpy",
)
BFLOAT16_SIZE = 2


def versions(setting: Setting) -> Measured:
    import gradaccum

    texts = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if setting.device == "cuda":
        nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        texts += [f"CUDA {torch.version.cuda}", f"NCCL {nccl}"]
    for package in PACKAGES:
        version = version_of(package)
        if version is not None:
            texts.append(f"{package} {version}")
    texts.append(f"gradaccum {gradaccum.__version__}")
    return Measured(None, ", ".join(texts))


def card(setting: Setting) -> Measured:
    about = torch.cuda.get_device_properties(0)
    gibibytes = about.total_memory / 2**30
    return Measured(
        None,
        f"{about.name}, compute capability {about.major}.{about.minor},"
        f" {about.multi_processor_count} multiprocessors, {gibibytes:.0f} GiB",
    )


def memory_bandwidth(setting: Setting) -> Measured:
    """Measure the triad ``a = b + s * c`` of large float32 arrays, as one kernel."""
    elements = setting.size(2**22, 2**28)
    b = torch.ones(elements, device=setting.device)
    c = torch.ones(elements, device=setting.device)
    a = torch.empty_like(b)
    action = lambda: torch.add(b, c, alpha=0.5, out=a)  # noqa: E731
    seconds = seconds_of(setting, action, repeats=10)
    bytes_moved = 3 * a.element_size() * elements
    return Measured(None, f"{bytes_moved / seconds / 1e9:,.0f} GB/s")


def matrix_product(setting: Setting) -> Measured:
    """Measure the product of two random square matrices in bfloat16."""
    size = setting.size(256, 8192)
    a = torch.randn(size, size, device=setting.device, dtype=torch.bfloat16)
    b = torch.randn(size, size, device=setting.device, dtype=torch.bfloat16)
    seconds = seconds_of(setting, lambda: a @ b, repeats=10)
    return Measured(None, f"{2 * size**3 / seconds / 1e12:,.3g} TFLOP/s")


CHECKS = (
    Check("versions", versions),
    Check("card", card, needs_gpu=True),
    Check("memory bandwidth, triad", memory_bandwidth),
    Check("matrix product, bfloat16", matrix_product),
)
