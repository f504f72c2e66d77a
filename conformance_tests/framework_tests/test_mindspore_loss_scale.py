"""The loss scale moves as `mindspore.amp.DynamicLossScaler` does, event by event.

Our scale and tracker are its ``scale_value`` and ``counter``, stepped once per window.
We differ by design, outside the comparison:

- the user can set a floor and a ceiling; MindSpore's floor is 1, and both stop at
  float32's range;
- a window of weight 0 is neither clean nor an overflow, so scale and tracker stay;
  MindSpore's caller has to choose;
- the backoff multiplies by ``1 / scale_factor``, MindSpore divides: equal for powers of
  two, an ulp apart for others.
"""

import numpy as np
import pytest
from mindspore import Tensor, amp

from gradaccum import DynamicLossScale

from .mindspore_common import (
    pynative_after,  # noqa: F401
)
from .mindspore_driver import driver


@pytest.mark.parametrize(
    ("factor", "interval", "init"),
    [(2, 1, 1.0), (2, 2, 2.0**126), (4, 3, 2.0**10), (16, 7, 2.0**16)],
)
def test_scale_moves_as_mindspores(factor, interval, init):
    """On random overflows, up to the ends of float32's range."""
    random = np.random.default_rng([factor, interval])
    theirs = amp.DynamicLossScaler(init, factor, interval)
    ours = DynamicLossScale(init, factor, 1 / factor, interval)
    optimizer, call, _ = driver("pynative", 1, ours)
    seen = set()
    for overflow in random.random(200) < np.repeat(
        random.choice([0.05, 0.3, 0.8], 20), 10
    ):
        call(np.inf if overflow else 0.0)
        theirs.adjust(Tensor(not overflow))
        assert optimizer.loss_scale.asnumpy() == theirs.scale_value.asnumpy()
        assert optimizer.storage.growth_tracker.asnumpy() == theirs.counter.asnumpy()
        seen.add(float(optimizer.loss_scale))
    assert len(seen) > 1
    assert all(1 <= scale < np.inf for scale in seen)
