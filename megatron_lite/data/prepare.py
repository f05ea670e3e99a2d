"""Text, or ready ids, to an indexed corpus: blocks of the inputs through an encoder, in one process or in several.

A block goes to the worker with the least to do and results are put back in order, so the corpus is the same to the byte
for any number of workers, and what is in memory is a few blocks whatever the corpus.
After every input that is done (at most once in RECORD_EVERY seconds) the point is made durable: `resume` begins there.
"""

from __future__ import annotations

import multiprocessing
import queue
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from importlib.util import find_spec
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from megatron_lite.data.encode import CHECKED_BYTES, CHECKED_SHARE, Encoded, Encoder, Options
from megatron_lite.data.indexed import token_dtype
from megatron_lite.data.readers import Block, Input, blocks, find_inputs, shares
from megatron_lite.data.tokenizer import load_tokenizer
from megatron_lite.data.writer import IndexedWriter
from megatron_lite.errors import DataError, require

IN_FLIGHT = 2  # blocks that a worker has
AHEAD = 8  # blocks per worker that may be done before an earlier one is: some take longer than others
RECORD_EVERY = 1.0  # seconds
LIBRARIES = ("tokenizers", "sentencepiece", "gigatoken", "pyarrow")


@dataclass
class Summary:
    """What went into a corpus and what did not."""

    documents: int = 0
    tokens: int = 0
    empty: int = 0
    filtered: int = 0  # records of another --where
    checked: int = 0  # documents that went through the tokenizer's own library as well
    bad: Counter[str] = field(default_factory=Counter)

    def add(self, block: Encoded) -> None:
        """Count a block."""
        self.documents += block.lengths.size
        self.tokens += block.tokens.size
        self.empty += block.empty
        self.filtered += block.filtered
        self.checked += block.checked
        self.bad += block.bad


def prepare(
    inputs: Sequence[str | Path],
    prefix: str,
    options: Options,
    workers: int = 1,
    *,
    shard: tuple[int, int] = (0, 1),
    resume: bool = False,
    progress: Callable[[Encoded], None] = lambda block: None,
) -> Summary:
    """Write `prefix`.bin, .idx and .json from all inputs (files, folders, patterns), or one shard of them, in order.

    Documents without a token (before the end-of-document id) are left out and counted. After an error or a kill the
    work goes on with `resume` from the last input that was recorded as done; else nothing is left of it.
    `progress` is called after each block.
    """
    tokenizer = load_tokenizer(options.tokenizer)
    require(
        not options.append_eod or tokenizer.eod_id is not None,
        f"the tokenizer {options.tokenizer} has no end-of-document id to append",
        DataError,
    )
    require(workers >= 1, f"workers={workers}, but it takes at least 1", DataError)
    paths = find_inputs(inputs)
    work = shares(paths, shard)
    total = max(1, sum(path.stat().st_size for path in paths))
    options = replace(options, checked_share=min(CHECKED_SHARE, CHECKED_BYTES / total))
    encoder = Encoder(tokenizer, options)
    manifest = _manifest(work, encoder, shard)
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    summary = Summary()
    with IndexedWriter(prefix, token_dtype(tokenizer.vocab_size), resume=resume) as writer:
        done = 0
        if writer.recorded is not None:
            require(
                writer.recorded["manifest"] == manifest,
                f"what {writer.partial}.* holds was prepared from other inputs or with other options; give the same "
                f"command with --resume, or remove {writer.partial}.* to begin again",
                DataError,
            )
            done, summary = writer.recorded["inputs_done"], _summary(writer.recorded["summary"])
        stream = blocks(work, options.columns, done)
        encoded = map(encoder, stream) if workers == 1 else _parallel(stream, options, workers)
        recorded = time.monotonic()
        for block in encoded:
            if block.error is not None:
                raise DataError(block.error)
            if block.input > done:
                done = block.input
                if time.monotonic() - recorded >= RECORD_EVERY:
                    facts = {"manifest": manifest, "inputs_done": done, "summary": asdict(summary)}
                    writer.record(facts)
                    recorded = time.monotonic()
            writer.add_documents(block.tokens, block.lengths)
            summary.add(block)
            progress(block)
        counts = {"empty": summary.empty, "filtered": summary.filtered, "checked": summary.checked}
        writer.manifest = manifest | counts | {"bad": dict(sorted(summary.bad.items()))}
    return summary


