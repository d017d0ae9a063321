"""Rules between settings of accelerate and the fields of `Plan`; the module `table` has them all."""
