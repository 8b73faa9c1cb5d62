"""What a run reads: from the texts that a recipe names, by their tokens, to blocks in an order."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np
import torch
from accelerate import PartialState
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, Subset
from transformers import PreTrainedTokenizerBase

from coca_attention.errors import UserError, error_prefix
from coca_lab.data.documents import DataError, Document, documents_of, text_fingerprint
from coca_lab.data.tasks import TRAINED_TASKS, vocabulary_text
from coca_lab.data.text import (
    TOKENIZER_CHARACTERS,
    end_of_text,
    load_tokenizer,
    tokenise,
    train_tokenizer,
    up_to,
)
from coca_lab.files import writing
from coca_lab.fingerprints import fingerprint, model_fingerprint
from coca_lab.old_names import RECALL
from coca_lab.recipe import TEXT, Recipe
from coca_lab.recipe_sections import VALIDATION
from coca_lab.training.folder import TOKENIZER, Digest
from coca_lab.training.retrieval import Retrieval, load_retrieval

log = logging.getLogger(__name__)


def inputs_of(recipe: Recipe, start: str = "") -> dict[str, str]:
    """Fingerprints of the texts and models that a recipe names, by what they are.

    That of the start may be given, for one that is yet to be trained. UserError if one is missing,
    or a task that it trains on.
    """
    data = recipe.data
    model = recipe.model
    inputs = dict[str, str]()
    for task in data.tasks:
        if task not in TRAINED_TASKS:
            raise UserError(
                f"data.tasks: there is no task {task!r} to train on; name the module that "
                f"registers it in COCA_IMPORT ({RECALL})"
            )
    for text in recipe.texts:
        if text.what not in inputs:
            with error_prefix(text.where):
                inputs[text.what] = text_fingerprint(text.source.source)
    for name, path in (("tokenizer", data.tokenizer), ("teacher", model.teacher)):
        if path is not None:
            inputs[name] = model_fingerprint(path)
    if model.start is not None:
        inputs["start"] = start or model_fingerprint(model.start)
    return inputs


# The tokenizer


def tokenizer_key(recipe: Recipe) -> str:
    """Fingerprint of everything that a newly trained tokenizer depends on."""
    data = recipe.data
    sources = []
    for text in filter(lambda text: text.trains, recipe.texts):
        source = text.source
        about = [source.text_field, source.bad_lines, text.weight]
        sources.append([text_fingerprint(source.source), *about])
    about = [data.held_out, data.vocab_size, data.split_digits, bool(data.passkey_share)]
    return fingerprint([sources, about])


def load_run_tokenizer(recipe: Recipe, output: Path) -> PreTrainedTokenizerBase:
    """The recipe's tokenizer; a newly trained one is saved in the run folder for later starts."""
    data = recipe.data
    name = data.tokenizer or recipe.model.start
    folder = output / TOKENIZER
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
        with error_prefix(text.where):
            documents = documents_of(text.source, text.held_out)
            yield from up_to(text.weight * TOKENIZER_CHARACTERS, documents)


# Tokens and blocks


@dataclass(frozen=True)
class TrainingData:
    """Everything that a run reads."""

    tokenizer: PreTrainedTokenizerBase
    stages: list[Subset]  # the blocks of every stage, in order if `Recipe.is_ordered`
    validation: Subset | None  # to measure perplexity on
    retrieval: Retrieval | None
    fingerprint: dict[str, Digest]  # of every text
    epochs: dict[str, float]  # passes over each source
    largest: int  # token id of the texts

    def describe(self) -> str:
        """The tokens of every text and how often they are read, in a few words."""
        counts = (f"{name} {text['tokens']:,} tokens" for name, text in self.fingerprint.items())
        return f"{', '.join(counts)}; {max(self.epochs.values()):.2f} passes"


