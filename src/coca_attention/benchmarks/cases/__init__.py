"""The built-in benchmark cases, one module each; importing a module registers its case."""

import importlib
import pkgutil

for module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{module.name}")
