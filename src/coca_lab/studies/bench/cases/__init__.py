"""The built-in benchmark cases: the ``CASE`` of every module of this package."""

import importlib
import pkgutil

from coca_lab.studies.bench.case import register_case

for module in pkgutil.iter_modules(__path__):
    register_case(importlib.import_module(f"{__name__}.{module.name}").CASE)
