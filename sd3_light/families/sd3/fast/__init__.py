"""Hand-written joint blocks: the stock module's weights and mathematics with fewer passes over memory."""
