"""What the user's objects hold, noted before a run and put back after it: buffers, attributes, modes, hooks, random generators.

The walk begins at the model and at what the loss function closes over. It notes each container's entries and each tensor's numbers, and
puts back the same objects with the same numbers: who holds a buffer elsewhere sees it unchanged. A value that changes nowhere on that way
(a file, a global variable) is out of reach; `repeatable` of the core notices if the loss depends on it.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils import data

DEPTH = 3
"""How many containers and objects deep the walk goes from a module or the loss function: a trainer must not drag in all that it has."""
LEFT_ALONE = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, torch.optim.Optimizer, data.Dataset, data.DataLoader)
"""Types of values into which the walk does not go: no forward pass changes them, and a copy of their tensors would be large."""


class Note(Protocol):
    """One object as it was."""

    def changed(self) -> Iterable[str]:
        """Names of what is no longer as it was."""
        ...

    def put_back(self) -> None:
        """Make it as it was."""
        ...


class TensorNote:
    """A tensor's numbers."""

    def __init__(self, path: str, tensor: Tensor) -> None:
        self._path, self._tensor, self._numbers = path, tensor, tensor.detach().clone()

    def changed(self) -> Iterator[str]:
        if not _equal(self._tensor.detach(), self._numbers):
            yield self._path

    def put_back(self) -> None:
        if any(self.changed()):
            self._tensor.data.copy_(self._numbers)  # By .data: the versions of parameters, which others watch, stay.


class EntriesNote:
    """The entries of a dict, of an object's attributes or of a module's buffers."""

    def __init__(self, path: str, entries: MutableMapping[Any, Any]) -> None:
        self._path, self._entries, self._before = path, entries, dict(entries)

    def changed(self) -> Iterator[str]:
        for key in [*self._before, *(key for key in self._entries if key not in self._before)]:
            if not _same(self._before.get(key, self), self._entries.get(key, self)):
                yield _joined(self._path, str(key))

    def put_back(self) -> None:
        for key in [key for key in self._entries if key not in self._before]:
            del self._entries[key]
        if list(self._entries) != list(self._before):
            self._entries.clear()
        for key, value in self._before.items():
            if key not in self._entries or self._entries[key] is not value:
                self._entries[key] = value


class SequenceNote:
    """The elements of a list or a deque."""

    def __init__(self, path: str, elements: Any) -> None:
        self._path, self._elements, self._before = path, elements, list(elements)

    def changed(self) -> Iterator[str]:
        now = list(self._elements)
        if len(now) != len(self._before) or not all(map(_same, now, self._before)):
            yield self._path

    def put_back(self) -> None:
        if any(self.changed()) or any(a is not b for a, b in zip(self._elements, self._before, strict=True)):
            self._elements.clear()
            self._elements.extend(self._before)


class CellNote:
    """A variable that the loss function closes over."""

    def __init__(self, path: str, cell: types.CellType) -> None:
        self._path, self._cell, self._before = path, cell, cell.cell_contents

    def changed(self) -> Iterator[str]:
        if not _same(self._cell.cell_contents, self._before):
            yield self._path

    def put_back(self) -> None:
        self._cell.cell_contents = self._before


class GeneratorNote:
    """A random generator's state."""

    def __init__(self, path: str, generator: torch.Generator) -> None:
        self._path, self._generator, self._state = path, generator, generator.get_state()

    def changed(self) -> Iterator[str]:
        return iter(())  # Random numbers have experiments of their own.

    def put_back(self) -> None:
        self._generator.set_state(self._state)


