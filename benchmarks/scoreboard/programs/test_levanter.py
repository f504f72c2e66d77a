"""Levanter's `microbatched` over its next-token loss: the accumulated gradient is the
large batch's, also where items have masks of different lengths.
"""

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
import pytest
from haliax.partitioning import ResourceAxis, set_mesh
from levanter.grad_accum import microbatched
from levanter.models.loss import next_token_loss

BATCH, POSITION = hax.Axis("batch", 8), hax.Axis("position", 6)
VOCAB, EMBED = hax.Axis("vocab", 11), hax.Axis("embed", 4)
MAPPING = {"batch": ResourceAxis.DATA}
AXES = (ResourceAxis.REPLICA, ResourceAxis.DATA, ResourceAxis.MODEL)


@pytest.mark.parametrize("ragged", [False, True], ids=["equal", "ragged"])
def test_microbatched(ragged: bool) -> None:
    random = np.random.default_rng(1)
    ids = random.integers(0, VOCAB.size, (BATCH.size, POSITION.size))
    lengths = 2 + np.arange(BATCH.size) % 5 if ragged else np.full(BATCH.size, 6)
    mask = (np.arange(POSITION.size) < lengths[:, None]).astype(np.float32)
    params = {
        name: hax.random.normal(jax.random.key(seed), (VOCAB, EMBED))
        for seed, name in enumerate(("embedding", "head"))
    }

    def loss_fn(params: Any, ids: Any, mask: Any) -> Any:
        vectors = params["embedding"].take(VOCAB, ids)
        logits = hax.dot(vectors, params["head"], axis=EMBED)
        loss = next_token_loss(POSITION, VOCAB, logits, ids, loss_mask=mask)
        return loss.scalar(), {}

    gradient = eqx.filter_value_and_grad(loss_fn, has_aux=True)
    batch = hax.named(ids, (BATCH, POSITION)), hax.named(mask, (BATCH, POSITION))
    with set_mesh(jax.make_mesh((1, 1, 1), AXES)):
        accumulated = microbatched(gradient, BATCH, 2, MAPPING, MAPPING)
        _, large = eqx.filter_jit(gradient)(params, *batch)
        _, small = eqx.filter_jit(accumulated)(params, *batch)
    for name in params:
        np.testing.assert_allclose(
            small[name].array, large[name].array, rtol=1e-4, atol=1e-6
        )
