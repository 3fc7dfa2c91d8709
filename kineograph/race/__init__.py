"""`kineo race`: which family is best on these data, in these minutes, by one judge."""
