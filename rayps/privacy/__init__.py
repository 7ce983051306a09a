"""Differential privacy: options, noise, the ledger of releases, epsilon, the claim. Neither torch nor ray."""
