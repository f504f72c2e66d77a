"""The mutants that no test can notice, each with the reason."""

from __future__ import annotations

from .running import Mutant

KINDS = "the order of kinds means nothing where one of them is looked for"
UNUSED = "it stands where nothing is divided"
SYMMETRIC = "a distance, and a sum of two pairs, are symmetric"
EDGE = "no measured number is the limit itself"
PROMOTION = "promotion is symmetric"
TUNED = "a size near the tuned limit has the same numbers, in about the same time"
IN_RANGE = "such a sum of squares is in range, and has no factor"
LENGTHS = "both have one entry for each field, or each leaf"

EQUIVALENT: dict[str, dict[str, str]] = {
    "gradaccum/transitions.py": {
        "(micro_step, optimizer_step + applied, skipped_windows + 1 - applied, overflow, weight, loss_scale, growth_tracker)": "discard forgets both",
        "clipping = divides * where(apply & ((excess >= 1)), excess, one)": "an excess of 1 divides by 1",
        "smaller_scale > rule.min_scale, smaller_scale, rule.min_scale + (0 / scale)": "both are 0",
    },
    "gradaccum/nests.py": {
        "PLAIN = (str, bool, bytes, int, float, complex, type(None))": KINDS,
        "PLAIN = (str, bytes, bool, int, float, type(None), complex)": KINDS,
        "PLAIN = (str, bytes, int, bool, float, complex, type(None))": KINDS,
        "(type(v), getattr(v, 'ndim', None), str(getattr(v, 'dtype', None)))": KINDS,
    },
    "gradaccum/statistics.py": {
        "one = 0 * weight + 2": UNUSED,
    },
    "gradaccum/verification/examination.py": {
        "return is_exact and (abs(math.fsum(fit.best) - 1) <= room)": EDGE,
        "by_neighbour = comparison.differing(swapped_gradients, gradients)": SYMMETRIC,
        "by_place = comparison.differing(turned_gradients, gradients)": SYMMETRIC,
        "for share, norm in zip(fit.best, fit.norms, strict=False):": "each micro-batch has a coefficient and a norm",
    },
    "gradaccum/window_loop.py": {
        "by_name = dict(zip(self.count, totals[1:], strict=False))": "a reduction of another length was refused",
    },
    "gradaccum/watching.py": {
        "pass  # self._last_end = 0.0": "to add a listener sets it, and without one no window is noted",
    },
    "backends/gradaccum_jax/gradient_sum.py": {
        "return jnp.promote_types(jnp.complex64, chosen_dtype)": PROMOTION,
        'return jnp.dtype("float32") if (leaf_dtype.itemsize <= 4) else leaf_dtype': "the floating dtype of 4 bytes is float32 itself",
        'return jnp.dtype("float32") if leaf_dtype.itemsize < 5 else leaf_dtype': "the floating dtype of 4 bytes is float32 itself",
        "leaf.dtype == wider(divisor.dtype, leaf.dtype)": PROMOTION,
        "quotient_dtype = wider(jnp.float32, total_dtype)": PROMOTION,
        "rows = jnp.atleast_1d(leaf.astype(jnp.promote_types(jnp.float32, leaf.dtype)))": PROMOTION,
        "norm = jnp.minimum(float(limits.max), _square_root(again) / factor)": "the smaller of two",
        "return jnp.max(jnp.maximum(-jnp.min(rows, axis=-1), jnp.max(rows, axis=-1)))": "the larger of two",
        "for leaf, dtype in zip(jax.tree.leaves(accumulator), dtypes, strict=False):": LENGTHS,
        "return all((leaf.size < SMALL_SIZE) for leaf in jax.tree.leaves(accumulator))": TUNED,
        "SMALL_SIZE = 2**15": TUNED,
        "if (group[0].size >= SMALL_SIZE):": TUNED,
        "kind = typeof(array) if (array.size < SMALL_SIZE) else place": TUNED,
        "smallest_exact = float(limits.tiny) / float(limits.eps) ** 3": "a norm that is measured again is as exact",
        "in_range = ((squares >= smallest_exact)) & (squares < jnp.inf)": EDGE,
        "factor = jnp.where((squares <= 1), large, 1 / large)": IN_RANGE,
        "factor = jnp.where(squares < 2, large, 1 / large)": IN_RANGE,
        "factor = jnp.where(squares < 1, large, 2 / large)": "twice this factor brings the squares into range too",
        "return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 2, squares)))": "this root is not selected",
    },
    "backends/gradaccum_jax/state.py": {
        "codes = kit.encode_terms(kit.terms_of(options._replace(steps=None), 1))": "without steps the number of the update is not read",
        "for new, old in zip(news, olds, strict=False)": LENGTHS,
        "return [vary(new, axes_of(old)) for new, old in zip(arrays, olds, strict=False)]": LENGTHS,
    },
    "backends/gradaccum_jax/update.py": {
        "return total.astype(wider(update.dtype, total.dtype))": PROMOTION,
    },
    "backends/gradaccum_torch/gradient_watch.py": {
        "PASSES = [1]": "only its changes are read",
        "self.version = (1)": "without a gradient the version is not read",
        "pass  # self.new_gradients.clear()": "a gradient that owns its memory is not copied again",
    },
    "backends/gradaccum_mindspore/gradient_sum.py": {
        "HALF = (ms.bfloat16, ms.float16)": KINDS,
        "CHUNK = 2**21": "chunks of any length have one norm",
        "flat = array.reshape(-2)": "NumPy takes any negative number for the length that is left",
        "if (squares.size >= ROW):": "a row is summed in one step or in two",
    },
    "backends/gradaccum_mindspore/window/pynative.py": {
        "for total, gradient in zip(self.storage.sums, gradients, strict=False):": "another number of gradients was refused before",
        "if (norm < FLOAT16_MAX * divisor):": "at the limit the elements tell the same",
    },
    "backends/gradaccum_mindspore/window/compiled.py": {
        "return False": "nobody reads what stands for None in compiled code",
        "LARGEST_WEIGHT = 2.0**41": "a sum of such weights is finite too, in any window that ends",
        "never = after[MICRO_STEP] < 1": "the micro-batch was counted",
    },
    "backends/gradaccum_mindspore/state.py": {
        "return UntilWeight(-code) if (code <= 0) else code": "an open window has a size",
        "return UntilWeight(-code) if code < 1 else code": "an open window has a size",
    },
}
"""By the file and the changed line."""


def why_equivalent(mutant: Mutant) -> str:
    """Return the reason why the mutant does what the package does, or an empty text."""
    of_file = EQUIVALENT.get(str(mutant.file), {})
    return of_file.get(mutant.mutation.becomes, "")
