"""crc32c, without what its package does on import.

`crc32c/__init__.py` looks up its own version through importlib.metadata and imports argparse: 25 ms of a start
that should take a blink. The compiled module in it is all we need.
"""

import sys
from collections.abc import Callable
from importlib.machinery import PathFinder
from importlib.util import find_spec, module_from_spec
from typing import cast

_MODULE = "crc32c._crc32c"


def _load() -> Callable[..., int]:
    package = find_spec("crc32c")
    spec = PathFinder.find_spec(_MODULE, package.submodule_search_locations) if package else None
    if spec is None or spec.loader is None:
        from crc32c import crc32c as function

        return cast(Callable[..., int], function)
    module = sys.modules.get(_MODULE)
    if module is None:
        module = sys.modules[_MODULE] = module_from_spec(spec)
        spec.loader.exec_module(module)
    return cast(Callable[..., int], module.crc32c)


crc32c = _load()