class Kept:
    """Everything that was noted, from several roots.

    Args:
        model: the model.
        loss_fn: the loss function, with what it closes over.
    """

    def __init__(self, model: object, loss_fn: Callable[..., object]) -> None:
        self._notes: list[Note] = []
        self._seen: dict[int, object] = {}
        self.modules: dict[str, nn.Module] = {}
        """The outermost modules found, by path; the model's is ""."""
        self._walk("", model, DEPTH)
        for name, value, note in _closed_over(loss_fn, set()):
            self._notes += [note] if note is not None else []
            self._walk(name, value, DEPTH)

    def changed(self) -> tuple[str, ...]:
        """Names of what is no longer as it was."""
        names = dict.fromkeys(name for note in self._notes for name in note.changed())
        return tuple(name for name in names if name.rpartition(".")[2] != "training")  # The mode is a condition, not state.

    def put_back(self) -> None:
        """Make everything as it was."""
        with torch.no_grad():
            for note in self._notes:
                note.put_back()

    def _walk(self, path: str, value: Any, depth: int) -> None:
        if id(value) in self._seen or isinstance(value, LEFT_ALONE) or depth < 0:
            return
        self._seen[id(value)] = value
        if isinstance(value, nn.Module):
            self._walk_module(path, value)
        elif isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta:
            self._notes.append(TensorNote(path, value))
        elif isinstance(value, torch.Generator):
            self._notes.append(GeneratorNote(path, value))
        elif isinstance(value, dict):
            self._walk_entries(path, value, depth)
        elif isinstance(value, list | deque):
            self._notes.append(SequenceNote(path, value))
            self._walk_all(path, enumerate(value), depth)
        elif isinstance(value, tuple):
            self._walk_all(path, enumerate(value), depth)
        elif isinstance(getattr(value, "__dict__", None), dict):
            self._walk_entries(path, vars(value), depth)

    def _walk_module(self, path: str, module: nn.Module) -> None:
        """A module's own tables do not count as a part of the path: a buffer is ``norm.running_mean``."""
        if not any(module is inner for outer in self.modules.values() for inner in outer.modules()):
            self.modules[path] = module
        for name, value in [("", vars(module)), *vars(module).items()]:
            if isinstance(value, dict) and (name == "" or name in ("_parameters", "_buffers", "_modules")):
                self._seen[id(value)] = value
                self._notes.append(EntriesNote(path, value))
                if name:
                    self._walk_all(path, value.items(), DEPTH)
            else:
                self._walk(_joined(path, name), value, DEPTH)

    def _walk_entries(self, path: str, entries: dict[Any, Any], depth: int) -> None:
        self._notes.append(EntriesNote(path, entries))
        self._walk_all(path, entries.items(), depth)

    def _walk_all(self, path: str, pairs: Iterable[tuple[object, Any]], depth: int) -> None:
        for key, value in list(pairs):
            self._walk(_joined(path, str(key)), value, depth - 1)


def _closed_over(loss_fn: Any, seen: set[int]) -> Iterator[tuple[str, object, Note | None]]:
    """What a function, a method, a partial or a callable object refers to besides its arguments."""
    if id(loss_fn) in seen:
        return
    seen.add(id(loss_fn))
    if isinstance(loss_fn, functools.partial):
        yield from _closed_over(loss_fn.func, seen)
        yield "loss_fn", [*loss_fn.args, *loss_fn.keywords.values()], None
    elif isinstance(loss_fn, types.MethodType):
        yield from _closed_over(loss_fn.__func__, seen)
        yield "loss_fn", loss_fn.__self__, None
    elif isinstance(loss_fn, types.FunctionType):
        yield "loss_fn", vars(loss_fn), None
        yield "loss_fn", loss_fn.__defaults__, None
        for name, cell in zip(loss_fn.__code__.co_freevars, loss_fn.__closure__ or (), strict=True):
            yield from _in_cell(name, cell, seen)
    else:
        yield "loss_fn", loss_fn, None


def _in_cell(name: str, cell: types.CellType, seen: set[int]) -> Iterator[tuple[str, object, Note | None]]:
    try:
        value = cell.cell_contents
    except ValueError:  # Nothing was assigned to the variable yet.
        return
    yield name, value, CellNote(name, cell)
    if isinstance(value, types.FunctionType | types.MethodType | functools.partial):
        yield from _closed_over(value, seen)


def _joined(path: str, name: str) -> str:
    return ".".join(filter(None, (path, name)))


def _same(a: object, b: object) -> bool:
    """Whether it is the same object, or an equal plain value."""
    return a is b or (type(a) is type(b) and isinstance(a, bool | int | float | str | bytes) and a == b)


def _equal(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a, b))
