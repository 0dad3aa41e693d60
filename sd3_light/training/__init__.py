"""The training stage's parts: the loop, the module that turns a batch into a loss, and what SD3 is to them."""
