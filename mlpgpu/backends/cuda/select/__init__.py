"""Which path an operation takes: plain functions from widths, rows and card to a choice and its reason."""
