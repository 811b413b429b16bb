"""Few rows through a whole network in one launch, which reads and writes the host's memory itself."""

from __future__ import annotations

import numpy as np

from .. import kernels
from ..kernels import NETWORK_MOST_ROWS
from ..run.arrays import Arrays
from ..runtime import Device, LoadedKernels, PreparedLaunch, Stream, pack, pinned
from ..select.network import FewRowsNetwork
from .copies import Fill

POLLS = 1 << 13  # how often the host looks for the end of a launch, some 0.5 ms, before it waits otherwise
DTYPES: dict[str, np.dtype] = {"float32": np.dtype(np.float32), "uint8": np.dtype(np.uint8)}


class FewRows:
    """The launches of a network for few rows of inputs of one type, and their memory; used inside ``with device:``.

    The host copies the rows to page-locked memory, and polls a word there that the kernel writes last: the driver is
    asked for neither a copy nor a synchronization.

    Arguments:
        shared: addresses of the parameters and the statistics.
    """

    def __init__(
        self, network: FewRowsNetwork, device: Device, stream: Stream, source: str, shared: dict[str, int]
    ) -> None:
        self._network, self._stream = network, stream
        plan, most = network.plan, NETWORK_MOST_ROWS
        entry = kernels.network_forward(source)
        self._function = LoadedKernels(device, [entry])[entry]
        self._arrays = Arrays(device)
        words = np.array(network.layers, np.int32)
        sizes = {"scratch": network.scratch_bytes, "layers": words.nbytes, "arrived": 4, "meetings": 8}
        for name, size in self._arrays.allocate(sizes).items():
            stream.fill(self._arrays.addresses[name], size)
        stream.upload(self._arrays.addresses["layers"], words)
        stream.synchronize()
        self._inputs = pinned(device, (most, plan.n_in), DTYPES[source])
        self._result = pinned(device, (most, plan.n_out), np.float32)
        self._done = pinned(device, (1,), np.uint32)
        self._done[0] = self._sequence = 0
        self._polled = memoryview(self._done)

        at = {s.name: shared["statistics"] + 4 * s.offset for s in plan.statistics}
        standardize, output = network.standardize, network.output
        address = self._arrays.addresses
        self._values: dict[str, float | None] = {
            "data": self._inputs.ctypes.data, "scale": 1.0, "mean": at[standardize.mean] if standardize else None,
            "deviation": at[standardize.scale] if standardize else None, "parameters": shared["parameters"],
            "layers": address["layers"], "layer_count": len(network.layers), "spread": network.spread,
            "scratch": address["scratch"], "pitch": network.pitch, "arrived": address["arrived"],
            "meetings": address["meetings"], "target_mean": at[output.mean] if output.mean else None,
            "target_scale": at[output.scale] if output.scale else None, "y": self._result.ctypes.data,
            "done": self._done.ctypes.data, "n_in": plan.n_in, "n": plan.n_out, "rows": most,
            "output": kernels.output_number(output.function), "is_logits": 0,
            "sequence": 0,
        }  # fmt: skip
        self._launches: dict[int, PreparedLaunch] = {}  # by the number of blocks

    def run(self, fill: Fill, out: np.ndarray, *, scale: float, logits: bool) -> bool:
        """Predict rows, at most ``NETWORK_MOST_ROWS``; returns whether each input is finite."""
        rows = len(out)
        if not fill(slice(0, rows), self._inputs[:rows], check=True):
            return False
        self._sequence = sequence = (self._sequence + 1) % (1 << 32)
        self._launch(rows).launch(scale=scale, rows=rows, is_logits=logits, sequence=sequence)
        polled = self._polled
        for _ in range(POLLS):
            if polled[0] == sequence:
                break
        else:
            self._stream.synchronize()
        out[...] = self._result[:rows]
        return True

    def _launch(self, rows: int) -> PreparedLaunch:
        blocks = self._network.blocks(rows)
        if blocks not in self._launches:
            entry = self._function.entry
            packed = pack(entry, [self._values[argument.name] for argument in entry.arguments])
            self._launches[blocks] = PreparedLaunch(self._function, self._stream, (blocks, 1, 1), packed)
        return self._launches[blocks]

    def close(self) -> None:
        """Give everything back; work that uses it must have ended."""
        self._launches.clear()
        self._polled.release()
        self._arrays.close()
        del self._inputs, self._result, self._done
