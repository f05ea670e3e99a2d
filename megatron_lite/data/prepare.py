"""JSON lines to an indexed corpus: batches of lines through the tokenizer, in one process or in several.

Batches are dealt to the workers in turn and their results are taken back in the same turn, so the corpus is the same
to the byte for any number of workers, and what is in memory is a few batches whatever the corpus.
"""

from __future__ import annotations

import itertools
import multiprocessing
import queue
import signal
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megatron_lite.data import readers
from megatron_lite.data.indexed import token_dtype
from megatron_lite.data.tokenizer import Tokenizer, load_tokenizer
from megatron_lite.data.writer import IndexedWriter
from megatron_lite.errors import DataError, require

BATCH_BYTES = 1 << 20  # of text per batch
IN_FLIGHT = 2  # batches per worker


@dataclass(frozen=True)
class Options:
    """What makes a corpus out of text; all of it is in the manifest."""

    tokenizer: str
    key: str = "text"
    append_eod: bool = False
    on_bad_line: Literal["stop", "skip"] = "stop"


@dataclass
class Encoded:
    """One batch of documents, laid end to end."""

    tokens: np.ndarray  # [sum of lengths], in the dtype of the corpus
    lengths: np.ndarray  # int64 [documents]
    num_bytes: int  # of the lines
    empty: int = 0  # documents without a token
    bad: Counter[str] = field(default_factory=Counter)  # lines left out, by reason
    error: str | None = None  # the first bad line, when they are not to be skipped


@dataclass
class Summary:
    """What went into a corpus and what did not."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    bad: Counter[str] = field(default_factory=Counter)


def prepare(
    inputs: list[Path],
    prefix: str,
    options: Options,
    workers: int = 1,
    progress: Callable[[Encoded], None] = lambda batch: None,
) -> Summary:
    """Write `prefix`.bin, .idx and .json from the lines of all inputs, in order.

    Documents without a token (after tokenizing, before the end-of-document id) are left out and counted. Any error
    leaves no file of the corpus behind. `progress` is called after each batch.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    require(
        not options.append_eod or tokenizer.eod_id is not None,
        f"the tokenizer {options.tokenizer} has no end-of-document id to append",
        DataError,
    )
    readers.check_inputs(inputs)
    require(workers >= 1, f"workers={workers}, but it takes at least 1", DataError)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    summary = Summary()
    batches = _batches(itertools.chain.from_iterable(map(readers.read_lines, inputs)))
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size)) as writer:
        encoded = map(_Encoder(tokenizer, options), batches) if workers == 1 else _parallel(batches, options, workers)
        for batch in encoded:
            if batch.error is not None:
                raise DataError(batch.error)
            writer.add_documents(batch.tokens, batch.lengths)
            summary.empty += batch.empty
            summary.bad += batch.bad
            progress(batch)
        summary.documents, summary.tokens = writer.num_documents, writer.num_tokens
        writer.manifest = _manifest(inputs, tokenizer, options, summary)
    return summary


class _Encoder:
    """A batch of lines to a batch of documents."""

    def __init__(self, tokenizer: Tokenizer, options: Options):
        self.tokenizer, self.options = tokenizer, options
        self.dtype = token_dtype(tokenizer.vocab_size)
        self.eod = np.array([tokenizer.eod_id] if options.append_eod else [], dtype=np.int32)

    def __call__(self, lines: list[readers.Line]) -> Encoded:
        result = Encoded(np.empty(0, self.dtype), np.empty(0, np.int64), sum(len(line.raw) + 1 for line in lines))
        texts = []
        for line in lines:
            try:
                texts.append(readers.parse(line, self.options.key))
            except readers.BadLine as bad:
                if self.options.on_bad_line == "stop":
                    result.error = str(bad)
                    return result
                result.bad[bad.reason] += 1
        documents = [ids for ids in self.tokenizer.encode(texts) if len(ids)]
        result.empty = len(texts) - len(documents)
        if documents:
            parts = [part for ids in documents for part in (ids, self.eod)]
            tokens = np.concatenate(parts)
            assert int(tokens.max()) < self.tokenizer.vocab_size
            result.tokens = tokens.astype(self.dtype)
            result.lengths = np.array([len(ids) + len(self.eod) for ids in documents], dtype=np.int64)
        return result


def _batches(lines: Iterator[readers.Line]) -> Iterator[list[readers.Line]]:
    batch: list[readers.Line] = []
    size = 0
    for line in lines:
        batch.append(line)
        size += len(line.raw) + 1
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _parallel(batches: Iterator[list[readers.Line]], options: Options, workers: int) -> Iterator[Encoded]:
    """Batch i goes to worker i % workers; results come back in order of i."""
    context = multiprocessing.get_context("spawn")
    team: list[tuple[Any, Connection]] = []
    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, options), daemon=True)
            process.start()
            theirs.close()
            team.append((process, ours))
        in_flight: deque[Connection] = deque()
        for (_, connection), batch in zip(itertools.cycle(team), batches, strict=False):
            if len(in_flight) == IN_FLIGHT * workers:
                yield _receive(in_flight.popleft())
            _send(connection, batch)
            in_flight.append(connection)
        while in_flight:
            yield _receive(in_flight.popleft())
    finally:
        for process, connection in team:
            connection.close()
            process.terminate()
            process.join()


def _send(connection: Connection, batch: list[readers.Line]) -> None:
    try:
        connection.send(batch)
    except OSError as error:
        raise DataError("a worker ended before its work; was it killed, or the machine out of memory?") from error


def _receive(connection: Connection) -> Encoded:
    try:
        result = connection.recv()
    except (EOFError, OSError) as error:
        raise DataError("a worker ended before its work; was it killed, or the machine out of memory?") from error
    assert isinstance(result, Encoded)
    return result


def _work(connection: Connection, options: Options) -> None:
    """A worker process: answers each batch. It ends when its pipe does, so also when the main process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends the workers
    encode = _Encoder(load_tokenizer(options.tokenizer), options)
    waiting: queue.SimpleQueue[list[readers.Line] | None] = queue.SimpleQueue()
    # a thread takes batches off the pipe at once: two full pipes would make both sides wait for each other
    threading.Thread(target=_take, args=(connection, waiting), daemon=True).start()
    while (batch := waiting.get()) is not None:
        try:
            connection.send(encode(batch))
        except BrokenPipeError:
            return


def _take(connection: Connection, waiting: queue.SimpleQueue[list[readers.Line] | None]) -> None:
    try:
        while True:
            waiting.put(connection.recv())
    except (EOFError, OSError):
        waiting.put(None)


def _manifest(inputs: list[Path], tokenizer: Tokenizer, options: Options, summary: Summary) -> dict[str, Any]:
    return {
        "format": 1,
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
        },
        "key": options.key,
        "append_eod": options.append_eod,
        "on_bad_line": options.on_bad_line,
        "empty": summary.empty,
        "bad": dict(sorted(summary.bad.items())),
        "inputs": [{"path": str(path), "bytes": path.stat().st_size} for path in inputs],
    }
