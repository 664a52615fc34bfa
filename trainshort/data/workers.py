"""Tokenizing on all cores: processes that read batches from a pipe and answer with arrays, in order.

They are started as fresh programs and not forked: that works from any program, threads or not, and a worker whose
parent is killed sees the end of its pipe and goes.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import struct
import subprocess
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, TypeVar

import numpy as np

from trainshort.common.machine import cores
from trainshort.data.encode import Encoded, encode
from trainshort.data.text import TextPart
from trainshort.data.tokenizer import ByteTokenizer, Tokenizer, tokenizer_from_text

_Label = TypeVar("_Label")
_START = "from trainshort.data.workers import serve; serve()"


def encode_all(
    batches: Iterator[tuple[_Label, list[TextPart]]], tokenizer: Tokenizer, *, spans: bool, workers: int | None
) -> Iterator[tuple[_Label, Encoded]]:
    """Encode labelled batches, in their order. Bytes need no other processes: numpy is faster than any pipe."""
    count = workers or cores()
    if isinstance(tokenizer, ByteTokenizer) or count == 1:
        for label, parts in batches:
            yield label, encode(tokenizer, parts, spans=spans)
        return
    with _Pool(tokenizer, spans, count) as pool:
        waiting: deque[tuple[_Label, Future[Encoded]]] = deque()
        for label, parts in batches:
            waiting.append((label, pool.submit(parts)))
            while len(waiting) > 2 * count:  # never more in memory than keeps everyone busy
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()


class _Pool:
    def __init__(self, tokenizer: Tokenizer, spans: bool, count: int) -> None:
        self.idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        self.workers: list[_Worker] = []
        settings = {"tokenizer": tokenizer.to_str(), "end_id": tokenizer.end_id, "spans": spans}
        try:
            for _ in range(count):
                self.workers.append(_Worker(settings))
        except BaseException:
            self.close()
            raise
        for worker in self.workers:
            self.idle.put(worker)
        self.threads = ThreadPoolExecutor(count)

    def submit(self, parts: list[TextPart]) -> Future[Encoded]:
        return self.threads.submit(self._ask, parts)

    def _ask(self, parts: list[TextPart]) -> Encoded:
        worker = self.idle.get()
        try:
            return worker.ask(parts)
        finally:
            self.idle.put(worker)

    def close(self) -> None:
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.close()

    def __enter__(self) -> _Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(wait=False, cancel_futures=True)
        self.close()
        self.threads.shutdown(wait=True)


class _Worker:
    def __init__(self, settings: dict[str, Any]) -> None:
        home = str(Path(__file__).parents[2])
        path = os.pathsep.join([home, *filter(None, [os.environ.get("PYTHONPATH")])])
        # One thread each: the processes are the parallelism.
        environment = {**os.environ, "PYTHONPATH": path, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C is for the parent alone
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.into, self.out = self.process.stdin, self.process.stdout
        with contextlib.suppress(BrokenPipeError):  # if it has died, the first question says so
            _send(self.into, json.dumps(settings).encode())

    def ask(self, parts: Sequence[TextPart]) -> Encoded:
        try:
            _send(self.into, json.dumps([list(part) for part in parts]).encode())
            header = json.loads(_receive(self.out))
            if "error" in header:
                raise ValueError(header["error"])
            tokens = np.frombuffer(_receive(self.out), dtype=header["dtype"])
            ends = np.frombuffer(_receive(self.out), dtype=np.int64)
            spans = np.frombuffer(_receive(self.out), dtype=np.uint32).reshape(-1, 2) if header["spans"] else None
        except (BrokenPipeError, EOFError) as error:
            raise RuntimeError("a tokenizing process has died: out of memory? try fewer workers") from error
        return Encoded(tokens, ends, spans)

    def close(self) -> None:
        for pipe in (self.into, self.out):
            with contextlib.suppress(OSError):  # what it still held has nobody to go to
                pipe.close()
        self.process.wait()


def serve() -> None:
    """The worker's side: answer until the pipe ends."""
    into, out = sys.stdin.buffer, sys.stdout.buffer
    try:
        settings = json.loads(_receive(into))
        tokenizer = tokenizer_from_text(settings["tokenizer"])
        tokenizer.end_id = settings["end_id"]
        while True:
            parts = [TextPart(*each) for each in json.loads(_receive(into))]
            try:
                encoded = encode(tokenizer, parts, spans=settings["spans"])
            except Exception as error:
                _send(out, json.dumps({"error": str(error)}).encode())
                continue
            header = {"dtype": encoded.tokens.dtype.str, "spans": encoded.spans is not None}
            _send(out, json.dumps(header).encode())
            for array in (encoded.tokens, encoded.ends, encoded.spans):
                if array is not None:
                    _send(out, array.tobytes())
    except (EOFError, BrokenPipeError):
        os._exit(0)


def _send(pipe: IO[bytes], message: bytes) -> None:
    pipe.write(struct.pack("<q", len(message)))
    pipe.write(message)
    pipe.flush()


def _receive(pipe: IO[bytes]) -> bytes:
    return _exactly(pipe, struct.unpack("<q", _exactly(pipe, 8))[0])


def _exactly(pipe: IO[bytes], count: int) -> bytes:
    message = pipe.read(count)
    if len(message) < count:
        raise EOFError
    return message
