"""Predictions of arrays on the host, by a network that was lowered, compiled and loaded once."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from ....datasets.interchange import CardArray
from ....errors import BackendError
from ....locks import Mutex
from ....plan import Plan
from ... import row_copies
from ...base import Inference, Program, State
from ...cores import granted_cores
from ...inputs import InputScaling, has_more_digits, input_standardize
from ...row_copies import RowCopies
from ..run.arrays import Arrays
from ..run.card_arrays import CardResult, ListedRows
from ..run.program import CudaProgram
from ..run.state import draw_parameters
from ..runtime import Device, LoadedKernels, Stream
from ..select.inference import by_threads, copy_threads, half_rows, part_rows, rows_in_flow, uploaded_as_they_lie
from ..select.network import FewRowsNetwork, few_rows_network
from ..select.setting import Setting
from .copies import (
    AT_ONCE,
    Copying,
    as_they_lie,
    copied_alone,
    copied_by_helpers,
    copied_by_pool,
    fill_from,
    parts,
)
from .few_rows import FewRows
from .room import Room
from .tiers import ROOMS, Tier, Tiers

STANDARDIZED = "standardized"  # inputs that go up as float32, once the host has standardized them
LEFT = "statistics after the host"  # what such inputs leave of the statistics


class CudaInference(Inference):
    """A network on a card, to predict with; any thread may call it, one at a time computes.

    A small array is one piece: it is copied up, computed and copied back.  A large one flows through in pieces: while
    one goes up, another is computed, and one comes back.  Threads in C++ copy rows to page-locked memory and look for
    what is not finite.  Where there are none, the driver copies some arrays itself; of others, and of the largest,
    threads in Python copy several pieces at a time.

    Arguments:
        plan: without a training step; its capacity bounds the rows of a piece.

    Raises:
        BackendError: the card has not the memory.
    """

    def __init__(self, plan: Plan, device: Device) -> None:
        self._plan, self._device = plan, device
        self._lock = Mutex()
        self._pool: ThreadPoolExecutor | None = None
        self._tiers: dict[str, Tiers] = {}
        self._few_rows: dict[str, FewRows] = {}
        setting = Setting(device.multiprocessors, device.arch, "float32", textured=False)
        self._network = few_rows_network(plan, setting)
        self._copy_threads = copy_threads(granted_cores(), is_compiled=row_copies.is_there())
        self._is_closed = False
        with device:
            self._stream, self._up, self._down = (Stream(device, name) for name in ("predict", "up", "down"))
            self._arrays = Arrays(device)
            sizes = {"parameters": plan.parameter_count, "statistics": plan.statistic_count}
            if input_standardize(plan) is not None:
                sizes[LEFT] = plan.statistic_count
            self._arrays.allocate({name: 4 * size for name, size in sizes.items()})
        self._scaling: InputScaling | None = None

    # --- parameters ---

    def load(self, state: State) -> None:
        with self._at_work():
            self._upload("parameters", state.parameters)
            self._upload("statistics", state.statistics)
            self._set_scaling(state.statistics[0])
            self._changed()

    def load_from(self, program: Program) -> bool:
        """As of any inference: from a program on the same card they are copied there."""
        if not isinstance(program, CudaProgram) or program.device is not self._device or program.has_parts:
            return False
        with self._at_work():
            sizes = {"parameters": self._plan.parameter_count, "statistics": self._plan.statistic_count}
            for name, size in sizes.items():
                if size:
                    self._stream.copy(self._arrays.addresses[name], program.address(name), 4 * size)
            self._set_scaling(program.workspace.fitted)
            self._changed()
            self._stream.synchronize()
        return True

    def draw(self, seed: int, statistics: np.ndarray) -> None:
        with self._at_work():
            address = self._arrays.addresses
            draw_parameters(self._plan, seed, address["parameters"], self._stream, LoadedKernels(self._device))
            self._upload("statistics", statistics)
            self._set_scaling(statistics[0])
            self._changed()
            self._stream.synchronize()

    def _upload(self, name: str, array: np.ndarray) -> None:
        if array.size:
            self._stream.upload(self._arrays.addresses[name], np.ascontiguousarray(array, np.float32))
            self._stream.synchronize()  # before the array goes

    def _set_scaling(self, fitted: np.ndarray) -> None:
        """Standardize inputs that have more digits than float32 on the host, by statistics (C,) in float64."""
        self._scaling = InputScaling.of(self._plan, fitted.astype(np.float64))
        if self._scaling is not None:
            self._upload(LEFT, self._scaling.left_of(fitted.astype(np.float64)))

    def _changed(self) -> None:
        for tiers in self._tiers.values():
            tiers.parameters_changed()

    # --- predictions ---

    def run(
        self,
        x: np.ndarray,
        out: np.ndarray,
        *,
        rows: np.ndarray | None = None,
        scale: float | None = None,
        logits: bool = False,
    ) -> bool:
        with self._at_work():
            kind, count, scaling = "float32" if scale is None else "uint8", len(out), None
            if has_more_digits(x.dtype, self._plan):
                kind, scaling = STANDARDIZED, self._scaling
            fill = fill_from(x, rows, scaling)
            if isinstance(self._network, FewRowsNetwork) and self._network.takes(count):
                few = self._few_rows_of(kind, self._network)
                return few.run(fill, out, scale=1.0 if scale is None else scale, logits=logits)
            tiers = self._tiers_of(kind)
            tiers.set_scale(1.0 if scale is None else scale)
            array = self._plan.logits if logits else self._plan.output
            tier, lying = tiers.tier(count), None
            predict = self._predict_piece if count <= tier.capacity else self._predict_pieces
            nbytes = count * tiers.item_bytes * self._plan.n_in
            if tier.by_helpers:
                copies = RowCopies.of(x, rows, tiers.dtype, scaling)
                if copies is not None:
                    with copies:
                        copying = copied_by_helpers(copies, nbytes, self._copy_threads)
                        return predict(tiers, tier, copying, None, array, out)
            elif kind != STANDARDIZED and uploaded_as_they_lie(nbytes, kind, tier.capacity):
                lying = as_they_lie(x, rows, tiers.dtype)
            check = not tier.checks_inputs
            if lying is None and count > tier.capacity and by_threads(nbytes):
                copying = copied_by_pool(fill, self._threads(), check=check)
            else:
                copying = copied_alone(fill, check=check)
            return predict(tiers, tier, copying, lying, array, out)

    def run_on_card(
        self,
        x: CardArray,
        shape: tuple[int, ...],
        *,
        rows: np.ndarray | None = None,
        scale: float | None = None,
        logits: bool = False,
    ) -> CardResult:
        with self._at_work():
            count, stream = shape[0], self._stream
            tiers = self._tiers_of("float32" if scale is None else "uint8")
            tiers.set_scale(1.0 if scale is None else scale)
            array = self._plan.logits if logits else self._plan.output
            result = CardResult(self._device, shape, np.dtype(np.float32))
            tier = tiers.tier(count)
            (room,) = tiers.rooms(tier, 1)
            row_bytes, result_bytes = room.row_bytes, 4 * self._plan.n_out
            source = "float32" if scale is None else "uint8"
            listed = None if rows is None else ListedRows(self._device, stream, x, rows, source)
            for piece in parts(slice(0, count), tier.capacity):
                size = piece.stop - piece.start
                room.begin(size)
                room.upload(stream, slice(0, 0))
                if listed is None:
                    stream.copy(room.addresses["data"], x.address + piece.start * row_bytes, size * row_bytes)
                else:
                    listed.take(piece, room.addresses["data"])
                room.launch(stream)
                stream.copy(result.address + piece.start * result_bytes, room.addresses[array], size * result_bytes)
                stream.synchronize()
            if listed is not None:
                listed.close()
            return result

    def _tiers_of(self, kind: str) -> Tiers:
        if kind not in self._tiers:
            given, has_helpers = self._given(kind), self._copy_threads > 0
            self._tiers[kind] = Tiers(self._plan, self._device, self._stream, *given, has_helpers=has_helpers)
        return self._tiers[kind]

    def _few_rows_of(self, kind: str, network: FewRowsNetwork) -> FewRows:
        if kind not in self._few_rows:
            self._few_rows[kind] = FewRows(network, self._device, self._stream, *self._given(kind))
        return self._few_rows[kind]

    def _given(self, kind: str) -> tuple[str, dict[str, int]]:
        """The type of inputs of a kind on the card, and addresses of the parameters and the statistics."""
        addresses = self._arrays.addresses
        if kind != STANDARDIZED:
            return kind, addresses
        return "float32", {**addresses, "statistics": addresses[LEFT]}

    def _predict_piece(
        self, tiers: Tiers, tier: Tier, copying: Copying, lying: np.ndarray | None, array: str, out: np.ndarray
    ) -> bool:
        """Rows that go up together: as they lie, or, where they are many, in parts while others are copied."""
        (room,), stream, count = tiers.rooms(tier, 1), self._stream, len(out)
        room.begin(count)
        is_finite = True
        if lying is not None:
            room.upload_from(stream, lying)
        else:
            most = part_rows(count, room.row_bytes) if tier.by_helpers else half_rows(count, room.row_bytes)
            begun = [(part, copying.begin(part, room.inputs[part])) for part in parts(slice(0, count), most)]
            for part, finish in begun:
                is_finite &= finish()
                room.upload(stream, part)
        room.launch(stream)
        room.download(stream, array, count)
        stream.synchronize()
        out[...] = room.result[:count]
        return is_finite and room.is_finite

    def _predict_pieces(
        self, tiers: Tiers, tier: Tier, copying: Copying, lying: np.ndarray | None, array: str, out: np.ndarray
    ) -> bool:
        """Rows that flow through in pieces: as they lie, or copied, some pieces while others go up."""
        rows, row_bytes = len(out), tiers.item_bytes * self._plan.n_in
        pieces = deque(enumerate(parts(slice(0, rows), rows_in_flow(rows, row_bytes, tier.capacity))))
        rooms = tiers.rooms(tier, min(ROOMS, len(pieces)))
        filling: deque[tuple[slice, Room, Callable[[], bool]]] = deque()
        left: deque[tuple[slice, Room]] = deque()  # pieces whose results come back
        is_finite = True
        while pieces or filling:
            while pieces and len(filling) < copying.at_once:
                number, piece = pieces.popleft()
                if number >= len(rooms):
                    is_finite &= self._take(*left.popleft(), out)
                room = rooms[number % len(rooms)]
                room.begin(piece.stop - piece.start)
                filling.append((piece, room, copying.begin(piece, room.inputs[: piece.stop - piece.start])))
            piece, room, finish = filling.popleft()
            count = piece.stop - piece.start
            if lying is not None:
                room.upload_from(self._up, lying[piece])
            else:
                is_finite &= finish()
                room.upload(self._up, slice(0, count))
            self._up.record(room.is_up)
            self._stream.wait(room.is_up)
            room.launch(self._stream)
            self._stream.record(room.is_made)
            self._down.wait(room.is_made)
            room.download(self._down, array, count)
            self._down.record(room.is_down)
            left.append((piece, room))
        while left:
            is_finite &= self._take(*left.popleft(), out)
        return is_finite

    def _take(self, piece: slice, room: Room, out: np.ndarray) -> bool:
        """Wait for a piece's results, and copy them out of its room; returns whether its inputs were finite."""
        room.is_down.synchronize()
        out[piece] = room.result[: piece.stop - piece.start]
        return room.is_finite

    def _threads(self) -> ThreadPoolExecutor:
        if self._pool is None:
            count = min(AT_ONCE, os.cpu_count() or 1)
            self._pool = ThreadPoolExecutor(count, thread_name_prefix="mlpgpu-predict")
        return self._pool

    # --- one at a time ---

    @contextlib.contextmanager
    def _at_work(self) -> Iterator[None]:
        self._device.check_process()
        with self._lock:
            if self._is_closed:
                raise BackendError("predictor", expected="one that is open", got="a closed one")
            with self._device:
                try:
                    yield
                except BaseException:
                    self._settle()
                    raise

    def _settle(self) -> None:
        """After an error: no copy to or from memory that is used again is in flight any longer."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        with contextlib.suppress(Exception):  # the device says what is wrong with it
            self._device.synchronize()

    def close(self) -> None:
        """Give everything back; closing twice does nothing."""
        if self._device.is_forked:
            return
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._pool is not None:
                self._pool.shutdown()
            with self._device:
                for stream in (self._up, self._stream, self._down):
                    stream.synchronize()
                for tiers in self._tiers.values():
                    tiers.close()
                for few in self._few_rows.values():
                    few.close()
                self._tiers.clear()
                self._few_rows.clear()
                self._arrays.close()
