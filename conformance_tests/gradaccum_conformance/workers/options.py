"""The few sets of options that the tests of workers share, because a backend compiles
anew for each.
"""

from __future__ import annotations

import gradaccum
from gradaccum_conformance.harness import Option

SCALE = gradaccum.DynamicLossScale(
    init_scale=4.0, growth_interval=2, min_scale=1.0, max_scale=16.0
)
CLIP = 64.0
SKIP = 128.0
SUM: dict[str, Option] = {"reduction": "sum", "clip_norm": CLIP, "skip_norm": SKIP}
DROPPING: dict[str, Option] = {
    "reduction": "sum_per_item",
    "on_overflow": "drop_micro_batch",
    "loss_scale": SCALE,
}
FULL: dict[str, Option] = {"steps": 2, "loss_scale": SCALE}
REDUCTIONS: dict[str, dict[str, Option]] = {
    "mean": {},
    "sum": SUM,
    "sum_per_item": DROPPING,
}
