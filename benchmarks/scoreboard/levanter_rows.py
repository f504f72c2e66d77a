"""The row of Levanter: its `microbatched` over its next-token loss with a mask."""

from __future__ import annotations

from typing import Any

import equinox as eqx
import haliax as hax
import jax
import numpy as np
from haliax.partitioning import ResourceAxis, set_mesh
from levanter.grad_accum import microbatched
from levanter.models.loss import next_token_loss

from benchmarks.scoreboard.measuring import Gradients

jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]
BATCH, POS, VOCAB, EMBED = (
    hax.Axis("batch", 8),
    hax.Axis("position", 6),
    hax.Axis("vocab", 11),
    hax.Axis("embed", 4),
)
PART = 2
MAPPING = {"batch": ResourceAxis.DATA}


def masked(*, micro: bool, even: bool) -> Gradients:
    random = np.random.default_rng(1)
    ids = hax.named(
        random.integers(0, VOCAB.size, (BATCH.size, POS.size)), (BATCH, POS)
    )
    lengths = np.full(BATCH.size, POS.size) if even else 2 + np.arange(BATCH.size) % 5
    mask = hax.named(
        (np.arange(POS.size) < lengths[:, None]).astype(float), (BATCH, POS)
    )
    params = {
        name: hax.named(
            random.standard_normal((VOCAB.size, EMBED.size)), (VOCAB, EMBED)
        )
        for name in ("embedding", "head")
    }

    def loss(params: Any, ids: Any, mask: Any) -> Any:
        logits = hax.dot(
            params["embedding"].take(VOCAB, ids), params["head"], axis=EMBED
        )
        return next_token_loss(POS, VOCAB, logits, ids, loss_mask=mask).scalar(), {}

    gradient = eqx.filter_value_and_grad(loss, has_aux=True)
    with set_mesh(
        jax.make_mesh(
            (1, 1, 1), (ResourceAxis.REPLICA, ResourceAxis.DATA, ResourceAxis.MODEL)
        )
    ):
        if micro:
            gradient = microbatched(gradient, BATCH, PART, MAPPING, MAPPING)
        _, found = eqx.filter_jit(gradient)(params, ids, mask)
    return {name: np.asarray(each.array) for name, each in found.items()}
