"""The joint blocks written by hand for speed: the stock module's weights and mathematics, fewer passes over memory."""
