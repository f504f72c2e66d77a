"""A torch that lacks a private name of FSDP2: a window is the same, by a slower way, or it is refused by that name."""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from types import ModuleType
from typing import Any
from unittest import mock

import gradaccum
from conformance_tests.framework_tests.refusing import refused
from conformance_tests.framework_tests.torch_shards.common import Way, alone, check, require_equal, sharded, train, windows_of, wrap
from gradaccum_torch import fsdp_private, torch_private


class Hidden:
    """An attribute of a class or of its instances that only the module with the private names cannot see: torch goes on to use it."""

    def __init__(self, owner: type, attribute: str) -> None:
        self.value, self.attribute = vars(owner).get(attribute), attribute
        self.looked_for = 0

    def __get__(self, instance: object, owner: type) -> Any:
        if sys._getframe(1).f_globals is vars(fsdp_private):
            self.looked_for += 1
            raise AttributeError(self.attribute)
        if instance is not None and self.attribute in vars(instance):
            return vars(instance)[self.attribute]
        return self.value.__get__(instance, owner) if hasattr(self.value, "__get__") else self.value

    def __set__(self, instance: object, value: Any) -> None:
        vars(instance)[self.attribute] = value


@contextmanager
def without(name: str) -> Iterator[None]:
    """Inside, torch lacks `name`."""
    module, _, path = name.partition(":")
    owner, _, attribute = path.rpartition(".")
    exists = torch_private.exists

    def seen(asked: str) -> bool:
        return asked != name and exists(asked)

    fsdp_private._require_names.cache_clear()
    with mock.patch.object(torch_private, "exists", seen), mock.patch.object(fsdp_private, "exists", seen):
        if not owner:
            with mock.patch.dict(sys.modules, {module: ModuleType(module)}):
                yield
        elif isinstance(kind := resolve_name(f"{module}:{owner}"), type):
            plain = vars(kind).get(attribute)
            setattr(kind, attribute, Hidden(kind, attribute))
            yield
            setattr(kind, attribute, plain) if plain is not None else delattr(kind, attribute)
    fsdp_private._require_names.cache_clear()


@check
def private_names_that_torch_lacks(rank: int) -> None:
    window, micro_batch, hybrid = Way("window", (2,)), Way("micro_batch", (2,)), Way("micro_batch", (2, 1))
    reference, _ = alone(windows_of())
    for name, cost in fsdp_private.lost().items():
        assert torch_private.exists(name), name
        if "`fully_shard`" in cost:
            refuses, trains = [micro_batch], list[Way]()
        elif "gradient_sync=" in cost:
            refuses, trains = [window], [micro_batch]
        elif "two dimensions" in cost:
            refuses, trains = [hybrid], [window, micro_batch]
        else:
            refuses, trains = [], [window]
        with without(name):
            for way in refuses:
                model = sharded(way)
                with refused(gradaccum.UsageError, name.rpartition(":")[2]):
                    train(model, wrap(model, way), rank)
            for way in trains:
                model = sharded(way)
                train(model, wrap(model, way), rank)
                require_equal(model, reference)
                gc.collect()
        if trains:
            default = fsdp_private.Sync(True, True, False)
            assert all(unit.sync == default for unit in fsdp_private.units_of(model)), f"{name}: let go, and waits"
