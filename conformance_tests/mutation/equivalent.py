"""The mutants that no test can notice, each with the reason."""

from __future__ import annotations

from .running import Mutant

KINDS = "the order of kinds means nothing where one of them is looked for"
UNUSED = "it stands where nothing is divided"
SYMMETRIC = "a distance, and a sum of two pairs, are symmetric"
EDGE = "no measured number is the limit itself"

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
    "gradaccum/verification/batch.py": {
        "self._axes_of_leaves = list(zip(self.leaves, self._axes, strict=False))": "each leaf has an axis or None",
        "for value, axis in zip(values, spread(axes, arguments, 'axes'), strict=False)": "each leaf has an axis or None",
    },
    "gradaccum/verification/comparison.py": {
        "self.differing(self.large, self.accumulate(parts, weighting))": SYMMETRIC,
        "for gradient, factor in zip(self.gradients(parts), factors, strict=False):": "each micro-batch has a factor",
        "pairs = zip(self.gradients(parts), factors, strict=False)": "each micro-batch has a factor",
        "if (size < sum_error * largest):": EDGE,
    },
    "gradaccum/verification/examination.py": {
        "SCALES = (2.0**17, 2.0**8)": "any power of two",
        "SCALES = (2.0**16, 2.0**9)": "any power of two",
        "SCALES = (2.0**16, (2.0 * 8))": "any power of two",
        "return is_exact and (abs(math.fsum(best) - 1) <= room)": EDGE,
        "if norm and (share <= SAME):": EDGE,
        "and (distance >= ROUNDING_LIMIT * comparison.floors[name])": EDGE,
        "if not changed_names(second, first[::-1]):": SYMMETRIC,
        "names = comparison.differing(gradient, comparison.accumulate(parts))": SYMMETRIC,
        "names = self.comparison.differing(gradient, carried_gradient)": SYMMETRIC,
        "for share, norm in zip(best, coefficients.norms, strict=False):": "each micro-batch has a coefficient and a norm",
    },
    "gradaccum/window_loop.py": {
        "by_name = dict(zip(self.count, totals[1:], strict=False))": "a reduction of another length was refused",
    },
    "gradaccum/watching.py": {
        "pass  # self._last_end = 0.0": "to add a listener sets it, and without one no window is noted",
    },
    "backends/gradaccum_jax/gradient_sum.py": {
        "return jnp.promote_types(jnp.complex64, chosen_dtype)": "promotion is symmetric",
        'return jnp.dtype("float32") if (leaf_dtype.itemsize <= 4) else leaf_dtype': "the floating dtype of 4 bytes is float32 itself",
        "leaf.dtype == wider(divisor.dtype, leaf.dtype)": "promotion is symmetric",
        "quotient_dtype = wider(jnp.float32, total_dtype)": "promotion is symmetric",
        "norm = jnp.minimum(float(limits.max), _square_root(again) / factor)": "the smaller of two",
        "for leaf, dtype in zip(jax.tree.leaves(accumulator), dtypes, strict=False):": "each leaf has a dtype",
    },
    "backends/gradaccum_jax/state.py": {
        "return [vary(new, axes_of(old)) for new, old in zip(arrays, olds, strict=False)]": "each old value has a new one",
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
