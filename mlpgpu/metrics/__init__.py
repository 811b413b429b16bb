"""Metrics by name, and the sums that they are made of."""

from .sums import SUMS as SUMS
from .sums import Compared as Compared
from .sums import curve_count as curve_count
from .sums import curve_positives as curve_positives
from .sums import true_class_ranks as true_class_ranks
from .table import METRICS as METRICS
from .table import MODES as MODES
from .table import VALIDATION as VALIDATION
from .table import Mode as Mode
from .table import Problem as Problem
from .table import element_columns as element_columns
from .table import find_metric as find_metric
from .table import improves as improves
from .table import is_metric as is_metric
from .table import metric_name as metric_name
from .table import sums_of as sums_of
from .table import top_k_of as top_k_of
from .table import values_of as values_of
