"""What the user said about the micro-batch under way, and whether ``.grad`` can be believed when it ends.

Everything here raises at the call that is wrong and changes nothing, so that the window can go on or be discarded.
"""

from __future__ import annotations

from gradaccum import UsageError
from gradaccum.kit import explain
from gradaccum_torch.sentinel import Sentinels


class MicroBatch:
    """Notes between two calls of ``step``."""

    def __init__(self) -> None:
        self.weight = 1.0
        """Its weight: 1 unless given."""
        self.noted = False
        """A weight was given, to ``opt.backward``, since the last ``step``."""
        self.scaled_by_user = False
        """``opt.scale`` was called, so a plain ``backward()`` is expected."""

    def require_same(self, weight: float) -> None:
        """All losses of one micro-batch have one weight.

        Raises:
            UsageError: an earlier one had another.
        """
        if self.noted and self.weight != weight:
            raise explain(
                UsageError,
                "weight",
                expected=f"{self.weight:g}, the weight of an earlier loss of the same micro-batch",
                got=weight,
                fix="Call opt.step() after each micro-batch, or give all its losses one weight.",
            )

    def note(self, weight: float) -> None:
        self.weight, self.noted = weight, True

    def clear(self) -> None:
        self.weight, self.noted, self.scaled_by_user = 1.0, False, False

    def require_scaled(self, sentinels: Sentinels, factor: float, scale_in_use: bool) -> None:
        """Every gradient of the micro-batch was multiplied by `factor`, weight times loss scale.

        Raises:
            UsageError: there was a plain ``backward()`` where `factor` is needed.
        """
        forgotten = scale_in_use and not self.noted and not self.scaled_by_user
        mixed = sentinels.arrivals.outside and self.noted and not self.scaled_by_user and factor != 1
        if forgotten or mixed:
            raise explain(
                UsageError,
                "loss",
                expected="to be multiplied by the loss scale and the weight before it is differentiated",
                found="a micro-batch with a plain backward()" if sentinels.arrived else "a step() without opt.backward(loss) before it",
                fix="Write opt.backward(loss) in place of loss.backward(), and opt.backward(loss, weight=0) for a micro-batch that adds "
                "nothing. To start the window anew call opt.discard().",
            )


def changed_gradients() -> UsageError:
    """The error for gradients that are not what ``backward()`` left."""
    return explain(
        UsageError,
        ".grad",
        expected="the gradients as backward() accumulated them since the window began",
        found="gradients that something else changed, such as clip_grad_norm_, scaler.unscale_, model.zero_grad() or an assignment",
        fix="To clip, write gradaccum.wrap(optimizer, ..., clip_norm=...); to clear, opt.zero_grad(); to log the norm, read "
        "opt.result.grad_norm after the window's last step; in place of p.grad = g, torch.autograd.backward(parameters, gradients); to "
        "change the window's gradient, opt.register_step_pre_hook(...), which runs once per update. The window cannot be mended: call "
        "opt.discard().",
    )


def unfinished(call: str) -> UsageError:
    """The error for a call that comes between ``backward()`` and ``step()`` and would leave a micro-batch half counted."""
    return explain(
        UsageError,
        call,
        expected="to be called after step()",
        found="a call between backward() and step() of a micro-batch in an open window",
        fix="Call opt.step() first, or opt.discard() to drop the whole window. If that backward() was for something else, as a "
        "GAN's generator or an adversarial input, keep it away from these parameters: loss.backward(inputs=list(generator.parameters())). "
        'To leave out micro-batches whose gradient is not finite, write on_overflow="drop_micro_batch".',
    )


def interrupted() -> UsageError:
    """The error for going on after a backward pass that raised when some of its gradients had arrived."""
    return explain(
        UsageError,
        "backward()",
        expected="to deliver a micro-batch's gradients or none",
        found="a backward pass that raised, such as out of memory, when it had delivered a part of them",
        fix="Call opt.discard() to drop the window, which holds that part. In the first micro-batch of a window opt.zero_grad() does, and "
        "opt.backward(loss), in place of loss.backward(), takes that part out by itself.",
    )


def cast_in_window() -> UsageError:
    """The error for parameters whose dtype was changed in an open window."""
    return explain(
        UsageError,
        "model.to(dtype)",
        expected="a call between two windows",
        found="parameters that were cast in an open window, and its partial sum with them",
        fix="Call opt.flush() before it. The window cannot be mended: call opt.discard().",
    )
