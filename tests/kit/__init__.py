"""The common code of the tests: models, wrappings, training, oracles, comparisons, and independent readers of files."""
