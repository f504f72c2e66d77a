"""A torch that lacks a private name of `LOST`: a window is the same, by a slower way."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from types import ModuleType
from typing import Any

from conformance_tests.framework_tests.torch_shards.common import Way, alone, check, require_equal, sharded, train, windows_of, wrap
from gradaccum_torch import fsdp_private


class Hidden:
    """An attribute of a class that only the module with the private names cannot see: torch goes on to use it."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.looked_for = 0

    def __get__(self, instance: object, owner: type) -> Any:
        if sys._getframe(1).f_globals is vars(fsdp_private):
            self.looked_for += 1
            raise AttributeError
        return self.value.__get__(instance, owner)


@contextmanager
def without(name: str) -> Iterator[None]:
    """Inside, torch lacks `name`, and the fallback is used."""
    module, _, path = name.partition(":")
    owner, _, attribute = path.rpartition(".")
    if owner:
        kind = resolve_name(f"{module}:{owner}")
        hidden = Hidden(vars(kind)[attribute])
        setattr(kind, attribute, hidden)
        yield
        setattr(kind, attribute, hidden.value)
        assert hidden.looked_for
        return
    found = sys.modules[module]
    assert hasattr(found, attribute)
    sys.modules[module] = ModuleType(module)
    yield
    sys.modules[module] = found


@check
def private_names_that_torch_lacks(rank: int) -> None:
    for name in fsdp_private.LOST:
        for way in (Way("micro_batch", (2,)), Way("window", (2,))):
            if way.sync == "micro_batch" and name.endswith("callback"):
                continue  # FSDP2 itself ends each backward pass there.
            with without(name):
                model = sharded(way)
                train(model, wrap(model, way), rank)
            require_equal(model, alone(windows_of())[0])
