"""From a recipe to blocks: the texts that it names, their tokenizer, and the order of reading."""

from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
from torch.utils.data import ConcatDataset, Subset
from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError, error_prefix
from coca_lab.data import (
    BlockDataset,
    Document,
    held_out,
    load_tokenizer,
    tokenise,
    train_tokenizer,
)
from coca_lab.data.blocks import (
    TaskBlocks,
    apportion,
    block_order,
    mixture_order,
    spread_evenly,
)
from coca_lab.data.tasks import vocabulary_text
from coca_lab.data.text import TOKENIZER_CHARACTERS, end_of_text, up_to
from coca_lab.files import writing
from coca_lab.recipe import TEXT, Recipe, Text
from coca_lab.training.folder import TOKENIZER, Digest
from coca_lab.training.retrieval import Retrieval, load_retrieval


def load_run_tokenizer(recipe: Recipe, output: Path) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer; a newly trained one is saved in the run folder for later starts."""
    data = recipe.data
    name, folder = data.tokenizer or recipe.model.start, output / TOKENIZER
    if name is None and not folder.is_dir():
        documents = training_documents(recipe)
        trained = train_tokenizer(documents, data.vocab_size, split_digits=data.split_digits)
        with writing(folder) as partial:
            trained.save_pretrained(partial)
    return load_tokenizer(name or folder)


def training_documents(recipe: Recipe) -> Iterator[Document]:
    """Documents to train a tokenizer on: of every source, as many as its weight asks for."""
    if recipe.data.passkey_share:
        yield Document("passkey", vocabulary_text())
    for text in filter(lambda text: text.trains, recipe.texts):
        documents = (d for d in text.source.documents() if not held_out(d, text.held_out))
        with error_prefix(text.where):
            yield from up_to(text.weight * TOKENIZER_CHARACTERS, documents)


@dataclass(frozen=True)
class TrainingData:
    """Everything that a run reads."""

    stages: list[Subset]  # the blocks of every stage, in order if `Recipe.is_ordered`
    validation: Subset | None  # to measure perplexity on, in whole global batches
    retrieval: Retrieval | None
    fingerprint: dict[str, Digest]  # of every text
    epochs: dict[str, float]  # passes over each source

    def describe(self) -> str:
        """The tokens of every text and how often they are read, in a few words."""
        counts = (f"{name} {text['tokens']:,} tokens" for name, text in self.fingerprint.items())
        return f"{', '.join(counts)}; {max(self.epochs.values()):.2f} passes"


def load_data(recipe: Recipe, tokenizer: PreTrainedTokenizerBase) -> TrainingData:
    """Tokenise the texts of a recipe, or find them in the cache, and cut them into blocks."""
    data, batch = recipe.data, recipe.training.global_batch_size
    # Before the text is read, which can take hours.
    retrieval = load_retrieval(recipe, tokenizer)
    shares = list(data.task_shares.values())
    weights = [source.weight * (1 - sum(shares)) for source in data.mixture.values()]
    # Of a mixture, the blocks of every source and task that have been read before every step.
    read = apportion([*weights, *shares], batch, recipe.steps) if weights else None
    wanted = {} if read is None else dict(zip(data.mixture, read[-1].tolist(), strict=False))
    blocks, validation = dict[str, BlockDataset | TaskBlocks](), None
    fingerprint = dict[str, Digest]()
    for text in recipe.texts:
        with error_prefix(text.where):
            if text.trains:
                made = _blocks(text, recipe, tokenizer, wanted.get(text.name))
                blocks[text.name] = made
            else:
                count = recipe.validation.batches * batch
                made = _blocks(text, recipe, tokenizer, count)
                validation = spread_evenly(made, count)
        digest = sha256(made.tokens.data).hexdigest()
        fingerprint[text.name] = {"tokens": len(made.tokens), "sha256": digest}
    for index, task in enumerate(data.task_shares):
        if read is None:
            count = round(len(blocks[TEXT]) * shares[index] / (1 - sum(shares)))
        else:
            count = max(int(read[-1, len(weights) + index]), 1)
        if count:
            length, apart = data.block_length, data.separate_documents
            seed = recipe.training.seed
            blocks[task] = TaskBlocks(task, tokenizer, length, count, seed, apart)
    order, epochs = _order(recipe, {name: len(each) for name, each in blocks.items()}, read)
    # Stages read consecutive parts of one order.
    steps = [stage.settings(recipe.training).steps for stage in recipe.run_stages]
    every = ConcatDataset(blocks.values())
    parts = np.split(order, batch * np.cumsum(steps)[:-1])
    stages = [Subset(every, part) for part in parts]  # pyright: ignore[reportArgumentType]
    return TrainingData(stages, validation, retrieval, fingerprint, epochs)


def _blocks(
    text: Text, recipe: Recipe, tokenizer: PreTrainedTokenizerBase, wanted: int | None
) -> BlockDataset:
    """The blocks of a text; of a stream without a limit, no more than are wanted."""
    data, most = recipe.data, text.max_tokens
    if most is None and wanted is not None and text.source.source.startswith("hf:"):
        most = wanted * data.block_length + 1  # with the last target
    tokens = tokenise(
        text.source,
        tokenizer,
        share=text.held_out,
        from_held_out=text.from_held_out,
        max_tokens=most,
        folder=data.token_folder,
    )
    end = end_of_text(tokenizer) if data.separate_documents else None
    return BlockDataset(tokens, data.block_length, end=end)


def _order(
    recipe: Recipe, sizes: dict[str, int], read: np.ndarray | None
) -> tuple[np.ndarray, dict[str, float]]:
    """The order in which the blocks of all texts are read, and the passes over each."""
    batch, seed = recipe.training.global_batch_size, recipe.training.seed
    if read is not None:
        epochs = {name: int(n) / sizes[name] for name, n in zip(sizes, read[-1], strict=True)}
        return mixture_order(list(sizes.values()), read, seed), epochs
    there, needed = sum(sizes.values()), recipe.steps * batch
    whole = there // batch * batch
    if not whole:
        raise UserError(
            f"the training data makes {there} blocks, fewer than global_batch_size {batch}; use "
            "more text or a smaller batch"
        )
    order = block_order(whole, needed, seed) if recipe.stages else np.arange(whole)
    return order, {TEXT: needed / whole}
