"""Keys and values of all rows of a decode batch, in one preallocated tensor.

Owns: where a token's key and value live, and what a layer attends over. Never: knows tokens, masks or requests.
Invariant: row r holds its keys at positions 0 .. p without gaps, so that "attend where position <= p" is the whole mask;
what lies beyond p is stale but finite. The interface to the model is ``update`` of transformers' ``Cache``
(https://huggingface.co/docs/transformers/kv_cache); nothing else of that class is used, because position ids and a
four-dimensional mask are always given.

Shape legend: S rows at most, N rows in use, T positions at most, L positions attended over, Q new positions, H key-value
heads, D head width.
"""

from __future__ import annotations

import torch


class SlotCache:
    """Preallocated key-value storage that a transformers model reads and writes through :meth:`update`."""

    def __init__(
        self,
        *,
        layers: int,
        rows: int,
        length: int,
        heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        # Zeros, not uninitialised memory: a masked position has weight 0, and 0 times NaN would still be NaN.
        self._use(torch.zeros(layers, 2, rows, length, heads, head_dim, dtype=dtype, device=device))
        self._rows: slice | None = None
        self._target: torch.Tensor | None = None

    def _use(self, store: torch.Tensor) -> None:
        self._store = store
        self._length = store.shape[3]
        self._flat = [(layer[0].flatten(0, 1), layer[1].flatten(0, 1)) for layer in store]
        self._window: tuple[int, int] = (0, 0)
        self._views: list[tuple[torch.Tensor, torch.Tensor]] = []

    def grow(self, length: int) -> None:
        """Make room for ``length`` positions in each row; what is stored stays."""
        layers, parts, rows, old, heads, head_dim = self._store.shape
        store = self._store.new_zeros(layers, parts, rows, length, heads, head_dim)
        store[:, :, :, :old] = self._store
        self._use(store)

    def begin_decode(self, places_N: torch.Tensor, length: int) -> None:
        """Make the next forward write one token into each of rows 0 .. N-1 and attend over ``length`` positions.

        ``places_N`` (int64): row start plus position of each row's token, see :meth:`row_starts`.
        """
        window = (len(places_N), length)
        if window != self._window:
            self._window = window
            used = self._store[:, :, : window[0], :length].transpose(3, 4)
            self._views = [(layer[0], layer[1]) for layer in used]
        self._rows = None
        self._target = places_N

    def begin_prefill(self, rows: slice, source: torch.Tensor) -> None:
        """Make the next forward fill ``rows`` from position 0; row i of them gets sequence ``source[i]`` of the forward."""
        self._rows = rows
        self._target = source

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer: int, *_: object, **__: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store a layer's new keys and values and return those to attend over. Called by the model.

        Shapes: in (N, H, Q, D); out (N, H, L, D) when decoding, the input itself when prefilling.
        """
        assert self._target is not None
        if self._rows is None:
            flat_keys, flat_values = self._flat[layer]
            flat_keys.index_copy_(0, self._target, keys.squeeze(2))
            flat_values.index_copy_(0, self._target, values.squeeze(2))
            return self._views[layer]
        for part, new in enumerate((keys, values)):
            self._store[layer, part, self._rows, : new.shape[2]] = new.transpose(1, 2).index_select(0, self._target)
        return keys, values

    def move(self, sources: torch.Tensor, targets: torch.Tensor, length: int) -> None:
        """Copy the first ``length`` positions of rows ``sources`` over rows ``targets`` (int64, equal sizes)."""
        used = self._store[:, :, :, :length]
        used.index_copy_(2, targets, used.index_select(2, sources))

    def row_starts(self, rows: int) -> torch.Tensor:
        """Index of position 0 of each of the first ``rows`` rows in the flat storage (int64)."""
        return torch.arange(rows, device=self._store.device) * self._length

    def get_seq_length(self, layer: int = 0) -> int:
        """Always 0: positions are given to the model with every call. Some models ask."""
        return 0
