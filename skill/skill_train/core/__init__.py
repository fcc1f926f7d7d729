"""The base of all packages: errors, output, files, child processes, digests and secrets."""
