"""Runs under a torch that lacks private names: ``python -m
conformance_tests.framework_tests.torch_renamed NAME ...``.

A name of torch's Python is taken away as torch would do it, by renaming: in the sources
of torch's own modules before they are imported. A function of torch's C is deleted, or
hidden from the library alone where torch goes on to use it, as an attribute of a type
in C is.
"""

from __future__ import annotations

import importlib.machinery
import os
import re
import sys
from types import CodeType, ModuleType
from typing import Any

_OF_C = ("torch:_foreach", "torch:_C._storage")
_HIDDEN = {"torch:Tensor._values", "torch:Tensor._base", "torch:UntypedStorage._cdata"}
_OTHERWISE = {"queue_callback": "_execution_engine"}
"""By a name in C: one in Python that hides it."""


class Hidden:
    """An attribute of a class that only the library cannot see."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __get__(self, instance: object, owner: type) -> Any:
        _hide()
        return self._value.__get__(instance, owner)


def _hide() -> None:
    if sys._getframe(2).f_globals["__name__"].partition(".")[0] in (
        "gradaccum_torch",
        "pkgutil",
    ):
        raise AttributeError


def _hide_in(module: ModuleType, name: str) -> None:
    held = vars(module).pop(name)

    def found(wanted: str) -> Any:
        _hide()
        if wanted == name:
            return held
        raise AttributeError(wanted)

    module.__getattr__ = found  # type: ignore[method-assign]


def rename(attributes: set[str]) -> None:
    """Give `attributes` other names in all of torch's Python that is imported from here
    on.
    """
    word, plain = (
        re.compile(rf"(?<!algorithms\.)\b({'|'.join(attributes)})\b"),
        importlib.machinery.SourceFileLoader.get_code,
    )

    def get_code(self: Any, fullname: str) -> CodeType | None:
        if fullname.partition(".")[0] == "torch" and word.search(
            source := self.get_data(self.path).decode()
        ):
            return compile(
                word.sub(r"\1_renamed", source), self.path, "exec", dont_inherit=True
            )
        return plain(self, fullname)

    importlib.machinery.SourceFileLoader.get_code = get_code  # type: ignore[method-assign]


def take_away(names: list[str]) -> None:
    """Import torch without `names`."""
    in_c = {
        name
        for name in names
        if name.startswith(_OF_C) or name.endswith(("._input_metadata", ":eval_frame"))
    }
    attributes = {re.split("[.:]", name)[-1] for name in set(names) - in_c - _HIDDEN}
    if attributes:
        rename({_OTHERWISE.get(each, each) for each in attributes})
    import torch

    if in_c:
        import torch._dynamo  # It needs such names itself.
    for name in names:
        owner, attribute = (
            (torch._C, name.rpartition(".")[2])
            if name.startswith("torch:_C")
            else (torch, name.rpartition(":")[2])
        )
        if name.endswith("._input_metadata"):
            del torch._C._functions.AccumulateGrad
        elif name.endswith(":eval_frame"):
            _hide_in(torch._C._dynamo, "eval_frame")
        elif name in in_c:
            delattr(owner, attribute)
        elif name in _HIDDEN:
            path, _, attribute = name.partition(":")[2].rpartition(".")
            kind = getattr(torch, path)
            setattr(
                kind,
                attribute,
                Hidden(
                    next(
                        vars(each)[attribute]
                        for each in kind.__mro__
                        if attribute in vars(each)
                    )
                ),
            )


def main(names: list[str]) -> None:
    take_away(names)
    from gradaccum_torch.private import names as private

    plain = private.exists
    # Torch's own methods go on to name what is hidden.
    private.exists = lambda name: (
        not (name in _HIDDEN and name in names) and plain(name)
    )
    from conformance_tests.framework_tests.torch_lacking import SCENARIOS

    for scenario in dict.fromkeys(SCENARIOS[name] for name in names):
        scenario()
    missing = {name for name in private.LOST if not private.exists(name)}
    assert missing >= set(names), set(names) - missing
    print("as promised", flush=True)
    os._exit(0)  # The process group is not destroyed.


if __name__ == "__main__":
    main(sys.argv[1:])
