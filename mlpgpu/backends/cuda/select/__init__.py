"""Which kernel every operation of a plan takes, and why: plain functions from shapes and a card to frozen data.

:mod:`.thresholds` holds every number that decides.  :mod:`.select` asks the other modules for all operations of a plan.
A choice follows from widths, rows, precision, reduction and card alone, never from a neighbour: what neighbours do in
one launch is the next pass's business (:mod:`..lower.fuse`).
"""
