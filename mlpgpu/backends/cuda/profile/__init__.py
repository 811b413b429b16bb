"""How long launches take, beside the least that the card could take for them."""
