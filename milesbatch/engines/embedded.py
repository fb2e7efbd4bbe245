"""The embedded rollout engine: a transformers model decoded by a thread of the worker's own process.

Owns: the queue, the decode thread, the futures, and the moment at which weights change. Never: reads weights from disk,
or sees text (but for stop texts). Invariant: everything that touches the model, the cache or a running row happens in the
decode thread, between two decoding steps; other threads only queue.

The result of one ``submit`` call that finds the engine idle is a pure function of (weights, requests, torch threads) as
long as no other call overlaps it. With ``isolate_calls`` overlapping calls wait for each other and it always is; without,
free rows are refilled from whichever call comes next, which is faster. The page behind it is
``milesbatch/engines/protocol.py``.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from milesbatch.engines.decode_batch import DecodeBatch, Detokenizer, Finished, Row
from milesbatch.engines.protocol import Completion, GenerationRequest, PolicyWeights
from milesbatch.engines.request_check import check_requests
from milesbatch.engines.weight_loading import CopyPlan, copy_weights, plan_copy
from milesbatch.errors import MilesbatchError


@dataclass(frozen=True, slots=True, eq=False)
class _Swap:
    """Weights that are checked and wait for the decode thread."""

    plan: CopyPlan
    version: int
    paused_s: Future[float] = field(default_factory=Future)


class EmbeddedEngine:
    """Continuous batching over a transformers causal language model (satisfies ``RolloutEngine``).

    ``model`` (float32 or bfloat16, on the CPU or one GPU) belongs to the engine from here on: it is put into evaluation
    mode, and its weights are what ``activate`` makes them. ``max_length`` (tokens) bounds prompt and response together;
    ``max_concurrent_samples`` rows are decoded at once, and their key-value memory is taken here. ``stop_text`` turns
    tokens into text, and is asked for text stops only; it is called in the decode thread.

    Raises:
        ModelError: the model cannot be driven (attention, context, sliding window); says which.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_length: int,
        max_concurrent_samples: int,
        stop_text: Detokenizer | None = None,
        isolate_calls: bool = False,
    ) -> None:
        model.eval().requires_grad_(False)
        self._model = model
        self._max_length = max_length
        self._vocab_size: int = model.get_input_embeddings().num_embeddings
        self._has_detokenizer = stop_text is not None
        self._isolate_calls = isolate_calls
        self._batch = DecodeBatch(model, max_length=max_length, max_rows=max_concurrent_samples, stop_text=stop_text)
        self._wake = threading.Condition()
        self._waiting: deque[tuple[int, Row]] = deque()
        """Requests in order, each with the number of its call."""
        self._swaps: deque[_Swap] = deque()
        self._calls = 0
        self._running_call = 0
        self._open_samples: dict[Future[Completion], None] = {}
        self._open_swaps: dict[Future[float], None] = {}
        """Every future that was given out and has no result yet, so that none is forgotten when the thread ends."""
        self._version = -1
        self._tokens_generated = 0
        self._is_closing = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="decode", daemon=True)
        self._thread.start()

    # -- what a worker calls ------------------------------------------------------------------------------------------

    def activate(self, weights: PolicyWeights) -> float:
        """Make ``weights`` the policy between two decoding steps; return the seconds for which decoding was paused.

        Running requests go on: they keep the keys and values that older weights made, and their later tokens carry the
        new version. Blocks until done.

        Raises:
            ModelError: a tensor is missing, unknown or does not fit; the old weights stay in use.
            MilesbatchError: the engine is closed. What ended the decode thread is raised again.
        """
        swap = _Swap(plan_copy(self._model, weights.tensors()), weights.version)
        with self._wake:
            self._check_alive()
            self._swaps.append(swap)
            self._open_swaps[swap.paused_s] = None
            self._wake.notify()
        return swap.paused_s.result()

    def submit(self, requests: Sequence[GenerationRequest]) -> list[Future[Completion]]:
        """Queue ``requests`` together, in order, and return a future for each.

        Requests of one call that find the engine idle are decoded as one fixed batch: the first
        ``max_concurrent_samples`` at once, the rest in order as rows become free.

        Raises:
            ValueError: a request cannot be generated (says which and why); none was queued.
            MilesbatchError: no weights are active yet, or the engine is closed. What ended the decode thread is raised
                again.
        """
        check_requests(
            requests,
            max_length=self._max_length,
            vocab_size=self._vocab_size,
            has_detokenizer=self._has_detokenizer,
        )
        rows = [Row(request, Future()) for request in requests]
        with self._wake:
            self._check_alive()
            if self._version < 0:
                raise MilesbatchError(
                    f"{len(rows)} requests were submitted before any weights are active", mend="call activate first"
                )
            self._calls += 1
            self._waiting.extend((self._calls, row) for row in rows)
            self._open_samples.update((row.future, None) for row in rows)
            self._wake.notify()
        return [row.future for row in rows]

    @property
    def policy_version(self) -> int:
        """Version that the next token will be drawn under; -1 before the first ``activate``."""
        return self._version

    @property
    def samples_in_flight(self) -> int:
        """Requests queued or running."""
        return len(self._open_samples)

    @property
    def tokens_generated(self) -> int:
        """Tokens since the start, of all requests."""
        return self._tokens_generated

    @property
    def cached_share(self) -> float | None:
        """Siblings share a prefill; it is not counted."""
        return None

    def close(self) -> None:
        """Stop the decode thread; futures still open end as ``abort`` with the tokens they have. May be called again."""
        with self._wake:
            self._is_closing = True
            self._wake.notify()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._is_closing:
            raise MilesbatchError("the engine is closed", mend="make a new engine")

    # -- the decode thread --------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while self._decode_once():
                pass
        except BaseException as failure:
            # Whatever it was, those who wait must hear of it; the thread itself still dies loudly.
            self._fail(failure)
            raise

    def _decode_once(self) -> bool:
        """Wait for work, then change weights, admit and step, each as far as there is cause. False once closed."""
        with self._wake:
            while not (self._is_closing or self._swaps or self._waiting or len(self._batch)):
                self._wake.wait()
            is_closing = self._is_closing
            swaps = [self._swaps.popleft() for _ in range(len(self._swaps))]
            admitted = [] if is_closing else self._take_waiting()
        for swap in swaps:
            self._apply(swap)
        if is_closing:
            self._abort()
            return False
        if admitted:
            self._batch.admit(admitted, self._version)
        if len(self._batch):
            drawn = len(self._batch)
            finished = self._batch.step()
            self._tokens_generated += drawn
            self._finish(finished)
        return True

    def _take_waiting(self) -> list[Row]:
        """Take what fits, in order (under the lock); requests that were cancelled are passed over."""
        taken: list[Row] = []
        busy = len(self._batch) > 0
        while self._waiting and len(taken) < self._batch.free:
            call, row = self._waiting[0]
            if self._isolate_calls and call != self._running_call and (busy or taken):
                break
            self._waiting.popleft()
            if row.future.set_running_or_notify_cancel():
                self._running_call = call
                taken.append(row)
            else:
                del self._open_samples[row.future]
        return taken

    def _apply(self, swap: _Swap) -> None:
        started = time.monotonic()
        copy_weights(swap.plan)
        self._version = swap.version
        self._batch.mark_version(swap.version)
        with self._wake:
            del self._open_swaps[swap.paused_s]
        swap.paused_s.set_result(time.monotonic() - started)

    def _finish(self, finished: Sequence[Finished]) -> None:
        if finished:
            with self._wake:
                for row, _ in finished:
                    del self._open_samples[row.future]
            for row, completion in finished:
                row.future.set_result(completion)

    def _abort(self) -> None:
        self._finish(self._batch.abort())
        with self._wake:
            waiting = [row.future for _, row in self._waiting]
            self._waiting.clear()
            self._open_samples.clear()
        for future in waiting:
            if future.set_running_or_notify_cancel():
                future.set_result(Completion((), (), "abort"))

    def _fail(self, failure: BaseException) -> None:
        with self._wake:
            self._failure = failure
            open_futures: list[Future[Any]] = [*self._open_samples, *self._open_swaps]
            self._open_samples.clear()
            self._waiting.clear()
        for future in open_futures:
            # A request that still waits may be cancelled at this very moment; once running it cannot.
            if future.running() or future.set_running_or_notify_cancel():
                future.set_exception(failure)
