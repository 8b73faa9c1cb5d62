"""The data of a training run: from a recipe and a tokenizer to blocks."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import ConcatDataset, Dataset, Subset
from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError, error_prefix
from coca_lab.data import (
    BlockDataset,
    Document,
    SourceSettings,
    held_out,
    load_tokenizer,
    tokenise,
    train_tokenizer,
)
from coca_lab.data.blocks import TaskBlocks, apportion, mixture_order
from coca_lab.data.documents import source_files
from coca_lab.data.tasks import vocabulary_text
from coca_lab.data.tokens import (
    TOKENIZER_CHARACTERS,
    cache_folder,
    end_of_text,
    up_to,
)
from coca_lab.files import writing
from coca_lab.training.recipe import TEXT, DataRecipe, Recipe
from coca_lab.training.retrieval import Retrieval, load_retrieval

VALIDATION, TOKENIZER = "validation", "tokenizer"


@dataclass(frozen=True)
class TrainingData:
    """Everything that a run reads."""

    blocks: Subset  # in whole global batches: of a mixture, of the whole run in training order;
    is_ordered: bool  # otherwise of one pass over the text, to be shuffled
    validation: Subset | None  # to measure perplexity on, in whole global batches
    retrieval: Retrieval | None
    fingerprint: dict[str, Any]  # of every text, its number of tokens and their SHA-256
    epochs: dict[str, float]  # passes over each source

    def describe(self) -> str:
        """The tokens of every text and how often they are read, in a few words."""
        counts = (f"{name} {text['tokens']:,} tokens" for name, text in self.fingerprint.items())
        return f"{', '.join(counts)}; {max(self.epochs.values()):.2f} passes"


def load_run_tokenizer(recipe: Recipe, output: Path) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer; a newly trained one is saved in the run folder for later starts."""
    data = recipe.data
    name, folder = data.tokenizer or recipe.model.start, output / TOKENIZER
    if name is None and not folder.is_dir():
        extra = [Document("passkey", vocabulary_text())] if data.passkey_share else []
        texts = chain(extra, training_documents(data))
        trained = train_tokenizer(texts, data.vocab_size, split_digits=data.split_digits)
        with writing(folder) as partial:
            trained.save_pretrained(partial)
    return load_tokenizer(name or folder)


def load_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> TrainingData:
    """Tokenise the texts of a recipe, or find them in the cache, and cut them into blocks."""
    data = recipe.data
    # Before the text is read, which can take hours.
    retrieval = load_retrieval(recipe, tokenizer)
    read = _blocks_read(recipe) if data.mixture else None
    texts: dict[str, np.ndarray] = {}
    blocks: dict[str, Any] = {}
    for index, (name, source) in enumerate(data.sources.items()):
        limit = source.max_tokens
        if limit is None and read is not None and source.source.startswith("hf:"):
            limit = int(read[-1, index]) * data.block_length + 1
        with error_prefix(_place(data, name)):
            texts[name] = tokenise(
                source,
                tokenizer,
                share=data.held_out,
                max_tokens=limit,
                folder=cache_folder(data.cache),
            )
            blocks[name] = _cut(texts[name], recipe, tokenizer)
    validation = None
    if recipe.validation.every is not None:
        texts[VALIDATION], validation = _load_validation(recipe, tokenizer)
    if read is None:
        dataset = _one_pass(recipe, tokenizer, blocks[TEXT])
        epochs = {TEXT: recipe.steps * recipe.training.global_batch_size / len(dataset)}
    else:
        for index, name in enumerate(data.task_shares, start=len(blocks)):
            blocks[name] = _task_blocks(recipe, tokenizer, name, max(int(read[-1, index]), 1))
        sizes = [len(source) for source in blocks.values()]
        order: Any = mixture_order(sizes, read, recipe.training.seed)
        dataset = Subset(ConcatDataset(list(blocks.values())), order)
        counts = zip(blocks, read[-1].tolist(), sizes, strict=True)
        epochs = {name: count / size for name, count, size in counts}
    fingerprint = {
        name: {"tokens": len(text), "sha256": sha256(text.data).hexdigest()}
        for name, text in texts.items()
    }
    return TrainingData(dataset, read is not None, validation, retrieval, fingerprint, epochs)


