"""Rules between settings of AutoModel and the fields of `Plan`; the module `table` has them all."""
