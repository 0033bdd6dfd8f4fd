"""Draft methods: on the device a `Drafter` for each kind of draft model, on the host n-grams."""
