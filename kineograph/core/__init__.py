"""The vocabulary of the house: config base, sample and batch types, keyed noise, the Task seam, run folder, errors."""
