"""A script of `test_jax_recompute`: recomputation over two devices.

The test runs it in its own process: JAX fixes the number of devices when it starts, and
a deadlock must not hang pytest.
"""

from __future__ import annotations

import functools
import os
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from conformance_tests.framework_tests.jax_versions import shard_map
from gradaccum_jax import recompute

MESH = jax.make_mesh((2,), ("data",))
SPREAD, WHOLE = PartitionSpec("data"), PartitionSpec()
RNG = np.random.default_rng(0)
WEIGHT = jax.device_put(
    jnp.asarray(RNG.normal(size=(4, 64)), jnp.float32), NamedSharding(MESH, WHOLE)
)
X = jax.device_put(
    jnp.asarray(RNG.normal(size=(32, 4)), jnp.float32), NamedSharding(MESH, SPREAD)
)


def loss(weight: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ weight)
    return jnp.mean(
        jnp.sum(
            jnp.sin(hidden[:, :, None] * hidden[:, None, :] * 1.5) ** 2, axis=(1, 2)
        )
    )


def test_recomputed_shards() -> None:
    def local(weight: Any, x: Any) -> Any:
        return jax.lax.pmean(recompute(loss)(weight, x), "data")

    def spread(weight: Any) -> Any:
        return shard_map(local, mesh=MESH, in_specs=(WHOLE, SPREAD), out_specs=WHOLE)(
            weight, X
        )

    np.testing.assert_allclose(
        jax.jit(jax.grad(spread))(WEIGHT), expected(), rtol=1e-4, atol=1e-4
    )
    np.testing.assert_allclose(
        jax.jit(jax.grad(recompute(loss)))(WEIGHT, X), expected(), rtol=1e-4, atol=1e-4
    )


@functools.cache
def expected() -> Any:
    return jax.jit(jax.grad(loss))(WEIGHT, X)


if __name__ == "__main__":
    test_recomputed_shards()
