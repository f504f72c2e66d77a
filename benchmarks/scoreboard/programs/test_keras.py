"""Keras's ``gradient_accumulation_steps``: an epoch of micro-batches applies the update
of the large batch, also where the last micro-batch or the last window is short.
"""

import keras
import numpy as np
import pytest


@pytest.mark.parametrize(
    "items", [8, 7, 6], ids=["equal", "short_batch", "short_window"]
)
def test_accumulated_update(items: int) -> None:
    keras.config.set_floatx("float64")
    x = np.random.default_rng(1).standard_normal((items, 5))
    y = np.sin(x.sum(1, keepdims=True))
    weights = []
    for batch_size, steps in ((items, None), (2, 4)):
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.layers.Input((5,)), keras.layers.Dense(1)])
        optimizer = keras.optimizers.SGD(0.1, gradient_accumulation_steps=steps)
        model.compile(optimizer, "mse")
        model.fit(x, y, batch_size=batch_size, epochs=1, shuffle=False, verbose=0)
        weights.append(np.array(model.get_weights()[0]))
    np.testing.assert_allclose(weights[1], weights[0], rtol=1e-6)
