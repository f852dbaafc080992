"""The base of everything: posteriors, messages, seeds, errors, processes, tables and pictures, without Lightning."""
