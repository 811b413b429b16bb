"""The data sets of programs: which rows lie where on a card, how they come there, and the orders of their epochs."""
