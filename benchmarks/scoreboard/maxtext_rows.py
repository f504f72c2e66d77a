"""The rows of MaxText: its loss of pre-training and its
`gradient_accumulation_loss_and_grad` on its own tiny Transformer, in float32.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train.train import loss_fn
from maxtext.utils import maxtext_utils, model_creation_utils
from maxtext.utils.gradient_accumulation import gradient_accumulation_loss_and_grad

from benchmarks.scoreboard.measuring import Gradients

ITEMS, LENGTH, STEPS = 8, 6, 4
TINY: dict[str, Any] = {
    "base_emb_dim": 8,
    "base_mlp_dim": 8,
    "base_moe_mlp_dim": 8,
    "head_dim": 4,
    "vocab_size": 16,
}
TINY |= {
    "base_num_query_heads": 2,
    "base_num_kv_heads": 2,
    "base_num_decoder_layers": 1,
    "max_target_length": LENGTH,
}
PLAIN: dict[str, Any] = {
    "dtype": "float32",
    "weight_dtype": "float32",
    "attention": "dot_product",
    "scan_layers": False,
}
PLAIN |= {
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "run_name": "scoreboard",
}
MIXTURE: dict[str, Any] = {
    "decoder_block": "mixtral",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "megablox": False,
    "sparse_matmul": False,
}


def gradient(micro: bool, ragged: bool, **options: Any) -> Gradients:
    steps = STEPS if micro else 1
    sizes = {
        "gradient_accumulation_steps": steps,
        "per_device_batch_size": ITEMS // steps,
        "base_output_directory": tempfile.mkdtemp(),
    }
    base = str(Path(pyconfig.__file__).parent / "base.yml")
    config = pyconfig.initialize(
        ["scoreboard", base], **sizes, **TINY, **PLAIN, **options
    )
    mesh = maxtext_utils.get_mesh_from_config(config)
    with linen.logical_axis_rules(config.logical_axis_rules):
        model: Any = model_creation_utils.from_config(
            config, mesh=mesh, rngs=nnx.Rngs(0)
        )
    ids = jnp.asarray(
        np.random.default_rng(1).integers(0, TINY["vocab_size"], (ITEMS, LENGTH + 1))
    )
    kept = jnp.arange(LENGTH) < (
        2 + jnp.arange(ITEMS)[:, None] % 5 if ragged else LENGTH
    )
    data = {
        "inputs": ids[:, :-1],
        "targets": ids[:, 1:],
        "inputs_position": jnp.tile(jnp.arange(LENGTH), (ITEMS, 1)),
    }
    data |= {
        "inputs_segmentation": jnp.ones((ITEMS, LENGTH), int),
        "targets_segmentation": jnp.broadcast_to(kept, (ITEMS, LENGTH)).astype(int),
    }
    if micro:
        whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())  # type: ignore[no-untyped-call]
        shardings = jax.tree.map(lambda _: whole, nnx.state(model, nnx.Param))
        _, _, found = gradient_accumulation_loss_and_grad(
            loss_fn, config, model, None, shardings, data, None
        )
    else:
        _, found = nnx.value_and_grad(loss_fn, has_aux=True)(
            model, config, data, None, None, is_train=True
        )
    return {path: np.asarray(leaf, np.float64) for path, leaf in named(found)}


def named(tree: Any) -> list[tuple[str, Any]]:
    return [
        (jax.tree_util.keystr(path[:-1], simple=True, separator="."), leaf)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    ]


def causal_lm(*, micro: bool, even: bool) -> Gradients:
    return gradient(micro, not even)


def experts(*, micro: bool, even: bool) -> Gradients:
    """Equal items. With `even` the loads of the experts are not balanced."""
    return gradient(
        micro, False, load_balance_loss_weight=0.0 if even else 0.01, **MIXTURE
    )


def token_after_next(*, micro: bool, even: bool) -> Gradients:
    """Equal items. With `even` the second prediction counts nothing."""
    return gradient(
        micro, False, mtp_num_layers=1, mtp_loss_scaling_factor=0.0 if even else 0.1
    )
