"""A program: the arrays of a plan on a card, and what runs over them."""
