"""From a recipe to batches: opens the sources of a stage, deals their rows to ranks, reads ahead in one thread."""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from megatron_lite.config import schema
from megatron_lite.config.rules import schedule_fits_into_stage
from megatron_lite.config.schema import Recipe
from megatron_lite.config.violation import StageView
from megatron_lite.data.batch import Batch, make_batch
from megatron_lite.data.corpus import other_tokenizer, read_manifest
from megatron_lite.data.source import Rows, Source, TrainingRows, ValidationRows
from megatron_lite.data.tokenizer import load_tokenizer
from megatron_lite.errors import DataError, require

AHEAD = 2  # steps read before they are asked for


def open_training(recipe: Recipe, stage: int, cache: Path) -> TrainingRows:
    """The rows of stage `stage` (from 0) of a recipe with that stage's overrides merged; see also `ended`.

    Refuses, before training: files that are missing or damaged, a corpus shorter than a row, ids the model has no row
    for, an empty part of a split, and a stage that would need more than max_epochs of a source.
    """
    config = recipe.stages[stage]
    unknown = sorted(set(config.mixture) - set(recipe.sources))
    require(
        not unknown,
        f"stage {config.name}: its blend names {unknown}, but the sources are {sorted(recipe.sources)}",
        DataError,
    )
    sources = {
        name: _source(recipe, stage, f"sources.{name}", recipe.sources[name], cache) for name in sorted(config.mixture)
    }
    rows = TrainingRows(sources, recipe.seed, stage, blend=config.blend, fractions=config.fractions)
    if rows.end(config.num_steps, config.rows_after) < config.num_steps:
        view = StageView(stage, ended(recipe, stage, rows), recipe.model, recipe.parallel, ranks=None)
        problems = [found.message for found in schedule_fits_into_stage(view)]
        require(not problems, f"{rows.ending}, but {'; '.join(problems)}", DataError)
    return rows


def ended(recipe: Recipe, stage: int, rows: Rows) -> Recipe:
    """The recipe with as many steps in stage `stage` as its rows last for; the same recipe if they are endless."""
    if rows.num_rows is None:
        return recipe
    stages = list(recipe.stages)
    steps = bisect_right(range(1, stages[stage].num_steps + 1), rows.num_rows, key=stages[stage].rows_after)
    stages[stage] = stages[stage].model_copy(update={"steps": steps, "tokens": None})
    return recipe.model_copy(update={"stages": tuple(stages)})


def cache_folder(recipe: Recipe) -> Path:
    """Where a run keeps its index files."""
    return Path(recipe.data.cache) if recipe.data.cache else Path(recipe.run) / "cache"


def count_indexes(rows: TrainingRows, validation: Mapping[str, ValidationRows]) -> tuple[int, int]:
    """How many index files these rows read, and how many of them this process built."""
    opened: dict[Path, bool] = {}
    for source in (*rows.sources.values(), *(held.source for held in validation.values())):
        for path, built in source.cache.opened.items():
            opened[path] = built or opened.get(path, False)
    return len(opened), sum(opened.values())


def check_tokenizer(recipe: Recipe, stage: int) -> None:
    """DataError unless the recipe's tokenizer can be loaded and is the one that wrote the stage's corpora."""
    tokenizer = load_tokenizer(recipe.tokenizer.path)
    sections = {f"sources.{name}": recipe.sources[name] for name in recipe.stages[stage].mixture}
    sections |= {f"validation.{name}": config for name, config in recipe.validation.items()}
    for section, config in sections.items():
        other = other_tokenizer(read_manifest(Path(config.path).expanduser()), tokenizer.fingerprint)
        require(
            other is None,
            f"[{section}] {config.path} was written with the tokenizer {other}, but "
            f"tokenizer.path = {recipe.tokenizer.path!r} is another one ({tokenizer.name})",
            DataError,
        )


def open_validation(recipe: Recipe, stage: int, cache: Path) -> dict[str, ValidationRows]:
    """The first `evaluation.rows` rows of every validation set, cut and packed as the stage's are."""
    return {
        name: ValidationRows(_source(recipe, stage, f"validation.{name}", config, cache), recipe.evaluation.rows)
        for name, config in recipe.validation.items()
    }


def _source(recipe: Recipe, stage: int, section: str, config: schema.Source, cache: Path) -> Source:
    seq_len, best_fit = recipe.stages[stage].seq_len, recipe.stages[stage].packing == "best_fit"
    return Source(section, config, seq_len, recipe.model.vocab_size, cache, recipe.data.mmap, best_fit)


class StepLoader:
    """Iterator over optimizer steps: for each one the list of this rank's micro-batches, in order.

    Row b of micro-batch m on rank r of `size` data ranks is row start + (m * size + r) * micro_batch + b of the stage.
    """

    def __init__(
        self,
        rows: Rows,
        *,
        steps: Iterable[int],
        start_row: int,
        micro_batch: int,
        rank: int,
        size: int,
        mask_documents: bool,
    ):
        """Reads in a thread, from `start_row` on; `steps` are the rows of each step over all ranks. `close()` ends it.

        Errors: DataError at the first step whose rows are not whole micro-batches for every rank.
        """
        self._rows, self._micro_batch, self._mask = rows, micro_batch, mask_documents
        self._stride = micro_batch * size
        self._rank_offset = rank * micro_batch
        self._steps, self._next_row = iter(steps), start_row
        self._pending: deque[Future[list[Batch]]] = deque()
        self._reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="data")
        self._read_ahead()

    def __iter__(self) -> Iterator[list[Batch]]:
        return self

    def __next__(self) -> list[Batch]:
        if not self._pending:
            self.close()
            raise StopIteration
        step = self._pending.popleft().result()  # raises here what the thread met
        self._read_ahead()
        return step

    def close(self) -> None:
        """Stop reading ahead; the iterator is then at its end. Calling it again does nothing."""
        self._pending.clear()
        self._steps = iter(())
        self._reader.shutdown(cancel_futures=True)

    def _read_ahead(self) -> None:
        while len(self._pending) < AHEAD and (rows := next(self._steps, None)) is not None:
            require(
                rows > 0 and rows % self._stride == 0,
                f"a step of {rows} rows cannot be divided into micro-batches of {self._micro_batch} rows on "
                f"{self._stride // self._micro_batch} data-parallel ranks: {rows} is not a multiple of {self._stride}; "
                f"change batch_tokens, micro_batch or the number of ranks",
                DataError,
            )
            self._pending.append(self._reader.submit(self._step, self._next_row, rows // self._stride))
            self._next_row += rows

    def _step(self, start: int, micro_batches: int) -> list[Batch]:
        batches = []
        for m in range(micro_batches):
            first = start + m * self._stride + self._rank_offset
            samples = range(first, first + self._micro_batch)
            batches.append(make_batch([self._rows.row(i) for i in samples], samples, self._mask))
        return batches


def validation_batches(
    rows: Rows, num_rows: int, micro_batch: int, rank: int, size: int, mask_documents: bool
) -> Iterator[Batch]:
    """Rows 0 … num_rows - 1, each on exactly one rank; every rank yields equally many batches of equal shape.

    Where rows run out, a batch is filled with rows without labels.
    """
    total = num_rows if rows.num_rows is None else min(num_rows, rows.num_rows)
    filler = dataclasses.replace(rows.row(0), num_labels=0)
    for start in range(0, total, micro_batch * size):
        first = start + rank * micro_batch
        samples = range(min(first, total), min(first + micro_batch, total))
        real = [rows.row(i) for i in samples]
        yield make_batch(real + [filler] * (micro_batch - len(real)), samples, mask_documents)
