"""Known bugs that can be switched on: each is a change to shipped code, and some seed must catch it."""

from __future__ import annotations

import importlib
import pkgutil

from simulation.mutation import Mutation

MUTATIONS: tuple[Mutation, ...] = tuple(
    mutation
    for module in sorted(pkgutil.iter_modules(__path__), key=lambda each: each.name)
    for mutation in importlib.import_module(f"{__name__}.{module.name}").MUTATIONS
)
