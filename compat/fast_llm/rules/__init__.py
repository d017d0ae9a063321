"""Rules between settings of Fast-LLM and the fields of `Plan`; the module `table` has them all."""
