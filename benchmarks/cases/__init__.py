"""One module a family; each holds its `CASES`. A new case is found by being here."""
