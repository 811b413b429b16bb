"""Callbacks: what happens beside training, after steps and epochs.

A trainer saves each callback's :meth:`~Callback.state` with itself, and hands it back before it
resumes, so that a resumed fit stops, keeps and saves where an unbroken one does.
"""

from __future__ import annotations

from .callback import Callback as Callback
from .callback import FunctionCallback as FunctionCallback
from .callback import TrainerLike as TrainerLike
from .callback import as_callback as as_callback
from .callback import check_monitor as check_monitor
from .checkpoint import Checkpoint as Checkpoint
from .csv_logger import CSVLogger as CSVLogger
from .early_stopping import EarlyStopping as EarlyStopping
from .histograms import Histograms as Histograms
from .histograms import check_counted as check_counted
from .listeners import SCHEDULE as SCHEDULE
from .listeners import Listeners as Listeners
from .listeners import check_column as check_column
from .pruning import OptunaPruning as OptunaPruning
from .tensorboard import TensorBoard as TensorBoard
