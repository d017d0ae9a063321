"""Rules between settings of Merak and the fields of `Plan`; the module `table` has them all."""
