"""What every other package may use: configuration, checks, files, progress. Imports nothing of trainshort."""
