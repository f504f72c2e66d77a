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
    "backends/gradaccum_torch/arithmetic.py": {
        "HALF = (torch.bfloat16, torch.float16)": KINDS,
        "wide_gradient = gradient.to(torch.promote_types(dtype, gradient.dtype))": "promotion is symmetric",
        "key = (getattr(tensor, 'placements', ()), mesh_of(tensor))": "it is only a key",
    },
    "backends/gradaccum_torch/gradient_sum.py": {
        "expects_windows = True": "expect_window of this class does nothing",
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
        "if total.dtype is dtype or (norm / divisor < torch.finfo(dtype).max):": "at the limit the elements tell the same",
        "(id(parameter), parameter.requires_grad, parameter.dtype)": "marks are only compared with each other",
        "(parameter.dtype, id(parameter), parameter.requires_grad)": "marks are only compared with each other",
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
