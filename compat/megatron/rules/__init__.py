"""Rules between settings of Megatron and the fields of `Plan`; the module `table` has them all."""
