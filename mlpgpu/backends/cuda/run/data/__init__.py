"""A data set on its way to a card: which rows lie where, how they come there, and the orders of its epochs."""
