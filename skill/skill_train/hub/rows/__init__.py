"""The first rows of a dataset on the Hub."""
