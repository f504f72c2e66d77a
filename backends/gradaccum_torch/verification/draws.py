"""Random numbers, item by item: each item of a micro-batch gets the numbers that it got
in the large batch.

An operation draws if it moves the state of its generator; one that begins at a state
seen before is a repetition, as in checkpointing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gradaccum_torch.torch_private.names import DispatchMode
from gradaccum_torch.verification.batch import Axis, NoAxis, axis_between, rows

NOT_PER_ITEM = ("randperm",)
"""Operations whose numbers mean places in the batch, so that an item has none of its
own.
"""
NOT_ALONE = ("attention", "rrelu", "_cudnn_rnn", "miopen_rnn")
"""Parts of names of operations that draw numbers and compute with them at once, so that
the numbers do not come out.
"""
OWN = tuple(
    str(Path(module.__file__ or "").parent)
    for module in (torch, sys.modules[__package__])
)


class Draw(NamedTuple):
    """The numbers of one random operation."""

    operation: str
    place: str
    """The line of the user's that asked for them."""
    numbers: Tensor

    def can_tell(self) -> bool:
        """True if equal numbers in two draws are no accident: not all the same, or one
        that is no 0 or 1.
        """
        if self.numbers.numel() == 1:
            return float(self.numbers) not in (0.0, 1.0)
        return self.numbers.numel() > 1 and bool(
            (self.numbers != self.numbers.flatten()[0]).any()
        )


class Drawing(DispatchMode):  # type: ignore[misc]
    """A mode that notes random operations, and replays those whose numbers a recording
    has.
    """

    def __init__(
        self, replay: Callable[[int, Draw], Tensor | None] = lambda number, draw: None
    ) -> None:
        super().__init__()
        self.draws: list[Draw] = []
        self.generators: dict[torch.Generator, Tensor] = {}
        """Generators that were handed to an operation, and their states before."""
        self._replay = replay
        self._begun: dict[bytes, int] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        generator = _generator_of(func, args, kwargs)
        if generator is not None and generator not in self.generators:
            self.generators[generator] = generator.get_state()
        before = _state(generator, args, kwargs)
        made = func(*args, **kwargs)
        if before == _state(generator, args, kwargs):
            return made  # Dropout with a probability of zero draws nothing.
        return self._drawn(func, args, made, before)

    def _drawn(self, func: Any, args: Sequence[Any], made: Any, state: bytes) -> Any:
        name = func.name().removeprefix("aten::").partition(".")[0]
        if name == "native_dropout":
            numbers = made[1]
        elif isinstance(made, Tensor):
            numbers = made
        else:
            numbers = made[0]
        draw = Draw(name, _place(), numbers.detach().clone())
        number = self._begun.setdefault(state, len(self._begun))
        if number == len(self.draws):
            self.draws.append(draw)
        given = self._replay(number, draw)
        if given is None:
            return made
        numbers.copy_(given)
        if name == "native_dropout":
            made[0].copy_(args[0] * given * (1 / (1 - args[1]) if args[1] < 1 else 0.0))
        return made


class Recording:
    """The draws of a large batch, and where the items stand in each."""

    def __init__(
        self, whole: Sequence[Draw], part: Sequence[Draw] | None, items: int, fewer: int
    ) -> None:
        self._whole = whole
        self.unreplayed = dict[str, None]()
        self._axes: dict[int, Axis | None] = {}
        for number, draw in enumerate(whole):
            other = part[number] if part is not None and number < len(part) else None
            self._note(number, draw, other, items, fewer)

    def _note(
        self, number: int, draw: Draw, other: Draw | None, items: int, fewer: int
    ) -> None:
        try:
            if (
                other is None
                or other.operation != draw.operation
                or any(part in draw.operation for part in NOT_ALONE)
            ):
                raise NoAxis
            axis = axis_between(draw.numbers.shape, other.numbers.shape, items, fewer)
            if axis is not None and draw.operation in NOT_PER_ITEM:
                raise NoAxis
            self._axes[number] = axis
        except NoAxis:
            self.unreplayed[f"{draw.operation} at {draw.place}"] = None

    @contextmanager
    def replayed(self, items: Sequence[int]) -> Iterator[None]:
        def replay(number: int, draw: Draw) -> Tensor | None:
            if (
                number not in self._axes
                or self._whole[number].operation != draw.operation
            ):
                return None
            given = rows(self._whole[number].numbers, self._axes[number], items)
            return given if given.shape == draw.numbers.shape else None

        if not self._whole:
            yield
            return
        with Drawing(replay):
            yield


def repeated(runs: Sequence[Sequence[Draw]]) -> list[str]:
    """Return where several runs in a row drew the same numbers although the random
    state moved.
    """
    first, *others = runs
    return list(
        dict.fromkeys(
            f"{draw.operation} at {draw.place}"
            for number, draw in enumerate(first)
            if draw.can_tell()
            and others
            and all(number < len(run) and _same(draw, run[number]) for run in others)
        )
    )


def _same(a: Draw, b: Draw) -> bool:
    return (
        a.operation == b.operation
        and a.numbers.shape == b.numbers.shape
        and bool(torch.equal(a.numbers, b.numbers))
    )


def _generator_of(
    func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> torch.Generator | None:
    return next(
        (
            value
            for value in (*args, *kwargs.values())
            if isinstance(value, torch.Generator)
        ),
        None,
    )


def _state(
    generator: torch.Generator | None, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> bytes:
    if generator is not None:
        return bytes(str(id(generator)), "ascii") + bytes(
            generator.get_state().numpy().tobytes()
        )
    device = kwargs.get("device") or next(
        (value.device for value in args if isinstance(value, Tensor)),
        torch.device("cpu"),
    )
    if torch.device(device).type == "cuda":
        state = torch.cuda.get_rng_state(device)
    else:
        state = torch.get_rng_state()
    return bytes(state.numpy().tobytes())


def _place() -> str:
    """Return the innermost line of the user's."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith(OWN):
        frame = frame.f_back
    if frame is None:
        return "an unknown line"
    return (
        f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} in"
        f" {frame.f_code.co_name}"
    )
