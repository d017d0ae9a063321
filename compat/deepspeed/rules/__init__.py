"""Rules between settings of DeepSpeed and the fields of `Plan`; the module `table` has them all."""
