"""The mutants that no test can notice, each with the reason."""

from __future__ import annotations

from .running import Mutant

KINDS = "the order of kinds means nothing where one of them is looked for"
UNUSED = "it stands where nothing is divided"
SYMMETRIC = "a distance, and a sum of two pairs, are symmetric"
EDGE = "no measured number is the limit itself"
TUNED = "a size near the tuned limit has the same numbers, in about the same time"
UNREAD = "nobody reads what stands for None in compiled code"
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
    "gradaccum/verification/batch.py": {
        "self._axes_of_leaves = list(zip(self.leaves, self._axes, strict=False))": "each leaf has an axis or None",
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
        "if is_finite(gradient) and (distance >= ROUNDING_LIMIT * limits[name])": EDGE,
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
        'return jnp.dtype("float32") if (leaf_dtype.itemsize <= 4) else leaf_dtype': "the floating dtype of 4 bytes is float32 itself",
        "for leaf, dtype in zip(jax.tree.leaves(accumulator), dtypes, strict=False):": LENGTHS,
        "SMALL_SIZE = 2**15": TUNED,
        "return bool((array.size >= SMALL_SIZE))": TUNED,
        "smallest_exact = float(limits.tiny) / (float(limits.eps) * 2)": "XLA:CPU keeps squares that are subnormal",
        "smallest_exact = float(limits.tiny) / float(limits.eps) ** 3": "a norm that is measured again is as exact",
        "in_range = ((squares >= smallest_exact)) & (squares < jnp.inf)": EDGE,
        "factor = jnp.where(squares < jnp.inf, large, 2 / large)": "twice this factor brings the squares into range too",
        "return jnp.where(is_zero, 0, jnp.sqrt(jnp.where(is_zero, 2, squares)))": "this root is not selected",
    },
    "backends/gradaccum_jax/state.py": {
        "codes = kit.encode_terms(kit.terms_of(options._replace(steps=None), 1))": "without steps the number of the update is not read",
        "for new, old in zip(news, olds, strict=False)": LENGTHS,
        "return [vary(new, axes_of(old)) for new, old in zip(arrays, olds, strict=False)]": LENGTHS,
    },
    "backends/gradaccum_torch/arithmetic.py": {
        "FAINT = 2.0**-32": "in a norm of 2^-32, too, no square that counts underflows",
        "HALF = (torch.bfloat16, torch.float16)": KINDS,
        "wide_gradient = gradient.to(torch.promote_types(dtype, gradient.dtype))": "promotion is symmetric",
        "key = (getattr(tensor, 'placements', ()), mesh_of(tensor))": "it is only a key",
    },
    "backends/gradaccum_torch/gradient_sum.py": {
        "expects_windows = True": "expect_window of this class does nothing",
        "return True": "a reduction that no pass launches is launched at the window's end",
    },
    "backends/gradaccum_torch/gradient_watch.py": {
        "PASSES = [1]": "only its changes are read",
        "PASSES[0] += 2": "only its changes are read",
        "PASSES[0] -= 1": "only its changes are read",
        "IN_PARTS = -3": "any number that is no version",
        "self._first_parameter = 1": "the first backward pass sets it",
        "pass  # self._first_parameter = 0": "the first backward pass sets it",
        "return not torch.allclose(self.norm, norm, rtol=0, atol=0, equal_nan=True)": SYMMETRIC,
        "pass  # self.new_gradients.clear()": "a gradient that owns its memory is not copied again",
        **dict.fromkeys(
            (
                "for _hook in (GradientWatch.pass_began, WatchedGradient.gradient_arrived, GradientWatch._pass_ended, GradientWatch._keep_new_gradients):",
                "for _hook in (WatchedGradient.gradient_arrived, GradientWatch._pass_ended, GradientWatch.pass_began, GradientWatch._keep_new_gradients):",
                "for _hook in (WatchedGradient.gradient_arrived, GradientWatch.pass_began, GradientWatch._keep_new_gradients, GradientWatch._pass_ended):",
            ),
            "the order of the functions means nothing",
        ),
    },
    "backends/gradaccum_torch/window.py": {
        "self.gradient_sum = GradientSum(self.watch, masters.parameters)": "another object replaces it before anything reads it",
        "self.extensions, numbers, strict=False": "each extension has its numbers",
        "if gradient is None and (factor < torch.finfo(torch.float16).max):": "a tensor of this factor can be made in both ways",
        "if total.dtype is dtype or (norm / divisor < torch.finfo(dtype).max):": "at the limit the elements tell the same",
        "(id(parameter), parameter.requires_grad, parameter.dtype)": "marks are only compared with each other",
        "(parameter.dtype, id(parameter), parameter.requires_grad)": "marks are only compared with each other",
    },
    "backends/gradaccum_mindspore/gradient_sum.py": {
        "HALF = (ms.bfloat16, ms.float16)": KINDS,
        "CHUNK = 2**21": "chunks of any length have one norm",
        "ROW = 4097": TUNED,
        "PACKED = 2**21": TUNED,
        "if (number_of_elements(map_over(shape_of, sums)) < PACKED):": TUNED,
        "return max(length for length in range(1, (ROW - 1)) if size % length == 0)": TUNED,
        "return max(length for length in range(1, ROW + 2) if size % length == 0)": TUNED,
        "return concat((*flat, zeros_to_full_rows(size, dtype))).reshape(ROW, -1)": "the elements are divided into rows again",
        "return False": UNREAD,
        "wide = ops.addn((cast(part, ms.float32), cast(total, ms.float32)))": "the sum of two",
        "pairs = zip(sums, dtypes, strict=False)": LENGTHS,
        "if (magnitudes.size >= ROW):": "the largest of a row is found in one step or in two",
        "_, magnitudes = ops.ArgMaxWithValue(axis=(1))(rows)": "it is the last of two axes",
        "squares = squares.reshape(-1, row_length(squares.size)).sum((1))": "it is the last of two axes",
        "flat = array.reshape(-2)": "NumPy takes any negative number for the length that is left",
        "if (squares.size >= ROW):": "a row is summed in one step or in two",
    },
    "backends/gradaccum_mindspore/window/pynative.py": {
        "for total, gradient in zip(self.storage.sums, gradients, strict=False):": "another number of gradients was refused before",
        "for total, gradient in zip(self.storage.sums, gradients, strict=False)": "another number of gradients was refused before",
        "storage.push(kit.discard(state._replace(micro_step=1)), state)": "discard forgets it",
        "if (norm < FLOAT16_MAX * divisor):": "at the limit the elements tell the same",
    },
    "backends/gradaccum_mindspore/window/compiled.py": {
        "return False": UNREAD,
        "SMALLEST_WEIGHT = 2.0**-41": "such a weight is above 0 too",
        "SMALLEST_WEIGHT = 4.0**-40": "such a weight is above 0 too",
        "LARGEST_WEIGHT = 2.0**41": "a sum of such weights is finite too, in any window that ends",
        "LARGEST_WEIGHT = 4.0**40": "a sum of such weights is finite too, in any window that ends",
        "for name, value in (('divisor', self.one), ('nothing', self.zero), ('is_applied', self.false)):": "the order only numbers them",
        "for name, value in (('is_applied', self.false), ('divisor', self.one), ('nothing', self.zero)):": "the order only numbers them",
        "never = (after[MICRO_STEP] <= 0)": "the micro-batch was counted",
        "never = after[MICRO_STEP] < 1": "the micro-batch was counted",
    },
    "backends/gradaccum_mindspore/state.py": {
        "INVALID = -2": "any negative number marks the window",
        "for parameter, dtype in zip(parameters, sum_dtypes, strict=False)": LENGTHS,
        "for field, old, new in zip(FIELD_DTYPES, before, rounded_state, strict=False):": LENGTHS,
        "return UntilWeight(-code) if (code <= 0) else code": "an open window has a size",
        "return UntilWeight(-code) if code < 1 else code": "an open window has a size",
    },
}
"""By the file and the changed line."""


def why_equivalent(mutant: Mutant) -> str:
    """Return the reason why the mutant does what the package does, or an empty text."""
    of_file = EQUIVALENT.get(str(mutant.file), {})
    return of_file.get(mutant.mutation.becomes, "")
