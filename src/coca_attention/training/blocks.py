"""From a recipe to the blocks that training reads."""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch.utils.data import ConcatDataset, Subset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from coca_attention.data import (
    BlockDataset,
    DataError,
    Document,
    Mixture,
    PasskeyBlocks,
    SourceSettings,
    TokenText,
    apportion,
    cache_folder,
    held_out,
    tokenised,
)
from coca_attention.data.documents import source_files
from coca_attention.data.tokens import TOKENIZER_CHARACTERS, end_of_text
from coca_attention.errors import UserError
from coca_attention.training.recipe import PASSKEY, DataRecipe, Recipe, WeightedSource

# What the one source of a recipe without a mixture is called, and the text that is not trained on.
TEXT = "text"
VALIDATION = "validation"


def check_sources(recipe: Recipe) -> None:
    """Raise DataError where a source does not exist, before work is done on any other."""
    data, validation = recipe.data, recipe.validation
    if not data.mixture:
        source_files(data.source)
    for name, part in data.mixture.items():
        with _named(f"data.mixture.{name}"):
            source_files(part.source)
    if validation.every is not None and validation.source is not None:
        with _named("validation.source"):
            source_files(validation.source)


@contextmanager
def _named(name: str) -> Iterator[None]:
    """Say in errors which of several sources they are about, by its place in the recipe."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{name}: {error}") from error


def training_documents(data: DataRecipe) -> Iterator[Document]:
    """Documents of the training split; of a mixture as many of each source as its weight asks for.

    Meant for training a tokenizer, which learns from the first `TOKENIZER_CHARACTERS`.
    """
    if not data.mixture:
        return (d for d in data.documents() if not held_out(d, data.held_out))
    return chain.from_iterable(
        _first_characters(name, part, data.held_out) for name, part in data.mixture.items()
    )


def _first_characters(name: str, part: WeightedSource, share: float) -> Iterator[Document]:
    left = part.weight * TOKENIZER_CHARACTERS
    with _named(f"data.mixture.{name}"):
        for document in part.documents():
            if not held_out(document, share):
                yield document
                left -= len(document.text)
                if left <= 0:
                    return


def validation_text(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> TokenText | None:
    """The text that perplexity is measured on in training; None where the recipe asks for none.

    Raises:
        UserError: If a cache cannot be written.
        DataError: If the source is missing, broken or empty.
    """
    data, validation = recipe.data, recipe.validation
    if validation.every is None:
        return None
    own = validation.source
    source = SourceSettings(own or data.source, data.text_field, data.bad_lines)
    stream = source.source.startswith("hf:")
    with _named("validation.source" if own else "data.held_out"):
        return tokenised(
            source,
            tokenizer,
            share=0.0 if own else data.held_out,
            held=own is None,
            # Of a stream no more is fetched than is measured on.
            max_tokens=_judged_blocks(recipe) * data.block_length + 1 if stream else None,
            folder=cache_folder(data.cache),
        )


def validation_blocks(
    recipe: Recipe, text: TokenText, tokenizer: PreTrainedTokenizerBase
) -> Subset:
    """Blocks spread evenly over a text, in whole global batches: no process gets fewer than others.

    Raises:
        UserError: If the text makes too few.
    """
    data = recipe.data
    end = end_of_text(tokenizer) if data.separate_documents else None
    try:
        blocks = BlockDataset(text.tokens, data.block_length, end=end)
    except UserError as error:
        raise UserError(f"{VALIDATION}: {error}") from error
    count = _judged_blocks(recipe)
    if len(blocks) < count:
        raise UserError(
            f"{VALIDATION}: the text makes {len(blocks)} blocks, fewer than {count} for "
            f"validation.batches {recipe.validation.batches}; use more text or fewer batches"
        )
    return Subset(blocks, [index * len(blocks) // count for index in range(count)])


def _judged_blocks(recipe: Recipe) -> int:
    return recipe.validation.batches * recipe.training.global_batch_size


def training_texts(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> dict[str, TokenText]:
    """The training split of every source as token ids.

    Args:
        recipe: The run. Where it has no mixture, its one source is called `TEXT`.
        tokenizer: Its tokenizer.

    Raises:
        UserError: If a cache cannot be written.
        DataError: If a source is missing, broken or empty.
    """
    data = recipe.data
    folder = cache_folder(data.cache)
    if not data.mixture:
        limit = data.max_tokens
        return {
            TEXT: tokenised(data, tokenizer, share=data.held_out, max_tokens=limit, folder=folder)
        }
    read = _apportioned(recipe)[-1]
    texts: dict[str, TokenText] = {}
    for index, (name, part) in enumerate(data.mixture.items()):
        limit = part.max_tokens
        if limit is None and part.source.startswith("hf:"):
            limit = int(read[index]) * data.block_length + 1
        with _named(f"data.mixture.{name}"):
            texts[name] = tokenised(
                part, tokenizer, share=data.held_out, max_tokens=limit, folder=folder
            )
    return texts


def training_blocks(
    recipe: Recipe, texts: dict[str, TokenText], tokenizer: PreTrainedTokenizerBase
) -> Subset | Mixture:
    """The blocks of a recipe, in whole global batches.

    Args:
        recipe: The run.
        texts: From `training_texts`.
        tokenizer: The tokenizer that made them.

    Returns:
        For a mixture the blocks of the whole run in the order of training; otherwise those of one
        pass over the text, to be shuffled.

    Raises:
        UserError: If a text makes no block, or all of it not one global batch.
    """
    data, seed = recipe.data, recipe.training.seed
    length, separate = data.block_length, data.separate_documents
    end = end_of_text(tokenizer) if separate else None
    blocks: dict[str, Any] = {}
    for name, text in texts.items():
        try:
            blocks[name] = BlockDataset(text.tokens, length, end=end)
        except UserError as error:
            raise UserError(f"{name}: {error}") from error
    if data.mixture:
        read = _apportioned(recipe)
        if data.passkey_share:
            count = max(int(read[-1, -1]), 1)
            blocks[PASSKEY] = PasskeyBlocks(tokenizer, length, count, seed, separate=separate)
        return Mixture(list(blocks.values()), read, seed)
    dataset = blocks[TEXT]
    passkeys = round(len(dataset) * data.passkey_share / (1 - data.passkey_share))
    if passkeys:
        mixed = PasskeyBlocks(tokenizer, length, passkeys, seed, separate=separate)
        dataset = ConcatDataset([dataset, mixed])
    batch = recipe.training.global_batch_size
    whole = len(dataset) // batch * batch
    if not whole:
        raise UserError(
            f"the training data makes {len(dataset)} blocks, fewer than "
            f"global_batch_size {batch}; use more text or a smaller batch"
        )
    return Subset(dataset, range(whole))


def epochs_read(recipe: Recipe, dataset: Subset | Mixture) -> dict[str, float]:
    """How often the run reads each of its sources."""
    if isinstance(dataset, Mixture):
        return dict(zip([*recipe.data.mixture, PASSKEY], dataset.epochs(), strict=False))
    return {TEXT: recipe.steps * recipe.training.global_batch_size / len(dataset)}


def _apportioned(recipe: Recipe) -> Any:
    """`apportion` of a mixture, passkey texts last where the recipe has any."""
    share = recipe.data.passkey_share
    weights = [part.weight * (1 - share) for part in recipe.data.mixture.values()]
    batch = recipe.training.global_batch_size
    return apportion([*weights, share] if share else weights, batch, recipe.steps)


@torch.no_grad()
def check_separable(model: PreTrainedModel) -> None:
    """Make sure that positions which begin anew keep documents apart in a model.

    Two texts that differ in their first document alone are read: what comes after must not notice.

    Raises:
        UserError: If it does.
    """
    words = torch.arange(1, 9, device=model.device) % model.config.get_text_config().vocab_size
    positions = torch.arange(4, device=model.device).repeat(1, 2)
    training = model.training
    model.eval()
    first, second = (
        model(
            input_ids=torch.cat((start, words[4:])).unsqueeze(0),
            position_ids=positions,
            use_cache=False,
        ).logits[0, 4:]
        for start in (words[:4], words[4:])
    )
    model.train(training)
    if (first - second).abs().max() > 1e-5 * second.abs().max():
        raise UserError(
            f"{type(model).__name__} does not keep documents apart: its attention crosses to an "
            "earlier document in the block although positions begin anew. Train without "
            "data.separate_documents, or with another attention implementation"
        )
