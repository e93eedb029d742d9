"""The rendezvous store of a job: connections of our own to it, signs of life of ranks, and the last rank that leaves."""