def stage_blocks(recipe: Recipe, data: TrainingData) -> Sequence[Dataset[Any]]:
    """The blocks of every stage: consecutive slices of one order for the whole run."""
    if not recipe.stages:
        return [data.blocks]  # which the Trainer shuffles if they have no order
    every = [stage.settings(recipe.training) for stage in recipe.stages]
    borders = np.cumsum([0, *(settings.steps * settings.global_batch_size for settings in every)])
    blocks, order = data.blocks, np.arange(len(data.blocks))
    if not data.is_ordered:
        order = block_order(len(blocks), int(borders[-1]), recipe.training.seed)
    slices: list[Any] = [order[first:end] for first, end in pairwise(borders)]
    return [Subset[Any](blocks, indices) for indices in slices]


def block_order(blocks: int, needed: int, seed: int) -> np.ndarray:
    """Order in which a run reads its blocks, (needed,) int64: one permutation after another."""
    generator = np.random.default_rng(seed)
    passes = -(-needed // blocks)
    return np.concatenate([generator.permutation(blocks) for _ in range(passes)])[:needed]


def check_sources(recipe: Recipe) -> None:
    """Raise DataError if a source does not exist, before any other is processed."""
    data, validation = recipe.data, recipe.validation
    for name, source in data.sources.items():
        with error_prefix(_place(data, name)):
            source_files(source.source)
    if validation.every is not None and validation.source is not None:
        with error_prefix("validation.source: "):
            source_files(validation.source)


def training_documents(data: DataRecipe) -> Iterator[Document]:
    """Documents to train a tokenizer on: of every source, as many as its weight asks for."""
    for name, source in data.sources.items():
        most = getattr(source, "weight", 1.0) * TOKENIZER_CHARACTERS
        with error_prefix(_place(data, name)):
            documents = (d for d in source.documents() if not held_out(d, data.held_out))
            yield from up_to(most, documents)


def _place(data: DataRecipe, name: str) -> str:
    """Prefix for errors about a source: where the recipe names it."""
    return f"data.mixture.{name}: " if data.mixture else "data.source: "


def _cut(text: np.ndarray, recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> BlockDataset:
    end = end_of_text(tokenizer) if recipe.data.separate_documents else None
    return BlockDataset(text, recipe.data.block_length, end=end)


def _task_blocks(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase, task: str, count: int
) -> TaskBlocks:
    data, seed = recipe.data, recipe.training.seed
    return TaskBlocks(
        task, tokenizer, data.block_length, count, seed, separate=data.separate_documents
    )


def _one_pass(recipe: Recipe, tokenizer: PreTrainedTokenizerBase, text: BlockDataset) -> Subset:
    """The blocks of a text and its tasks' shares of blocks, in whole global batches."""
    shares, batch = recipe.data.task_shares, recipe.training.global_batch_size
    dataset: Any = text
    for task, share in shares.items():
        if count := round(len(text) * share / (1 - sum(shares.values()))):
            dataset = ConcatDataset([dataset, _task_blocks(recipe, tokenizer, task, count)])
    whole = len(dataset) // batch * batch
    if not whole:
        raise UserError(
            f"the training data makes {len(dataset)} blocks, fewer than global_batch_size "
            f"{batch}; use more text or a smaller batch"
        )
    return Subset(dataset, range(whole))


def _blocks_read(recipe: Recipe) -> np.ndarray:
    """`apportion` of a mixture, with the recipe's tasks last."""
    shares = list(recipe.data.task_shares.values())
    weights = [source.weight * (1 - sum(shares)) for source in recipe.data.mixture.values()]
    batch = recipe.training.global_batch_size
    return apportion([*weights, *shares], batch, recipe.steps)


def _load_validation(
    recipe: Recipe, tokenizer: PreTrainedTokenizerBase
) -> tuple[np.ndarray, Subset]:
    """The validation text, and blocks spread evenly over it, in whole global batches."""
    data, validation = recipe.data, recipe.validation
    count = validation.batches * recipe.training.global_batch_size
    source = SourceSettings(validation.source or data.source, data.text_field, data.bad_lines)
    with error_prefix(f"{'validation.source' if validation.source else 'data.held_out'}: "):
        text = tokenise(
            source,
            tokenizer,
            share=0.0 if validation.source else data.held_out,
            from_held_out=not validation.source,
            # A stream is fetched only as far as it is needed.
            max_tokens=count * data.block_length + 1 if source.source.startswith("hf:") else None,
            folder=cache_folder(data.cache),
        )
        blocks = _cut(text, recipe, tokenizer)
        if len(blocks) < count:
            raise UserError(
                f"the text makes {len(blocks)} blocks, fewer than {count} for validation.batches "
                f"{validation.batches}; use more text or fewer batches"
            )
    return text, Subset(blocks, [index * len(blocks) // count for index in range(count)])