def load_data(recipe: Recipe, inputs: Mapping[str, str], output: Path) -> TrainingData:
    """Tokenise the texts of a recipe, or find them in the cache, and cut them into blocks.

    Args:
        recipe: The run.
        inputs: Fingerprints of the texts, from `inputs_of`.
        output: Folder of the run, for a newly trained tokenizer.
    """
    with PartialState().main_process_first():
        tokenizer = load_run_tokenizer(recipe, output)
    data = recipe.data
    batch = recipe.training.global_batch_size
    asks = recipe.validation.passkeys or recipe.validation.needles
    # Before the text is read, which can take hours.
    retrieval = load_retrieval(recipe, tokenizer) if asks else None
    shares = data.task_shares
    weights = [source.weight * (1 - sum(shares.values())) for source in data.mixture.values()]
    # Of a mixture, the blocks of every source and task that have been read before every step.
    read = apportion([*weights, *shares.values()], batch, recipe.steps) if weights else None
    wanted = {} if read is None else dict(zip(data.mixture, read[-1].tolist(), strict=False))
    wanted[VALIDATION] = recipe.validation.batches * batch
    blocks = dict[str, BlockDataset]()
    validation = None
    digests = dict[str, Digest]()
    largest = 0
    for text in recipe.texts:
        most = text.max_tokens
        count = wanted.get(text.name)
        if most is None and count is not None and text.source.source.startswith("hf:"):
            # Of a stream no more than is read, with the last target.
            most = count * data.block_length + 1
        with error_prefix(text.where):
            tokens = tokenise(
                text.source,
                tokenizer,
                share=text.held_out,
                from_held_out=text.from_held_out,
                max_tokens=most,
                folder=data.token_folder,
                content=inputs[text.what],
            )
            end = end_of_text(tokenizer) if data.separate_documents else None
            made = BlockDataset(tokens, data.block_length, end=end)
            if text.trains:
                blocks[text.name] = made
            else:
                validation = spread_evenly(
                    made, wanted[VALIDATION], PartialState().num_processes, batch
                )
        largest = max(largest, int(tokens.max()))
        digest = sha256(tokens.data).hexdigest()
        digests[text.name] = {"tokens": len(tokens), "sha256": digest}
    if data.tasks:  # whose texts may have any token that is not special
        special = set(tokenizer.all_special_ids)
        largest = max(largest, *(x for x in range(len(tokenizer)) if x not in special))
    stages, epochs = _in_order(recipe, tokenizer, blocks, read)
    return TrainingData(tokenizer, stages, validation, retrieval, digests, epochs, largest)


# Blocks and orders


class BlockDataset(Dataset):
    """Consecutive blocks of a token array; block i predicts tokens i*L + 1 … i*L + L.

    Every item has L inputs and, shifted by one, L targets, so every token of the array except the
    first is a target once, and the last position of a block is trained like the others.

    Args:
        tokens: 1-D.
        length: L in tokens, at least 1.
        end: Token id of the end of text, to keep documents apart (see `separate_documents`).

    Raises:
        DataError: If the text is shorter than one block.
    """

    def __init__(self, tokens: np.ndarray, length: int, *, end: int | None = None) -> None:
        self.tokens = tokens
        self.length = length
        self.end = end
        if len(self) < 1:
            raise DataError(
                f"the text has {len(tokens)} tokens, fewer than one block of {length} and its last "
                "target; use more text or a shorter `block_length`"
            )

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if not 0 <= index < len(self):
            raise IndexError(index)
        start = index * self.length
        return _item(self.tokens[start : start + self.length + 1], self.end)


class TaskBlocks(Dataset):
    """Blocks of a task's texts, made when they are read; UserError if none fits into a block."""

    # The seed and the number of a block determine it.
    def __init__(
        self,
        task: str,
        tokenizer: PreTrainedTokenizerBase,
        length: int,
        count: int,
        seed: int,
        separate: bool = False,
    ) -> None:
        self.length = length
        self.count = count
        self.seed = seed
        self.end = end_of_text(tokenizer) if separate else None
        self.blocks = TRAINED_TASKS[task](tokenizer)
        self[0]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = self.blocks(self.length + 1, (self.seed, index))
        item = _item(block.ids, self.end)
        if block.trained is not None:
            ignored = ~torch.from_numpy(block.trained[1:])
            item["shift_labels"] = item["shift_labels"].masked_fill(ignored, -100)
        return item


def _item(block: np.ndarray, end: int | None) -> dict[str, Tensor]:
    """L + 1 tokens as L inputs and L targets; with an end of text, documents are kept apart."""
    tokens = torch.from_numpy(block.astype(np.int64))
    # `shift_labels` are already aligned with the inputs; Transformers' loss then does not shift
    # `labels` itself, which would lose the last target.
    item = {"input_ids": tokens[:-1], "labels": tokens[:-1], "shift_labels": tokens[1:]}
    return item if end is None else separate_documents(item, end)


def separate_documents(item: dict[str, Tensor], end: int) -> dict[str, Tensor]:
    """Keep the documents of an item apart, which ``end`` follows, and which has no target."""
    # Positions that restart make Transformers mask attention between documents.
    ended = item["input_ids"] == end
    steps = torch.arange(len(ended))
    starts = torch.zeros_like(steps)
    starts[1:] = torch.where(ended[:-1], steps[1:], 0).cummax(0).values
    targets = item["shift_labels"].masked_fill(ended, -100)
    return {**item, "shift_labels": targets, "position_ids": steps - starts}


