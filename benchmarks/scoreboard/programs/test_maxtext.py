"""MaxText's `gradient_accumulation_loss_and_grad` over its loss of pre-training: the
accumulated gradient is the large batch's, also where the loss has a second term, of the
experts' balance or of the token after the next.
"""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen, nnx
from maxtext.configs import pyconfig
from maxtext.trainers.pre_train.train import loss_fn
from maxtext.utils import maxtext_utils, model_creation_utils
from maxtext.utils.gradient_accumulation import gradient_accumulation_loss_and_grad

ITEMS, LENGTH = 8, 6
TINY = {
    "base_emb_dim": 8,
    "base_mlp_dim": 8,
    "base_moe_mlp_dim": 8,
    "base_num_decoder_layers": 1,
    "base_num_kv_heads": 2,
    "base_num_query_heads": 2,
    "head_dim": 4,
    "max_target_length": LENGTH,
    "vocab_size": 16,
    "attention": "dot_product",
    "dtype": "float32",
    "weight_dtype": "float32",
    "scan_layers": False,
    "dataset_type": "synthetic",
    "enable_checkpointing": False,
    "enable_goodput_recording": False,
    "run_name": "accumulation",
}
EXPERTS = {
    "decoder_block": "mixtral",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "megablox": False,
    "sparse_matmul": False,
    "load_balance_loss_weight": 0.01,
}
TOKEN_AFTER_NEXT = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}


def gradient(steps: int, folder: Path, options: dict[str, Any]) -> dict[str, Any]:
    config = pyconfig.initialize(
        ["accumulation", str(Path(pyconfig.__file__).parent / "base.yml")],
        gradient_accumulation_steps=steps,
        per_device_batch_size=ITEMS // steps,
        base_output_directory=str(folder),
        **TINY,
        **options,
    )
    mesh = maxtext_utils.get_mesh_from_config(config)
    with linen.logical_axis_rules(config.logical_axis_rules):
        model = model_creation_utils.from_config(config, mesh=mesh, rngs=nnx.Rngs(0))
    tokens = np.random.default_rng(1).integers(0, 16, (ITEMS, LENGTH + 1))
    data = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "inputs_position": np.tile(np.arange(LENGTH), (ITEMS, 1)),
        "inputs_segmentation": np.ones((ITEMS, LENGTH), int),
        "targets_segmentation": np.ones((ITEMS, LENGTH), int),
    }
    if steps == 1:
        of_batch = nnx.value_and_grad(loss_fn, has_aux=True)
        _, found = of_batch(model, config, data, None, None, is_train=True)
    else:
        unsharded = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        shardings = jax.tree.map(lambda _: unsharded, nnx.state(model, nnx.Param))
        _, _, found = gradient_accumulation_loss_and_grad(
            loss_fn, config, model, None, shardings, data, None
        )
    leaves = jax.tree_util.tree_leaves_with_path(found)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize(
    "options",
    [{}, EXPERTS, TOKEN_AFTER_NEXT],
    ids=["causal_lm", "experts", "token_after_next"],
)
def test_accumulated_gradient(options: dict[str, Any], tmp_path: Path) -> None:
    large = gradient(1, tmp_path, options)
    accumulated = gradient(4, tmp_path, options)
    for name, expected in large.items():
        np.testing.assert_allclose(
            accumulated[name], expected, rtol=1e-3, atol=1e-5, err_msg=name
        )
