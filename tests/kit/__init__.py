"""What tests share: models, wrappings, training, oracles, comparisons, and readers of files of their own."""