def spread_evenly(blocks: BlockDataset, count: int, processes: int = 1, batch: int = 1) -> Subset:
    """Blocks to validate on, spread evenly over a text: as many as it has, if it has too few.

    Every process reads equally many; UserError if there is not one for each. ``batch`` is how many
    blocks a global batch has, in which the recipe sets them.
    """
    there = min(count, len(blocks)) // processes * processes
    if there < count:
        makes = f"the validation text makes {len(blocks):,} blocks of {blocks.length:,} tokens"
        if not there:
            raise UserError(f"{makes}, fewer than the {processes} processes: use more text")
        if PartialState().is_main_process:
            asked = f"validation.batches asks for {count // batch:,} batches of {batch:,}"
            log.warning("%s, and %s: all %s blocks are measured", makes, asked, f"{there:,}")
    return Subset(blocks, [index * len(blocks) // there for index in range(there)])


def _in_order(
    recipe: Recipe,
    tokenizer: PreTrainedTokenizerBase,
    texts: dict[str, BlockDataset],
    read: np.ndarray | None,
) -> tuple[list[Subset], dict[str, float]]:
    """The blocks of texts and tasks that every stage reads, and the passes over each source."""
    data = recipe.data
    shares = recipe.data.task_shares
    seed = recipe.training.seed
    batch = recipe.training.global_batch_size
    blocks = dict[str, BlockDataset | TaskBlocks](texts)
    for task, share in shares.items():
        if read is None:
            count = round(len(texts[TEXT]) * share / (1 - sum(shares.values())))
        else:
            count = max(int(read[-1, len(blocks)]), 1)
        if count:
            length = data.block_length
            apart = data.separate_documents
            blocks[task] = TaskBlocks(task, tokenizer, length, count, seed, apart)
    sizes = {name: len(each) for name, each in blocks.items()}
    if read is not None:
        order = mixture_order([*sizes.values()], read, seed)
        epochs = {name: int(n) / sizes[name] for name, n in zip(sizes, read[-1], strict=True)}
    else:
        there = sum(sizes.values())
        needed = recipe.steps * batch
        whole = there // batch * batch
        if not whole:
            raise UserError(
                f"the training data makes {there} blocks, fewer than `global_batch_size` {batch}; "
                "use more text or a smaller batch"
            )
        order = block_order(whole, needed, seed) if recipe.stages else np.arange(whole)
        epochs = {TEXT: needed / whole}
    # Stages read consecutive parts of one order.
    every = ConcatDataset(blocks.values())
    steps = [each.steps for each in recipe.schedules]
    parts = np.split(order, batch * np.cumsum(steps)[:-1])
    return [Subset(every, part) for part in parts], epochs  # pyright: ignore


def block_order(blocks: int, needed: int, seed: int) -> np.ndarray:
    """Order in which stages read their blocks, (needed,) int64: one permutation after another."""
    generator = np.random.default_rng(seed)
    passes = -(-needed // blocks)
    return np.concatenate([generator.permutation(blocks) for _ in range(passes)])[:needed]


def apportion(weights: list[float], batch: int, steps: int) -> np.ndarray:
    """Blocks of each source that have been read before every step, (steps + 1, sources), int64."""
    # Row s sums to s * batch. Later steps compensate for rounding: a source is never a whole block
    # ahead of its share, and no count ever decreases.
    shares = np.array(weights) / sum(weights)
    read = np.zeros((steps + 1, len(shares)), dtype=np.int64)
    for step in range(1, steps + 1):
        due = shares * step * batch
        # Start safely below what is due, then give each missing block to the largest deficit.
        counts = np.maximum(read[step - 1], np.floor(due).astype(np.int64) - len(shares))
        for _ in range(step * batch - int(counts.sum())):
            counts[np.argmax(due - counts)] += 1
        read[step] = counts
    return read


def mixture_order(sizes: Sequence[int], read: np.ndarray, seed: int) -> np.ndarray:
    """Indices into concatenated sources of these sizes, in the order of a run that reads so much.

    ``read`` is from `apportion`. Each source is read in passes: a pass has each of its blocks once,
    in a new random order.
    """
    steps = len(read) - 1
    sources = len(sizes)
    source_of = np.repeat(np.tile(np.arange(sources), steps), np.diff(read, axis=0).ravel())
    order = np.empty(len(source_of), dtype=np.int64)
    for source, size in enumerate(sizes):
        wanted = source_of == source
        passes = range(-(-int(wanted.sum()) // size))
        permutations = [np.random.default_rng([seed, source, n]).permutation(size) for n in passes]
        blocks = np.concatenate(permutations) if permutations else np.empty(0, dtype=np.int64)
        order[wanted] = sum(sizes[:source]) + blocks[: wanted.sum()]
    return order
