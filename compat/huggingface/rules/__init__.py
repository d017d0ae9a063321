"""Rules between settings of Hugging Face and the fields of `Plan`; the module `table` has them all."""