def _summary(saved: dict[str, Any]) -> Summary:
    return Summary(**saved | {"bad": Counter(saved["bad"])})


def _parallel(blocks: Iterator[Block], options: Options, workers: int) -> Iterator[Encoded]:
    """Results in the order of the blocks, whoever encoded them and when."""
    context = multiprocessing.get_context("spawn")
    processes = []
    at_work: dict[Connection, deque[int]] = {}  # numbers of the blocks that each worker has
    done: dict[int, Encoded] = {}
    taken = 0

    def collect() -> Iterator[Encoded]:
        """Wait for results, then hand on those whose turn it is."""
        nonlocal taken
        for ready in wait([connection for connection, numbers in at_work.items() if numbers]):
            assert isinstance(ready, Connection)
            done[at_work[ready].popleft()] = _receive(ready)
        while taken in done:
            yield done.pop(taken)
            taken += 1

    try:
        for _ in range(workers):
            ours, theirs = context.Pipe()
            process = context.Process(target=_work, args=(theirs, options), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            at_work[ours] = deque()
        for number, block in enumerate(blocks):
            while number - taken >= AHEAD * workers or min(map(len, at_work.values())) >= IN_FLIGHT:
                yield from collect()
            freest = min(at_work, key=lambda connection: len(at_work[connection]))
            _send(freest, block)
            at_work[freest].append(number)
        while any(at_work.values()):
            yield from collect()
    finally:
        for process, connection in zip(processes, at_work, strict=True):
            connection.close()
            process.terminate()
            process.join()


def _send(connection: Connection, block: Block) -> None:
    try:
        connection.send(block)
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
    """A worker process: answers each block. It ends when its pipe does, so also when the main process is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the main process ends the workers
    encode = Encoder(load_tokenizer(options.tokenizer), options)
    waiting: queue.SimpleQueue[Block | None] = queue.SimpleQueue()
    # a thread takes blocks off the pipe at once: two full pipes would make both sides wait for each other
    threading.Thread(target=_take, args=(connection, waiting), daemon=True).start()
    while (block := waiting.get()) is not None:
        try:
            connection.send(encode(block))
        except BrokenPipeError:
            return


def _take(connection: Connection, waiting: queue.SimpleQueue[Block | None]) -> None:
    try:
        while True:
            waiting.put(connection.recv())
    except (EOFError, OSError):
        waiting.put(None)


def _manifest(work: Sequence[Input], encoder: Encoder, shard: tuple[int, int]) -> dict[str, Any]:
    tokenizer, options = encoder.tokenizer, encoder.options
    return {
        "format": 2,
        "tokenizer": {
            "name": tokenizer.name,
            "fingerprint": tokenizer.fingerprint,
            "vocab_size": tokenizer.vocab_size,
            "eod_id": tokenizer.eod_id,
        },
        "backend": (encoder.fast or tokenizer).name,
        "versions": {name: version(name) for name in LIBRARIES if find_spec(name) is not None},
        "key": options.columns.text,
        "ids_key": options.columns.ids,
        "where": list(options.columns.where) if options.columns.where else None,
        "append_eod": options.append_eod,
        "on_bad_line": options.on_bad_line,
        "shard": f"{shard[0]}/{shard[1]}",
        "inputs": [
            {"path": str(share.path), "bytes": share.path.stat().st_size, "begin": share.begin, "end": share.end}
            for share in work
        ],
    }
