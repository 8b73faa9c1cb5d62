"""Folders for which Transformers imports this package by itself, by their ``auto_map``.

The code in such a folder only imports the classes from the package, which must be installed, so
what runs is never code of the folder. Transformers asks for ``trust_remote_code=True`` all the
same.
"""

from pathlib import Path
from typing import Any

from transformers.models.auto import modeling_auto

from coca_attention.errors import UserError, install

MODULE = "modeling_coca"
CODE = f'''\
"""The classes of this model, from the package that has their code."""

try:
    from coca_attention.models import CLASSES
except ImportError as error:
    raise ImportError(
        "this model needs the package coca-attention: {install()}"
    ) from error

globals().update(CLASSES)
'''


class PackagedConfig:
    """A configuration whose code is in this package; saves the loader where `make_portable` was."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Nothing: Transformers would copy the file of the class into every folder it saves."""

    def save_pretrained(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> None:
        """As in Transformers."""
        super().save_pretrained(save_directory, *args, **kwargs)  # pyright: ignore
        if getattr(self, "auto_map", None):
            (Path(save_directory) / f"{MODULE}.py").write_text(CODE, encoding="utf-8")


class PackagedModel:
    """A model whose code is in this package."""

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModel") -> None:
        """Nothing, see `PackagedConfig`."""


def check_portable(model: Any) -> None:
    """Raise UserError if the model has parts beside its decoder."""
    if model.config.get_text_config() is not model.config:
        raise UserError(
            f"of {type(model).__name__} only the decoder can be a model of this package, so its "
            "folder cannot name the package in auto_map: use a folder of coca convert without "
            "--portable, and import coca_attention.models before loading it"
        )


def make_portable(model: Any) -> None:
    """Have a model and its configuration saved with an ``auto_map``, now and by who loads it.

    Raises:
        UserError: If the model's classes are not of this package.
    """
    check_portable(model)
    config: Any = model.config
    if PackagedConfig not in type(config).__mro__:
        raise UserError(
            f"{type(model).__name__} is a model of Transformers itself, which loads without this "
            "package: there is nothing to export"
        )
    classes: dict[str, type] = {"AutoConfig": type(config)}
    for name, auto in vars(modeling_auto).items():
        registered: Any = getattr(auto, "_model_mapping", ())
        if name.startswith("AutoModel") and type(config) in registered:
            classes[name] = registered[type(config)]
    config.auto_map = {name: f"{MODULE}.{cls.__name__}" for name, cls in classes.items()}
