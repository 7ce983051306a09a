"""Communication: connections between two peers (`link`), collectives (`ring`), compression of gradients."""
