"""Training from recipes with Transformers' Trainer."""

from coca_lab.recipe import Recipe, as_yaml, load_recipe
from coca_lab.training.folder import is_finished, last_checkpoint, read_summary
from coca_lab.training.model import model_config
from coca_lab.training.run import train
from coca_lab.training.texts import BlockDataset
from coca_lab.training.trainer import TrainingDiverged

__all__ = [
    "BlockDataset",
    "Recipe",
    "TrainingDiverged",
    "as_yaml",
    "is_finished",
    "last_checkpoint",
    "load_recipe",
    "model_config",
    "read_summary",
    "train",
]
