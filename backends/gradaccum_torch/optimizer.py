"""The wrapped optimizer: a `torch.optim.Optimizer` that runs the inner one once per window of micro-batches.

These are the calls that a user makes. What they do to the window is `Window`'s, where its sum lives is a `Strategy`'s, and whether
``.grad`` can be believed is `Sentinels`'. What raises does so before anything changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradaccum import StepResult, UsageError
from gradaccum.kit import Options, ScaleRule, explain, require_weight
from gradaccum_torch.checks import require_loss
from gradaccum_torch.forwarding import forwarded, is_forwarded
from gradaccum_torch.grad_scaler import refused
from gradaccum_torch.micro_batch import unfinished
from gradaccum_torch.persistence import PersistentOptimizer
from gradaccum_torch.window import Window

_FROM_SCALER = "grad_scale"
"""What ``scaler.step`` sets on an optimizer for the time of its step."""


class AccumulatingOptimizer(PersistentOptimizer):
    """What `gradaccum.wrap` makes of a torch optimizer; use it in the optimizer's place.

    ``loss.backward(); opt.step(); opt.zero_grad()`` stays as it was, in either order. In mid-window ``zero_grad`` keeps the partial
    sum, and ``step`` counts a micro-batch; the last one's ``step`` divides, clips, runs the inner optimizer and frees ``.grad``.

    Args:
        inner: the optimizer to run once per window.
        options: those of `gradaccum.wrap`, with ``accumulate_dtype`` as a torch dtype or None.
    """

    def __init__(self, inner: torch.optim.Optimizer, options: Options) -> None:
        super().__init__(inner, options)
        self._window = Window(inner, options)

    @property
    def result(self) -> StepResult:
        """What the last ``step``, ``flush`` or ``discard`` did, in Python numbers."""
        return self._window.result

    @property
    def master_weights(self) -> dict[int, Tensor]:
        """The float32 master of each half-precision parameter by its index, with ``master_weights=True``; the tensors themselves."""
        return self._window.parameters.masters()

    def backward(self, loss: Tensor, weight: float | None = None, **kwargs: Any) -> None:
        """``loss.backward(**kwargs)`` with the weight and the loss scale multiplied in.

        Args:
            loss: scalar tensor, shape ``()``. It is not changed.
            weight: the micro-batch's number of items, >= 0; 1 if not given. With 0 there is no backward pass at all: the micro-batch
                is counted and contributes nothing, even if its gradient would be NaN.
            kwargs: those of `torch.Tensor.backward`.

        Raises:
            ArgumentTypeError, ArgumentValueError: `loss` is no tensor, `weight` no such number.
            UsageError: another loss of the same micro-batch had another weight.
        """
        loss, number = require_loss(loss), 1.0 if weight is None else require_weight(weight)
        self._window.micro_batch.require_same(number)
        if number:
            with self._window.own_backward():
                self._window.scaled(loss, number).backward(**kwargs)  # type: ignore[no-untyped-call]
        self._window.micro_batch.note(number)

    def scale(self, loss: Tensor) -> Tensor:
        """`loss` times the loss scale, for ``opt.scale(loss).backward()``; the weight is then 1.

        Args:
            loss: tensor of any shape, float dtype kept.

        Raises:
            ArgumentTypeError: `loss` is no tensor.
            UsageError: another loss of the same micro-batch had another weight.
        """
        loss = require_loss(loss)
        self._window.micro_batch.require_same(1.0)
        self._window.micro_batch.note(1.0)
        self._window.micro_batch.scaled_by_user = True
        return self._window.scaled(loss, 1.0)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Count the micro-batch whose gradient is in ``.grad``, and at the end of the window make the update.

        Args:
            closure: only for ``steps=1``: re-evaluates the model, as `torch.optim.LBFGS` needs.

        Returns:
            None; with a closure, what the inner optimizer's ``step`` returns.

        Raises:
            UsageError: something changed ``.grad`` since autograd filled it, a plain ``backward()`` was used where weight or loss
                scale are needed, or a closure was given where it cannot work. The window is as it was before the call.
        """
        if closure is not None:
            return self._step_with(closure)
        if _FROM_SCALER in self.__dict__:
            return self._step_for_scaler()
        if self._window.count():
            self._window.close(self._run_update, bool(self._optimizer_step_pre_hooks))
        return None

    def flush(self) -> None:
        """Close the open window now, dividing by what it holds; an empty one stays as it is.

        Raises:
            UsageError: a micro-batch is under way (``backward`` without ``step``), or something changed ``.grad``.
        """
        self._window.flush(self._run_update, bool(self._optimizer_step_pre_hooks))

    def discard(self) -> None:
        """Forget the open window and the micro-batch under way: no update, nothing counted, the loss scale as it was."""
        self._window.discard()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear what is in ``.grad`` between two windows; in mid-window keep the partial sum.

        Raises:
            UsageError: it comes between ``backward`` and ``step`` in mid-window, where the micro-batch is part of the sum already.
        """
        strategy = self._window.strategy
        if self._window.fields.micro_step and not strategy.keeps_micro_batch_apart:
            if strategy.sentinels.arrived:
                raise unfinished("zero_grad()")
            return
        self._window.parameters.zero_grad(set_to_none)
        strategy.forget_micro_batch()
        self._window.micro_batch.clear()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group, also in mid-window; see `torch.optim.Optimizer.add_param_group`."""
        self._inner.add_param_group(param_group)
        self._window.groups_changed()

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return forwarded(value, name, self._window) if is_forwarded(value) else value

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Read by ``scaler.step``: whether it may call ``step`` at once, without unscaling and without waiting for the device."""
        return self._window.scaler is not None

    def _step_for_scaler(self) -> None:
        """The step that ``scaler.step`` calls: the scale is moved by the ``scaler.update`` that follows, or held."""
        window, scaler = self._window, self._window.scaler
        if scaler is None:
            raise refused()
        window.micro_batch.scaled_by_user = scaler.update_follows = True
        counted = False
        try:
            if counted := window.count():
                window.close(self._run_update, bool(self._optimizer_step_pre_hooks))
        except BaseException:
            # scaler.step does not get to it, and the next step may be the user's own.
            del self.grad_scale, self.found_inf
            if counted and not window.fields.micro_step:
                scaler.write(window.fields)
            raise
        finally:
            scaler.update_follows = False
        if window.fields.micro_step:
            scaler.hold()
        else:
            scaler.settle(self, window.fields, window.result.overflow)

    def _groups_for_scaler(self, its_locals: Mapping[str, Any]) -> list[dict[str, Any]]:
        scaler = self._window.scaler
        if scaler is None or its_locals.get("self") is not scaler.scaler or not its_locals.get("allow_fp16"):
            raise refused()
        return [scaler.group()]

    def _step_inner(self, *args: Any, **kwargs: Any) -> Any:
        returned = self._window.update.run_inner(args, kwargs)
        if self._window.parameters.has_masters:
            self._window.parameters.round()
        return returned

    def _step_with(self, closure: Callable[[], Any]) -> Any:
        self._require_plain()
        with self._window.counting_applied():
            return self._run_update(lambda: self._evaluate(closure))

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        weight = self._window.micro_batch.weight
        if self._window.factor(weight) != 1:
            raise explain(UsageError, "weight", expected="1 inside a closure", got=weight, fix="Leave the weight out.")
        return loss

    def _require_plain(self) -> None:
        """A closure sees the true gradient in ``.grad``, with nothing left to do to it."""
        self._window.open()
        if found := self._in_the_way():
            raise explain(
                UsageError,
                "closure",
                expected="no closure, or steps=1 with no other option than reduction and accumulate_dtype",
                found=f"a closure, which must find the true gradient in .grad each time, beside {', '.join(found)}",
                fix="Write opt.backward(loss); opt.step() for each micro-batch, or leave these options out for step(closure).",
            )

    def _in_the_way(self) -> list[str]:
        """The options, as one would write them, that leave something to be done to what a closure puts in ``.grad``."""
        options, window = self._options, self._window
        found = [f"{name}={value}" for name in ("clip_norm", "skip_norm") if (value := getattr(options, name)) is not None]
        found += [f"steps={window.size}"] if window.size != 1 else []
        found += ["loss_scale="] if options.scale_rule != ScaleRule() else []
        found += [f"on_overflow={options.on_overflow!r}"] if options.on_overflow == "drop_micro_batch" else []
        found += ["master_weights=True"] if window.parameters.has_masters else []
        pairs = zip(window.parameters.positions(), window.sum_dtypes, strict=True)
        apart = {f"sums of {p.dtype} gradients in {total} (write accumulate_dtype={p.dtype})" for p, total in pairs if p.dtype != total}
        return [*found, *sorted(apart)]
