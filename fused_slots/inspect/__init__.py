"""Looking at block tables from outside: explain, check, record and replay, pictures."""
