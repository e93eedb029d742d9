"""A bench of several hosts on one machine: namespaces joined by a network, with a file system that they share."""
